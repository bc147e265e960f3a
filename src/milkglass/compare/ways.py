"""Defines the ways of using a model, and lists them by name.

To add a way, write a subclass and add a line to WAYS. A package adds its own under the entry point group
"milkglass.way".
"""

from __future__ import annotations

import abc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from milkglass.catalogue import Catalogue
from milkglass.client.alone import LinearModel
from milkglass.client.key.scheme import scheme_for
from milkglass.compare import answers
from milkglass.compare.chat_rows import CHAT_TASK, ChatRows, has_tools, unsanitized_share
from milkglass.compare.result import UNCHANGED_GROUPS, WayGroup, slower_alternative
from milkglass.compare.rows import ComparisonRows
from milkglass.deadline import require_time
from milkglass.defences.catalogue import defence_of
from milkglass.defences.obfuscated_tables import Plain, TableDefence
from milkglass.defences.sanitized_text import ReplacedTextClient, SanitizedTokensClient
from milkglass.defences.token_halves import TokenClient
from milkglass.errors import UsageError, did_you_mean
from milkglass.experiments.kinds.comparison import with_defence_dtype, with_training
from milkglass.experiments.procedures.cells import CellData, TrainedCell, train_cell
from milkglass.experiments.runs import unpack_answers
from milkglass.metrics.percent import percent
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.families import architecture_of
from milkglass.models.resolve import is_available_offline, resolve_model
from milkglass.progress import Log
from milkglass.sanitizers.masking import LanguageTally
from milkglass.sequences import Sequences
from milkglass.server.spec import Hyperparameters
from milkglass.system import Stopwatch
from milkglass.threat.defence import Client, Defence
from milkglass.threat.observations import Observation, Tokens

ClientT = TypeVar("ClientT", bound=Client)
SMALL_BYTES = range(200_000_000)  # sizes in bytes of a model that a laptop trains in minutes
LARGE_BYTES = range(200_000_000, 700_000_000)  # sizes in bytes near BERT-base's, in fp32
MIN_TABLE_ROWS = 20_000  # a matrix with at least so many rows is taken for a table of tokens
MAX_SMALL_DECODER_BYTES = 600_000_000  # a model that writes answers on a laptop
LABEL_TASKS = ("classification", "regression")
ALL_TASKS = (*LABEL_TASKS, CHAT_TASK)
MIN_MIXED_TABLE_STEPS = 100  # steps; fewer do not teach a model a mixed table
TIMED_TEXTS = 200  # texts that are sent once more, to measure what sending costs


@dataclass(frozen=True)
class ComparisonSettings:
    """Holds what every way of one comparison shares.

    Attributes:
        name: the public model's name, as the user gave it.
        base: the public model.
        digest: the public model's digest.
        rows: the user's training rows and held-out rows.
        training: the settings of every training.
        seed: the seed of every training, key and draw.
        cells: the folder in which trained halves are kept, to be used again.
        threads: how many threads one training uses.
        log: receives the progress of what takes long.
        commands: what the fields of next commands stand for: {model}, {rows}, {task}, {kept}, {text}, {halves} (the
            options of a training of two halves) and {compare}. "run", which is no field, is the command of this
            comparison.
        notes: how the model is trained on the rows and evaluated.
    """

    name: str
    base: Checkpoint
    digest: str
    rows: ComparisonRows
    training: Hyperparameters
    seed: int
    cells: Path
    threads: int
    log: Log
    commands: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def cell_data(self) -> CellData:
        """Returns the rows in the form that a training takes."""
        return self.rows.cell_data()


