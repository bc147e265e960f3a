"""`milkglass sanitize`, from the command line."""

from __future__ import annotations

import json
import multiprocessing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from milkglass.rows.examples import read_examples, summarise
from milkglass.sanitizers import word_list
from tests import tiny
from tests.cli.kit import SECRET, call, document, refused
from tests.sanitizers.kit import WORDS, table
from tests.warm import CONTEXT, warm_pools

__all__ = ["warm_pools"]


@pytest.fixture
def glove(tmp_path: Path) -> Path:
    words = table(40, 6)
    path = tmp_path / "glove.txt"
    rows = zip(words.words, words.vectors, strict=True)
    path.write_text("".join(f"{word} {' '.join(f'{x:.5f}' for x in row)}\n" for word, row in rows))
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILKGLASS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def commonest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the list of English words the first 2,000: a table of 40 words needs no more."""
    known = dict(islice(word_list.english_frequencies().items(), 2000))
    monkeypatch.setattr(word_list, "english_frequencies", lambda: known)


def rows_file(tmp_path: Path, count: int = 600) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "in.jsonl"
    rows = [{"text": f"{' '.join(rng.choice(WORDS, 5))}, {SECRET} {i}", "label": "ab"[i % 2]} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("method", ["santext", "santext+", "custext", "custext+", "rnm"])
def test_every_method_from_end_to_end(tmp_path: Path, glove: Path, method: str) -> None:
    source, out = rows_file(tmp_path), tmp_path / "out.jsonl"
    result = call("sanitize", "--method", method, source, out, "--table", glove, "--epsilon", "2", "--seed", "5")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["label"] for row in rows] == ["ab"[i % 2] for i in range(600)]
    allowed = {*table(40, 6).words}
    assert all(word.strip(",") in allowed for row in rows for word in row["text"].split())
    assert "unchanged: label" in result.stdout
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert (report["method"], report["epsilon"], report["rows"], report["seed_given"]) == (method, 2.0, 600, True)
    assert report["table"] == {"name": "glove.txt", "words": 40, "width": 6}
    assert f"guarantee: {report['guarantee'] or 'none'}" in result.stdout
    assert (report["guarantee"] is None) == (method == "rnm")
    assert report["words"]["unknown"]["replaced_share"] == 1 and report["words"]["number"]["words"] == 600
    assert (report["words"]["sensitive"]["words"] > 0) == (method in ("santext+", "rnm"))
    assert ("no --corpus: which words are rare" in result.stderr) == (method in ("santext+", "rnm"))
    assert (report.get("frequencies") == "a list of English words (wordfreq)") == (method in ("santext+", "rnm"))
    assert SECRET not in json.dumps(report) + result.stdout + result.stderr


def test_a_corpus_decides_what_is_rare_and_says_what_santext_draws_from(tmp_path: Path, glove: Path) -> None:
    source, corpus = rows_file(tmp_path, 30), tmp_path / "corpus.txt"
    corpus.write_text("apple apple apple fig\n")
    run = ("sanitize", "--method", "santext+", source, tmp_path / "o.jsonl", "--table", glove)
    result = call(*run, "--corpus", corpus)
    assert result.exit_code == 0 and "no --corpus" not in result.stderr
    assert "words that occur in corpus.txt: what is written shows some of its rare words" in result.stderr
    report = json.loads((tmp_path / "o.jsonl.report.json").read_text())
    assert report["frequencies_counted"] is True and "frequencies" not in report


@pytest.mark.parametrize("words", [("custext",), ("rnm",), ("rnm", "--set", "guarantee=strict")], ids=" ".join)
def test_lists_are_made_once_for_a_table(tmp_path: Path, glove: Path, words: tuple[str, ...]) -> None:
    """The second run says so, and gives what the first one gave; another k has lists of its own."""
    run = ("sanitize", rows_file(tmp_path, 30), "--table", glove, "--seed", "5", "--method", *words, "--k")
    first, again, other = (call(*run, k, tmp_path / f"{at}.jsonl") for at, k in enumerate(("6", "6", "7")))
    assert [one.exit_code for one in (first, again, other)] == [0, 0, 0], first.stderr
    kept = "lists of glove.txt were kept from an earlier run, and are reused"
    assert [kept in one.stderr for one in (first, again, other)] == [False, True, False]
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()


def test_lists_by_private_counts_are_not_kept(tmp_path: Path, glove: Path, cache: Path) -> None:
    source = rows_file(tmp_path, 30)
    run = ("sanitize", source, "--table", glove, "--method", "custext", "--corpus", source)
    for number in range(2):
        result = call(*run, tmp_path / f"{number}.jsonl")
        assert result.exit_code == 0 and "were kept" not in result.stderr
    assert not (cache / "lists").exists()


@pytest.mark.slow
def test_workers_do_not_change_the_result(tmp_path: Path, glove: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are spawned here, as the product spawns them."""
    monkeypatch.setattr(multiprocessing, "get_context", CONTEXT)
    source = rows_file(tmp_path, 1500)
    for workers in (1, 2):
        call("sanitize", source, tmp_path / f"{workers}.jsonl", "--table", glove, "--seed", "5", "--workers", workers)
    assert (tmp_path / "1.jsonl").read_bytes() == (tmp_path / "2.jsonl").read_bytes()


