"""Writes the demo's data: `python -m milkglass.demo.data.make FOLDER`. Every run writes the same files.

situations.jsonl has what people write to the message desk of an invented clinic: forty situations for each label. Each
is a template in which `[a|b]` offers ways to say it and `slots` fills `{slot}`. Five messages are made of each, worded
and filled differently, with the openings, closings and invented names of wording.json: 480 to train on, 120 to test.
The test messages are of situations that are not in training, so that the accuracy is about new ones. tests/demo checks
the files.

Everybody and everything named here is invented, the medicines too.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 20261121
MESSAGES_A_SITUATION = 5  # messages a situation
HELD_OUT = 8  # situations of each label, the last ones, are only in the test split
WORD_RANGE = (8, 40)
HERE = Path(__file__).parent
WORDING: dict[str, Any] = json.loads((HERE / "wording.json").read_text("utf-8"))
DESK: dict[str, str] = WORDING["desk"]  # by label, which desk a message goes to; none takes what is urgent
INSTRUCTION = "Which desk takes this?"


def situations() -> dict[str, list[dict[str, str]]]:
    """Returns the situations by label, each with a "message"."""
    by_label: dict[str, list[dict[str, str]]] = {}
    for line in (HERE / "situations.jsonl").read_text("utf-8").splitlines():
        situation = json.loads(line)
        by_label.setdefault(situation["label"], []).append(situation)
    return by_label


def slots(rng: random.Random) -> dict[str, str]:
    """Returns one invented person, with what may be said about them."""
    first, last = rng.choice(WORDING["first"]), rng.choice(WORDING["last"])
    number = f"{rng.randint(1, 9)}{rng.randint(0, 9999):04d}"
    return {
        "first": first,
        "last": last,
        "name": f"{first} {last}",
        "child": rng.choice(WORDING["child"]),
        "age": str(rng.randint(3, 39)),
        "doctor": rng.choice(WORDING["last"]),
        "place": rng.choice(WORDING["place"]),
        "med": rng.choice(WORDING["medicine"]),
        "dose": f"{rng.choice((2, 4, 5, 10, 20, 40))} {rng.choice(('mg', 'units', 'ml'))}",
        "day": rng.choice(WORDING["day"]),
        "date": rng.choice((f"{rng.randint(2, 28)} {rng.choice(WORDING['month'])}", f"the {rng.randint(4, 20)}th")),
        "time": rng.choice(WORDING["time"]),
        "fever": f"{rng.randint(390, 411) / 10}",
        "sugar": str(rng.randint(380, 590)),
        "amount": rng.choice(("${:.2f}", "{:.0f} crowns", "€ {:.2f}")).format(rng.randint(1450, 98000) / 100),
        "ref": f"{rng.choice('ABKRT')}-{rng.randint(10000, 99999)}",
        "phone": f"555 {rng.randint(100, 999)} {rng.randint(10, 99)}",
        "number": number,
    }


def word(template: str, values: dict[str, str], rng: random.Random) -> str:
    """Returns the template with one of each [a|b] chosen and the slots filled."""
    selected = re.sub(r"\[([^\]]*)\]", lambda m: rng.choice(m[1].split("|")), template)
    return selected.format(**values)


QUESTION = re.compile(r"(can|could|do|does|is|may|will|why|what|who|which)\b", re.IGNORECASE)


def message(template: str, values: dict[str, str], rng: random.Random) -> str:
    """Returns what one person writes about the person of `values`: an opening, the matter, a closing.

    Some write carelessly.
    """
    body, style, sender = word(template, values, rng), rng.random(), slots(rng)
    opening, closing = (word(rng.choice(choices), sender, rng) for choices in (WORDING["open"], WORDING["close"]))
    if style < 0.75 and not opening.endswith((", ", ": ")):
        body = body[0].upper() + body[1:]
    end = rng.choice("??.") if QUESTION.match(body) else "."
    text = opening + body + end + closing
    return text.lower().replace(",", "") if style > 0.93 else text


def tickets(is_test: bool, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yields {"text", "label"} of each message of one split, no text twice."""
    texts_seen: set[str] = set()
    for label, group in situations().items():
        for situation in group[-HELD_OUT:] if is_test else group[:-HELD_OUT]:
            count = 0
            while count < MESSAGES_A_SITUATION:
                values = slots(rng)
                text = message(situation["message"], values, rng)
                if text in texts_seen or not WORD_RANGE[0] <= len(text.split()) <= WORD_RANGE[1]:
                    continue
                texts_seen.add(text)
                count += 1
                yield {"text": text, "label": label}


def replies(rows: list[dict[str, str]], count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yields instructions that ask which of two desks takes a message, for `count` of the messages.

    A small model learns this one task in a minute or two. In that time it does not learn what is urgent.
    """
    for row in rng.sample([row for row in rows if row["label"] in DESK], count):
        yield {"instruction": INSTRUCTION, "input": row["text"], "output": DESK[row["label"]]}


def main(folder: Path) -> None:
    for is_test in (False, True):
        rng = random.Random(SEED + is_test)
        rows = list(tickets(is_test, rng))
        rng.shuffle(rows)
        split = "test" if is_test else "train"
        write(folder / f"tickets_{split}.jsonl", rows)
        write(folder / f"replies_{split}.jsonl", list(replies(rows, 60 if is_test else 240, rng)))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