@dataclass(frozen=True, eq=False)
class WayAnswers:
    """Holds a way's answers to the held-out rows, and what they cost.

    Attributes:
        answers: (rows,) classes or scores; for rows with answers see `losses_and_counts` in compare/answers.py.
        setup_seconds: CPU seconds of the user's machine to set the way up.
        seconds_per_1000_texts: CPU seconds of the user's machine for 1,000 texts, once the way is set up.
        bytes_per_text: the mean bytes of a text on the wire.
        cell: the trained halves, if there are any: what attacks read.
        model: the linear model, if the way has one.
        folder: the folder of the public model that was trained here, with its tokenizer.
        more: further measures of the same answers.
        notes: what to know of the answers.
    """

    answers: NDArray[Any]
    setup_seconds: float
    seconds_per_1000_texts: float
    bytes_per_text: float = 0.0
    cell: TrainedCell | None = field(default=None, repr=False)
    model: LinearModel | None = field(default=None, repr=False)
    folder: Path | None = None
    more: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Way(abc.ABC):
    """Describes one way of using a model, and measures its answers and their cost.

    Attributes:
        name: the way's name in the catalogue.
        title: what the way does, for a table.
        group: what leaves the machine.
        trust: whom the user trusts.
        provider: what the provider needs.
        command: a template of the command that the user runs next, with fields of `ComparisonSettings.commands`.
        quick: whether `--quick` runs the way.
        needs_all: whether the way runs only if it is named, or with `--all`.
        tasks: the tasks of rows that the way is for.
        attack_work: the least budget of attacks on the way, in seconds of one core's work, for a way that only a longer
            attack undoes.
    """

    name: str
    title: str
    group: WayGroup
    trust: str = "nobody"
    provider: str = "nothing"
    command: str = ""
    quick: bool = True
    needs_all: bool = False
    tasks: tuple[str, ...] = LABEL_TASKS
    attack_work: float = 0.0

    @property
    def is_local(self) -> bool:
        return self.group == "nothing is sent"

    @abc.abstractmethod
    def measure_answers(self, settings: ComparisonSettings) -> WayAnswers:
        """Sets the way up, answers the held-out rows and measures what that costs. Raises MilkglassError."""

    def refusal(self, settings: ComparisonSettings) -> str | None:
        """Returns why the way does not apply, or None."""
        return None

    def relative_training_cost(self, settings: ComparisonSettings) -> float:
        """Returns the approximate cost of training the way, relative to training the comparison's model.

        It is 0 if nothing is trained.
        """
        return 0.0

    def model_to_train(self, settings: ComparisonSettings) -> Checkpoint | None:
        """Returns the model that is trained, or None if none is."""
        return None

    def task_refusal(self, task: str) -> str | None:
        """Returns why the way is not for rows of this task, or None."""
        if task in self.tasks:
            return None
        if task == CHAT_TASK:
            return "it is for rows with labels"
        return "it is for rows with answers" if self.tasks == (CHAT_TASK,) else "it is for rows with classes"

    def title_for(self, task: str) -> str:
        """Returns the title of the way where rows have this task."""
        return self.title

    def command_for(self, task: str) -> str:
        """Returns the template of the next command where rows have this task."""
        return self.command

    def is_default(self, task: str, base: Checkpoint, is_quick: bool) -> bool:
        """Returns whether a comparison of this model on rows with this task runs the way if no names are given."""
        return task in self.tasks and (self.quick or not is_quick)


def trained_cell_of(settings: ComparisonSettings, defence: Defence, base: Checkpoint | None = None) -> TrainedCell:
    """Returns the trained halves of a defence.

    They are trained if no earlier comparison or recipe kept halves of the same model, rows and settings.
    """
    model, training = base or settings.base, with_defence_dtype(settings.training, defence)
    digest = settings.digest if base is None else base.digest()
    return train_cell(
        model, digest, settings.cell_data, with_training(defence, training), training, settings.seed,
        settings.cells, settings.threads, settings.log,
    )  # fmt: skip


def answers_of(settings: ComparisonSettings, cell: TrainedCell) -> NDArray[Any]:
    """Returns (rows,) the classes or scores that trained halves gave for the held-out rows."""
    predictions = unpack_answers(cell.packed_predictions)
    return predictions.astype(np.float64) if settings.rows.task == "regression" else predictions.astype(np.int64)