def test_json_on_stdout_and_what_may_cross_by_name(tmp_path: Path, glove: Path) -> None:
    source, out = rows_file(tmp_path, 3), tmp_path / "out.jsonl"
    words = ("sanitize", source, out, "--table", glove, "--json", "--allow", SECRET.upper(), "--keep-stopwords")
    found = document(call(*words))
    assert found["out"] == str(out) and found["allowed_words"] == 1 and found["stopwords_kept"] is True
    assert "words that are kept have none" in found["guarantee"]
    assert all(f", {SECRET} " in json.loads(line)["text"] for line in out.read_text().splitlines())


def test_the_epsilon_that_is_taken_where_none_is_given(tmp_path: Path, glove: Path) -> None:
    source = rows_file(tmp_path, 3)
    for method, epsilon in (("custext", 3.0), ("custext+", 1.0), ("santext", 2.2), ("rnm", 1.0)):
        words = ("sanitize", "--method", method, source, tmp_path / f"{method}.jsonl", "--table", glove, "--json")
        assert document(call(*words))["epsilon"] == epsilon
    assert document(call("sanitize", source, tmp_path / "o.jsonl", "--table", glove, "--json"))["epsilon"] == 3
    given = ("sanitize", source, tmp_path / "p.jsonl", "--table", glove, "--epsilon", 1, "--json")
    assert document(call(*given))["epsilon"] == 1


def test_strict_rnm_says_what_holds(tmp_path: Path, glove: Path) -> None:
    source = rows_file(tmp_path, 30)
    words = ("sanitize", "--method", "rnm", source, "--table", glove, "--k", "5", "--set", "guarantee=strict", "--json")
    assert document(call(*words, tmp_path / "a", "--set", "p=1"))["guarantee"].startswith(
        "1-DP between words of one list"
    )
    assert document(call(*words, tmp_path / "b", "--set", "p=0.5"))["guarantee"].startswith("2.792-DP")


def test_lines_of_stdin(tmp_path: Path, glove: Path) -> None:
    given = f"apple {SECRET}, 17\n\nfig\n"
    words = ("sanitize", "-", "--table", glove, "--method", "custext", "--seed", "3")
    result = call(*words, stdin=given)
    assert result.exit_code == 0 and SECRET not in result.stdout and "17" not in result.stdout
    lines = result.stdout.split("\n")
    assert len(lines) == 4 and lines[1] == "" and lines[0].count(",") == 1 and len(lines[2].split()) == 1
    assert "4 words" in result.stderr and "guarantee: 3-DP" in result.stderr
    assert call(*words, stdin=given).stdout == result.stdout
    assert call(*words, stdin="apple\n\nfig\n").stdout.split("\n")[2] == lines[2], "a line draws from its own stream"
    corpus = rows_file(tmp_path, 20)
    for counted in (("--corpus", corpus), ()):
        result = call("sanitize", "-", "--table", glove, "--method", "rnm", *counted, stdin=given)
        assert result.exit_code == 0 and "guarantee: none" in result.stderr
        assert ("no --corpus" in result.stderr) == (not counted)


def test_a_models_own_table(tmp_path: Path) -> None:
    folder, source = tiny.save("llama-tied", tmp_path / "model"), tmp_path / "in.txt"
    source.write_text(f"the nurse called about {SECRET}\n")
    report = document(call("sanitize", source, tmp_path / "out.txt", "--table", folder, "--k", 5, "--json"))
    assert report["table"]["name"] == "model" and report["table"]["width"] == 32
    assert SECRET not in (tmp_path / "out.txt").read_text()


def test_training_data_of_a_decoder_by_its_tokens(tmp_path: Path) -> None:
    """What is written can be trained on, with the answers as they were; the instruction is kept, the rest not."""
    folder, source, out = tiny.save("llama-tied", tmp_path / "model"), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        [{"role": "user", "content": f"Summarize: {text}"}, {"role": "assistant", "content": text[:9]}]
        for text in tiny.TEXTS
    ]
    source.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), "utf-8")
    words = ("sanitize", source, "--method", "rnm", "--by", "tokens", "--table", folder, "--k", "4", "--set", "p=1")
    report = document(call(*words, out, "--role", "user", "--instruction", "Summarize: ", "--json"))
    assert report["by"] == "tokens" and report["guarantee"] is None
    assert report["words"]["all"]["replaced_share"] == 1
    found = list(read_examples(out))
    assert summarise(out).task == "causal-lm"
    for row, one in zip(rows, found, strict=True):
        assert one.messages[1] == row[1] and one.messages[0]["content"].startswith("Summarize: ")
        assert one.messages[0] != row[0]
    misspelt = call(*words, tmp_path / "b.jsonl", "--instruction", "Sumarize: ")
    refused(misspelt, 5, "no text of in.jsonl begins with the instruction")
    refused(call(*words, tmp_path / "b.jsonl", "--role", "users"), 5, "no message of the roles users")


