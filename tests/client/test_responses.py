"""Ids that are exchanged where they occur: a key, its codec and its keys for jobs send a text equally."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from milkglass.client.codec.aliases import IdRandomiser
from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import encode_examples
from milkglass.client.key.file import seal, unseal, write_key
from milkglass.client.key.generate import for_job, new_key
from milkglass.client.key.key import Key, KeyInfo
from milkglass.errors import DamagedKey
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.responses import RandomisedResponse
from milkglass.noise.stream import Stream
from milkglass.rows.examples import Example
from milkglass.schemes.coarse import Coarse
from milkglass.schemes.symbols.symbol_map import SymbolMap
from tests import tiny
from tests.cli.kit import PASSPHRASE, call, document

TEXT = "the nurse reads a letter to the doctor"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(tiny.save("bert", tmp_path_factory.mktemp("responses") / "bert"))


@pytest.fixture(scope="module")
def key(base: Checkpoint) -> Key:
    numbers = np.arange(tiny.VOCAB)
    numbers[5:] = 5 + numbers[5:] % 12
    scheme = Coarse(12, epsilon=1.0, map=SymbolMap.of(numbers, np.ones(tiny.VOCAB)))
    return new_key(base, str(base.folder), scheme, base.digest(), bytes(range(32)))


def sent(key: Key, base: Checkpoint, *texts: str) -> list[list[int]]:
    return [one.tolist() for one in Codec.open(key, base.folder).encode(texts, truncate=True).ids]


def test_the_same_text_is_sent_equally_whatever_stands_beside_it(key: Key, base: Checkpoint) -> None:
    assert sent(key, base, TEXT) == sent(key, base, TEXT)
    assert sent(key, base, "hello", TEXT, TEXT)[1:] == 2 * sent(key, base, TEXT)


def test_an_audit_reads_the_ids_that_were_sent(key: Key, base: Checkpoint) -> None:
    """Each text has draws of its own, so that equal texts are equal on the wire and in the audit."""
    codec, texts = Codec.open(key, base.folder), [TEXT, "hello", TEXT]
    audited = encode_examples(codec, [Example(index, "text", text) for index, text in enumerate(texts)])
    assert [ids.tolist() for ids in audited.scrambled] == sent(key, base, *texts)


def test_the_draws_of_a_text_are_the_known_answer() -> None:
    known = json.loads((Path(__file__).parents[2] / "vectors" / "responses.json").read_text("utf-8"))
    mechanism = RandomisedResponse(np.array(known["values"]), known["text"]["epsilon"])
    responses = IdRandomiser(mechanism, Stream(bytes.fromhex(known["key"])))
    ids = np.array(known["ids"], np.int32)
    for _ in range(2):
        assert responses.randomise(np.array(known["text"]["tokens"]), ids).tolist() == known["text"]["sent"]


def test_another_text_and_another_key_are_exchanged_otherwise(key: Key, base: Checkpoint) -> None:
    """Where they agree in the words, a shared stream would show which ids were exchanged."""
    symbols = key.first_ids[Codec.open(key, base.folder).tokenizer(TEXT)["input_ids"]]
    one, other = sent(key, base, TEXT)[0], sent(key, base, TEXT + " hello")[0]
    kept, again = np.array(one[:-1]) == symbols[:-1], np.array(other[: len(one) - 1]) == symbols[:-1]
    assert not np.array_equal(kept, again)
    renewed = replace(key, secret=bytes(32))
    assert sent(renewed, base, TEXT)[0] != one, "the same permutation, other draws"


def symbols_sent(key: Key, base: Checkpoint, text: str) -> list[int]:
    """The symbols that were sent, which anyone can solve from the rows of the model."""
    assert key.token_symbols is not None
    back = {int(key.first_ids[token]): int(symbol) for token, symbol in enumerate(key.token_symbols)}
    return [back[one] for one in sent(key, base, text)[0]]


def test_a_codec_alone_sends_what_the_key_sends(key: Key, base: Checkpoint) -> None:
    """So that sending a text again spends nothing more."""
    held = unseal(seal(key.codec_alone(), "pw", scrypt_n=2), "pw")
    assert held.secret is None
    for text in (TEXT, "hello", TEXT + " hello"):
        assert sent(held, base, text) == sent(key, base, text)


def test_a_vote_over_keys_of_one_map_reads_no_more_than_one_of_them(key: Key, base: Checkpoint) -> None:
    """A key, its codec, keys for jobs, their codecs, and a key for a job of a key for a job."""
    jobs = [unseal(seal(for_job(base, key, f"job {number}"), "pw", scrypt_n=2), "pw") for number in range(6)]
    keys = [key, key.codec_alone(), *jobs, jobs[0].codec_alone(), for_job(base, jobs[1], "another")]
    assert len({tuple(one.sigma.tolist()) for one in jobs}) == 6
    for text in (TEXT, "hello there", TEXT + " hello"):
        assert len({tuple(symbols_sent(one, base, text)) for one in keys}) == 1


def test_keys_of_before_draws_were_kept_open_and_are_named(key: Key, base: Checkpoint, tmp_path: Path) -> None:
    """Their draws are as they were; each command says that a repetition spends epsilon again."""
    old_codec = replace(key.codec_alone(), info=key.info.for_codec(True))
    assert len({tuple(sent(old_codec, base, TEXT)[0]) for _ in range(8)}) == 8
    child = for_job(base, key, "second")
    document = {name: value for name, value in child.info.document.items() if name != "responses"}
    old_child = replace(child, info=KeyInfo(document))
    assert sent(old_child, base, TEXT) == sent(old_child, base, TEXT)
    assert symbols_sent(old_child, base, TEXT) != symbols_sent(child, base, TEXT)
    for number, (one, words) in enumerate(
        ((old_codec, "spends epsilon again"), (old_child, "spends epsilon under each"))
    ):
        write_key(tmp_path / str(number), one, PASSPHRASE, allows_weak=True)
        result = call("encode", TEXT, "--key", tmp_path / str(number))
        assert words in " ".join(result.stderr.split())
    write_key(tmp_path / "new", child, PASSPHRASE, allows_weak=True)
    assert "spends epsilon" not in call("encode", TEXT, "--key", tmp_path / "new").stderr


def test_a_list_of_exchanged_ids_that_does_not_fit_is_refused(key: Key, base: Checkpoint) -> None:
    child = for_job(base, key, "second")
    kept = dict(child.info.responses or {})
    for ids in (kept["ids"][1:], kept["ids"][:1] * len(kept["ids"])):
        broken = replace(child, info=KeyInfo({**child.info.document, "responses": {**kept, "ids": ids}}))
        with pytest.raises(DamagedKey, match="exchanged ids"):
            Codec.open(broken, base.folder)


def test_a_key_for_a_job_exchanges_too(key: Key, base: Checkpoint) -> None:
    child = for_job(base, key, "second")
    assert child.info.scheme["epsilon"] == 1.0
    codec = Codec.open(child, base.folder)
    assert codec.id_randomiser is not None and len(codec.id_randomiser.mechanism.values) == 12
    plain = codec.tokenizer(TEXT)["input_ids"]
    assert 0 < (np.array(sent(child, base, TEXT)[0]) != child.first_ids[plain]).sum() < len(plain)


def test_rows_that_are_written_again_are_the_same_file(tmp_path: Path) -> None:
    """So that an upload which was interrupted goes on."""
    tiny.save("bert", tmp_path / "model")
    rows = tmp_path / "rows.csv"
    lines = [f"{one},{number % 2}" for number, one in enumerate(["the nurse called", "hello there", "a b c"] * 8)]
    rows.write_text("text,label\n" + "\n".join(lines) + "\n", "utf-8")
    made = ("obfuscate", tmp_path / "model", tmp_path / "out", "--key", tmp_path / "k", "--data", rows)
    words = ("--scheme", "coarse", "--symbols", "12", "--epsilon", "1", "--set", "kmeans.vectors=table")
    document(call(*made, *words, "--json"))
    files = [tmp_path / f"{one}.parquet" for one in "ab"]
    for out in files:
        document(call("encode", "--in", rows, "--out", out, "--key", tmp_path / "k", "--json"))
    first, second = (pq.read_table(one).to_pydict() for one in files)
    assert first == second
