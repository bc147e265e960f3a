"""Checks whether training rows fit a model, by the facts of the uploaded file (server/storage/training_rows.py)."""

from __future__ import annotations

from milkglass.errors import IdOutOfRange, TooLong, UsageError
from milkglass.server.spec import Hyperparameters
from milkglass.server.storage.store import ModelRecord, TrainingFileInfo


def require_fit(model: ModelRecord, rows: TrainingFileInfo, chosen: Hyperparameters) -> None:
    """Raises UsageError, IdOutOfRange or TooLong for rows that cannot train this model. No message names an id."""
    causal = chosen.task == "causal-lm"
    if causal and model.kind != "decoder":
        raise UsageError("this model is an encoder: it cannot be trained for causal-lm", "use task `classification`")
    if rows.nested_labels != causal:
        raise UsageError(
            f"labels holds {'lists' if rows.nested_labels else 'single numbers'}, which does not fit {chosen.task}",
            "causal-lm needs a list of labels a row, classification and regression one number",
        )
    if rows.real_labels != (chosen.task == "regression"):
        raise UsageError(
            f"labels holds {'real' if rows.real_labels else 'whole'} numbers, which does not fit {chosen.task}",
            "regression needs float32 labels, classification int32 ones",
        )
    if rows.max_id >= model.vocab_size:
        raise IdOutOfRange(
            f"the data holds ids beyond the model's vocabulary of {model.vocab_size}",
            "encode it with the key of this very model",
        )
    if not rows.real_labels:
        _require_labels(model, rows, chosen)
    if not causal and model.kind == "decoder" and model.pad_token_id is None and chosen.batch_size > 1:
        raise UsageError(
            f"this model has no padding id: it cannot be trained for {chosen.task} {chosen.batch_size} rows at a time",
            "set batch_size to 1, or upload the model with a pad_token_id in its config",
        )
    if rows.max_token_type is not None and rows.max_token_type >= max(1, model.token_types):
        raise IdOutOfRange(f"the model has {model.token_types} token types, the data more", "leave token_type_ids out")
    used = min(rows.longest, chosen.max_length)
    if model.positions is not None and used > model.positions:
        raise TooLong(
            f"rows of {used} tokens are longer than the model's {model.positions} positions",
            f"set max_length to {model.positions} or less",
        )


def _require_labels(model: ModelRecord, rows: TrainingFileInfo, chosen: Hyperparameters) -> None:
    """Checks labels that are whole numbers: classes or ids."""
    causal = chosen.task == "causal-lm"
    if rows.max_label is None or rows.min_label is None:
        raise UsageError("every label is -100: there is nothing to learn", "give the answers their ids as labels")
    if not causal and rows.unlabelled:
        raise UsageError("some labels are -100: a row for classification needs a class", "leave those rows out")
    classes = model.vocab_size if causal else chosen.num_labels
    if rows.min_label < 0 or rows.max_label >= classes:
        raise IdOutOfRange(f"the data holds labels outside 0 to {classes - 1}", "is num_labels right?")
