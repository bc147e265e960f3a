"""An owner's texts in shared training, and their defences: shadows instead of words, a shield on gradients.

    [defences."pruning 0.99"]
    shield = "random-pruning"            milkglass/gradient_defences/catalogue.py, with its parameters
    ratio = 0.99
    [defences.ghost]
    ghost = { k = 70, way = "states" }   ShadowSearchSettings and SelectionSettings (sanitizers/ghost); {}: the paper's

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
from milkglass.experiments.cache import ArtifactCache
from milkglass.experiments.recipe import Recipe, from_entries, table_of
from milkglass.gradient_defences.catalogue import gradient_defence_from_recipe
from milkglass.gradient_defences.defence import GradientDefence
from milkglass.metrics.interval import with_half_widths
from milkglass.metrics.text import mean_similarity
from milkglass.models.checkpoint import Checkpoint
from milkglass.progress import Log
from milkglass.rows.examples import Example
from milkglass.sanitizers.ghost.ghost import Ghost
from milkglass.sanitizers.ghost.search import ShadowSearchSettings
from milkglass.sanitizers.ghost.selection import SelectionSettings
from milkglass.sequences import Ids, Sequences
from milkglass.threat.training_step import Task, pad_texts

SENTENCES_PER_SAVE = 32  # sentences whose shadows are found before they are written to disk


@dataclass(frozen=True, eq=False)
class PrivateRows:
    """Holds tokenized texts and their labels.

    Attributes:
        ids: the public ids of each text, special tokens included.
        labels: (texts,) the class of each text. None: the task has no classes.
    """

    ids: Sequences
    labels: Ids | None

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, indices: Ids) -> PrivateRows:
        """Returns the rows with these indices."""
        return PrivateRows(self.ids.select(indices), None if self.labels is None else self.labels[indices])

    def batch(self, pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Returns ids and mask (texts, tokens), padded with the id `pad_id`, and the labels (texts,)."""
        ids, mask = pad_texts(list(self.ids), pad_id)
        return ids, mask, None if self.labels is None else torch.from_numpy(self.labels)


@dataclass(frozen=True)
class RowFilter:
    """Sets which texts `choose_rows` takes.

    Attributes:
        count: how many texts are taken, the same number of each class.
        min_words: the fewest words of a text.
        max_words: the most words of a text.
        max_tokens: the most tokens of a text, special ones included.
    """

    count: int
    min_words: int = 1
    max_words: int = 1000
    max_tokens: int = 128


@dataclass(frozen=True)
class DefenceSpec:
    """Holds a parsed entry of [defences].

    Attributes:
        shield: the defence that changes gradients; plain if none is named.
        ghost: the settings of GHOST, which replaces words by shadows. None: words stay.
    """

    shield: GradientDefence
    ghost: tuple[ShadowSearchSettings, SelectionSettings] | None

    @classmethod
    def of(cls, name: str, entry: Mapping[str, Any]) -> DefenceSpec:
        """Returns an entry of [defences], parsed. Raises UsageError if the shield or GHOST refuses a parameter."""
        values = dict(entry)
        ghost_entry = table_of(values, "ghost") if "ghost" in values else None
        values.pop("ghost", None)
        return cls(
            gradient_defence_from_recipe(values), None if ghost_entry is None else _ghost_settings(name, ghost_entry)
        )


def _ghost_settings(name: str, entry: dict[str, Any]) -> tuple[ShadowSearchSettings, SelectionSettings]:
    setting_classes = (ShadowSearchSettings, SelectionSettings)
    names = [parameter.name for settings in setting_classes for parameter in fields(settings)]
    if unknown := sorted(set(entry) - set(names)):
        raise UsageError(f"{name}: ghost has no {unknown[0]!r}", f"it has: {', '.join(names)}")
    search, selection = (
        {parameter.name: entry[parameter.name] for parameter in fields(settings) if parameter.name in entry}
        for settings in setting_classes
    )
    return from_entries(ShadowSearchSettings, search), from_entries(SelectionSettings, selection)