def text_bytes(texts: Sequence[str]) -> int:
    """Returns the size of texts in UTF-8."""
    return sum(len(text.encode()) for text in texts)


def wire_bytes(sent: Sequence[Observation], text_count: int) -> float:
    """Returns the mean bytes of a text on the wire: ids as JSON, states as they are."""
    total = 0
    for observation in sent:
        if isinstance(observation, Tokens):
            total += sum(len(json.dumps(ids.tolist())) for ids in observation.ids)
        else:
            parts = [*vars(observation).values()]
            total += sum(part.nbytes for part in parts if isinstance(part, np.ndarray | torch.Tensor))
    return total / max(1, text_count)


# --- nothing is sent --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class CommonestClassWay(Way):
    """Names the class that most rows have, or their mean score."""

    def title_for(self, task: str) -> str:
        return "naming the mean score" if task == "regression" else self.title

    def measure_answers(self, settings: ComparisonSettings) -> WayAnswers:
        labels, count = np.asarray(settings.rows.train.labels), len(settings.rows.held_out.texts)
        if settings.rows.task == "regression":
            return WayAnswers(
                np.full(count, labels.mean()), 0.0, 0.0, notes=("the mean score of the rows trained with",)
            )
        notes = ("the class that most of the rows trained with have",)
        return WayAnswers(np.full(count, np.bincount(labels).argmax()), 0.0, 0.0, notes=notes)


@dataclass(frozen=True, kw_only=True)
class LinearWay(Way):
    """Fits the linear model of client/alone.py to the user's own words."""

    def measure_answers(self, settings: ComparisonSettings) -> WayAnswers:
        train, held_out, watch = settings.rows.train, settings.rows.held_out, Stopwatch()
        is_regression = settings.rows.task == "regression"
        model = LinearModel.fit(
            train.texts, train.labels, train.pairs, is_regression, settings.seed, lambda step: require_time()
        )
        setup, watch = watch.cost().processor, Stopwatch()
        predictions = model.predict(held_out.texts, held_out.pairs)
        return WayAnswers(predictions, setup, 1000 * watch.cost().processor / len(held_out.texts), model=model)


@dataclass(frozen=True, kw_only=True)
class ModelWay(Way):
    """Uses a model on this machine: the comparison's own if it suits, else the embedded one that `model` names."""

    model: str

    @abc.abstractmethod
    def suits(self, base: Checkpoint) -> bool:
        """Returns whether the comparison's own model is used."""

    def trains(self, base: Checkpoint) -> bool:
        """Returns whether a comparison of this model trains it on this machine by this way."""
        return self.suits(base)

    def is_default(self, task: str, base: Checkpoint, is_quick: bool) -> bool:
        return task in self.tasks and (self.quick or not is_quick or self.suits(base))

    def chosen_model(self, settings: ComparisonSettings) -> Checkpoint:
        """Returns the comparison's own model if it suits, else the embedded one.

        Raises ModelNotFound if the embedded one is not installed.
        """
        return settings.base if self.suits(settings.base) else Checkpoint.open(resolve_model(self.model))

    def refusal(self, settings: ComparisonSettings) -> str | None:
        if self.suits(settings.base) or is_available_offline(self.model):
            return None
        return f"{self.model} is not here: `milkglass models {self.model}` fetches it"

    def model_to_train(self, settings: ComparisonSettings) -> Checkpoint | None:
        return self.chosen_model(settings)

    def relative_training_cost(self, settings: ComparisonSettings) -> float:
        trained = None if self.refusal(settings) else self.model_to_train(settings)  # what is not here is not fetched
        return 0.0 if trained is None else layer_weight_count(trained) / layer_weight_count(settings.base)


