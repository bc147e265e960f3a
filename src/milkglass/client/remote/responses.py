"""Checks the answers of a server, which is not trusted, before they are used.

A RecordShape checks the types of the fields of models, files, uploads, jobs and events. strict_json.py makes strings
and numbers themselves safe. Each function that reads an answer raises RemoteError for an invalid one.

Before any id leaves, `check_key` checks that the server's model was made with the key. With another key the answers
would be nonsense, and the server would get text in ids that belong to another model. A server that lies gains nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, final

from milkglass.client.plain_names import is_plain
from milkglass.client.remote.strict_json import SERVER_HINT, parse_object
from milkglass.errors import KeyForOtherModel, RemoteError

if TYPE_CHECKING:
    from milkglass.client.key.key import Key

MAX_RECORDS = 100_000  # the most records of one list
PROBABILITY_TOLERANCE = 1e-3  # how far a rounded probability may lie above 1


def is_text(value: Any) -> TypeGuard[str]:
    """Returns whether a value is a string."""
    return isinstance(value, str)


def is_whole(value: Any) -> TypeGuard[int]:
    """Returns whether a value is a whole number, and not a truth value."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count(value: Any) -> TypeGuard[int]:
    """Returns whether a value is a whole number from 0 on."""
    return is_whole(value) and value >= 0


def is_number(value: Any) -> TypeGuard[int | float]:
    """Returns whether a value is a number. strict_json.py lets only finite ones through."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@final
@dataclass(frozen=True)
class RecordShape:
    """Checks the types of a record's fields. A field may be missing or null; fields that are not named stay unchecked.

    Attributes:
        noun: the record's name in messages.
        text_fields: fields with strings.
        count_fields: fields with whole numbers from 0 on.
        number_fields: fields with numbers.
    """

    noun: str
    text_fields: tuple[str, ...] = ()
    count_fields: tuple[str, ...] = ()
    number_fields: tuple[str, ...] = ()

    def read(self, record: Any) -> dict[str, Any]:
        """Returns the record. Raises RemoteError if it is no object, or a field has another type."""
        if not isinstance(record, dict):
            raise RemoteError(f"{self.noun} of the answer is not a JSON object", SERVER_HINT)
        for names, is_valid, kind in (
            (self.text_fields, is_text, "a text"),
            (self.count_fields, is_count, "a whole number from 0 on"),
            (self.number_fields, is_number, "a number"),
        ):
            for name in names:
                value = record.get(name)
                if value is not None and not is_valid(value):
                    raise RemoteError(f"{name} in {self.noun} of the answer is not {kind}", SERVER_HINT)
        return record

    def records_of(self, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the records in the list `data` of an answer, each checked by `read`."""
        return [self.read(record) for record in records_of(answer)]


MODEL_SHAPE = RecordShape(
    "a model",
    ("id", "kind", "parent", "job", "key_id", "owned_by"),
    ("vocab_size", "bytes", "max_model_len", "layers"),
    ("created",),
)
FILE_SHAPE = RecordShape("a file", ("id", "purpose", "sha256"), ("bytes",), ("created_at",))
UPLOAD_SHAPE = RecordShape(
    "an upload", ("id", "purpose", "sha256"), ("bytes", "received", "chunk_bytes"), ("created_at",)
)
_JOB_SHAPE = RecordShape("a job", ("id", "model", "status", "fine_tuned_model"), ("trained_tokens",), ("created_at",))
_PROGRESS_SHAPE = RecordShape(
    "the progress",
    count_fields=("step", "total_steps"),
    number_fields=("loss", "train_loss", "eval_loss", "accuracy", "pearson", "eval_accuracy", "eta_seconds"),
)
_EVENT_SHAPE = RecordShape("an event", ("message",))


def read_job(record: Any) -> dict[str, Any]:
    """Reads a job. `progress` and `metrics` become objects, and `error` becomes null or {"message": text}."""
    fields = _JOB_SHAPE.read(record)
    error = fields.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    if message is not None and not isinstance(message, str):
        raise RemoteError("the error of a job of the answer is not a text", SERVER_HINT)
    return {
        **fields,
        "error": None if error is None else error if isinstance(error, dict) else {"message": message},
        "progress": _PROGRESS_SHAPE.read(fields.get("progress") or {}),
        "metrics": _PROGRESS_SHAPE.read(fields.get("metrics") or {}),
    }


def read_event(event_data: str) -> dict[str, Any]:
    """Reads one event of a job: {"message": text, "data": {...}, ...}."""
    fields = _EVENT_SHAPE.read(parse_object(event_data, "an event of the job"))
    return {**fields, "message": fields.get("message") or "", "data": _PROGRESS_SHAPE.read(fields.get("data") or {})}


def records_of(answer: Mapping[str, Any], name: str = "data") -> list[dict[str, Any]]:
    """Returns the records in the list `name` of an answer, which must be JSON objects."""
    records = answer.get(name)
    if (
        not isinstance(records, list)
        or len(records) > MAX_RECORDS
        or not all(isinstance(record, dict) for record in records)
    ):
        raise RemoteError(f"the answer has no list of {name}, or one of more than {MAX_RECORDS} entries", SERVER_HINT)
    return records


