"""Models: whole, in shards, as deltas; what a config may not say; fetching and deleting."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from starlette.testclient import TestClient

from milkglass.errors import CorruptCheckpoint, UnsupportedModel
from milkglass.models.checkpoint import Checkpoint, read_json, write_json
from milkglass.models.config_entries import check_configs, check_ids
from milkglass.models.soundness import facts_of
from milkglass.models.staging import Configs, Staging, write_delta
from tests import tiny
from tests.server.kit import error, register, registration, rows_file, running, sha256, upload


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else 1


def left_over(tmp_path: Path) -> list[str]:
    return [path.name for room in ("models", "work") for path in (tmp_path / "home" / room).iterdir()]


def test_a_model_is_an_ordinary_folder(client: TestClient, tmp_path: Path, folders: dict[str, Path]) -> None:
    register(client, "llama", folders["llama-untied"])
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["llama"]
    model = client.get("/v1/models/llama").json()
    assert (model["kind"], model["vocab_size"], model["max_model_len"]) == ("decoder", tiny.VOCAB, 128)
    made = Checkpoint.open(tmp_path / "home" / "models" / "llama")
    assert made.digest() == Checkpoint.open(folders["llama-untied"]).digest()
    names = {file["name"] for file in client.get("/v1/models/llama/files").json()["data"]}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}


def test_shards_and_their_index(client: TestClient, tmp_path: Path) -> None:
    folder = tiny.save("llama-untied", tmp_path / "sharded", shard="40KB")
    body = registration(client, "sharded", folder)
    assert len(body["files"]) > 1
    short = client.post("/v1/models", json=body | {"files": body["files"][1:]})
    assert short.status_code == 400 and "files are given" in error(short)["message"]
    assert client.post("/v1/models", json=body).status_code == 200
    assert Checkpoint.open(tmp_path / "home" / "models" / "sharded").digest() == Checkpoint.open(folder).digest()


def test_fetching_resumes_and_can_be_checked(client: TestClient, folders: dict[str, Path]) -> None:
    register(client, "bert", folders["bert"])
    files = {file["name"]: file for file in client.get("/v1/models/bert/files").json()["data"]}
    weights = client.get("/v1/models/bert/files/model.safetensors").content
    assert files["model.safetensors"]["sha256"] == sha256(weights)
    assert files["model.safetensors"]["bytes"] == len(weights)
    part = client.get("/v1/models/bert/files/model.safetensors", headers={"Range": f"bytes={len(weights) - 10}-"})
    assert part.status_code == 206 and part.content == weights[-10:]


def test_deleting(client: TestClient, tmp_path: Path, folders: dict[str, Path]) -> None:
    register(client, "bert", folders["classifier"])
    assert client.post("/classify", json={"model": "bert", "input": [1, 2]}).status_code == 200  # loaded: put out first
    assert client.delete("/v1/models/bert").json() == {"id": "bert", "object": "model", "deleted": True}
    assert client.delete("/v1/models/bert").status_code == 404
    assert left_over(tmp_path) == []
    register(client, "bert", folders["classifier"])


def test_a_file_may_go_when_its_model_is_made(client: TestClient, folders: dict[str, Path]) -> None:
    body = registration(client, "bert", folders["classifier"])
    client.post("/v1/models", json=body)
    assert client.delete(f"/v1/files/{body['files'][0]['file_id']}").status_code == 200
    assert client.post("/classify", json={"model": "bert", "input": [1, 2]}).status_code == 200


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "unsupported_model"),
        ({"nested": {"auto_map": {}}}, "unsupported_model"),
        ({"custom_pipelines": {}}, "unsupported_model"),
        ({"quantization_config": {"quant_method": "gptq"}}, "unsupported_model"),
        ({"_attn_implementation": "somebody/kernel"}, "unsupported_model"),
        ({"attn_implementation": "somebody/kernel"}, "unsupported_model"),
        ({"text_config": {"_attn_implementation_internal": "somebody/kernel"}}, "unsupported_model"),
        ({"experts_implementation": "somebody/code"}, "unsupported_model"),
        ({"a": [{"_experts_implementation": "somebody/code"}]}, "unsupported_model"),
        ({"use_kernels": True}, "unsupported_model"),
        ({"a": _nested(16)}, "unsupported_model"),
        ({"a": [1] * 100_001}, "unsupported_model"),
        ({"pad_token_id": 300}, "corrupt_checkpoint"),
        ({"pad_token_id": -1}, "corrupt_checkpoint"),
        ({"pad_token_id": 0.5}, "corrupt_checkpoint"),
        ({"pad_token_id": True}, "corrupt_checkpoint"),
        ({"eos_token_id": [2, 300]}, "corrupt_checkpoint"),
        ({"bos_token_id": 10**6}, "corrupt_checkpoint"),
        ({"sep_token_id": -5}, "corrupt_checkpoint"),
        ({"cls_token_id": 300}, "corrupt_checkpoint"),
        ({"decoder_start_token_id": 300}, "corrupt_checkpoint"),
        ({"forced_eos_token_id": [300]}, "corrupt_checkpoint"),
        ({"suppress_tokens": [1, 300]}, "corrupt_checkpoint"),
        ({"text_config": {"pad_token_id": 300}}, "corrupt_checkpoint"),
        ({"num_labels": 10_001}, "unsupported_model"),
        ({"num_labels": 1e9}, "unsupported_model"),
        ({"text_config": {"num_labels": 2_000_000}}, "unsupported_model"),
        ({"id2label": {str(n): "x" for n in range(10_001)}}, "unsupported_model"),
        ({"intermediate_size": 4_000_000}, "corrupt_checkpoint"),
        ({"head_dim": 1 << 20}, "corrupt_checkpoint"),
        ({"tie_word_embeddings": False, "attention_bias": True}, "corrupt_checkpoint"),
        ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "corrupt_checkpoint"),
        ({"model_type": "mamba"}, "unsupported_model"),
        ({"model_type": None}, "unsupported_model"),
        ({"num_hidden_layers": 2**60}, "unsupported_model"),
        ({"num_hidden_layers": 10**9}, "corrupt_checkpoint"),
        ({"num_hidden_layers": -1}, "corrupt_checkpoint"),
        ({"num_hidden_layers": "two"}, "corrupt_checkpoint"),
        ({"vocab_size": 299}, "corrupt_checkpoint"),
        ({"hidden_size": 64}, "corrupt_checkpoint"),
        ({"num_attention_heads": 0}, "corrupt_checkpoint"),
        ({"max_position_embeddings": {"a": "the-private-diagnosis"}}, "corrupt_checkpoint"),
    ],
)
def test_configs_that_are_refused(
    client: TestClient, tmp_path: Path, folders: dict[str, Path], config: dict[str, Any], code: str
) -> None:
    body = registration(client, "llama", folders["llama-untied"])
    answer = client.post("/v1/models", json=body | {"config": body["config"] | config})
    assert answer.status_code == 400, answer.text
    assert error(answer)["code"] == code and "private" not in answer.text
    assert left_over(tmp_path) == [] and client.get("/v1/models").json()["data"] == []


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../evil"},
        {"id": ".hidden"},
        {"id": "a..b"},
        {"id": ""},
        {"files": []},
        {"files": [{"name": "../../token", "file_id": "x"}]},
        {"files": [{"name": "pytorch_model.bin", "file_id": "file-1"}]},
        {"config": []},
        {"config": {"a": float("1e300")}},
        {"index": {"weight_map": {"a": "../../etc/passwd"}}},
        {"index": {"weight_map": 5}},
        {"index": {}},
        {"delta": {"format": "other/1", "base": "sha256:" + "0" * 64}},
        {"delta": {"format": "milkglass-delta/1", "base": "sha256:short"}},
        {"trust_remote_code": True},
    ],
)
def test_registrations_that_are_refused(
    client: TestClient, tmp_path: Path, folders: dict[str, Path], change: dict[str, Any]
) -> None:
    answer = client.post("/v1/models", json=registration(client, "bert", folders["bert"]) | change)
    assert answer.status_code == 400, answer.text
    assert error(answer) and left_over(tmp_path) == []


def test_the_same_call_again_answers_the_same_model(client: TestClient, folders: dict[str, Path]) -> None:
    """Its first answer may have been lost; also where the weights were uploaded again."""
    body = registration(client, "mine", folders["llama-untied"])
    body["config"] |= {"milkglass_key_id": KEY_ID}
    made = client.post("/v1/models", json=body)
    again = body | {"files": registration(client, "mine", folders["llama-untied"])["files"]}
    for repeated in (body, again):
        answer = client.post("/v1/models", json=repeated)
        assert (answer.status_code, answer.json()) == (200, made.json())
    assert len(client.get("/v1/models").json()["data"]) == 1
    foreign = body | {"config": body["config"] | {"milkglass_key_id": KEY_ID[::-1]}}
    unnamed = body | {"config": {n: value for n, value in body["config"].items() if n != "milkglass_key_id"}}
    others = {n: t + 1 for n, t in load_file(folders["llama-untied"] / "model.safetensors").items()}
    weights = upload(client, "model.safetensors", save(others, {"format": "pt"}), "model")
    changed = body | {"files": [{"name": "model.safetensors", "file_id": weights}]}
    for different in (foreign, unnamed, changed, body | {"generation_config": None}):
        answer = client.post("/v1/models", json=different)
        assert answer.status_code == 409 and error(answer)["code"] == "conflict"
    assert client.get("/v1/models/mine").json() == made.json()


def test_names_files_and_purposes_must_be_real(client: TestClient, folders: dict[str, Path]) -> None:
    body = registration(client, "bert", folders["bert"])
    assert client.post("/v1/models", json=body).status_code == 200
    gone = body | {"id": "b", "files": [{"name": "model.safetensors", "file_id": "file-none"}]}
    assert client.post("/v1/models", json=gone).status_code == 404
    rows = upload(client, "t.safetensors", rows_file([[1]], [0]), "fine-tune")
    wrong = body | {"id": "b", "files": [{"name": "model.safetensors", "file_id": rows}]}
    assert "was not uploaded for a model" in error(client.post("/v1/models", json=wrong))["message"]
    twice = body | {"id": "b", "files": body["files"] * 2}
    assert "same name" in error(client.post("/v1/models", json=twice))["message"]


def test_weights_that_lack_tensors_are_never_made_up(
    client: TestClient, tmp_path: Path, folders: dict[str, Path]
) -> None:
    tensors = load_file(folders["llama-untied"] / "model.safetensors")
    head, inner = tensors.pop("lm_head.weight"), tensors.pop("model.layers.1.mlp.up_proj.weight")
    body = registration(client, "llama", folders["llama-untied"])
    file = upload(client, "model.safetensors", save(tensors | {"lm_head.weight": head}, {"format": "pt"}), "model")
    body["files"] = [{"name": "model.safetensors", "file_id": file}]
    answer = client.post("/v1/models", json=body)
    assert answer.status_code == 400 and "lack model.layers.1.mlp.up_proj.weight" in error(answer)["message"]
    tensors["model.layers.1.mlp.up_proj.weight"] = inner  # only the head is missing: a task may add one
    file = upload(client, "model.safetensors", save(tensors, {"format": "pt"}), "model")
    body["files"] = [{"name": "model.safetensors", "file_id": file}]
    assert client.post("/v1/models", json=body).status_code == 200
    answer = client.post("/v1/completions", json={"model": "llama", "prompt": [1]})
    assert answer.status_code == 400 and "1 tensor is missing (lm_head.weight)" in error(answer)["message"]
    register(client, "plain", folders["bert"])  # never fine-tuned: it has no classifier
    answer = client.post("/classify", json={"model": "plain", "input": [1]})
    message = error(answer)["message"]
    assert answer.status_code == 400 and "fine-tune it first" in message
    assert (
        "4 tensors are missing (bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias and 1 more)"
        in message
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama-untied", {"intermediate_size": 1 << 36}),
        ("gpt2", {"n_positions": 30_000}),
        ("bert", {"max_position_embeddings": 10_000_000}),
        ("bert", {"intermediate_size": 10_000_000}),
    ],
)
def test_weights_of_another_shape(client: TestClient, folders: dict[str, Path], name: str, change: Any) -> None:
    body = registration(client, "m", folders[name])
    answer = client.post("/v1/models", json=body | {"config": body["config"] | change})
    assert answer.status_code == 400 and error(answer)["code"] == "corrupt_checkpoint"
    assert "another shape than the weights have" in error(answer)["message"]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_family_is_backed_by_its_own_weights(tmp_path: Path, name: str) -> None:
    """Whole, without the base model's prefix, and with the norms' old names."""
    folder = tiny.save(name, tmp_path / "plain")
    assert facts_of(Checkpoint.open(folder)).vocab_size == tiny.VOCAB
    prefix = tiny.build(name).base_model_prefix + "."
    bare = {n.removeprefix(prefix): t for n, t in load_file(folder / "model.safetensors").items()}
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): t for n, t in bare.items()
    }
    (folder / "model.safetensors").write_bytes(save(old, {"format": "pt"}))
    assert facts_of(Checkpoint.open(folder)).vocab_size == tiny.VOCAB


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(("more", "status"), [({}, 200), ({"partial_rotary_factor": 1e8}, 400)])
def test_a_buffer_that_no_file_backs_is_refused(
    client: TestClient, folders: dict[str, Path], more: dict[str, Any], status: int
) -> None:
    body = registration(client, "m", folders["llama-untied"])
    body["config"] |= {"rope_parameters": LLAMA3 | more}
    answer = client.post("/v1/models", json=body)
    assert answer.status_code == status
    assert status == 200 or "a buffer of more than" in error(answer)["message"]


@pytest.mark.parametrize("place", ["write_json", "link_or_copy", "the store"])
def test_a_disk_that_fills_meanwhile_leaves_nothing(
    client: TestClient, tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "the-private-diagnosis")

    body = registration(client, "bert", folders["bert"])
    if place == "the store":
        monkeypatch.setattr(client.app.state.context.store.models, "add", full)
    else:
        monkeypatch.setattr(f"milkglass.server.storage.registry.{place}", full)
    answer = client.post("/v1/models", json=body)
    assert answer.status_code == 507 and "private" not in answer.text
    assert left_over(tmp_path) == []
    monkeypatch.undo()
    assert client.post("/v1/models", json=body).status_code == 200


class Doubled:
    """Rows of a table, times two: what a scheme would replace a table with."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def block(self, start: int, stop: int) -> torch.Tensor:
        return self.table[start:stop] * 2