def test_what_by_tokens_refuses(tmp_path: Path, glove: Path) -> None:
    source, out = rows_file(tmp_path, 3), tmp_path / "out.jsonl"
    words = ("sanitize", source, out, "--by", "tokens")
    refused(call(*words, "--table", glove, "--method", "rnm"), 2, "glove.txt has words")
    refused(call(*words, "--method", "custext+"), 2, "custext+ keeps some words")
    refused(call(*words, "--method", "ghost"), 2, "ghost has no use for --by")
    (tmp_path / "in.tsv").write_text("text\tlabel\na b\tc\n", "utf-8")
    refused(call("sanitize", tmp_path / "in.tsv", tmp_path / "o.tsv", "--role", "user"), 2, "has no conversations")
    refused(call("sanitize", "-", "--role", "user"), 2, "stdin is read as lines")


def test_what_is_refused(tmp_path: Path, glove: Path) -> None:
    source, out = rows_file(tmp_path, 3), tmp_path / "out.jsonl"
    table_of = ("--table", glove)
    refused(call("sanitize", tmp_path / "none", out, *table_of), 2, "there is no file")
    refused(call("sanitize", tmp_path, out, *table_of), 2, "is a folder")
    refused(call("sanitize", source, *table_of), 2, "no OUT was given")
    refused(call("sanitize", source, source, *table_of), 2, "exists already")
    for epsilon in ("0", "-1", "nan", "inf"):
        refused(call("sanitize", source, out, *table_of, "--epsilon", epsilon), 2, "epsilon is")
    refused(call("sanitize", source, out, *table_of, "--method", "dp"), 2, "there is no sanitizer 'dp'")
    refused(call("sanitize", source, out, *table_of, "--set", "p=0.5"), 2, "custext has no parameter 'p'")
    refused(call("sanitize", source, out, *table_of, "--method", "custext", "--k", "500"), 2, "from 2 to 40")
    refused(call("sanitize", source, out, "--table", tmp_path / "none"), 3, "there is no model folder")
    (tmp_path / "empty").write_text("")
    refused(call("sanitize", source, out, "--table", tmp_path / "empty"), 3, "has no words")
    refused(call("sanitize", "-", out, *table_of), 2, "stdin is read as lines")
    source.write_text(source.read_text() + '{"text": 5}\n')
    late = call("sanitize", source, out, *table_of, "--method", "rnm")
    refused(late, 5, "line 4")  # before frequencies are looked up and lists are made
    source.write_text(f'{{"text": "{SECRET}"\n')
    result = call("sanitize", source, out, *table_of)
    refused(result, 5, "line 1 of in.jsonl is not JSON")
    assert SECRET not in result.stderr and not out.exists()


def test_a_seed_is_part_of_what_is_promised(glove: Path, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text(f"{WORDS[0]} {WORDS[1]}\nzzz yyy xxx\n", "utf-8")
    run = ("sanitize", "--method", "custext", "--k", 3, "--table", glove, path)
    result = call(*run, tmp_path / "a.txt", "--seed", 1)
    assert "DP" in result.stdout and "against anyone who cannot guess the seed" in result.stdout
    assert "60 % of the words are not in the table" in result.stdout
    assert "cannot guess" in json.loads((tmp_path / "a.txt.report.json").read_text("utf-8"))["guarantee"]
    assert "cannot guess" not in call(*run, tmp_path / "b.txt").stdout


@pytest.mark.parametrize(
    ("more", "out", "message"),
    [
        (("--epsilon", 1e300), "o.txt", "epsilon is 1e+300, a finite number from 1e-09 to 1e+06 is needed"),
        (("--k", 3), "o.jsonl", "o.jsonl is a name for json, and in.txt contains lines"),
        (("--table", "nothere.txt"), "o.txt", "there is no file nothere.txt"),
        (
            ("--method", "santext+", "--set", "sensitive=0"),
            "o.txt",
            "sensitive=0: a finite number above 0, up to 1 is needed",
        ),
        (("--method", "custex"), "o.txt", "there is no sanitizer 'custex'"),
    ],
)
def test_more_that_is_refused(glove: Path, tmp_path: Path, more: tuple[object, ...], out: str, message: str) -> None:
    path = tmp_path / "in.txt"
    path.write_text("nurse friday\n", "utf-8")
    result = call("sanitize", "--method", "custext", "--table", glove, path, tmp_path / out, *more)
    refused(result, 2, message)
    assert not (tmp_path / out).exists()
