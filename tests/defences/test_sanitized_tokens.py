"""Tokens replaced by a sanitizer: lists over the model's own rows, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from milkglass.audit.defence_scene import scene_of, sent_and_original
from milkglass.defences.catalogue import defence_of
from milkglass.defences.sanitized_text import SanitizedTextClient, SanitizedTokensClient
from milkglass.errors import UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import load_tokenizer
from milkglass.threat.defence import LabelledTexts
from milkglass.threat.observations import Tokens
from tests.sanitizers.kit import literal
from tests.tiny import TEXTS, VOCAB, save

CORPUS = LabelledTexts(TEXTS, [0, 1] * (len(TEXTS) // 2) + [0] * (len(TEXTS) % 2))
SECRET = bytes(range(32))
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
RNM = {"sanitizer": "rnm", "epsilon": 0.01, "k": 5, "sensitive": 1.0}  # all are sensitive, the list is drawn evenly


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=VOCAB // 3, special_tokens=SPECIAL))
    return made


def sentencepiece() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=VOCAB - 10, special_tokens=SPECIAL, unk_token="<unk>")
    made.train_from_iterator(TEXTS, trainer)
    return made


# A model, and what stands in its folder in place of its byte-level BPE; and a piece that only such a tokenizer has.
KINDS: dict[str, tuple[str, Callable[[], Tokenizer] | None, str]] = {
    "bert, word pieces": ("bert", wordpiece, "##"),
    "gpt2, byte-level": ("gpt2", None, "\u0120"),
    "llama, sentence pieces": ("llama-tied", sentencepiece, "\u2581"),
}


@pytest.fixture(scope="module", params=KINDS)
def halves(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, object]:
    root = tmp_path_factory.mktemp("tokens")
    name, make, mark = KINDS[request.param]
    base = Checkpoint.open(save(name, root / "base"))
    if make:
        names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        PreTrainedTokenizerFast(tokenizer_object=make(), **names).save_pretrained(base.folder)
    ids = load_tokenizer(base.folder)(TEXTS)["input_ids"]
    pieces = {piece for one in ids for piece in load_tokenizer(base.folder).convert_ids_to_tokens(one)}
    assert any(piece.startswith(mark) for piece in pieces), "no text has such a piece"
    client, _ = defence_of(RNM).split(base, CORPUS, SECRET, root / "server")
    return base, client


def test_rnm_is_by_tokens_unless_words_are_asked_for(tmp_path: Path) -> None:
    base = Checkpoint.open(save("bert", tmp_path / "base"))
    for number, (entry, kind) in enumerate(
        [(RNM, SanitizedTokensClient), ({**RNM, "by": "words", "k": 2}, SanitizedTextClient)]
    ):
        client, _ = defence_of(entry).split(base, CORPUS, SECRET, tmp_path / f"server{number}")
        assert isinstance(client, kind)


def test_every_token_becomes_one_of_the_list_of_its_row(halves: tuple[Checkpoint, object]) -> None:
    """The lists of the paper's formula over all rows but the special ones, computed one row at a time."""
    base, client = halves
    assert isinstance(client, SanitizedTokensClient)
    sent, original, origin = sent_and_original(client, TEXTS)
    assert origin is not None and np.array_equal(origin, np.arange(len(original.ids)))
    table = client.mechanism.table
    candidates = table.candidates
    x = table.vectors[candidates].astype(np.float64)
    tokenizer = load_tokenizer(base.folder)
    for before, after in set(zip(original.ids.tolist(), sent.ids.tolist(), strict=True)):
        if before in tokenizer.all_special_ids:
            assert after == before
            continue
        near, _ = literal.candidate_list(x, int(np.flatnonzero(candidates == before)[0]), 5)
        assert after in candidates[near]
    ordinary = ~np.isin(original.ids, tokenizer.all_special_ids)
    assert ordinary.any() and (sent.ids != original.ids)[ordinary].all()
    marks = [i for i in original.ids.tolist() if tokenizer.decode([i]).strip() in {",", "."}]
    assert marks, "punctuation is a token like others"


def test_what_is_sent_is_what_is_graded(halves: tuple[Checkpoint, object]) -> None:
    client = halves[1]
    assert isinstance(client, SanitizedTokensClient)
    (one,) = client.send(TEXTS)
    assert isinstance(one, Tokens)
    assert np.array_equal(one.ids.ids, sent_and_original(client, TEXTS)[0].ids)


def test_the_channel_attack_has_its_rehearsal(tmp_path: Path) -> None:
    base = Checkpoint.open(save("bert", tmp_path / "base"))
    client, server = defence_of(RNM).split(base, CORPUS, SECRET, tmp_path / "server")
    scene = scene_of(base, client, server, TEXTS[:2], {"same kind of text": ["the nurse came on monday", "call me"]})
    (_, alike) = scene.adversaries
    assert alike.knowledge.rehearse is not None and alike.knowledge.corpus is not None
    sent, origin = alike.knowledge.rehearse(alike.knowledge.corpus, 1)
    assert len(sent.ids) == len(alike.knowledge.corpus.ids) == len(origin)


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"by": "letters"}, "by .*'letters'"),
        ({"keep_stopwords": True}, "rnm keeps"),
        ({"allow": ["house"]}, "rnm keeps"),
    ],
)
def test_what_cannot_be_is_refused(more: dict[str, object], fault: str) -> None:
    with pytest.raises(UsageError, match=fault):
        defence_of({**RNM, **more})


def test_a_glove_file_has_words(tmp_path: Path) -> None:
    (tmp_path / "glove.txt").write_text("a 1 2\nb 2 1\nc 0 1\n", "utf-8")
    with pytest.raises(UsageError, match="GloVe"):
        defence_of({**RNM, "by": "tokens", "words": "glove.txt"}, tmp_path)
