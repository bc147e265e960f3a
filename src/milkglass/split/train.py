"""Trains and splits a model by labelled texts, and writes the two halves' folders, both or neither.

Both halves are here during training. `evaluate` measures the cost of the defence on other texts: how many the halves
classify correctly with the noise of sending, or how their scores correlate with the right ones. It sends nothing, and
uses up no text's number.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from torch.optim.optimizer import register_optimizer_step_post_hook

from milkglass import files
from milkglass.client.data.training_rows import in_fresh_order
from milkglass.errors import CodecError, UsageError, naming_texts
from milkglass.hidden_states.catalogue import parameter_values
from milkglass.hidden_states.defence import HiddenStateDefence
from milkglass.hidden_states.mechanism import HalvesTraining
from milkglass.hidden_states.tokens import PublicTokenizer
from milkglass.metrics.glue import pearson
from milkglass.models.checkpoint import Checkpoint
from milkglass.noise.root import SECRET_BYTES
from milkglass.progress import Progress
from milkglass.rows.data_file import Source
from milkglass.rows.examples import Example, checked_summary, no_labels_error, number_labels, read_examples
from milkglass.split import folders
from milkglass.split.client import SplitClassifier, are_short_enough
from milkglass.split.server import ServerHalf
from milkglass.threat.defence import LabelledTexts

NO_LENGTH_LIMIT = 1 << 40  # tokens, so that only the model's own limit applies


@dataclass(frozen=True)
class TrainingTexts:
    """Holds labelled texts for a training.

    Attributes:
        corpus: the texts with the numbers of their classes, or with their scores.
        labels: the number of each class, by its name. {}: the texts have scores.
        places: the line of each text, for messages. Empty: the texts were not read from a file.
    """

    corpus: LabelledTexts = field(repr=False)
    labels: dict[str, int] = field(repr=False)
    places: Sequence[str] = field(default=(), repr=False)

    @property
    def has_pairs(self) -> bool:
        """Returns whether the texts are pairs."""
        return self.corpus.pairs is not None


def read_training_texts(source: Source, task: str | None = None) -> TrainingTexts:
    """Reads texts and the names of their classes, or their scores, from a file.

    Args:
        task: "classification" or "regression". None: classes, unless the labels look like scores, which is refused.

    Raises:
        CodecError: nothing can be learnt from the rows.
    """
    summary, is_regression = checked_summary(source, task), task == "regression"
    if summary.task not in ("classification", "regression"):
        raise no_labels_error(source, summary)
    # The client's split.json keeps the labels
    labels = {} if is_regression else number_labels(in_fresh_order(summary.labels), None)
    examples = list(read_examples(source, is_regression))
    corpus = _labelled_texts(examples, labels, summary.has_pairs)
    return TrainingTexts(corpus, labels, [str(example.place(source)) for example in examples])


def step_count(defence: HiddenStateDefence, text_count: int) -> int:
    """Returns how many optimiser steps a training on `text_count` texts takes."""
    training = defence.training
    steps = training.epochs * -(-text_count // training.batch_size)
    return steps if training.max_steps is None else min(steps, training.max_steps)


def require_readable(
    defence: HiddenStateDefence, base: Checkpoint, data: TrainingTexts, max_length: int | None
) -> None:
    """Checks the model and the texts before the training.

    Args:
        max_length: the most tokens of a text. None: the defence's own limit.

    Raises:
        UnsupportedModel: the model cannot be cut.
        UsageError: the length is beyond the model's, or leaves no room for a text.
        CodecError: a text has no token.
    """
    defence.require_splittable(base)
    reader = PublicTokenizer(base.folder, NO_LENGTH_LIMIT)
    special_count = reader.tokenizer.num_special_tokens_to_add(pair=data.has_pairs)
    min_tokens, max_tokens = special_count + (2 if data.has_pairs else 1), reader.max_tokens
    if max_length is not None and not min_tokens <= max_length <= max_tokens:
        raise UsageError(
            f"max_length is {max_length}, and this model reads {min_tokens} to {max_tokens} tokens, "
            f"{special_count} of them special",
            f"give {min_tokens} to {max_tokens}; {min(max_tokens, HalvesTraining().max_length)} is the default",
        )
    with naming_texts(data.places.__getitem__) if data.places else nullcontext():
        reader.encode(data.corpus.texts, data.corpus.pairs, cut=True)


def require_free_folders(client_folder: Path, server_folder: Path) -> None:
    """Raises UsageError if one of the folders exists, or lies in the other."""
    for folder in (client_folder, server_folder):
        if folder.exists():
            raise UsageError(f"{folder} exists already", "give a new folder, or remove that one first")
    client_path, server_path = client_folder.absolute(), server_folder.absolute()
    if client_path == server_path or client_path in server_path.parents or server_path in client_path.parents:
        raise UsageError(
            f"{client_folder} and {server_folder} are one folder, or one is in the other",
            "the client's half must never lie where the server's goes",
        )


def train_and_write(
    defence: HiddenStateDefence,
    base: Checkpoint,
    model: str,
    data: TrainingTexts,
    client_folder: Path,
    server_folder: Path,
    progress: Progress,
) -> None:
    """Trains both halves and writes their folders, which must be new.

    Args:
        defence: how states are disturbed.
        base: the model to split.
        model: the model's folder or hub id, which the client's half names.
        data: the texts to train on.
        client_folder: gets the client's half.
        server_folder: gets the server's half.
        progress: receives a 1 for each step.

    Raises:
        UsageError: one of the folders exists, or lies in the other.
    """
    require_free_folders(client_folder, server_folder)
    with (
        _work_folder_beside(client_folder) as client_work_folder,
        _work_folder_beside(server_folder) as server_work_folder,
    ):
        with _report_steps(progress):
            client_half, _ = defence.split(
                base, data.corpus, secrets.token_bytes(SECRET_BYTES), server_work_folder / "half"
            )
        client_half.save(client_work_folder / "half")
        folders.write_description(
            server_work_folder / "half", folders.ServerDescription(defence.name, parameter_values(defence))
        )
        description = folders.ClientDescription(
            defence.name, parameter_values(defence), asdict(defence.training), model, data.labels, data.has_pairs,
            folders.weights_digest(server_work_folder / "half"),
        )  # fmt: skip
        folders.write_description(client_work_folder / "half", description)
        _move_both({client_work_folder / "half": client_folder, server_work_folder / "half": server_folder})


@contextmanager
def _work_folder_beside(folder: Path) -> Iterator[Path]:
    """Yields a private folder in the same place, which is removed at the end, also after Ctrl-C."""
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".milkglass-split-", dir=folder.absolute().parent) as name:
        yield Path(name)


def _move_both(moves: dict[Path, Path]) -> None:
    """Moves both halves to their places, or neither."""
    moved_folders: list[Path] = []
    try:
        for source, target in moves.items():
            files.rename_into_place(source, target)
            moved_folders.append(target)
    except BaseException:  # one half alone cannot be used
        for target in moved_folders:
            shutil.rmtree(target)
        raise


@contextmanager
def _report_steps(progress: Progress) -> Iterator[None]:
    """Reports each step of a training: torch calls this hook after every optimiser step in this process."""
    handle = register_optimizer_step_post_hook(lambda *_: progress(1))
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Evaluation:
    """Holds how well two halves answer texts on which they were not trained.

    Attributes:
        quality: the share of texts that are classified correctly, or Pearson's correlation of scores.
        text_count: how many texts were answered.
        left_out_count: how many others were too long to be sent.
    """

    quality: float
    text_count: int
    left_out_count: int


def read_labelled_texts(source: Source, labels: dict[str, int], has_pairs: bool) -> LabelledTexts:
    """Reads texts and the numbers of their classes, or their scores, from a file.

    Args:
        labels: the numbers of the training's classes, by their names. {}: the training's texts have scores.
        has_pairs: whether the training's texts are pairs.

    Raises:
        CodecError: a label is not among the training's, or texts are pairs and the training's are not, or the reverse.
    """
    examples = list(read_examples(source, are_scores=not labels))
    for example in examples:
        if example.label is None or (labels and example.label not in labels):
            raise CodecError(
                f"{example.place(source)} has {'a label that the training file lacks' if labels else 'no score'}",
                "use the same label names" if labels else "give each row one",
            )
    if any((example.pair is not None) != has_pairs for example in examples):
        raise CodecError(
            f"{source.name} has other columns than the training file", "give text_pair in both, or in none"
        )
    return _labelled_texts(examples, labels, has_pairs)


def _labelled_texts(examples: Sequence[Example], labels: dict[str, int], has_pairs: bool) -> LabelledTexts:
    """Returns the examples' texts with the numbers of their labels, or with their scores if `labels` is empty."""
    numbers: list[int] | list[float] = (
        [labels[str(example.label)] for example in examples] if labels else [float(str(one.label)) for one in examples]
    )
    second_texts = [example.pair or "" for example in examples] if has_pairs else None
    return LabelledTexts([example.text for example in examples], numbers, second_texts)


def evaluate(half: SplitClassifier, server_half: ServerHalf, data: LabelledTexts, progress: Progress) -> Evaluation:
    """Measures two halves on texts, by accuracy or the correlation of scores.

    Texts that are too long to be sent are left out. Raises CodecError if all are. `progress` receives the number of
    texts of each frame.
    """
    is_short = are_short_enough(half.client.reader, data.texts, data.pairs)
    short_indices = np.flatnonzero(is_short).tolist()
    if not short_indices:
        raise CodecError(f"all {len(is_short)} texts are too long to be sent", "give --max-length more")
    texts = [data.texts[index] for index in short_indices]
    pairs = None if data.pairs is None else [data.pairs[index] for index in short_indices]
    answers = half.answers(texts, pairs, server_half.info, server_half.answer, progress)
    truth = np.array(data.labels)[short_indices]
    if half.description.is_regression:
        quality = pearson(answers[:, 0], truth, np.random.default_rng(0)).value
    else:
        quality = float((answers.argmax(1) == truth).mean())
    return Evaluation(quality, len(short_indices), len(is_short) - len(short_indices))
