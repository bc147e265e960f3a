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
from milkglass.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel, UsageError
from milkglass.metrics.percent import percent
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
        CorruptCheckpoint: a file of the folder was changed or is damaged.
        UsageError: the model writes answers and names no class, or it was trained on pairs and there are none.
    """
    mark = require_classifier(folder)
    _require_pairs(folder, mark.get("pairs"), pairs is not None)
    if (folder / alone.LINEAR_FILE).is_file():
        return _linear_answers(folder, mark, texts, pairs)
    from milkglass.defences.obfuscated_tables import public_codec
    from milkglass.defences.token_halves import TokenServer
    from milkglass.models.soundness import facts_of
    from milkglass.sequences import Sequences
    from milkglass.threat.observations import Tokens

    base = Checkpoint.open(folder)
    names = None if mark["task"] == "regression" else _class_names(folder, base)
    facts_of(base)
    codec = public_codec(base)
    pair_texts, max_length = None if pairs is None else list(pairs), int(mark["max_length"])
    encoded = codec.encode(list(texts), pair_texts, truncate=True, max_length=max_length)
    if encoded.cut_indices:
        report_cut(encoded.cut_indices, max_length)
    ids = Sequences.of(encoded.ids)
    types = None if encoded.token_type_ids is None else Sequences.of(encoded.token_type_ids)
    try:
        logits = TokenServer(folder).answer((Tokens(ids, token_types=types),))
    except (CorruptCheckpoint, UnsupportedModel, UsageError) as error:
        raise _damaged_error(folder, error.message) from None
    if logits.shape[1] != (class_count := 1 if names is None else len(names)):
        raise _damaged_error(folder, f"it has {logits.shape[1]} outputs, and not {class_count}")
    _require_finite(folder, logits)
    if names is None:
        scale = Scale.from_document(mark["scale"])
        return [LocalAnswer("", {}, float(x) if scale is None else scale.restore(float(x))) for x in logits[:, 0]]
    return _class_answers(softmax(logits.astype(np.float64), axis=1), names)


def _linear_answers(
    folder: Path, mark: dict[str, Any], texts: Sequence[str], pairs: Sequence[str] | None
) -> list[LocalAnswer]:
    """Returns the answers of a kept linear model. Raises CorruptCheckpoint for files that do not fit each other."""
    try:
        model, names = alone.load(folder)
        classes = {*model.classes.tolist()}
        are_classes = classes <= {*range(len(names))} and len(classes) == len(model.classes)
        are_classes = are_classes and len({*names}) == len(names)
        if model.is_regression != (mark["task"] == "regression") or not model.members or not are_classes:
            raise ValueError("its classes, its members and the task do not fit each other")
        if model.is_regression:
            outputs = np.asarray(model.predict(texts, pairs))
        else:  # a class without a row of the training has a share of its own, so that the sum is made 1
            outputs = softmax(model.log_probabilities(texts, pairs, len(names)), axis=1)
    except (ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise _damaged_error(folder, f"the parts of its linear model do not fit ({type(error).__name__})") from None
    _require_finite(folder, outputs)
    if model.is_regression:
        return [LocalAnswer("", {}, float(score)) for score in outputs]
    return _class_answers(outputs, names)


def _class_names(folder: Path, base: Checkpoint) -> list[str]:
    """Returns the names of an encoder's classes, by number. Raises CorruptCheckpoint if its config does not name them.

    Two classes of one name would be one key of the answer.
    """
    entries = base.config.get("id2label")
    names = [entries.get(str(number)) for number in range(len(entries))] if isinstance(entries, dict) else []
    if len(names) < 2 or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise _damaged_error(folder, "id2label of its config.json does not name each class, from 0 on, by its own name")
    return [str(name) for name in names]


def _require_finite(folder: Path, outputs: Any) -> None:
    """Raises CorruptCheckpoint if a model answers with NaN or infinity."""
    if not np.isfinite(outputs).all():
        raise _damaged_error(folder, "it answers with numbers that are not finite")


def _damaged_error(folder: Path, fault: str) -> CorruptCheckpoint:
    """Returns the error for a folder whose files are not those that `compare` wrote."""
    return CorruptCheckpoint(f"the model in {folder} cannot be used: {fault}", "make it anew with `compare --keep`")


def require_classifier(folder: Path) -> dict[str, Any]:
    """Returns what a comparison noted of the model that it kept in a folder.

    Raises:
        ModelNotFound: the folder holds no kept model.
        CorruptCheckpoint: what was noted is damaged.
        UsageError: the model writes answers and names no class.
    """
    usual = "give the folder `kept` of a comparison, or its --keep"
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}", usual)
    if not (folder / MARK).is_file():
        inner = folder / "kept"
        where = f"give {shlex.quote(str(inner))}" if (inner / MARK).is_file() else usual
        raise ModelNotFound(f"{folder} holds no model that `compare` kept", where)
    try:
        mark = read_json(folder / MARK, must_be_finite=True)
    except CorruptCheckpoint:
        raise _damaged_error(folder, f"{MARK} is damaged") from None
    if mark.get("task") == "causal-lm":
        raise UsageError(f"{folder} holds a model that writes answers, and names no class", "serve it with an engine")
    scale, length = mark.get("scale"), mark.get("max_length")
    is_scale = isinstance(scale, list) and len(scale) == 2 and all(type(number) in (int, float) for number in scale)
    faults = {
        "task": mark.get("task") not in ("classification", "regression"),
        "max_length": type(length) is not int or length < 1,
        "scale": scale is not None and not is_scale,
        "pairs": mark.get("pairs") not in (True, False, None),
        "learnt": mark.get("learnt") not in (True, False, None),
        "held_out": mark.get("held_out") is not None and not _is_quality(mark["held_out"]),
    }
    if fault := next((name for name, is_wrong in faults.items() if is_wrong), None):
        raise _damaged_error(folder, f"{MARK} has a {fault} that `compare` does not write")
    return mark


def quality_note(folder: Path) -> str:
    """Returns a sentence on the quality of a kept model, by the rows that its comparison held out; "" if it is unknown.

    Raises what `require_classifier` raises.
    """
    mark = require_classifier(folder)
    quality = mark.get("held_out")
    if quality is None:  # an earlier version kept the model
        return ""
    value, low, high, same_answer = (quality[name] for name in ("value", "low", "high", "same_answer"))
    if mark["task"] == "regression":
        found, useless = f"a correlation of {value:.2f} ({low:.2f} to {high:.2f})", ""
    else:
        found = f"{percent(value)} right ({100 * low:.0f} to {100 * high:.0f})"
        useless = f"; naming the commonest class had {percent(same_answer)}"
    is_learnt = low > same_answer if mark.get("learnt") is None else mark["learnt"]
    doubt = "" if is_learnt else ": it is not shown to have learnt anything"
    confidence = "; the number beside an answer is the model's own confidence, often too high"
    return (
        f"in the comparison this model had {found} of the {quality['rows']} rows that it was chosen by{useless}{doubt}"
        f"{'' if mark['task'] == 'regression' else confidence}"
    )


def _is_quality(quality: Any) -> bool:
    """Returns whether an entry of the mark is a quality as `keep.py` writes it."""
    names = ("value", "low", "high", "same_answer", "rows")
    is_complete = isinstance(quality, dict) and {*quality} == {*names}
    return is_complete and all(type(quality[name]) in (int, float) for name in names)


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