def choose_rows(
    tokenizer: Any, examples: Sequence[Example], class_numbers: Mapping[str, int] | None, row_filter: RowFilter,
    rng: np.random.Generator,
) -> PrivateRows:  # fmt: skip
    """Chooses examples in random order and tokenizes them.

    Args:
        class_numbers: the number of each label. None: labels are not needed.

    Raises:
        UsageError: too few examples pass the filter, or one has no known label.
    """
    ids: list[list[int]] = []
    labels: list[int] = []
    class_quota = -(-row_filter.count // len(class_numbers)) if class_numbers else 0
    remaining_quota = dict.fromkeys(range(len(class_numbers or ())), class_quota)
    long_text_count = 0  # texts of more tokens than the filter allows
    for i in rng.permutation(len(examples)).tolist():
        example = examples[i]
        if len(ids) == row_filter.count:
            break
        if not row_filter.min_words <= len(example.text.split()) <= row_filter.max_words:
            continue
        text_ids = tokenizer(example.text, split_special_tokens=True)["input_ids"]
        if len(text_ids) > row_filter.max_tokens:
            long_text_count += 1
            continue
        if not text_ids:
            continue
        if class_numbers is not None:
            if example.label not in class_numbers:
                raise UsageError("some rows have no label, or an unknown one", "give labelled data")
            if not remaining_quota[class_numbers[example.label]]:
                continue
            remaining_quota[class_numbers[example.label]] -= 1
            labels.append(class_numbers[example.label])
        ids.append(text_ids)
    if len(ids) < row_filter.count:
        quota_text = f", {class_quota} of each class" if class_numbers else ""
        raise UsageError(
            f"{row_filter.count} texts of {row_filter.min_words} to {row_filter.max_words} words and at most "
            f"{row_filter.max_tokens} tokens are needed{quota_text}, there are {len(ids)}; {long_text_count} have more "
            "tokens",
            "ask for fewer texts or other lengths in the recipe, or give more data",
        )
    return PrivateRows(Sequences.of(ids), np.array(labels, np.int64) if class_numbers is not None else None)


def open_ghost(base: Checkpoint, defence: DefenceSpec, seed: int) -> Ghost:
    """Returns the GHOST of a defence that has one, over a model's folder."""
    assert defence.ghost is not None
    return Ghost.open(base.folder, *defence.ghost, seed=seed)


def shadow_rows(
    base: Checkpoint, rows: Sequences, defence: DefenceSpec, seed: int, cache: ArtifactCache, log: Log
) -> Sequences:
    """Returns the texts that go into training: their shadows, or without GHOST the texts themselves.

    Args:
        cache: keeps the shadows as they are found, so that a stopped run resumes.
    """
    if defence.ghost is None:
        return rows
    ghost = open_ghost(base, defence, seed)
    settings = [part.document() for part in defence.ghost]
    identity = json.dumps([base.digest(), base.config, ghost.digest, *settings, seed], sort_keys=True)
    name = hashlib.sha256(identity.encode() + rows.ids.tobytes() + rows.lengths.tobytes()).hexdigest()[:16]
    path = cache.path_of("shadows", f"shadows-{name}.jsonl")
    shadows = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    while len(shadows) < len(rows):
        next_rows = np.arange(len(shadows), min(len(shadows) + SENTENCES_PER_SAVE, len(rows)))
        shadows += [shadow.tolist() for shadow in ghost.shadows(rows.select(next_rows))]
        with files.atomic_write(path) as file:
            file.write("".join(f"{json.dumps(shadow)}\n" for shadow in shadows))
            cache.record_writer(path)
        log(f"{len(shadows)} of {len(rows)} sentences have their shadows")
    return Sequences.of(shadows)


def shadow_likeness(texts: Sequences, shadows: Sequences, read: Callable[[Ids], str], seed: int) -> dict[str, float]:
    """Returns how similar the shadows are to the texts (Table 1): mean ROUGE-1, 2, L and METEOR, from 0 to 1."""
    scores = mean_similarity([read(ids) for ids in shadows], [read(ids) for ids in texts], np.random.default_rng(seed))
    return with_half_widths({f"shadow {name}": interval for name, interval in scores.items()}, scale=1)


@dataclass(frozen=True, kw_only=True)
class SharedStepRecipe(Recipe):
    """Measures or attacks the gradients that a client shares. Subclasses write `measure`.

    Attributes:
        seed: decides the rows, the shadows, the model's new head and all noise.
        data: a file or a named data set.
        defences: the defences, as the module describes.
        task: the task of the model.
        lora: the rank of adapters, if only these are trained. None: the whole model is trained.
    """

    seed: int
    data: str
    defences: Mapping[str, Mapping[str, Any]]
    task: Task = "classification"
    lora: int | None = None

    is_cacheable = True

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