def delta_of(folder: Path, target: Path) -> dict[str, Any]:
    base = Checkpoint.open(folder)
    table = base.read("model.embed_tokens.weight")
    configs = Configs(base.config, base.generation_config)
    write_delta(base, base.digest(), {"model.embed_tokens.weight": Doubled(table)}, configs, Staging(target, "test"))
    return read_json(target / "delta.json")


def test_a_delta_is_assembled_with_its_base(tmp_path: Path, folders: dict[str, Path]) -> None:
    folder = folders["llama-untied"]
    about = delta_of(folder, tmp_path / "delta")
    with running(tmp_path / "home", base_models=(folder.parent,)) as client:
        found = client.get(f"/v1/base-models/{about['base']}")
        assert found.status_code == 200 and found.json() == {"id": about["base"], "object": "base_model"}
        none = client.get(f"/v1/base-models/sha256:{'0' * 64}")
        assert none.status_code == 404 and "none of the server's base models has the digest" in error(none)["message"]
        assert client.get("/v1/base-models/other").status_code in (400, 422)
        body = registration(client, "scrambled", tmp_path / "delta") | {"delta": about}
        answer = client.post("/v1/models", json=body)
        assert answer.status_code == 200, answer.text
        made = Checkpoint.open(tmp_path / "home" / "models" / "scrambled")
        plain = Checkpoint.open(folder)
        assert torch.equal(made.read("model.embed_tokens.weight"), 2 * plain.read("model.embed_tokens.weight"))
        assert torch.equal(made.read("model.norm.weight"), plain.read("model.norm.weight"))
        assert left_over(tmp_path) == ["scrambled"]
        names = {path.name for path in made.folder.iterdir()}
        assert not any("token" in name for name in names), "the base's tokenizer came along"
        assert client.post("/v1/completions", json={"model": "scrambled", "prompt": [1]}).status_code == 200

        assert client.post("/v1/models", json=body).json() == answer.json(), "the same call again"
        whole = registration(client, "scrambled", folder)
        for different in (whole, body | {"delta": about | {"base": "sha256:" + "0" * 64}}):
            assert client.post("/v1/models", json=different).status_code == 409

        other = body | {"id": "other", "delta": about | {"base": "sha256:" + "0" * 64}}
        refused = client.post("/v1/models", json=other)
        assert refused.status_code == 400 and error(refused)["code"] == "wrong_base_model"
        assert left_over(tmp_path) == ["scrambled"]


