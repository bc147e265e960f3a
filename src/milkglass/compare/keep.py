"""Keeps the best model with nothing sent as an ordinary folder, and answers with it.

An encoder is an ordinary Hugging Face folder, with its tokenizer and the names of its classes in config.json, which
`transformers.pipeline("text-classification", FOLDER)` opens. A linear model is linear.json and linear.safetensors. A
model that writes answers is an ordinary folder with its tokenizer and chat template, which any engine serves.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from milkglass import files
from milkglass.client import alone
from milkglass.compare.chat_rows import TASK
from milkglass.compare.ways import ComparisonSettings, WayAnswer
from milkglass.defences.token_halves import TokenServer
from milkglass.errors import ModelNotFound, UsageError
from milkglass.models.checkpoint import Checkpoint, read_json
from milkglass.rows.labels import Scale
from milkglass.sequences import Sequences
from milkglass.threat.observations import Tokens

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "merges.txt", "vocab.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip
MARK = "milkglass.json"


def is_kept(folder: Path, origin: Mapping[str, str]) -> bool:
    """Returns whether a folder keeps the model of this origin (see `keep`)."""
    mark = folder / MARK
    return mark.is_file() and origin.items() <= read_json(mark).items()


def kept_way(folder: Path, run: str) -> str:
    """Returns the way whose model a folder keeps, if a comparison of this name kept it; else ""."""
    mark = read_json(folder / MARK) if (folder / MARK).is_file() else {}
    return str(mark.get("way", "")) if mark.get("run") == run else ""


def require_free(folder: Path) -> None:
    """Raises UsageError if a folder holds something else than a kept model, which a model would replace."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder", "give a new folder with --keep")
    if folder.is_dir() and not (folder / MARK).is_file() and any(folder.iterdir()):
        raise UsageError(f"{folder} holds other things than a kept model", "give a new folder with --keep")


def keep(setting: ComparisonSettings, answer: WayAnswer, folder: Path, origin: Mapping[str, str]) -> None:
    """Writes a way's model to a folder, in place of one that an earlier comparison kept there.

    Args:
        answer: the way's answers, with the model that gave them. A way without a model writes nothing.
        origin: tells the model from those of other ways and comparisons.

    Raises:
        UsageError: the folder holds something else, or the model has no folder of its own.
    """
    require_free(folder)
    if answer.cell is None and answer.model is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    names = list(setting.rows.names)
    with files.new_dir(folder) as partial:
        if answer.model is not None:
            alone.save(answer.model, names, partial)
        else:
            _write_model(answer, setting, names, partial)
        scale = Scale.of(map(float, setting.rows.train.labels)) if setting.rows.task == "regression" else None
        mark = {
            "made by": "milkglass compare", "task": setting.rows.task, "max_length": setting.training.max_length,
            "scale": None if scale is None else scale.document(), "pairs": setting.rows.train.pairs is not None,
            **origin,
        }  # fmt: skip
        (partial / MARK).write_text(json.dumps(mark) + "\n", "utf-8")


