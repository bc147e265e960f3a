"""An owner's texts in shared training, and what is shared of them: rows, their shadows, a shield.

    [defences."pruning 0.99"]
    shield = "random-pruning"            milkglass/gradient_defences/catalogue.py, with its parameters
    ratio = 0.99
    [defences.ghost]
    ghost = { k = 70, way = "states" }   fields of Search and Selection in sanitizers/ghost; {}: the paper's

An empty entry is plain; ghost and a shield may be combined. Shadows are written to disk as they are found, since that
takes as long as a training, and a stopped run resumes. They are as private as the texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from milkglass import files
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.cache import ArtifactCache
from milkglass.experiments.recipe import Recipe, from_entries, table_of
from milkglass.gradient_defences.catalogue import gradient_defence_of
from milkglass.gradient_defences.defence import GradientDefence
from milkglass.metrics.interval import with_spread
from milkglass.metrics.text import rouge
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import Log
from milkglass.rows.examples import Example
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.search import Search
from milkglass.sanitizers.ghost.selection import Selection
from milkglass.sequences import Ids, Sequences
from milkglass.threat.training_step import Task, batch

SENTENCES_A_PART = 32  # sentences between two savings


@dataclass(frozen=True, eq=False)
class PrivateRows:
    """Tokenised texts and their labels.

    Attributes:
        ids: of each text, with special tokens.
        labels: (b,) or None.
    """

    ids: Sequences
    labels: Ids | None

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, numbers: Ids) -> PrivateRows:
        return PrivateRows(self.ids.chosen(numbers), None if self.labels is None else self.labels[numbers])

    def batch(self, pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns ids and mask (b, t), and the labels."""
        ids, mask = batch([text_ids.tolist() for text_ids in self.ids], pad)
        return ids, mask, None if self.labels is None else torch.from_numpy(self.labels)


@dataclass(frozen=True)
class RowFilter:
    """Which texts are taken.

    Attributes:
        texts: how many, the same number of each class.
        least, most: the fewest and the most words.
        longest: the most tokens, special ones too.
    """

    texts: int
    least: int = 1
    most: int = 1000
    longest: int = 128


@dataclass(frozen=True)
class DefenceSpec:
    """A parsed entry of [defences].

    Attributes:
        shield: changes the gradients.
        ghost: replaces words. None: they are not replaced.
    """

    shield: GradientDefence
    ghost: tuple[Search, Selection] | None

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any]) -> DefenceSpec:
        """Parses an entry. Raises UsageError."""
        values = dict(entry)
        ghost_entry = table_of(values, "ghost") if "ghost" in values else None
        values.pop("ghost", None)
        return cls(gradient_defence_of(values), None if ghost_entry is None else _ghost(name, ghost_entry))


def _ghost(name: str, entry: dict[str, Any]) -> tuple[Search, Selection]:
    setting_classes = (Search, Selection)
    names = [parameter.name for settings in setting_classes for parameter in fields(settings)]
    if unknown := sorted(set(entry) - set(names)):
        raise UsageError(f"{name}: ghost has no {unknown[0]!r}", f"it has: {', '.join(names)}")
    search, selection = (
        {parameter.name: entry[parameter.name] for parameter in fields(settings) if parameter.name in entry}
        for settings in setting_classes
    )
    return from_entries(Search, search), from_entries(Selection, selection)


def classes_of(ref: str, examples: Sequence[Example]) -> Mapping[str, int]:
    """Returns the numbers of the classes: a named data set's own, else in the order of their names."""
    data_set = data_refs.parse_ref(ref)
    if data_set:
        return data_set[0].numbers
    return {name: i for i, name in enumerate(sorted({str(row.label) for row in examples}))}


