"""Regression on the server: its files, its jobs, what a worker trains, what /classify answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from starlette.testclient import TestClient
from transformers import AutoModelForSequenceClassification, EvalPrediction

from milkglass.errors import BadUpload
from milkglass.metrics import glue
from milkglass.server import training
from milkglass.server.jobs import trainer
from milkglass.server.jobs.data import PaddingCollator, TrainingDataset
from milkglass.server.spec import Hyperparameters, JobSpec, Status
from tests import tiny
from tests.server.kit import classifier, error, register, rows_file, running, upload

IDS = [[5 + i % 40, 6, 7 + i % 3][: 2 + i % 2] for i in range(64)]
SCORES = [(i % 40) / 10 - 2 for i in range(64)]  # told by the first id


def make_job(folder: Path, model: Path, **chosen: Any) -> Path:
    folder.mkdir()
    for name in ("train", "validation"):
        (folder / f"{name}.safetensors").write_bytes(rows_file(IDS, SCORES))
    spec = JobSpec(
        model=str(model),
        train=str(folder / "train.safetensors"),
        validation=str(folder / "validation.safetensors"),
        hyperparameters=Hyperparameters(task="regression", **chosen),
    )
    (folder / "spec.json").write_text(spec.model_dump_json())
    return folder


@pytest.mark.parametrize("name", ["bert", "llama-tied"])
def test_a_worker_learns_numbers(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    job = make_job(tmp_path / "job", model, max_steps=60, batch_size=16, learning_rate=1e-2)
    assert training.main(job) == 0
    status = Status.model_validate_json((job / "status.json").read_text())
    assert status.state == "succeeded" and set(status.metrics) == {"eval_loss", "pearson"}
    assert status.metrics["pearson"] > 0.8 and status.metrics["eval_loss"] < 0.5 * np.var(SCORES)
    config = json.loads((job / "result" / "config.json").read_text())
    assert config["problem_type"] == "regression" and list(config["id2label"]) == ["0"]
    net: Any = AutoModelForSequenceClassification.from_pretrained(job / "result").eval()
    said = net(input_ids=torch.tensor([IDS[20]])).logits
    assert said.shape == (1, 1)


def test_the_loss_is_the_mean_squared_error(tmp_path: Path) -> None:
    net = training.load_model(str(tiny.save("bert", tmp_path / "model")), Hyperparameters(task="regression")).eval()
    (tmp_path / "a.safetensors").write_bytes(rows_file(IDS[:4], SCORES[:4]))
    data = TrainingDataset(tmp_path / "a.safetensors", "regression", 8)
    batch = PaddingCollator(0)([data[i] for i in range(4)])
    assert batch["labels"].dtype == torch.float32
    torch.testing.assert_close(batch["labels"], torch.tensor(SCORES[:4]))
    expected = net(**batch)
    torch.testing.assert_close(expected.loss, ((expected.logits[:, 0] - batch["labels"]) ** 2).mean())


def test_pearson_is_glues_and_none_of_a_constant() -> None:
    rng = np.random.default_rng(0)
    said, wanted = rng.normal(size=50), rng.normal(size=50)
    found = trainer.pearson_metric(EvalPrediction(said[:, None].astype(np.float32), wanted.astype(np.float32)))
    assert found["pearson"] == pytest.approx(glue.pearson(said, wanted, rng).value, abs=1e-6)
    constant = trainer.pearson_metric(EvalPrediction(np.ones((3, 1)), np.arange(3.0)))
    assert np.isnan(constant["pearson"])
    assert trainer.reported_figures({"eval_pearson": constant["pearson"], "eval_loss": 1.0}) == {"eval_loss": 1.0}


def test_a_regression_has_one_number() -> None:
    assert Hyperparameters(task="regression").num_labels == 1
    assert Hyperparameters(task="regression").chosen_method == "full"
    with pytest.raises(ValidationError, match="must be 1 for regression"):
        Hyperparameters(task="regression", num_labels=3)


@pytest.mark.parametrize(("task", "label"), [("regression", 1), ("classification", 1.0), ("causal-lm", 1)])
def test_a_worker_reads_no_other_numbers(tmp_path: Path, task: Any, label: float) -> None:
    (tmp_path / "a.safetensors").write_bytes(rows_file([[1]], [label]))
    with pytest.raises(BadUpload, match=f"does not fit {task}"):
        TrainingDataset(tmp_path / "a.safetensors", task, 8)


def test_jobs_and_their_data(client: TestClient, folders: dict[str, Path]) -> None:
    register(client, "bert", folders["bert"])
    real = upload(client, "t.safetensors", rows_file([[1, 2], [3]], [0.5, -7.25]), "fine-tune")
    whole = upload(client, "t.safetensors", rows_file([[1, 2], [3]], [0, 1]), "fine-tune")
    body = {"model": "bert", "hyperparameters": {"task": "regression"}}

    def asked(training_file: str, **more: Any) -> Any:
        return client.post("/v1/fine_tuning/jobs", json={**body, "training_file": training_file, **more})

    assert asked(real).json()["hyperparameters"]["num_labels"] == 1
    assert "whole numbers, which does not fit regression" in error(asked(whole))["message"]
    message = error(asked(real, hyperparameters={}))["message"]
    assert "real numbers, which does not fit classification" in message
    assert "must be 1" in error(asked(real, hyperparameters={"task": "regression", "num_labels": 2}))["message"]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (rows_file([[1, 2], [3]], [0.5, float("nan")]), "not finite"),
        (rows_file([[1, 2], [3]], [0.5, float("inf")]), "not finite"),
    ],
)
def test_what_is_no_score(client: TestClient, data: bytes, named: str) -> None:
    answer = client.post("/v1/files", files={"file": ("train.safetensors", data)}, data={"purpose": "fine-tune"})
    assert answer.status_code == 400 and named in error(answer)["message"]


def test_classify_answers_a_number(tmp_path: Path) -> None:
    folder = classifier(tmp_path / "scorer", labels=1)
    net: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    asked = [[5, 6, 7], [8]]
    with running(tmp_path / "home") as client:
        register(client, "scorer", folder)
        found = client.post("/classify", json={"model": "scorer", "input": asked}).json()["data"]
    for place, one in enumerate(found):
        assert set(one) == {"index", "score", "num_classes"} and one["num_classes"] == 1
        assert one["score"] == pytest.approx(net(torch.tensor([asked[place]])).logits.item(), abs=1e-5)
    assert found[0]["score"] not in (0.0, 1.0)  # no softmax of one number
