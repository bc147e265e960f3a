"""Writes the demo's data: `python -m milkglass.demo.data.make FOLDER`. Every run writes the same files.

situations.jsonl has what people write to the message desk of an invented clinic: forty situations for each of three
labels. A situation is a template in which `[a|b]` offers alternatives and `draw_slots` fills `{slot}`. Five messages
are made of each, worded and filled differently, with the openings, closings and invented names of wording.json: 480 to
train on, 120 to test. The test messages are of situations that are not in training, so that the accuracy is about new
ones. tests/demo checks the files.

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
MESSAGES_PER_SITUATION = 5
HELD_OUT_SITUATIONS = 8  # so many of each label's situations, the last ones, are only in the test split
WORD_RANGE = (8, 40)  # the fewest and the most words of a message
HERE = Path(__file__).parent
WORDING: dict[str, Any] = json.loads((HERE / "wording.json").read_text("utf-8"))
DESK_OF_LABEL: dict[str, str] = WORDING["desk"]  # the desk for messages with a label; there is none for urgent ones
INSTRUCTION = "Which desk takes this?"


def read_situations() -> dict[str, list[dict[str, str]]]:
    """Returns the situations by label. The template of a situation is its "message"."""
    by_label: dict[str, list[dict[str, str]]] = {}
    for line in (HERE / "situations.jsonl").read_text("utf-8").splitlines():
        situation = json.loads(line)
        by_label.setdefault(situation["label"], []).append(situation)
    return by_label


def draw_slots(rng: random.Random) -> dict[str, str]:
    """Draws an invented person, and returns the values of the slots in templates."""
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


def fill_template(template: str, values: dict[str, str], rng: random.Random) -> str:
    """Returns the template with one alternative of each [a|b] drawn, and the slots filled."""
    template = re.sub(r"\[([^\]]*)\]", lambda match: rng.choice(match[1].split("|")), template)
    return template.format(**values)


QUESTION = re.compile(r"(can|could|do|does|is|may|will|why|what|who|which)\b", re.IGNORECASE)


def write_message(template: str, values: dict[str, str], rng: random.Random) -> str:
    """Returns a message about the person of `values`: an opening, the filled template, a closing.

    Some messages have no capitals and no commas.
    """
    body, style, sender = fill_template(template, values, rng), rng.random(), draw_slots(rng)
    opening, closing = (
        fill_template(rng.choice(choices), sender, rng) for choices in (WORDING["open"], WORDING["close"])
    )
    if style < 0.75 and not opening.endswith((", ", ": ")):
        body = body[0].upper() + body[1:]
    end = rng.choice("??.") if QUESTION.match(body) else "."
    text = opening + body + end + closing
    return text.lower().replace(",", "") if style > 0.93 else text


def make_tickets(is_test: bool, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yields the messages of the test split or of the training split as {"text", "label"}, no text twice."""
    texts_seen: set[str] = set()
    for label, group in read_situations().items():
        for situation in group[-HELD_OUT_SITUATIONS:] if is_test else group[:-HELD_OUT_SITUATIONS]:
            count = 0
            while count < MESSAGES_PER_SITUATION:
                values = draw_slots(rng)
                text = write_message(situation["message"], values, rng)
                if text in texts_seen or not WORD_RANGE[0] <= len(text.split()) <= WORD_RANGE[1]:
                    continue
                texts_seen.add(text)
                count += 1
                yield {"text": text, "label": label}


def make_replies(rows: list[dict[str, str]], count: int, rng: random.Random) -> Iterator[dict[str, str]]:
    """Yields instructions that ask which of two desks takes a message, for `count` of the messages.

    A small model learns this one task in a minute or two. In that time it does not learn what is urgent.
    """
    for row in rng.sample([row for row in rows if row["label"] in DESK_OF_LABEL], count):
        yield {"instruction": INSTRUCTION, "input": row["text"], "output": DESK_OF_LABEL[row["label"]]}


def main(folder: Path) -> None:
    """Writes the messages and the instructions of both splits into a folder."""
    for is_test in (False, True):
        rng = random.Random(SEED + is_test)
        rows = list(make_tickets(is_test, rng))
        rng.shuffle(rows)
        split = "test" if is_test else "train"
        write_rows(folder / f"tickets_{split}.jsonl", rows)
        write_rows(folder / f"replies_{split}.jsonl", list(make_replies(rows, 60 if is_test else 240, rng)))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Writes rows as JSON Lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
