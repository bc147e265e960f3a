"""A server's answers, checked before they are used: a server is not trusted.

Strings and numbers themselves are made safe by strict_json.py; records of models, files and jobs are read by
records.py. Each function raises RemoteError for what cannot be.

Out of scope: how the answers came here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from milkglass.client.obfuscate.upload_check import PLAIN_NAME
from milkglass.client.remote.records import is_number, is_whole, rows
from milkglass.client.remote.strict_json import HINT, document
from milkglass.errors import RemoteError


def response_id(answer: Mapping[str, Any], name: str = "id") -> str:
    """An id of the server's, which can stand in an address."""
    value = answer.get(name)
    if not isinstance(value, str) or not PLAIN_NAME.fullmatch(value) or ".." in value:
        raise RemoteError(f"the answer has no proper {name}", HINT)
    return value


def response_number(answer: Mapping[str, Any], name: str) -> int:
    value = answer.get(name)
    if not is_whole(value) or value < 0:
        raise RemoteError(f"the answer has no proper number of {name}", HINT)
    return value


def in_order(found: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """By their `index`, which must be 0 to count - 1, each once."""
    by_index = {row["index"]: row for row in found if is_whole(row.get("index"))}
    if len(found) != count or set(by_index) != set(range(count)):
        raise RemoteError(f"the server's {len(found)} answers do not fit the {count} questions", "try again")
    return [by_index[number] for number in range(count)]


# --- inference --------------------------------------------------------------------------------------------------------
@final
@dataclass(frozen=True)
class Prediction:
    """What a model says of one text.

    Attributes:
        label: the number of the likeliest class.
        probabilities: of each class, in order.
        score: of a regression, as it was trained (client/label_scale.py reads it); there are no probabilities
        then.
    """

    label: int
    probabilities: tuple[float, ...]
    score: float | None = None


def classified(row: Mapping[str, Any]) -> Prediction:
    if "score" in row:
        return Prediction(0, (), _score(row["score"]))
    label, probabilities = str(row.get("label", "")), row.get("probs")
    if not re.fullmatch(r"LABEL_[0-9]{1,5}", label) or not isinstance(probabilities, list):
        raise RemoteError("the server's classification has no label or no probabilities", "is the model a classifier?")
    if not all(map(is_number, probabilities)):
        raise RemoteError("the server's probabilities are not finite numbers", "try again")
    number = int(label.removeprefix("LABEL_"))
    if number >= len(probabilities):
        raise RemoteError(f"the server answers {label} of {len(probabilities)} classes", "try again")
    return Prediction(number, tuple(float(one) for one in probabilities))


def _score(value: Any) -> float:
    if not is_number(value):
        raise RemoteError("the server's score is not a finite number", "try again")
    return float(value)


def delta(data: str) -> list[int]:
    """The token ids of one event of a completion."""
    value = document(data, "an event of the answer")
    error = value.get("error")
    if isinstance(error, dict):
        raise RemoteError(f"the server stopped: {error.get('message') or 'no reason given'}", "try again")
    choices = rows(value, "choices")
    return token_ids(choices[0]) if choices else []


def token_ids(choice: Mapping[str, Any]) -> list[int]:
    ids = choice.get("token_ids")
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(map(is_whole, ids)):
        raise RemoteError("the server's token ids are not whole numbers", "try again")
    return ids