@dataclass(frozen=True, kw_only=True)
class EncoderWay(ModelWay):
    """Trains an encoder on this machine: the comparison's own model if its bytes are in `size`, else `model`."""

    size: range = SMALL_BYTES

    def suits(self, base: Checkpoint) -> bool:
        return architecture_of(base).kind == "encoder" and weight_bytes(base) in self.size

    def measure_answers(self, settings: ComparisonSettings) -> WayAnswers:
        return local_answers(settings, self.chosen_model(settings))


@dataclass(frozen=True, kw_only=True)
class DecoderWay(ModelWay):
    """Uses a small decoder on this machine: the comparison's own model if it is small, else `model`.

    Attributes:
        is_tuned: whether the decoder is trained on the user's rows.
    """

    model: str = "demo:smollm2"
    is_tuned: bool = True
    tasks: tuple[str, ...] = (CHAT_TASK,)

    def suits(self, base: Checkpoint) -> bool:
        return weight_bytes(base) <= MAX_SMALL_DECODER_BYTES

    def trains(self, base: Checkpoint) -> bool:
        return self.is_tuned and self.suits(base)

    def model_to_train(self, settings: ComparisonSettings) -> Checkpoint | None:
        return super().model_to_train(settings) if self.is_tuned else None

    def measure_answers(self, settings: ComparisonSettings) -> WayAnswers:
        return local_written_answers(settings, self.chosen_model(settings), self.is_tuned)


@dataclass(frozen=True, kw_only=True)
class OwnModelWay(Way):
    """Trains the comparison's own model on this machine.

    The way "plain" uses the same trained model, so that it is trained once. By default the way runs unless another
    local way trains the same model.
    """

    def is_default(self, task: str, base: Checkpoint, is_quick: bool) -> bool:
        others = [way for way in WAYS.values() if isinstance(way, ModelWay) and task in way.tasks]
        return task in self.tasks and not any(way.trains(base) for way in others)

    def command_for(self, task: str) -> str:
        return SERVE_LOCALLY if task == CHAT_TASK else CLASSIFY_LOCALLY

    def model_to_train(self, settings: ComparisonSettings) -> Checkpoint | None:
        return settings.base

    def relative_training_cost(self, settings: ComparisonSettings) -> float:
        return 1.0

    def measure_answers(self, settings: ComparisonSettings) -> WayAnswers:
        if settings.rows.task == CHAT_TASK:
            return local_written_answers(settings, settings.base)
        return local_answers(settings, settings.base)


def local_answers(settings: ComparisonSettings, base: Checkpoint) -> WayAnswers:
    """Trains a model with a head for labels on this machine, and measures its answers."""
    cell = trained_cell_of(settings, Plain(), None if base is settings.base else base)
    watch, (texts, pairs) = Stopwatch(), timed_texts(settings)
    cell.client.receive(cell.tuned.answer(cell.client.send(texts, pairs)))
    seconds = 1000 * watch.cost().processor / len(texts)
    setup = cell.client_seconds + cell.training_seconds
    return WayAnswers(answers_of(settings, cell), setup, seconds, cell=cell, folder=base.folder)


def local_written_answers(settings: ComparisonSettings, base: Checkpoint, is_tuned: bool = True) -> WayAnswers:
    """Trains a decoder on this machine if `is_tuned`, and measures its answers in words."""
    assert isinstance(settings.rows, ChatRows)
    is_settings_base = base is settings.base
    cell, _ = decoder_cell_of(settings, Plain(), None if is_settings_base else base, is_tuned)
    losses = answers.losses_and_counts(cell, settings.rows, None if is_settings_base else settings.base)
    setup = cell.client_seconds + (cell.training_seconds if is_tuned else 0.0)
    return WayAnswers(
        losses,
        setup,
        1000 * cell.figures["seconds"],
        cell=cell,
        folder=base.folder,
        more=answers.similarity_figures(cell),
    )