def rows_of(
    tokenizer: Any, examples: Sequence[Example], numbers: Mapping[str, int] | None, expected: RowFilter,
    rng: np.random.Generator,
) -> PrivateRows:  # fmt: skip
    """Returns some of the examples, in random order.

    Args:
        numbers: of the classes. None: labels are not needed.

    Raises:
        UsageError: there are too few.
    """
    ids: list[list[int]] = []
    labels: list[int] = []
    remaining = dict.fromkeys(range(len(numbers)), -(-expected.texts // len(numbers))) if numbers else {}
    for i in rng.permutation(len(examples)).tolist():
        example = examples[i]
        if len(ids) == expected.texts:
            break
        if not expected.least <= len(example.text.split()) <= expected.most:
            continue
        text_ids = tokenizer(example.text, split_special_tokens=True)["input_ids"]
        if not text_ids or len(text_ids) > expected.longest:
            continue
        if numbers is not None:
            if example.label not in numbers:
                raise UsageError("some rows have no label, or an unknown one", "give labelled data")
            if not remaining[numbers[example.label]]:
                continue
            remaining[numbers[example.label]] -= 1
            labels.append(numbers[example.label])
        ids.append(text_ids)
    if len(ids) < expected.texts:
        raise UsageError(
            f"{expected.texts} texts of {expected.least} to {expected.most} words are needed, there are {len(ids)}",
            "take fewer, or other lengths",
        )
    return PrivateRows(Sequences.of(ids), np.array(labels, np.int64) if numbers is not None else None)


def ghost_of(base: Checkpoint, guard: DefenceSpec, seed: int) -> Ghost:
    assert guard.ghost is not None
    return Ghost.open(base.folder, *guard.ghost, seed=seed)


def shadow_rows(
    base: Checkpoint, rows: Sequences, guard: DefenceSpec, seed: int, cache: ArtifactCache, progress: Log
) -> Sequences:
    """Returns the rows as they go into training: their shadows, or without GHOST the rows themselves."""
    if guard.ghost is None:
        return rows
    ghost = ghost_of(base, guard, seed)
    parts = [base.digest(), base.config, ghost.searched, *(settings.document() for settings in guard.ghost), seed]
    identity = json.dumps(parts, sort_keys=True)
    name = hashlib.sha256(identity.encode() + rows.ids.tobytes() + rows.lengths.tobytes()).hexdigest()[:16]
    path = cache.path_of("shadows", f"shadows-{name}.jsonl")
    shadows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    while len(shadows) < len(rows):
        subset = np.arange(len(shadows), min(len(shadows) + SENTENCES_A_PART, len(rows)))
        shadows += [shadow.tolist() for shadow in ghost.shadows(rows.chosen(subset))]
        with files.atomic_write(path) as file:
            file.write("".join(f"{json.dumps(shadow)}\n" for shadow in shadows))
            cache.record_writer(path)
        progress(f"{len(shadows)} of {len(rows)} sentences have their shadows")
    return Sequences.of(shadows)


def likeness(before: Sequences, after: Sequences, read: Callable[[Ids], str], seed: int) -> dict[str, float]:
    """Returns how similar the shadows are to their texts (Table 1): mean ROUGE-1, 2, L and METEOR from 0 to 1."""
    likeness = rouge([read(ids) for ids in after], [read(ids) for ids in before], np.random.default_rng(seed))
    return with_spread({f"shadow {name}": interval for name, interval in likeness.items()}, scale=1)


@dataclass(frozen=True, kw_only=True)
class SharedStepRecipe(Recipe):
    """The base of recipes of shared gradients.

    Attributes:
        seed: of the rows, the shadows, the model's new head and all noise.
        data: a file or a named data set.
        defences: see the module.
        task: of the model.
        lora: the rank of adapters, if only these are trained. None: the whole model is trained.
    """

    seed: int
    data: str
    defences: Mapping[str, Mapping[str, Any]]
    task: Task = "classification"
    lora: int | None = None

    cached = True

    def about(self) -> dict[str, Any]:
        return {
            **self.head,
            "task": self.task,
            "seed": self.seed,
            "private": self.data,
            "variants": self.defences,
            **({} if self.lora is None else {"lora": self.lora}),
            **self.quick_entry,
        }