KEY_ID = "00ff" * 8


def test_the_description_of_a_model(client: TestClient, tmp_path: Path, folders: dict[str, Path]) -> None:
    body = registration(client, "mine", folders["bert"])
    body["config"] |= {"milkglass_key_id": KEY_ID}
    made = client.post("/v1/models", json=body).json()
    assert made["key_id"] == KEY_ID and made["parent"] is None
    weights = (folders["bert"] / "model.safetensors").stat().st_size
    assert weights < made["bytes"] < weights + 5000
    assert client.get("/v1/models/mine").json() == made and client.get("/v1/models").json()["data"] == [made]
    register(client, "foreign", folders["bert"])
    assert client.get("/v1/models/foreign").json()["key_id"] is None


@pytest.mark.parametrize("value", ["the-private-diagnosis", KEY_ID[:-1], KEY_ID.upper(), 5, [KEY_ID], {}, True])
def test_an_identifier_that_cannot_be(client: TestClient, folders: dict[str, Path], value: Any) -> None:
    body = registration(client, "mine", folders["bert"])
    body["config"] |= {"milkglass_key_id": value}
    answer = client.post("/v1/models", json=body)
    assert answer.status_code == 400 and "milkglass_key_id in config.json is not 32" in error(answer)["message"]
    assert "private" not in answer.text