# --- something is sent ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class DefenceWay(Way):
    """Puts a defence in front of a provider's model.

    Attributes:
        entry: the defence as a recipe writes it (defences/catalogue.py); {} for none. Parameters that a scheme's entry
            lacks are those that `milkglass obfuscate` suggests for the model.
    """

    entry: Mapping[str, Any] = field(default_factory=dict)

    def defence(self, settings: ComparisonSettings) -> Defence:
        """Returns the defence of `entry`, with parameters that suit the comparison's model."""
        if "scheme" not in self.entry:
            return defence_of(self.entry)
        parameters = {name: value for name, value in self.entry.items() if name != "scheme"}
        return TableDefence(scheme_for(settings.base, self.entry["scheme"], **parameters))

    def refusal(self, settings: ComparisonSettings) -> str | None:
        return self.defence(settings).refusal(settings.base)

    def model_to_train(self, settings: ComparisonSettings) -> Checkpoint | None:
        return settings.base

    def relative_training_cost(self, settings: ComparisonSettings) -> float:
        return 1.0 if self.entry else 0.0  # without a defence the cell is that of the local model

    def measure_answers(self, settings: ComparisonSettings) -> WayAnswers:
        if isinstance(settings.rows, ChatRows):
            return self._measure_written_answers(settings, settings.rows)
        cell = trained_cell_of(settings, self.defence(settings))
        texts, pairs = timed_texts(settings)
        client, train = without_memory(cell.client), settings.rows.train
        # What a client does once, with its first text, is no part of the time
        client.send(train.texts[:1], None if train.pairs is None else train.pairs[:1])
        watch = Stopwatch()
        sent = client.send(texts, pairs)
        seconds = 1000 * watch.cost().processor / len(texts)
        size = wire_bytes(sent, len(texts))
        if isinstance(client, TokenClient) and self._sends_text(client):
            size = text_bytes([*client.prepare(texts), *client.prepare(pairs or [])]) / len(texts)
        elif isinstance(client, SanitizedTokensClient):  # `milkglass sanitize --by tokens` writes them as text
            ids = next(one for one in sent if isinstance(one, Tokens)).ids
            size = text_bytes(client.codec.tokenizer.batch_decode(list(ids), skip_special_tokens=True)) / len(texts)
        # The provider trains, so that no training counts
        return WayAnswers(
            answers_of(settings, cell), cell.client_seconds, seconds, size, cell, notes=self._language_notes(settings)
        )

    def _sends_text(self, client: Client) -> bool:
        """Returns whether text crosses, not ids or states."""
        return self.group in UNCHANGED_GROUPS or isinstance(client, ReplacedTextClient)

    def _measure_written_answers(self, settings: ComparisonSettings, rows: ChatRows) -> WayAnswers:
        cell, preparer = decoder_cell_of(settings, self.defence(settings))
        examples, preparer = rows.asked[:TIMED_TEXTS], replace(preparer, client=without_memory(preparer.client))
        preparer.prompt(rows.chats[0])
        watch = Stopwatch()
        prompts = [preparer.prompt(example) for example in examples]
        seconds = 1000 * watch.cost().processor / len(examples)
        size = wire_bytes([Tokens(Sequences.of(prompts))], len(examples))
        if self._sends_text(preparer.client):
            size = sum(text_bytes(preparer.texts(example)) for example in examples) / len(examples)
        elif self.group == "states are sent":  # a row of the table for each token
            size = sum(map(len, prompts)) / len(examples) * answers.vector_bytes(settings.base)
        return WayAnswers(
            answers.losses_and_counts(cell, rows),
            cell.client_seconds,
            seconds,
            size,
            cell,
            more=answers.similarity_figures(cell),
            notes=(*self._notes(settings), *self._language_notes(settings)),
        )

    def _language_notes(self, settings: ComparisonSettings) -> tuple[str, ...]:
        """Returns a sentence if names are masked in texts that do not look English."""
        if not self.entry.get("masked"):
            return ()
        note = LanguageTally.of(settings.rows.attacked_texts).note()
        return (note,) if note else ()

    def _notes(self, settings: ComparisonSettings) -> tuple[str, ...]:
        """Returns sentences on what the answers are worth, and on what else crosses."""
        notes, steps = list[str](), settings.training.max_steps
        if self.entry.get("scheme") == "obfuslm" and steps is not None and steps < MIN_MIXED_TABLE_STEPS:
            alternative = slower_alternative(settings.commands.get("run", ""))
            notes.append(f"{steps} steps are too few to learn a mixed table anew: give --epochs{alternative}")
        broken = getattr(getattr(self.defence(settings), "scheme", None), "broken", None)
        if broken:
            notes.append(broken)
        if self.entry.get("sanitizer"):
            notes.append("what is trained with it crosses too, and there the answers cross as they are")
            assert isinstance(settings.rows, ChatRows)
            if share := unsanitized_share(settings.rows.chats):
                notes.append(
                    f"{percent(share)} of the prompts' words are in system messages, results of tools and earlier "
                    "answers: they cross as they are, and do not count as read here"
                )
        if self.entry.get("masked"):
            notes.append(
                "it learns from masked answers, and the loss is of answers without: putting names back may lower it"
            )
        if self.entry and has_tools(settings.rows) and (self.entry.get("masked") or self.entry.get("sanitizer")):
            notes.append("definitions and calls of tools cross as they are, and do not count as read here")
        if self.group == "sent as it is" and weight_bytes(settings.base) <= MAX_SMALL_DECODER_BYTES:
            notes.append("the model is small enough to run on your machine, where it gives the same answers")
        return tuple(notes)


