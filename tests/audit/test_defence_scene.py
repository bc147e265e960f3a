"""Which piece of a sanitized text came of which piece of the text: words that change their length and number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit.defence_scene import _matching_places, _pieces, replaced_and_cut, scene_of, sent_and_original
from milkglass.audit.plan import without_id_recovery
from milkglass.audit.report.findings import all_findings
from milkglass.audit.run import RunOptions, run
from milkglass.audit.scene import ALIKE
from milkglass.client.codec.codec import Codec
from milkglass.defences.catalogue import defence_of
from milkglass.defences.obfuscated_tables import key_from_secret, public_codec
from milkglass.defences.sanitized_text import ReplacedTextClient, SanitizedTextClient
from milkglass.errors import UsageError
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.mechanism import HalvesTraining
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.defence import Client, LabelledTexts, Server
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.observations import Activations, Observation, Tokens, Weights
from milkglass.threat.truth import score
from tests import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny.save("bert", tmp_path_factory.mktemp("models") / "base"))


@pytest.fixture(scope="module")
def codec(base: Checkpoint) -> Codec:
    return Codec.open(key_from_secret(base, None, bytes(32)), base.folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "words.txt"
    found = sorted({word.strip(",") for text in tiny.TEXTS for word in text.split()} - {"120", "80"})
    rng = np.random.default_rng(0)
    path.write_text("".join(f"{w} {' '.join(f'{x:.4f}' for x in rng.normal(size=6))}\n" for w in found), "utf-8")
    return path


def spelled(codec: Codec, ids: Ids | Sequence[int]) -> list[str]:
    return [codec.tokenizer.decode([int(one)]) for one in ids]


def test_pieces_of_a_word_belong_to_the_word_in_its_place(codec: Codec) -> None:
    is_changed = [np.array([False, True, False, True, False, False, False])]
    before, own = _pieces(codec, [["", "nurse", " ", "of", ", ", "zzz", ""]], is_changed)
    after, other = _pieces(codec, [["", "of", " ", "nurse", ", ", "zzz", ""]], is_changed)
    origin = _matching_places(own, other)
    parts = ["", "nurse", " ", "of", ", ", "zzz", ""]
    for token, at, row in zip(before.ids, origin, own, strict=True):
        text = codec.tokenizer.decode([int(token)])
        assert text.strip() in parts[int(row[1])] or text in parts[int(row[1])]
        if at != NO_BELIEF:
            assert other[at].tolist() == row.tolist()
    assert (origin == NO_BELIEF).sum() == sum(tuple(row) not in set(map(tuple, other.tolist())) for row in own)
    same = own[:, 1] == 5
    assert spelled(codec, before.ids[same]) == spelled(codec, after.ids[origin[same]])


class Renaming(ReplacedTextClient):
    """Sends `mask` in place of each "nurse"."""

    mask = "MASK"

    def parts(self, texts: Sequence[str]) -> list[tuple[list[str], list[str]]]:
        found = []
        for text in texts:
            words = re.split("(nurse)", text)
            found.append((words, [self.mask if word == "nurse" else word for word in words]))
        return found


@pytest.mark.parametrize("mask", ["MASK", "the very long name of somebody else"])
def test_what_is_cut_off_is_not_replaced(mask: str, base: Checkpoint, codec: Codec) -> None:
    """A text longer than the model reads loses its end, with a mask or without one."""
    limited = replace(codec, max_tokens=60)
    client = Renaming(limited, bytes(32), {"name": "renaming"})
    object.__setattr__(client, "mask", mask)
    texts = ["the nurse called", "we see the wound", "the nurse called " * 60]
    sent, original, _ = sent_and_original(client, texts)
    is_replaced, is_cut = replaced_and_cut(client, texts)
    assert len(original.ids) == len(is_replaced) == len(is_cut) and not (is_replaced & is_cut).any()
    short = int(original.lengths[:2].sum())
    assert "".join(spelled(codec, original.ids[:short][is_replaced[:short]])).replace("##", "") == "nurse"
    assert not is_cut[:short].any() and (sent.lengths[2], original.lengths[2]) == (60, 60), "both long texts are cut"
    parts = client.parts(texts[2:])
    is_changed = [np.array([word == "nurse" for word in parts[0][0]])]
    (_, rows), (_, sent_rows) = (_pieces(limited, [pieces[of] for pieces in parts], is_changed) for of in (0, 1))
    masks = {int(piece) for piece in range(1, len(parts[0][0]), 2)}
    masks_sent, masked = ({*found.tolist()} & masks for found in (sent_rows[:, 1], rows[is_replaced[short:], 1]))
    assert masked == masks_sent & {*rows[:, 1].tolist()} and masked
    cut = is_cut[short:-1]
    assert cut.any() == (mask != "MASK") and (np.diff(cut.astype(int)) >= 0).all(), "a longer mask cuts the end"


def test_words_behind_a_mask_are_read_though_its_end_is_in_a_token_with_the_next_mark(codec: Codec) -> None:
    """A byte-level tokenizer has ">." and " (<" as one token: what follows is not moved by one."""
    texts = ["we see (nurse) and the nurse. the wound is red, nurse's and nurse, again"]
    masked = [text.replace("nurse", "<MASK>") for text in texts]
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words.train_from_iterator(masked * 9 + texts * 9, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    byte_level = replace(codec, tokenizer=PreTrainedTokenizerFast(tokenizer_object=words), max_tokens=200)
    client = Renaming(byte_level, bytes(32), {"name": "renaming"})
    object.__setattr__(client, "mask", "<MASK>")
    sent, original, origin = sent_and_original(client, texts)
    assert {">.", " (<"} <= {*spelled(byte_level, sent.ids)}, "else the tokenizer has no such tokens"
    assert origin is not None
    is_replaced, is_cut = replaced_and_cut(client, texts)
    is_read = (origin != NO_BELIEF) & (sent.ids[np.maximum(origin, 0)] == original.ids)
    unread = spelled(byte_level, original.ids[~is_read & ~is_replaced])
    assert not is_cut.any()
    assert unread == [" (", ")", ".", "'s", ","], "marks beside a mask alone, and 's, which is two tokens behind one"
    first_names = original.ids[is_replaced][0], origin[is_replaced][0]
    assert "nurse" in spelled(byte_level, [first_names[0]])[0]
    assert "<" in spelled(byte_level, [sent.ids[first_names[1]]])[0], "a mask's place is where its first letter is"


def test_nothing_replaced_is_read_whole(base: Checkpoint, words: Path, tmp_path: Path) -> None:
    """Words that are allowed cross as they are: reading what was sent reads everything."""
    entry = {"sanitizer": "custext", "epsilon": 1.0, "k": 3, "words": "words.txt", "allow": frozenset(tokens())}
    corpus = LabelledTexts(tiny.TEXTS, [0] * 4)
    client, server = defence_of(entry, words.parent).split(base, corpus, bytes(32), tmp_path / "s")
    assert isinstance(client, SanitizedTextClient)
    sent, original, origin = sent_and_original(client, tiny.TEXTS)
    assert origin is not None
    assert (origin != NO_BELIEF).all()
    assert np.array_equal(sent.ids[origin], original.ids)
    scene = scene_of(base, client, server, tiny.TEXTS, {})
    table = np.arange(scene.transcript.vocab_size)[:, None]
    assert score(Guess(by_id=table), scene.truth, np.random.default_rng(0)).measures["tokens top-1"].value == 1.0
    begun, attacks = list[str](), {name: ATTACKS[name] for name in ("knn", "as-it-is", "cluster-solve", "decipherment")}
    options = RunOptions(on_begin=begun.append, ends_when_all_is_read=True)
    results = run(scene, attacks, None, Budget(60), 0, options=options).results
    assert begun == [ATTACKS["as-it-is"].title], "nothing is left to be read by others"
    assert {result.attack: result.state for result in results} == {
        "as-it-is": "done", **dict.fromkeys(("knn", "cluster-solve", "decipherment"), "does not apply"),
    }  # fmt: skip


def test_attacks_that_recover_ids_read_no_more_of_public_ids_than_is_sent(
    base: Checkpoint, words: Path, tmp_path: Path
) -> None:
    entry = {"sanitizer": "custext", "epsilon": 3.0, "k": 3, "words": "words.txt"}
    client, server = defence_of(entry, words.parent).split(base, None, bytes(32), tmp_path / "s")
    scene = scene_of(base, client, server, tiny.TEXTS[:2], {ALIKE: tiny.TEXTS})
    useful = without_id_recovery(scene, ATTACKS)
    assert {*useful} == {name for name, attack in ATTACKS.items() if not attack.recovers_ids}
    others = {name: attack for name, attack in ATTACKS.items() if attack.recovers_ids and not attack.min_seconds}
    results = run(scene, {"as-it-is": ATTACKS["as-it-is"], **others}, None, Budget(60), 0).results
    share_of = {one.attack: one.measures["tokens top-1"].value for one in results if one.state == "done"}
    assert {"cluster-solve", "knn", "decipherment"} <= {*share_of}
    assert max(share_of.values()) == share_of["as-it-is"] < 1


class ExtendedClient(SanitizedTextClient):
    """Might do more to what is sent than the class that it extends."""


def test_attacks_that_recover_ids_stay_where_ids_may_be_scrambled(
    base: Checkpoint, words: Path, tmp_path: Path
) -> None:
    """Of a scheme, of a client of another class, and of a server with another table."""
    sentinel = defence_of({"scheme": "sentinel"}, tmp_path).split(base, None, bytes(32), tmp_path / "sentinel")
    entry = {"sanitizer": "custext", "epsilon": 3.0, "k": 3, "words": "words.txt"}
    client, server = defence_of(entry, words.parent).split(base, None, bytes(32), tmp_path / "custext")
    assert isinstance(client, SanitizedTextClient)
    parts = {field.name: getattr(client, field.name) for field in fields(client)}
    for halves in (sentinel, (ExtendedClient(**parts), server), (client, sentinel[1])):
        scene = scene_of(base, *halves, tiny.TEXTS[:2], {ALIKE: tiny.TEXTS})
        assert {*without_id_recovery(scene, ATTACKS)} == {*ATTACKS}


def test_an_attack_that_names_ids_says_nothing_of_states(base: Checkpoint, codec: Codec) -> None:
    """States of noise, beside a table on the server: naming its rows does not name what was sent."""

    class Noise(Client):
        def send(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Observation, ...]:
            lengths = Sequences.of(codec.encode(texts).ids).lengths
            return (Activations(torch.randn(int(lengths.sum()), 32), lengths, layer=1),)

        def save(self, folder: Path) -> None: ...

    class Table(Disk):
        def stored_observations(self) -> tuple[Observation, ...]:
            return (Weights(Model.open(base.folder)),)

    scene = scene_of(base, Noise(), Table(), tiny.TEXTS[:2], {ALIKE: tiny.TEXTS})
    attacks = {name: attack for name, attack in ATTACKS.items() if not attack.min_seconds}
    results = run(scene, attacks, None, Budget(60), 0).results
    shares = [one.value("tokens top-1") for one in results if one.state == "done" and "tokens top-1" in one.measures]
    assert all(share < 0.5 for share in shares)
    assert {one.state for one in results if ATTACKS[one.attack].recovers_ids} == {"does not apply"}


def tokens() -> list[str]:
    return sorted({word.strip(",") for text in tiny.TEXTS for word in text.split()})


def test_the_rehearsal_is_of_the_attackers_own_text(base: Checkpoint, words: Path, tmp_path: Path) -> None:
    entry = {"sanitizer": "custext", "epsilon": 1.0, "k": 3, "words": "words.txt"}
    client, server = defence_of(entry, words.parent).split(base, None, bytes(32), tmp_path / "s")
    scene = scene_of(base, client, server, tiny.TEXTS[:2], {ALIKE: tiny.TEXTS})
    knowledge = scene.adversaries[1].knowledge
    assert knowledge.corpus is not None and knowledge.rehearse is not None
    assert len(knowledge.corpus) == 2  # the private ones were taken out
    first, origin = knowledge.rehearse(knowledge.corpus, 1)
    again, _ = knowledge.rehearse(knowledge.corpus, 1)
    other, _ = knowledge.rehearse(knowledge.corpus, 2)
    assert np.array_equal(first.ids, again.ids)
    assert not np.array_equal(first.ids, other.ids)
    assert len(origin) == len(knowledge.corpus.ids)
    with pytest.raises(ValueError, match="attacker's own text"):
        knowledge.rehearse(scene.truth.tokens, 1)


@dataclass(frozen=True)
class Disk(Server):
    """Has nothing."""

    folder: Path = Path()

    def stored_observations(self) -> tuple[Observation, ...]:
        return ()

    def answer(self, sent: tuple[Observation, ...]) -> Any:
        raise NotImplementedError


class Shorter(Client):
    """Leaves out the last token of each text, and says so or not."""

    def __init__(self, base: Checkpoint, says: bool) -> None:
        self.codec, self.says = public_codec(base), says

    def send(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Observation, ...]:
        return (Tokens(Sequences.of(ids[:-1] for ids in self.codec.encode(texts).ids)),)

    def origin(self, texts: Sequence[str], original: Sequences, sent: Sequences) -> Ids | None:
        if not self.says:
            return None
        places = np.arange(len(original.ids)) - original.sequence_indices
        places[np.cumsum(original.lengths) - 1] = NO_BELIEF
        return places

    def save(self, folder: Path) -> None: ...


def test_a_client_of_another_class_says_where_each_token_was_sent(base: Checkpoint) -> None:
    scene = scene_of(base, Shorter(base, True), Disk(), tiny.TEXTS, {})
    truth = scene.truth
    assert truth.origin is not None and (truth.origin == NO_BELIEF).sum() == len(tiny.TEXTS)
    there = truth.origin != NO_BELIEF
    assert (truth.sent.ids[truth.origin[there]] == truth.tokens.ids[there]).all()
    with pytest.raises(UsageError, match=rf"Shorter sends \d+ ids for {len(scene.truth.tokens.ids)} "):
        scene_of(base, Shorter(base, False), Disk(), tiny.TEXTS, {})


class Sending(Client):
    """Sends what it was made with."""

    def __init__(self, sent: Any) -> None:
        self.sent = sent

    def send(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Observation, ...]:
        return self.sent  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None: ...


def test_a_client_sends_observations_and_a_state_for_each_token(base: Checkpoint, codec: Codec) -> None:
    lengths = np.array([len(ids) for ids in codec.encode(tiny.TEXTS).ids])
    states = Activations(torch.ones(int(lengths.sum()), 4), lengths, 0)
    assert scene_of(base, Sending((states,)), Disk(), tiny.TEXTS, {}).transcript.observations == (states,)
    pooled = Activations(torch.ones(len(lengths), 4), np.ones(len(lengths), np.int64), 0, pooled=True)
    assert scene_of(base, Sending((pooled,)), Disk(), tiny.TEXTS, {})
    for sent, named in (
        (states, "a Activations that is no tuple"),
        (None, "a NoneType that is no tuple"),
        ((replace(pooled, pooled=False),), f"sends {len(lengths)} states"),
        ((replace(states, lengths=lengths[:-1]),), f"of {len(lengths) - 1} texts"),
    ):
        with pytest.raises(UsageError, match=named):
            scene_of(base, Sending(sent), Disk(), tiny.TEXTS, {})


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"scheme": "sentinel"}, "SentinelLMs is broken"),
        ({"encoder": "textmixer", "layer": 1}, "keys can be computed"),
        ({"encoder": "dp-forward", "layer": 1, "epsilon": 5.0}, None),
    ],
)
def test_an_audit_says_first_of_a_broken_defence_that_it_is(
    base: Checkpoint, tmp_path: Path, entry: dict[str, object], says: str | None
) -> None:
    texts = [f"{one} {number}" for number in range(4) for one in tiny.TEXTS]
    defence = defence_of(entry, tmp_path)
    if isinstance(defence, HiddenStateDefence):
        defence = replace(defence, training=HalvesTraining(epochs=1, max_steps=1, max_length=32))
    client, server = defence.split(base, LabelledTexts(texts, [0, 1] * 8), bytes(32), tmp_path / "server")
    first = all_findings(scene_of(base, client, server, texts[:6], {}), (), {})[0]
    if says is None:
        assert first.title != "This defence is broken"
    else:
        assert first.title == "This defence is broken"
        assert says in first.explanation
