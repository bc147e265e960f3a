"""A coarse vocabulary by the command line: obfuscate, verify, what is sent, training in this process, and refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from milkglass.client.codec.codec import Codec
from milkglass.client.data.marked_rows import parquet_tensors, write_tensors
from milkglass.client.key.file import read_key
from milkglass.client.obfuscate.symbols import count_texts, new_coarse_key
from milkglass.client.training_request import held_out_mask
from milkglass.experiments.reproduce import reproduce
from milkglass.models.checkpoint import Checkpoint
from milkglass.schemes.coarse import Coarse
from milkglass.server import training
from milkglass.server.spec import Hyperparameters, JobSpec, Status
from tests import tiny
from tests.cli.kit import PASSPHRASE, call, document, refused
from tests.client.stub import Stub
from tests.experiments.running import figures as figures_of
from tests.warm import warm_workers

__all__ = ["warm_workers"]

SICK, PAID = ["fever", "nurse", "father", "eat"], ["invoice", "scan", "appointment", "test"]
FILLERS = ["the", "of", "my", "on", "please", "it", "not", "and", "since", "a", "about"]
MAP = ["--scheme", "coarse", "--symbols", "40", "--set", "least_bits=0.5", "--set", "most_share=0.95"]

COMPARISON = """# a comment
kind = "comparison"
paper = "p"
model = "MODEL"
attacks = ["text-in-context"]
[attacked]
rows = 40
public = 200
private = "held out"
[data.small]
train = "train.tsv"
held_out = "dev.tsv"
[training]
max_steps = 80
batch_size = 16
learning_rate = 1e-2
group_by_length = false
[defences.plain]
[defences.symbols]
scheme = "coarse"
symbols = 40
least_bits = 0.5
most_share = 0.95
"""


def rows(seed: int, count: int) -> list[dict[str, str]]:
    """Each text holds words of one class among fillers."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        sick = bool(rng.integers(2))
        words = [*rng.choice(FILLERS, 5), *rng.choice(SICK if sick else PAID, 2)]
        rng.shuffle(words)
        made.append({"text": " ".join(words), "label": "clinic-desk" if sick else "billing-desk"})
    return made


