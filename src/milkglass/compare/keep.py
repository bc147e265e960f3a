"""Keeps the best model with nothing sent as an ordinary folder; `kept_model.py` answers with it.

An encoder is an ordinary Hugging Face folder, with its tokenizer and the names of its classes in config.json, which
`transformers.pipeline("text-classification", FOLDER)` opens. A linear model is linear.json and linear.safetensors. A
model that writes answers is an ordinary folder with its tokenizer and chat template, which any engine serves.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from milkglass import files
from milkglass.client import alone
from milkglass.compare.chat_rows import CHAT_TASK
from milkglass.compare.kept_model import MARK
from milkglass.compare.quality import quality_of
from milkglass.compare.ways import WAYS, ComparisonSettings, WayAnswers
from milkglass.defences.token_halves import TokenServer
from milkglass.errors import CorruptCheckpoint, UsageError
from milkglass.models.checkpoint import read_json
from milkglass.rows.labels import Scale

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "merges.txt", "vocab.json",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def is_kept(folder: Path, origin: Mapping[str, Any]) -> bool:
    """Returns whether a folder keeps the model of this origin (see `keep`)."""
    mark = folder / MARK
    return mark.is_file() and origin.items() <= read_json(mark).items()


def kept_way(folder: Path, run: str) -> str:
    """Returns the way whose model a folder keeps, if a comparison of this name kept it; else ""."""
    try:
        mark = read_json(folder / MARK) if (folder / MARK).is_file() else {}
    except CorruptCheckpoint:  # no answer can be given with this folder, so that no command names it
        return ""
    return str(mark.get("way", "")) if mark.get("run") == run else ""


def kept_run(folder: Path) -> str:
    """Returns the name of the comparison that kept a model in a folder, as a name of a folder; "" if it is unknown."""
    try:
        run = read_json(folder / MARK).get("run") if (folder / MARK).is_file() else None
    except CorruptCheckpoint:
        return ""
    return run if isinstance(run, str) and run.isalnum() else ""


def require_free(folder: Path) -> None:
    """Raises UsageError if a folder holds something else than a kept model, which a model would replace.

    So does a folder whose mark is damaged: what it holds is not known.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file, not a folder", "give a new folder with --keep")
    if not folder.is_dir():
        return
    if not (folder / MARK).is_file() and any(folder.iterdir()):
        raise UsageError(f"{folder} holds other things than a kept model", "give a new folder with --keep")
    if (folder / MARK).is_file():
        try:
            read_json(folder / MARK)
        except CorruptCheckpoint:
            raise UsageError(
                f"{folder / MARK} is damaged, and does not say what the folder keeps",
                "remove the folder, or give a new one with --keep",
            ) from None
    model_files = (MARK, "config.json", *TOKENIZER_FILES, alone.LINEAR_FILE)
    for path in sorted(folder.iterdir()):
        if path.name not in model_files and not path.name.endswith((".safetensors", ".index.json")):
            raise UsageError(
                f"{folder} holds {path.name} beside a kept model, which another model would replace",
                "move it elsewhere, or give a new folder with --keep",
            )


def require_apart(kept_folder: Path, out: Path, cells: Path) -> None:
    """Raises UsageError if keeping a model would remove other files of a comparison.

    Args:
        kept_folder: the folder in which a model is kept.
        out: the folder of the comparison.
        cells: the folder of trained cells.
    """
    kept = kept_folder.resolve()
    if kept == out.resolve() or kept in out.resolve().parents:
        raise UsageError(f"--keep {kept_folder} holds --out {out}", "give the kept model a folder of its own")
    for folder in (cells, out / "runs"):
        other = folder.resolve()
        if kept == other or kept in other.parents or other in kept.parents:
            raise UsageError(
                f"the kept model's folder {kept_folder} and {folder}, where the comparison keeps other files, are one "
                "inside the other",
                "give the kept model a folder of its own with --keep",
            )