def decoder_cell_of(
    settings: ComparisonSettings, defence: Defence, base: Checkpoint | None = None, is_tuned: bool = True
) -> tuple[TrainedCell, answers.ChatPreparer]:
    """Returns the trained halves of a defence on rows with answers, and the preparer of what its client half sends."""
    assert isinstance(settings.rows, ChatRows)
    digest = settings.digest if base is None else base.digest()
    return answers.train_decoder_cell(
        base or settings.base, digest, settings.rows, defence, settings.training, is_tuned, settings.seed,
        settings.cells, settings.threads, settings.log,
    )  # fmt: skip


def timed_texts(settings: ComparisonSettings) -> tuple[list[str], list[str] | None]:
    """Returns the first held-out texts, and their second texts if they are pairs, by which sending is timed."""
    rows = settings.rows.held_out
    return list(rows.texts[:TIMED_TEXTS]), None if rows.pairs is None else list(rows.pairs[:TIMED_TEXTS])


def without_memory(client: ClientT) -> ClientT:
    """Returns a copy of a client half that has cached no text: a text costs less when it is sent again."""
    return replace(client) if is_dataclass(client) and not isinstance(client, type) else client


def weight_bytes(base: Checkpoint) -> int:
    """Returns the size of a checkpoint's weights."""
    return sum(path.stat().st_size for path in base.folder.glob("*.safetensors"))


def layer_weight_count(base: Checkpoint) -> int:
    """Returns how many weights a training multiplies by: those of the layers, since rows of tables are looked up."""
    matrices = (tensor.shape for tensor in base.tensors.values() if len(tensor.shape) == 2)
    return sum(rows * columns for rows, columns in matrices if rows < MIN_TABLE_ROWS)


CLASSIFY_LOCALLY = "milkglass classify --local {kept} {text}"
SERVE_LOCALLY = "vllm serve {kept}"
TRUST_IN_PROVIDER = "the provider, who reads it"
NEEDS_TO_TRAIN = "a GPU, and your model of any kind"
NEEDS_TO_SERVE = "a GPU, and the scrambled model"