def response_id(answer: Mapping[str, Any], name: str = "id") -> str:
    """Returns the field `name`, which must be an id that can be part of an address."""
    identifier = answer.get(name)
    if not isinstance(identifier, str) or not is_plain(identifier):
        raise RemoteError(f"the answer has no proper {name}", SERVER_HINT)
    return identifier


def response_count(answer: Mapping[str, Any], name: str) -> int:
    """Returns the field `name`, which must be a whole number from 0 on."""
    count = answer.get(name)
    if not is_count(count):
        raise RemoteError(f"the answer has no proper number of {name}", SERVER_HINT)
    return count


def sort_by_index(answers: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Returns answers sorted by their `index`, which must be 0 to count - 1, each once."""
    answer_by_index = {answer["index"]: answer for answer in answers if is_whole(answer.get("index"))}
    if len(answers) != count or set(answer_by_index) != set(range(count)):
        raise RemoteError(f"the server's {len(answers)} answers do not fit the {count} questions", "try again")
    return [answer_by_index[number] for number in range(count)]


# --- inference --------------------------------------------------------------------------------------------------------
@final
@dataclass(frozen=True)
class Prediction:
    """Holds a model's answer to one text: the likeliest class, and the probability of each.

    A regression has only a score, in the scale in which it was trained (rows/labels.py reads it).

    Attributes:
        label: the number of the likeliest class; 0 for a regression.
        probabilities: the probability of each class, by its number; empty for a regression.
        score: the score of a regression. None: the model classifies.
    """

    label: int
    probabilities: tuple[float, ...]
    score: float | None = None


def read_prediction(row: Mapping[str, Any]) -> Prediction:
    """Reads one answer of /classify: a class with its probabilities, or the score of a regression."""
    if "score" in row:
        if not is_number(row["score"]):
            raise RemoteError("the server's score is not a finite number", "try again")
        return Prediction(0, (), float(row["score"]))
    label, probabilities = str(row.get("label", "")), row.get("probs")
    if not re.fullmatch(r"LABEL_[0-9]{1,5}", label) or not isinstance(probabilities, list):
        raise RemoteError("the server's classification has no label or no probabilities", "is the model a classifier?")
    if not all(map(is_number, probabilities)):
        raise RemoteError("the server's probabilities are not finite numbers", "try again")
    if not all(0 <= probability <= 1 + PROBABILITY_TOLERANCE for probability in probabilities):
        raise RemoteError("the server's probabilities are not all between 0 and 1", SERVER_HINT)
    label_number = int(label.removeprefix("LABEL_"))
    if label_number >= len(probabilities):
        raise RemoteError(f"the server answers {label} of {len(probabilities)} classes", "try again")
    if probabilities[label_number] < max(probabilities):  # else a label would be shown with another one's probability
        raise RemoteError(f"the server answers {label}, and by its probabilities another is likelier", SERVER_HINT)
    return Prediction(label_number, tuple(float(probability) for probability in probabilities))


def completion_ids(event_data: str) -> list[int]:
    """Returns the token ids of one event of a completion."""
    completion = parse_object(event_data, "an event of the answer")
    error = completion.get("error")
    if isinstance(error, dict):
        raise RemoteError(f"the server stopped: {error.get('message') or 'no reason given'}", "try again")
    choices = records_of(completion, "choices")
    return token_ids(choices[0]) if choices else []


def token_ids(choice: Mapping[str, Any]) -> list[int]:
    """Returns the token ids of one choice of a completion, or [] if it has none."""
    ids = choice.get("token_ids")
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(map(is_whole, ids)):
        raise RemoteError("the server's token ids are not whole numbers", "try again")
    return ids


# --- the key ----------------------------------------------------------------------------------------------------------
def is_made_with(description: Mapping[str, Any], key: Key) -> bool | None:
    """Returns whether a server's model was made with the key. None: its config has no key identifier."""
    identifier = description.get("key_id")
    return None if identifier is None else identifier == key.identifier


def check_key(description: Mapping[str, Any], key: Key, model: str) -> str | None:
    """Checks that a server's model was made with a key.

    Args:
        description: the server's description of the model.
        key: the key.
        model: the model's name, for messages.

    Returns:
        A warning if the server does not say which key made the model, else None.

    Raises:
        KeyForOtherModel: another key made the model.
        RemoteError: the description is invalid.
    """
    is_same_key = is_made_with(description, key)
    if is_same_key:
        return None
    if is_same_key is False:
        raise _other_key_error(f"{model} was scrambled with another key than this one")
    vocab_size, kind = response_count(description, "vocab_size"), description.get("kind")
    if vocab_size != len(key.sigma):
        raise _other_key_error(f"{model} has {vocab_size} tokens, this key is for a model of {len(key.sigma)}")
    if kind != key.info.kind:
        noun = "an encoder" if key.info.kind == "encoder" else "a decoder"
        raise _other_key_error(f"{model} is not {noun}, as the key's model is")
    return (
        f"warning: {model} doesn't say which key scrambled it; its vocabulary size and kind fit this key, "
        "and nothing more could be checked"
    )


def _other_key_error(message: str) -> KeyForOtherModel:
    """Returns the error for a model of another key. `message` says how that was recognised."""
    return KeyForOtherModel(
        f"{message}, so nothing was sent",
        "give the key that the model was scrambled with; `milkglass models --server URL --key FILE` shows which fit",
    )