def _write_model(answer: WayAnswer, setting: ComparisonSettings, names: Sequence[str], folder: Path) -> None:
    """Writes the trained encoder and its tokenizer, with the settings that `classify --local` needs."""
    assert answer.cell is not None and isinstance(answer.cell.tuned, TokenServer) and answer.folder is not None
    for path in answer.cell.tuned.folder.iterdir():
        if path.name == "config.json" or path.suffix == ".safetensors" or path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    for name in TOKENIZER_FILES:
        if (answer.folder / name).is_file():
            shutil.copyfile(answer.folder / name, folder / name)
    if setting.rows.task == TASK:
        return
    settings = read_json(folder / "tokenizer_config.json")
    settings["model_max_length"] = setting.training.max_length
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    config = read_json(folder / "config.json")
    if names:
        config["id2label"] = {str(number): name for number, name in enumerate(names)}
        config["label2id"] = {name: number for number, name in enumerate(names)}
    (folder / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")


@dataclass(frozen=True)
class LocalAnswer:
    """Holds the answer to one text: the likeliest class and the probability of each, or a score."""

    label: str
    probabilities: dict[str, float]
    score: float | None = None


def answers(
    folder: Path, texts: Sequence[str], pairs: Sequence[str] | None = None,
    report_cut: Callable[[Sequence[int], int], None] = lambda indices, limit: None,
) -> list[LocalAnswer]:  # fmt: skip
    """Returns a kept model's answers. Texts are cut as they were in training; a linear model reads them whole.

    Args:
        report_cut: receives the indices of the texts that are cut, if there are any, and to how many tokens.

    Raises:
        ModelNotFound: the folder holds no kept model.
        UsageError: the model writes answers and names no class, or it was trained on pairs and there are none.
    """
    mark = require_classifier(folder)
    _require_pairs(folder, mark.get("pairs"), pairs is not None)
    if (folder / alone.LINEAR_FILE).is_file():
        model, names = alone.load(folder)
        if model.is_regression:
            return [LocalAnswer("", {}, float(score)) for score in model.predict(texts, pairs)]
        return _class_answers(np.exp(model.log_probabilities(texts, pairs, len(names))), names)
    from milkglass.defences.obfuscated_tables import public_codec

    base = Checkpoint.open(folder)
    codec = public_codec(base)
    pair_texts, max_length = None if pairs is None else list(pairs), int(mark["max_length"])
    encoded = codec.encode(list(texts), pair_texts, truncate=True, max_length=max_length)
    if encoded.cut_indices:
        report_cut(encoded.cut_indices, max_length)
    ids = Sequences.of(encoded.ids)
    types = None if encoded.token_type_ids is None else Sequences.of(encoded.token_type_ids)
    logits = TokenServer(folder).answer((Tokens(ids, types=types),))
    if mark["task"] == "regression":
        scale = Scale.from_document(mark["scale"])
        return [LocalAnswer("", {}, float(x) if scale is None else scale.restore(float(x))) for x in logits[:, 0]]
    names = [base.config["id2label"][str(n)] for n in range(logits.shape[1])]
    return _class_answers(softmax(logits.astype(np.float64), axis=1), names)


def require_classifier(folder: Path) -> dict[str, Any]:
    """Returns what a comparison noted of the model that it kept in a folder.

    Raises:
        ModelNotFound: the folder holds no kept model.
        UsageError: the model writes answers and names no class.
    """
    usual = "give the folder `kept` of a comparison, or its --keep"
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}", usual)
    if not (folder / MARK).is_file():
        inner = folder / "kept"
        where = f"give {shlex.quote(str(inner))}" if (inner / MARK).is_file() else usual
        raise ModelNotFound(f"{folder} holds no model that `compare` kept", where)
    mark = read_json(folder / MARK)
    if mark["task"] == TASK:
        raise UsageError(f"{folder} holds a model that writes answers, and names no class", "serve it with an engine")
    return mark


def _require_pairs(folder: Path, was_trained_on_pairs: bool | None, has_pairs: bool) -> None:
    """Raises UsageError for single texts where a model was trained on pairs, or pairs where it was not.

    None: an earlier version kept the model and did not say.
    """
    if was_trained_on_pairs and not has_pairs:
        raise UsageError(f"the model in {folder} was trained on pairs of texts", "give --pair, or --pair-column")
    if was_trained_on_pairs is False and has_pairs:
        raise UsageError(f"the model in {folder} was trained on single texts", "leave out --pair and --pair-column")


def _class_answers(probabilities: Any, names: Sequence[str]) -> list[LocalAnswer]:
    """Returns an answer for each row of probabilities (texts, classes)."""
    return [
        LocalAnswer(names[int(row.argmax())], dict(zip(names, row.tolist(), strict=True)))
        for row in np.asarray(probabilities)
    ]