def _sanitized_way(method: str, epsilon: int, needs_all: bool = False) -> DefenceWay:
    """Returns the way that replaces words by a sanitizer. One that only `--all` runs has the epsilon in its name."""
    by_tokens = method == "rnm"
    options = f"--method {method} --epsilon {epsilon}{' --by tokens' if by_tokens else ''} --table {{model}}"
    reads_corpus = method != "custext+"
    return DefenceWay(
        name=f"{method}-{epsilon}" if needs_all else method,
        title=f"{'tokens' if by_tokens else 'words'} replaced by {method.upper()}, epsilon {epsilon}",
        group="words are replaced", trust=TRUST_IN_PROVIDER, provider=NEEDS_TO_TRAIN, quick=False, needs_all=needs_all,
        entry={"sanitizer": method, "epsilon": float(epsilon)},
        command=f"milkglass sanitize {{rows}} replaced.jsonl {options}{' --corpus {rows}' if reads_corpus else ''}",
    )  # fmt: skip


def _halves_way(
    method: str, title: str, trust: str, provider: str = "a GPU, and the upper layers", needs_all: bool = False
) -> DefenceWay:
    """Returns the way that sends hidden states, disturbed by a method."""
    return DefenceWay(
        name=method, title=title, group="states are sent", trust=trust, provider=provider, quick=False,
        needs_all=needs_all, entry={"encoder": method},
        command=f"milkglass split train {{model}} --method {method} --data {{rows}} --client mine --server theirs"
        "{halves}",
    )  # fmt: skip


WAYS: Catalogue[Way] = Catalogue(
    "way",
    CommonestClassWay(name="commonest", title="naming the commonest class", group="nothing is sent"),
    LinearWay(
        name="linear", title="a linear model on your machine", group="nothing is sent", command=CLASSIFY_LOCALLY,
    ),
    EncoderWay(
        name="encoder", title="a small encoder on your machine", group="nothing is sent", model="demo:minilm",
        command=CLASSIFY_LOCALLY,
    ),
    EncoderWay(
        name="large-encoder", title="an encoder of BERT-base's size on your machine", group="nothing is sent",
        model="demo:mpnet", size=LARGE_BYTES, command=CLASSIFY_LOCALLY, quick=False,
    ),
    DecoderWay(
        name="untuned", title="the published small model on your machine", group="nothing is sent", is_tuned=False,
        command=SERVE_LOCALLY,
    ),
    DecoderWay(
        name="alone", title="the small model tuned on your machine", group="nothing is sent", command=SERVE_LOCALLY,
    ),
    OwnModelWay(
        name="own-model", tasks=ALL_TASKS, title="the provider's model trained on your machine",
        group="nothing is sent",
    ),
    DefenceWay(
        name="masked", tasks=ALL_TASKS, title="names masked by Presidio", group="names are masked",
        trust=TRUST_IN_PROVIDER, provider=NEEDS_TO_TRAIN, entry={"masked": True},
        command="milkglass sanitize {rows} masked.jsonl --method mask",
    ),
    _sanitized_way("custext+", 3),
    _sanitized_way("custext+", 6, needs_all=True),
    _sanitized_way("santext+", 14),
    _sanitized_way("santext+", 12, needs_all=True),
    _sanitized_way("rnm", 3),
    _sanitized_way("rnm", 1, needs_all=True),
    DefenceWay(
        name="obfuslm", tasks=ALL_TASKS, title="vocabulary scrambled by ObfusLM", group="words are scrambled",
        trust="the provider, not to attack the ids with similar text", provider=NEEDS_TO_SERVE,
        entry={"scheme": "obfuslm"},
        command="milkglass obfuscate {model} scrambled --key my.mgkey",
    ),
    DefenceWay(
        name="cmif", title="tokens replaced by RNM in an enclave, vectors sent (CMIF), epsilon 3",
        group="states are sent", tasks=(CHAT_TASK,), trust="the enclave, and the noise",
        provider="a GPU, and the model", entry={"sanitizer": "rnm", "epsilon": 3.0},
        command="milkglass split enclave build URL --out enclave",
    ),
    DefenceWay(
        name="orthogonal", title="weights in secret orthogonal coordinates", group="words are scrambled",
        tasks=(CHAT_TASK,), attack_work=75.0, trust="the provider, not to attack the weights with similar text",
        provider=NEEDS_TO_SERVE, entry={"scheme": "orthogonal"},
        command="milkglass obfuscate {model} orthogonal --key orthogonal.mgkey --scheme orthogonal",
    ),
    DefenceWay(
        name="coarse-16", title="16 symbols in place of words", group="words are scrambled",
        trust="the provider, not to attack the symbols with similar text", provider=NEEDS_TO_SERVE,
        entry={"scheme": "coarse", "symbols": 16},
        command="milkglass obfuscate {model} coarse-16 --key coarse-16.mgkey --scheme coarse --data {rows}{task}",
    ),
    DefenceWay(
        name="coarse-64", title="64 symbols in place of words", group="words are scrambled", quick=False,
        trust="the provider, not to attack the symbols with similar text", provider=NEEDS_TO_SERVE,
        entry={"scheme": "coarse", "symbols": 64},
        command="milkglass obfuscate {model} coarse-64 --key coarse-64.mgkey --scheme coarse --set symbols=64 "
        "--data {rows}{task}",
    ),
    # Of the methods of hidden_states that keep the task, least is read of CAPE (obfuslm_table2.quick.json)
    _halves_way("cape", "one noisy vector a text (CAPE)", trust="the noise, which has no proof here",
                provider="a small head: your machine runs the whole encoder"),
    _halves_way("textobfuscator", "a vector a token, near its cluster's centre (TextObfuscator)", needs_all=True,
                trust="the noise, which has no proof here"),
    _halves_way("dp-forward", "a noisy vector a token (DP-Forward), epsilon 8", needs_all=True, trust="the noise"),
    DefenceWay(
        name="confidential", tasks=ALL_TASKS, title="the model as it is, in attested hardware",
        group="confidential hardware", trust="the maker of the hardware, and the program that it proves to run",
        provider="a confidential machine and GPU", command="milkglass attest --help",
    ),
    DefenceWay(
        name="plain", tasks=ALL_TASKS, title="the model as it is, at the provider", group="sent as it is",
        trust=TRUST_IN_PROVIDER, provider=NEEDS_TO_TRAIN,
    ),
    group="milkglass.way",
    kind=Way,
)  # fmt: skip