def written(path: Path, content: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in content), "utf-8")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, rows, a key and the scrambled model."""
    home = tmp_path_factory.mktemp("coarse")
    tiny.save("bert", home / "model")
    written(home / "train.jsonl", rows(1, 240))
    written(home / "held-out.jsonl", rows(2, 120))
    (home / "public.txt").write_text("\n".join(tiny.TEXTS) + "\n", "utf-8")
    files = ["--data", home / "train.jsonl", "--public-text", home / "public.txt"]
    answer = document(call("obfuscate", home / "model", home / "out", "--key", home / "k", *MAP, *files, "--json"))
    (home / "obfuscated.json").write_text(json.dumps(answer))
    return home


def accuracy_of(model: Path, job: Path) -> float:
    """Train in this process, as a server does, with the rows that lie in the job's folder.

    So small a model ends at chance under one key in some dozens, by the order of its rows: another order is tried then.
    """
    for seed in range(3):
        for name in ("result", "checkpoints"):
            shutil.rmtree(job / name, ignore_errors=True)
        for name in ("status.json", "events.jsonl"):
            (job / name).unlink(missing_ok=True)
        settings = Hyperparameters(task="classification", max_steps=80, batch_size=16, learning_rate=1e-2, seed=seed)
        rows_of = {split: str(job / f"{split}.safetensors") for split in ("train", "validation")}
        spec = JobSpec(model=str(model), **rows_of, hyperparameters=settings)
        (job / "spec.json").write_text(spec.model_dump_json())
        assert training.main(job) == 0
        status = Status.model_validate_json((job / "status.json").read_text())
        assert status.state == "succeeded", status
        if status.metrics["accuracy"] > 0.8:
            break
    return status.metrics["accuracy"]


def test_a_model_learns_from_symbols_and_nothing_else_leaves(made: Path) -> None:
    key = read_key(made / "k", PASSPHRASE)
    job = made / "job"
    job.mkdir()
    for name, source in (("train", "train"), ("validation", "held-out")):
        out = made / f"{name}.parquet"
        document(call("encode", "--in", made / f"{source}.jsonl", "--out", out, "--key", made / "k", "--json"))
        write_tensors(job / f"{name}.safetensors", parquet_tensors(out))
    table = pq.read_table(made / "train.parquet")
    assert set(table.column_names) <= {"input_ids", "attention_mask", "token_type_ids", "labels"}
    codec = Codec.open(key, made / "model")
    texts = [one["text"] for one in rows(1, 240)]
    plain = codec.tokenizer(texts)["input_ids"]
    assert table["input_ids"].to_pylist() == [key.first_ids[one].tolist() for one in plain]
    assert max(map(max, table["input_ids"].to_pylist())) < len(key.sigma) <= 44
    assert set(table["labels"].to_pylist()) == {0, 1}
    assert accuracy_of(made / "out", job) > 0.8
    model = AutoModelForSequenceClassification.from_pretrained(job / "result").eval()
    assert model.config.vocab_size == len(key.sigma)
    held_out = rows(2, 40)
    numbers = read_key(made / "k", PASSPHRASE).info.labels
    assert numbers
    with torch.inference_mode():
        ids = codec.encode([one["text"] for one in held_out]).ids
        named = [int(model(input_ids=torch.from_numpy(one[None].astype(np.int64))).logits.argmax()) for one in ids]
    right = [one == numbers[row["label"]] for one, row in zip(named, held_out, strict=True)]
    assert np.mean(right) > 0.75
    words = {word for text in texts for word in re.findall(r"[a-z]{5,}", text)} | {"clinic-desk", "billing-desk"}
    secret = [word.encode() for word in words] + [key.root, key.sigma.tobytes()]
    for folder in (made / "out", job):
        for path in (one for one in folder.rglob("*") if one.is_file()):
            content = path.read_bytes()
            assert not [one for one in secret if one in content], path.name


@pytest.mark.parametrize("name", ["llama-tied", "llama-untied"])
def test_a_decoder_is_trained_as_a_classifier(made: Path, tmp_path: Path, name: str) -> None:
    tiny.save(name, tmp_path / "model")
    data = ("--data", made / "train.jsonl")
    run = ("obfuscate", tmp_path / "model", tmp_path / "out", "--key", tmp_path / "k", *MAP, *data)
    result = call(*run)
    assert result.exit_code == 0 and "it cannot generate, since an id names no token" in result.stdout, result.stderr
    assert document(call("verify", tmp_path / "out", "--key", tmp_path / "k", "--json"))["passed"]
    key, config = read_key(tmp_path / "k", PASSPHRASE), Checkpoint.open(tmp_path / "out").config
    padding = config["pad_token_id"]
    assert padding == key.first_ids[0] and (key.first_ids == padding).sum() == 1, (
        "padding would end texts before their end"
    )
    assert config["vocab_size"] == len(key.sigma) <= 44
    kept = Checkpoint.open(tmp_path / "out").tensors
    assert {kept[one].shape[0] for one in kept if "embed_tokens" in one or "lm_head" in one} == {len(key.sigma)}
    job = tmp_path / "job"
    job.mkdir()
    for part, source in (("train", "train"), ("validation", "held-out")):
        out = job / f"{part}.parquet"
        document(call("encode", "--in", made / f"{source}.jsonl", "--out", out, "--key", tmp_path / "k", "--json"))
        write_tensors(job / f"{part}.safetensors", parquet_tensors(out))
        sent = pq.read_table(out)["input_ids"].to_pylist()
        assert max(map(max, sent)) < len(key.sigma) and not any(padding in one for one in sent)
    assert accuracy_of(tmp_path / "out", job) > 0.8


def test_a_decoder_of_symbols_is_asked_for_classes(stub: Stub, made: Path, tmp_path: Path) -> None:
    key = decoder_key(made, tmp_path, stub)
    stub.replies["POST /classify"] = lambda h: h.answer(
        200, {"data": [{"index": 0, "label": "LABEL_1", "probs": [0.2, 0.8]}]}
    )
    stub.replies["POST /v1/fine_tuning/jobs"] = lambda h: h.answer(200, {"id": "job-1", "status": "queued"})
    assert call("finetune", "mine", made / "train.jsonl", "--key", key, "--detach").exit_code == 0
    (asked,) = [json.loads(body) for name, _, body in stub.calls if name == "POST /v1/fine_tuning/jobs"]
    assert asked["hyperparameters"]["task"] == "classification"
    answer = document(call("classify", "mine", "the nurse", "--key", key, "--labels-of", "newest", "--json"))
    (asked,) = [json.loads(body) for name, _, body in stub.calls if name == "POST /classify"]
    codec = Codec.open(read_key(key, PASSPHRASE), tmp_path / "model")
    assert asked["input"] == [codec.encode(["the nurse"]).ids[0].tolist()]
    (name,) = [n for n, number in (read_key(key, PASSPHRASE).info.labels or {}).items() if number == 1]
    assert name in json.dumps(answer)


def test_a_decoder_of_symbols_neither_answers_nor_learns_answers(stub: Stub, made: Path, tmp_path: Path) -> None:
    key = decoder_key(made, tmp_path, stub)
    before = len(stub.calls)
    refused(call("generate", "mine", "the nurse", "--key", key), 3, "under this key an id names no token")
    refused(call("generate", "mine", "the nurse", "--raw", "--key", key), 3, "use `milkglass classify`")
    refused(call("chat", "mine", "--key", key, stdin="the nurse\n"), 3, "under this key an id names no token")
    chats = written(tmp_path / "chats.jsonl", [{"instruction": "the nurse", "output": "called"}])
    texts = written(tmp_path / "texts.jsonl", [{"text": "the nurse called"}])
    for data in (chats, texts):
        refused(call("finetune", "mine", data, "--key", key), 2, "these rows are for a model that generates")
    run = ("encode", "--in", chats, "--out", tmp_path / "out.parquet", "--key", key)
    refused(call(*run), 2, "these rows are for a model that generates")
    assert not (tmp_path / "out.parquet").exists() and len(stub.calls) == before, "nothing was sent"


def decoder_key(made: Path, folder: Path, stub: Stub) -> Path:
    """The key of a decoder of symbols, which the stub tells that it has."""
    tiny.save("llama-tied", folder / "model")
    run = ("obfuscate", folder / "model", folder / "out", "--key", folder / "k", *MAP, "--data", made / "train.jsonl")
    document(call(*run, "--json"))
    key = read_key(folder / "k", PASSPHRASE)
    stub.described = {"kind": "decoder", "vocab_size": len(key.sigma), "key_id": key.identifier}
    return folder / "k"


@pytest.mark.slow
def test_a_comparison_has_a_decoder_as_the_servers_classifier(tmp_path: Path) -> None:
    for split, seed, count in (("train", 1, 240), ("dev", 2, 60)):
        lines = [f"{one['text']}\t{int(one['label'] == 'clinic-desk')}\n" for one in rows(seed, count)]
        (tmp_path / f"{split}.tsv").write_text("sentence\tlabel\n" + "".join(lines), "utf-8")
    recipe = tmp_path / "small.toml"
    recipe.write_text(COMPARISON.replace("MODEL", str(tiny.save("llama-tied", tmp_path / "model"))), "utf-8")
    result = json.loads(reproduce(recipe, tmp_path, tmp_path / "out").read_text("utf-8"))
    figures = {name: one["measured"] for name, one in figures_of(result).items()}
    assert figures["accuracy, small, plain"] > 80
    assert figures["accuracy, small, symbols"] > 80
    read = "tokens top-1, text-in-context, same kind of text, small, symbols"
    assert 0 < figures[read] < 100


def test_the_report_states_the_rate_and_key_status_repeats_it(made: Path) -> None:
    answer = json.loads((made / "obfuscated.json").read_text())
    key, rate = read_key(made / "k", PASSPHRASE), answer["rate"]
    assert rate["ids"] == len(key.sigma) == Checkpoint.open(made / "out").config["vocab_size"]
    assert rate["most_bits"] == pytest.approx(np.log2(len(key.sigma)))
    assert 0 < rate["bits"] < rate["most_bits"] and 0 < rate["running"] <= 1
    assert rate["symbols"] == answer["promise"]["clusters"] and rate["alone"] == answer["promise"]["verbatim"] == 4
    assert "map" not in answer["scheme"], "found from private labels"
    status = document(call("key", "status", made / "k", "--json"))
    assert status["rate"] == rate
    said = call("key", "status", made / "k").stdout
    assert f"{rate['ids']:.0f} ids, at most {rate['most_bits']:.2f} bits a token" in said
    assert "rate" not in document(call("key", "status", made / "k", "--json"))["jobs"]


def test_verify_decode_jobs_and_the_same_key_again(made: Path, tmp_path: Path) -> None:
    assert document(call("verify", made / "out", "--key", made / "k", "--json"))["passed"]
    refused(call("decode", "--key", made / "k", "5"), 5, "an id names a cluster of tokens")
    again = call("obfuscate", made / "model", tmp_path / "again", "--key", made / "k")
    assert again.exit_code == 0 and "bits a token" in again.stdout, again.stderr
    for path in (made / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    child = tmp_path / "child"
    document(call("key", "for-job", made / "k", "march", "--out", child, "--json"))
    one, other = read_key(made / "k", PASSPHRASE), read_key(child, PASSPHRASE)
    assert one.info.scheme == other.info.scheme and one.sigma.tolist() != other.sigma.tolist()
    assert document(call("key", "status", child, "--json"))["rate"]
    run = ("key", "for-job", made / "k", "april", "--out", tmp_path / "april", "--clusters", "new")
    refused(call(*run), 2, "the map of a coarse vocabulary is kept")


@pytest.mark.slow
def test_an_audit_grades_the_guess_of_the_commonest_token(made: Path, tmp_path: Path) -> None:
    run = ("audit", "--key", made / "k", "--text", made / "train.jsonl", "--out", tmp_path / "audit", "--budget", "10m")
    answer = document(call(*run, "--json"))
    cells = {one["attack"]: one for one in answer["cells"] if one["adversary"] in ("same kind of text", "model only")}
    assert cells["cluster-conditional"]["state"] == "done"
    assert cells["text-in-context"]["state"] == "done"
    assert not answer["spent"] and not answer["curve"]
    size = len(read_key(made / "k", PASSPHRASE).sigma)
    rate = answer["rate"]
    assert rate["ids"] == size and rate["most_bits"] == pytest.approx(np.log2(size))
    assert 0 < rate["bits"] < rate["most_bits"]
    page = (tmp_path / "audit" / "audit.html").read_text("utf-8")
    assert f"{rate['most_bits']:.2f} bits" in page and f"{rate['bits']:.2f} bits" in page
    assert "1/k" not in page and "--function-words" not in page and "transcript" not in page
    said = call("key", "status", made / "k").stdout
    assert "each text is read separately" in said and "words read" in said and "cipher" not in said
    assert not [one["reason"] for one in answer["cells"] if one["state"] == "failed"]


def test_rows_that_are_held_out_choose_no_symbol(made: Path, tmp_path: Path) -> None:
    """Their labels are turned round: the map stays. Those of other rows decide it."""
    base, root = Checkpoint.open(made / "model"), bytes(range(32))
    content, digest = rows(5, 600), base.digest()
    apart = held_out_mask(root, digest, [one["text"] for one in content])
    assert apart.sum() == 60

    def symbols(turned: np.ndarray) -> list[int]:
        names = {"clinic-desk": "billing-desk", "billing-desk": "clinic-desk"}
        changed = [
            {**one, "label": names[one["label"]] if turn else one["label"]}
            for one, turn in zip(content, turned, strict=True)
        ]
        data = written(tmp_path / "rows.jsonl", changed)
        scheme = Coarse(symbols=12, least_bits=0.5, most_share=0.95)
        return new_coarse_key(base, "x", scheme, digest, count_texts(base, data, None), root).info.document["scheme"][
            "map"
        ]["tokens"]

    plain = symbols(np.zeros(600, bool))
    assert symbols(apart) == plain
    assert symbols(~apart & (np.arange(600) % 3 == 0)) != plain


def test_refusals_come_before_long_work(made: Path, tmp_path: Path) -> None:
    new = ("obfuscate", made / "model", tmp_path / "o", "--key", tmp_path / "k")
    data = ("--data", made / "train.jsonl")
    refused(call(*new, "--scheme", "coarse"), 2, "--data is missing")
    refused(call(*new, "--scheme", "orthogonal", *data), 2, "the scheme is orthogonal")
    refused(call(*new, "--symbols", "9"), 2, "obfuslm has no parameter 'symbols'")
    refused(call(*new, "--scheme", "coarse", *data, "--k", "9"), 2, "coarse has no parameter 'k'")
    refused(call(*new, "--scheme", "coarse", *data, "--symbols", "1"), 2, "2 or more")
    refused(call(*new, "--scheme", "coarse", *data, "--symbols", "250"), 2, "left for 250 symbols")
    refused(call(*new, "--scheme", "coarse", *data, "--set", "map.tokens=x"), 2, "no parameter 'map'")
    refused(call(*new, *MAP, *data, "--delta"), 2, "which no delta can hold")
    refused(call(*new, *MAP, "--data", tmp_path / "none.jsonl"), 2, "there is no file")
    again = ("obfuscate", made / "model", tmp_path / "o", "--key", made / "k", *MAP, *data)
    refused(call(*again), 2, "exists already")
    refused(call(*again, passphrase="wrong"), 4, "the passphrase is wrong")
    gone = tmp_path / "none.jsonl"  # a weak passphrase is refused before rows or a model are looked at
    refused(call(*new, *MAP, "--data", gone, passphrase="abc"), 4, "weak")
    chats = written(tmp_path / "chats.jsonl", [{"instruction": "a", "output": "b"}])
    refused(call(*new, *MAP, "--data", chats), 2, "holds conversations")
    tiny.save("gpt2", tmp_path / "gpt2")
    run = ("obfuscate", tmp_path / "gpt2", tmp_path / "o", "--key", tmp_path / "k", *MAP, *data)
    refused(call(*run), 3, "the model's config names no padding")
    assert not (tmp_path / "k").exists() and not (tmp_path / "o").exists()


def test_scores_and_pairs_have_symbols_too(made: Path, tmp_path: Path) -> None:
    content = [{**one, "text_pair": one["text"], "label": len(one["text"]) / 3} for one in rows(5, 40)]
    scored = written(tmp_path / "scores.jsonl", content)
    run = ("obfuscate", made / "model", tmp_path / "o", "--key", tmp_path / "k", *MAP, "--data", scored)
    answer = document(call(*run, "--task", "regression", "--json"))
    assert answer["rate"]["ids"] > 10
    text = written(tmp_path / "text.jsonl", [{"text": one["text"]} for one in rows(5, 40)])
    run = ("obfuscate", made / "model", tmp_path / "o2", "--key", tmp_path / "k2", *MAP, "--data", text)
    assert "has no labels" in call(*run).stderr


def test_the_options_that_a_refusal_of_labels_names_are_there(made: Path, tmp_path: Path) -> None:
    """Numbers with a fraction may be scores, or names such as versions: the command asks, and takes each answer."""
    versions = written(
        tmp_path / "rows.jsonl", [{**row, "label": f"1.{n % 2 + 1}"} for n, row in enumerate(rows(5, 40))]
    )
    run = ("obfuscate", made / "model", tmp_path / "o", "--key", tmp_path / "k", *MAP, "--data", versions)
    named = re.findall(r"`(--task \w+)`", refused_text(call(*run)))
    assert named == ["--task regression", "--task classification"]
    for number, option in enumerate(named):
        taken = (*run[:2], tmp_path / f"o{number}", "--key", tmp_path / f"k{number}", *run[5:], *option.split())
        assert call(*taken).exit_code == 0, option


def refused_text(result: Any) -> str:
    assert result.exit_code == 5, result.stderr
    return str(result.stderr)


def test_rows_do_not_choose_the_scheme(made: Path, tmp_path: Path) -> None:
    start = ("obfuscate", made / "model", tmp_path / "out", "--key", tmp_path / "k", "--data", made / "train.jsonl")
    for words in ((), ("--epsilon", "3"), ("--set", "epsilon=3"), ("--scheme", "obfuslm")):
        refused(call(*start, *words), 2, "the scheme is obfuslm")
    assert not (tmp_path / "k").exists()


def test_an_epsilon_is_reported_with_what_it_covers(made: Path, tmp_path: Path) -> None:
    words = ("--scheme", "coarse", "--symbols", "8", "--epsilon", "2", "--data", made / "train.jsonl")
    run = call("obfuscate", made / "model", tmp_path / "out", "--key", tmp_path / "k", *words)
    assert run.exit_code == 0, run.stderr
    said = " ".join((run.stdout + run.stderr).split())
    assert "a token to any reader on average" in said and "2-DP locally, given the map and all others" in said
    assert "The map, which your rows gave, lengths and labels are not covered" in said
    status = " ".join(call("key", "status", tmp_path / "k").stdout.split())
    assert "is read by a vote" in status and "each text is read separately" not in status
    (tmp_path / "one.txt").write_text("the nurse called\n", "utf-8")
    encoded = [call("encode", "--in", tmp_path / "one.txt", "--key", tmp_path / "k").stdout for _ in range(2)]
    assert encoded[0] == encoded[1] and encoded[0]