def keep(settings: ComparisonSettings, measured: WayAnswers, folder: Path, origin: Mapping[str, Any]) -> None:
    """Writes a way's model to a folder, in place of one that an earlier comparison kept there.

    Args:
        measured: the way's answers, with the model that gave them. A way without a model writes nothing.
        origin: tells the model from those of other ways and comparisons: its "way", its "run", and whether the
            comparison shows that anything was "learnt".

    Raises:
        UsageError: the folder holds something else, or the model has no folder of its own.
    """
    require_free(folder)
    if measured.cell is None and measured.model is None:
        return
    names = list(settings.rows.class_names)
    with files.new_dir(folder, replaces=True) as partial:
        if measured.model is not None:
            alone.save(measured.model, names, partial)
        else:
            _write_model(measured, settings, names, partial)
        scale = Scale.of(map(float, settings.rows.train.labels)) if settings.rows.task == "regression" else None
        if scale is not None and measured.model is None and _fold_scale(partial, scale):
            scale = None
        mark = {
            "made by": "milkglass compare", "task": settings.rows.task, "max_length": settings.training.max_length,
            "scale": None if scale is None else scale.document(), "pairs": settings.rows.train.pairs is not None,
            "held_out": _held_out_quality(settings, measured), **origin,
        }  # fmt: skip
        (partial / MARK).write_text(json.dumps(mark) + "\n", "utf-8")


def _held_out_quality(settings: ComparisonSettings, measured: WayAnswers) -> dict[str, float] | None:
    """Returns the quality of a model's answers to the held-out rows, and that of the same answer to all of them.

    None: the model writes answers, or its scores are all equal.
    """
    if settings.rows.task == CHAT_TASK:
        return None
    quality = quality_of(settings.rows, measured.answers)
    constant = quality_of(settings.rows, WAYS["commonest"].measure_answers(settings).answers)
    if math.isnan(quality.value):
        return None
    same_answer = 0.0 if math.isnan(constant.value) else constant.value  # equal scores have no correlation
    low, high = (quality.value if math.isnan(end) else end for end in (quality.low, quality.high))
    rows = len(settings.rows.held_out.texts)
    return {"value": quality.value, "low": low, "high": high, "rows": rows, "same_answer": same_answer}


def _fold_scale(folder: Path, scale: Scale) -> bool:
    """Puts the scale of the scores into a model's last layer, so that any library gives scores in the user's unit.

    Returns:
        Whether the model has such a layer: one number out, with a bias, in fp32.
    """
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, bias in tensors.items():
            weight_name = f"{name.removesuffix('.bias')}.weight"
            weight = tensors.get(weight_name) if name.endswith(".bias") and bias.shape == (1,) else None
            if weight is not None and weight.shape[0] == 1 and weight.dtype == bias.dtype == np.float32:
                tensors[weight_name] = (weight * scale.spread).astype(np.float32)
                tensors[name] = (bias * scale.spread + scale.mean).astype(np.float32)
                save_file(tensors, path, metadata={"format": "pt"})
                return True
    return False


def _write_model(measured: WayAnswers, settings: ComparisonSettings, names: Sequence[str], folder: Path) -> None:
    """Writes the trained encoder and its tokenizer, with the settings that `classify --local` needs."""
    assert measured.cell is not None and isinstance(measured.cell.tuned, TokenServer) and measured.folder is not None
    for path in measured.cell.tuned.folder.iterdir():
        if path.name == "config.json" or path.suffix == ".safetensors" or path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    for name in TOKENIZER_FILES:
        if (measured.folder / name).is_file():
            shutil.copyfile(measured.folder / name, folder / name)
    if settings.rows.task == CHAT_TASK:
        return
    tokenizer_config = read_json(folder / "tokenizer_config.json")
    tokenizer_config["model_max_length"] = settings.training.max_length
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=1) + "\n", "utf-8")
    config = read_json(folder / "config.json")
    if names:
        config["id2label"] = {str(number): name for number, name in enumerate(names)}
        config["label2id"] = {name: number for number, name in enumerate(names)}
    (folder / "config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")
