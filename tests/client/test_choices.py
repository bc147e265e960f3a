"""Which of a token's ids is taken, and how ids come back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chisquare

from milkglass.client.codec.aliases import AliasChoices, repeated_stream
from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key, KeyInfo
from milkglass.client.special_tokens import reserved_ids
from milkglass.errors import CodecError, ModelError
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.stream import Stream
from milkglass.schemes.obfuslm import ObfusLM
from tests import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny.save("bert", tmp_path_factory.mktemp("choices") / "bert"))


def codec_of(base: Checkpoint, scheme: ObfusLM, seed: int | None = None) -> tuple[Key, Codec]:
    key = new_key(base, str(base.folder), scheme, base.digest(), bytes(range(32)))
    if seed is None:
        return key, Codec.open(key, base.folder)
    return key, Codec.open(key, base.folder, repeated_stream(Stream(seed.to_bytes(32))))


def test_each_alias_is_as_likely_and_each_draw_by_itself(base: Checkpoint) -> None:
    key, codec = codec_of(base, ObfusLM(4, 0.1, 0.9, aliases=3), seed=5)
    token = int(np.setdiff1d(np.arange(tiny.VOCAB), reserved_ids(base, tiny.VOCAB))[40])
    drawn = codec.scramble(np.full(30_000, token))
    ids, counts = np.unique(drawn, return_counts=True)
    assert (codec.inverse[ids] == token).all() and len(ids) == 3
    assert chisquare(counts).pvalue > 1e-3
    places = np.searchsorted(ids, drawn)
    pairs = np.bincount(3 * places[:-1] + places[1:], minlength=9)
    assert chisquare(pairs).pvalue > 1e-3


def test_an_id_of_a_cluster_says_nothing_of_its_member(base: Checkpoint) -> None:
    key, codec = codec_of(base, ObfusLM(4, 0.1, 0.9, rows="shared"), seed=6)
    assert key.groups is not None
    group = key.groups[3]
    drawn = [codec.scramble(np.full(20_000, token)) for token in group[:2]]
    for one in drawn:
        ids, counts = np.unique(one, return_counts=True)
        assert sorted(ids.tolist()) == sorted(key.sigma[group].tolist())
        assert chisquare(counts).pvalue > 1e-3


def test_special_tokens_have_one_id(base: Checkpoint) -> None:
    for scheme in (ObfusLM(4, 0.1, 0.9, aliases=4), ObfusLM(4, 0.1, 0.9, rows="shared")):
        key, _ = codec_of(base, scheme)
        choices = AliasChoices.of(key)
        assert choices is not None
        special = reserved_ids(base, tiny.VOCAB)
        assert (choices.counts[special] == 1).all()
        assert (choices.ids[choices.starts[special]] == key.sigma[special]).all()
        assert (np.delete(choices.counts, special) > 1).all()


def test_every_alias_is_decoded_and_labels_are_the_ids(base: Checkpoint) -> None:
    _, codec = codec_of(base, ObfusLM(4, 0.1, 0.9, aliases=2))
    encoded = codec.encode(tiny.TEXTS * 5).ids
    assert codec.decode_batch(encoded) == tiny.TEXTS * 5
    assert len({one.tobytes() for one in encoded}) == len(encoded), "the same text is sent as other ids"
    done = codec.encode_causal(tiny.TEXTS)
    for ids, labels in zip(done.ids, done.labels, strict=True):
        assert (ids == labels).all() and ids[-1] == codec.stop_ids[0]
    chats = [[{"role": "user", "content": one}, {"role": "assistant", "content": one}] for one in tiny.TEXTS]
    told = codec.encode_examples(chats)
    for ids, labels in zip(told.ids, told.labels, strict=True):
        kept = labels != -100
        assert kept.any() and (ids[kept] == labels[kept]).all()


def test_a_generator_makes_the_same_ids_again_and_the_system_does_not(base: Checkpoint) -> None:
    scheme = ObfusLM(4, 0.1, 0.9, aliases=4)
    one, two = (codec_of(base, scheme, seed=9)[1].encode(tiny.TEXTS).ids for _ in range(2))
    assert all((a == b).all() for a, b in zip(one, two, strict=True))
    _, secret = codec_of(base, scheme)
    assert any(
        (a != b).any() for a, b in zip(secret.encode(tiny.TEXTS).ids, secret.encode(tiny.TEXTS).ids, strict=True)
    )


def test_the_plain_twin_of_a_codec_gives_original_ids(base: Checkpoint) -> None:
    _, codec = codec_of(base, ObfusLM(4, 0.1, 0.9, rows="shared"))
    (ids,) = codec.without_scrambling.encode(tiny.TEXTS[:1]).ids
    assert ids.tolist() == codec.tokenizer(tiny.TEXTS[0])["input_ids"]
    assert codec.without_scrambling.decode(ids) == tiny.TEXTS[0]


def test_ids_of_clusters_are_not_read_back(base: Checkpoint) -> None:
    _, codec = codec_of(base, ObfusLM(4, 0.1, 0.9, rows="shared"))
    (ids,) = codec.encode(tiny.TEXTS[:1]).ids
    for ask in (codec.decode, codec.count_unknown):
        with pytest.raises(CodecError, match="an id names a cluster of tokens"):
            ask(ids)


def test_a_token_that_is_special_to_the_tokenizer_alone_is_refused(base: Checkpoint) -> None:
    key = new_key(base, "x", ObfusLM(4, 0.1, 0.9, aliases=2), base.digest(), bytes(range(32)))
    about = {**key.info.document, "slots": {"copies": 2, "single": key.info.document["slots"]["single"][1:] + [50]}}
    with pytest.raises(ModelError, match="1 special tokens have several ids"):
        Codec.open(Key(key.root, key.model_digest, key.sigma, KeyInfo(about)), Path(base.folder))