def test_digests_are_remembered_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from milkglass.models.safetensors_header import read_header
    from milkglass.server.storage.registry import BaseModels
    from milkglass.server.storage.store import Store

    folder = tiny.save("gpt2", tmp_path / "bases" / "gpt2")
    digest, calls = Checkpoint.open(folder).digest(), []
    counted = Checkpoint.digest
    monkeypatch.setattr(Checkpoint, "digest", lambda self: (calls.append(1), counted(self))[1])
    store = Store(tmp_path / "state.sqlite")
    bases, changed = BaseModels((tmp_path / "bases",), store), read_header(folder / "model.safetensors")
    assert bases.find(digest, changed).folder == bases.find(digest, changed).folder == folder
    assert len(calls) == 1
    (folder / "model.safetensors").touch()
    bases.find(digest, changed)
    assert len(calls) == 2
    store.close()


@pytest.mark.parametrize(
    ("name", "pads"),
    [
        ("gpt2", (300, 10**6, -7)),
        ("roberta", (-5, 300)),
        ("mpnet", (-5, 300)),
        ("bert", (-1, 300)),
        ("xlm-roberta", (-5,)),
    ],
)
def test_padding_ids_of_every_kind_of_model(tmp_path: Path, name: str, pads: tuple[int, ...]) -> None:
    """RoBERTa counts its positions from the padding id; a GPU fails for good at an id that its table does not have."""
    folder = tiny.save(name, tmp_path / name)
    described = facts_of(Checkpoint.open(folder))
    assert described.pad_token_id is None or 0 <= described.pad_token_id < tiny.VOCAB
    config = read_json(folder / "config.json")
    for pad in pads:
        write_json(folder / "config.json", config | {"pad_token_id": pad})
        with pytest.raises(CorruptCheckpoint, match="pad_token_id in config.json is .*, and the table has 300"):
            facts_of(Checkpoint.open(folder))