def choose_ways(
    names: Sequence[str], is_quick: bool, takes_all: bool, task: str = "", base: Checkpoint | None = None
) -> list[Way]:
    """Returns the ways to run, in the catalogue's order: those that are named, or those for the task and the model.

    Args:
        names: names of ways. Empty: the ways for the task and the model.
        is_quick: leaves out the ways that take long.
        takes_all: takes every way for the task, also slow ones and those of packages. Otherwise a package's way runs
            only if it is named.
        task, base: the task of the rows, and the model. If `base` is None, they are not known yet: names are checked,
            and without names nothing is returned.

    Raises:
        UsageError: a name is unknown, or names are given and `takes_all`.
    """
    if names:
        if takes_all:
            raise UsageError("--ways names some ways, and --all takes every one", "give one of the two")
        unknown_names = [name for name in names if name not in WAYS]
        if len(unknown_names) > 1:
            raise UsageError(
                f"there are no ways {', '.join(map(repr, unknown_names))}",
                f"{''.join(did_you_mean(name, WAYS) for name in unknown_names)}some of {', '.join(WAYS)}, with commas",
            )
        chosen_names = {WAYS[name].name for name in names}
        return [way for way in WAYS.values() if way.name in chosen_names]
    if base is None:
        return []
    if takes_all:
        return [way for way in WAYS.values() if task in way.tasks]
    usual_ways = (way for way in WAYS.values() if way.name in WAYS.built_in and not way.needs_all)
    return [way for way in usual_ways if way.is_default(task, base, is_quick)]
