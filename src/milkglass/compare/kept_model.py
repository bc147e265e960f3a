"""Answers with a model that a comparison kept, on this machine.

Libraries that only an encoder needs are imported when one answers, so that a wrong folder is reported at once.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import softmax

from milkglass.client import alone
from milkglass.errors import ModelNotFound, UsageError
from milkglass.models.checkpoint import Checkpoint, read_json
from milkglass.rows.labels import Scale

MARK = "milkglass.json"


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
    from milkglass.defences.token_halves import TokenServer
    from milkglass.sequences import Sequences
    from milkglass.threat.observations import Tokens

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
    if mark["task"] == "causal-lm":
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