def test_a_padding_id_that_only_transformers_fills_in(tmp_path: Path) -> None:
    """RoBERTa's is 1 where the config has none; of a vocabulary of one token that is none."""
    folder = tiny.save("roberta", tmp_path / "roberta")
    config = read_json(folder / "config.json")
    del config["pad_token_id"]
    write_json(folder / "config.json", config)
    assert facts_of(Checkpoint.open(folder)).pad_token_id == 1
    with pytest.raises(CorruptCheckpoint, match="pad_token_id in config.json is 1, and the table has 1 rows"):
        check_ids({"pad_token_id": 1}, 1)


def test_ids_of_a_generation_config(client: TestClient, folders: dict[str, Path]) -> None:
    body = registration(client, "llama", folders["llama-untied"])
    for bad in ({"eos_token_id": [2, 300]}, {"pad_token_id": -1}, {"forced_bos_token_id": 10**6}):
        answer = client.post("/v1/models", json=body | {"generation_config": bad})
        assert answer.status_code == 400 and "and the table has 300 rows" in error(answer)["message"]
    assert client.post("/v1/models", json=body | {"generation_config": {"eos_token_id": [2, 3]}}).status_code == 200


def test_the_depth_and_length_of_a_config() -> None:
    """Without recursion: a config that is far too deep is refused like one that is a little too deep."""
    check_configs({"a": _nested(15)}, None)
    for depth in (16, 190, 900):
        with pytest.raises(UnsupportedModel, match="16 levels"):
            check_configs({"a": _nested(depth)}, None)
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsupportedModel, match="16 levels"):
        check_configs({"a": deep}, None)
    check_configs({"a": [[1] * 300] * 300}, None)
    with pytest.raises(UnsupportedModel, match="100000 entries"):
        check_configs({"a": [[1] * 300] * 340}, None)
    while isinstance(deep, list):  # taken apart by hand: Python frees nested lists by recursion
        deep = deep.pop()
