"""Recipes of kind "sanitized-generation": decoders with sanitized prompts (CMIF, section 4.2, Figure 3).

    [data]                      splits of conversations, or of classified texts, whose labels are then the answers
    [variants.plain]            nothing is sanitized
    [variants."epsilon=1"]      a sanitizer by tokens; it changes the user's text in prompts and in training data

The server's own worker trains every variant. A sanitizing variant answers sanitized prompts at three stages, named
at the end of a measure: "before" any training; "clear", by the plain variant's trained model; and "after", trained on
text that the same mechanism sanitized. The plain variant has "before" and "after".
procedures/sanitized_chats.py says what is sanitized, and how.

Classified texts have accuracy and, with two classes, precision and recall; conversations have ROUGE. Each figure has
the half-width of its interval. The loss is in nats a token of the answers. With `instructions` there are IFEval's
accuracies on unsanitized prompts, since the paper measures what training did to the model. "tokens unchanged" is about
the user's tokens in the prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from milkglass import files
from milkglass.client.codec.codec import Codec
from milkglass.defences.catalogue import sanitizer_of
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.entries import naming_entry
from milkglass.experiments.kinds.generation import (
    GeneratorTuningRecipe,
    RecordFields,
    add_predictions,
    greedy_ids,
    instruction_answers,
    load_generator,
    loss_figures,
    reference_answers,
    row_losses,
    rule_figures,
)
from milkglass.experiments.procedures import sanitized_chats
from milkglass.experiments.procedures.cells import quality_figures
from milkglass.experiments.procedures.sanitized_chats import ChatSanitizer
from milkglass.experiments.record import ResultRecord, make_records
from milkglass.experiments.runs import SPLITS, RunContext, TrainedVariant, seeded_codec
from milkglass.metrics.interval import proportion, ratio, with_half_widths
from milkglass.models.checkpoint import Checkpoint
from milkglass.rows.examples import read_examples
from milkglass.sanitizers.method import SanitizerMethod
from milkglass.sanitizers.text import TokenReader
from milkglass.schemes.scheme import Scheme
from milkglass.sequences import Ids
from milkglass.server.jobs.data import TrainingDataset
from milkglass.server.spec import Status

NO_CLASS = -1  # the class number of an answer that names no class, or more than one
STAGE_BEFORE, STAGE_CLEAR, STAGE_AFTER = "before", "clear", "after"


@dataclass(frozen=True)
class PromptSet:
    """Holds the prompts that one variant sends.

    Attributes:
        prompts: for each prompt its ids (tokens,).
        references: the data set's own answers.
        private_counts: (prompts,) how many tokens of each prompt are the user's.
        unchanged_counts: (prompts,) how many of these cross unchanged.
    """

    prompts: list[Ids]
    references: list[str]
    private_counts: NDArray[np.int64]
    unchanged_counts: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SanitizedGenerationRecipe(GeneratorTuningRecipe):
    """Fine-tunes decoders on sanitized text, and measures their answers to sanitized prompts.

    Attributes:
        rows: how many rows of the training data are used; the seed draws them.
        words: the maximum number of words in a row's first message; longer rows are left out. None: no limit.
        instruction: the text put before each classified text. Conversations must begin with it.
        keep_instruction: whether the instruction is not sanitized.
    """

    rows: int
    instruction: str
    keep_instruction: bool = True
    words: int | None = None

    reported_fields = ("seed", "rows", "words", "instruction", "keep_instruction", "training", "variants", "evaluation")

    def check_variants(self) -> None:
        if [name for name, entry in self.variants.items() if not entry] != ["plain"]:
            raise UsageError("a recipe of this kind has one variant without a sanitizer", "call it plain")
        for name, entry in self.variants.items():
            if entry:
                method_of(name, entry)

    def scheme(self, parameters: Mapping[str, Any]) -> Scheme | None:
        return None

    @property
    def kept_instruction(self) -> str:
        """Returns the instruction if it is not sanitized, else ""."""
        return self.instruction if self.keep_instruction else ""

    def text_files(self, base: Checkpoint, run: RunContext) -> Mapping[str, Mapping[str, Path]]:
        """Returns the rows that were drawn, and for each variant the same rows sanitized."""
        plain = {split: run.out / "data" / f"{split}.jsonl" for split in SPLITS}
        row_counts = {"train": self.rows, "validation": self.evaluation["answers"]}
        for split, path in plain.items():
            if not path.is_file():
                sanitized_chats.write_chats(
                    sanitized_chats.draw_rows(self._chats(run, split), row_counts[split], self.seed, split), path
                )
        paths_by_variant: dict[str, Mapping[str, Path]] = {}
        for name, sanitizer in self._sanitizers(base, run).items():
            run.log(f"{name}: the rows" + (" are sanitized" if sanitizer else ""))
            paths_by_variant[name] = {
                split: sanitizer.write(path, path.with_name(f"{name}-{path.name}")) if sanitizer else path
                for split, path in plain.items()
            }
        return paths_by_variant

    def _chats(self, run: RunContext, split: str) -> list[Any]:
        return sanitized_chats.conversations_of(
            data_refs.load_examples(run.data, self.data[split], run.log), self.instruction, self.words
        )

    def _sanitizers(self, base: Checkpoint, run: RunContext) -> Mapping[str, ChatSanitizer | None]:
        """Returns the sanitizer of each variant.

        Sensitive tokens are counted on all rows that fit, since most tokens never occur in a small corpus and would be
        sensitive.
        """
        reader = TokenReader.of_model(base.folder, "the model")
        counts = sanitized_chats.token_counts(reader, self._chats(run, "train"), self.kept_instruction)
        instruction, seed = self.kept_instruction, self.seed
        return {
            name: ChatSanitizer.of(method_of(name, entry), reader, counts, instruction, seed) if entry else None
            for name, entry in self.variants.items()
        }

    def grade_variants(
        self, run: RunContext, base: Checkpoint, variants: list[TrainedVariant], statuses: Mapping[str, Status]
    ) -> list[ResultRecord]:
        """Returns the figures of all variants. One model is loaded at a time and answers all its prompts.

        Answers are stored in the run's folder, and those that are there are not generated again.
        """
        codec = seeded_codec(variants[0].key, base.folder, "evaluation")
        sanitizers = self._sanitizers(base, run)
        prompt_sets = {name: self._prompt_set(run, codec, sanitizer) for name, sanitizer in sanitizers.items()}
        records: list[ResultRecord] = []
        for name in (variant_name for variant_name, sanitizer in sanitizers.items() if sanitizer):
            counts = (
                prompt_sets[name].unchanged_counts.astype(np.float64),
                prompt_sets[name].private_counts.astype(np.float64),
            )
            unchanged = ratio(*counts, np.random.default_rng(self.seed))
            records += make_records(with_half_widths({"tokens unchanged": unchanged}), variant=name)
        for folder, asked_variants in self._answer_plan(base, variants):
            model: Any = None
            for variant, stage in asked_variants:
                run.log(f"{variant.name}: answers {stage}")
                path = run.out / "answers" / f"{variant.name}-{stage}.json"
                # Answers of an older version have no losses
                if not path.is_file() or "losses" not in json.loads(path.read_text("utf-8")):
                    model = model or load_generator(folder)
                    files.make_private_dir(path.parent)
                    files.write_json(
                        path, self._answer_record(run, model, codec, variant, prompt_sets[variant.name], stage)
                    )
                records += self._result_records(
                    run, json.loads(path.read_text("utf-8")), prompt_sets[variant.name], variant, stage
                )
        return records

    def _answer_plan(
        self, base: Checkpoint, variants: list[TrainedVariant]
    ) -> Iterator[tuple[Path, list[tuple[TrainedVariant, str]]]]:
        """Yields the folder of each model, and the variants whose prompts it answers, with the stage."""
        plain = next(variant for variant in variants if variant.is_plain)
        sanitizing = [variant for variant in variants if not variant.is_plain]
        yield base.folder, [(variant, STAGE_BEFORE) for variant in variants]
        yield plain.job_folder / "result", [(plain, STAGE_AFTER), *((variant, STAGE_CLEAR) for variant in sanitizing)]
        for variant in sanitizing:
            yield variant.job_folder / "result", [(variant, STAGE_AFTER)]

    def _prompt_set(self, run: RunContext, codec: Codec, sanitizer: ChatSanitizer | None) -> PromptSet:
        """Returns the validation prompts as one variant sends them, with the true answers."""
        examples = list(read_examples(run.out / "data" / "validation.jsonl"))
        conversations = [example.messages[:-1] for example in examples]
        if sanitizer is None:
            prompts = [codec.encode_chat(chat).astype(np.int64) for chat in conversations]
            lengths = np.array([len(prompt_ids) for prompt_ids in prompts])
            return PromptSet(prompts, reference_answers(examples), lengths, lengths)
        sent = [sanitizer.sent_prompt(codec.tokenizer, chat, codec.max_tokens) for chat in conversations]
        counts = np.array([(prompt.private_count, prompt.unchanged_count) for prompt in sent])
        private_counts, unchanged_counts = counts.T
        return PromptSet([prompt.ids for prompt in sent], reference_answers(examples), private_counts, unchanged_counts)

    def _answer_record(
        self,
        run: RunContext,
        model: PreTrainedModel,
        codec: Codec,
        variant: TrainedVariant,
        prompt_set: PromptSet,
        stage: str,
    ) -> dict[str, Any]:
        """Returns a model's losses and its written answers, as they are stored."""
        held_out = TrainingDataset(variant.job_folder / "validation.safetensors", "causal-lm", self.training.max_length)
        texts = [codec.decode(ids) for ids in greedy_ids(model, prompt_set.prompts, self.evaluation["new_tokens"])]
        losses, tokens = row_losses(model, held_out)
        answers: dict[str, Any] = {"losses": losses.tolist(), "tokens": tokens.tolist(), "texts": texts}
        if (instructions := self.instruction_file) and (
            stage == STAGE_AFTER or (stage == STAGE_BEFORE and variant.is_plain)
        ):
            run.log(f"{variant.name}: instructions {stage}")
            prompts = instructions.read(run.data)
            answers["followed"] = instruction_answers(model, codec, prompts, instructions.new_tokens)
        return answers

    def _result_records(
        self, run: RunContext, answers: Mapping[str, Any], prompt_set: PromptSet, variant: TrainedVariant, stage: str
    ) -> list[ResultRecord]:
        """Returns the figures of one variant's answers at one stage."""
        fields = {"variant": variant.name, "when": stage}
        losses = np.array(answers["losses"], np.float64), np.array(answers["tokens"], np.float64)
        data_set, _ = data_refs.parse_named_split(self.data["validation"]) or (None, "")
        if labels := data_set.labels if data_set else ():
            records = loss_figures(losses, self.seed, fields, run.predictions)
            records += self._class_figures(answers["texts"], prompt_set.references, labels, fields, run.predictions)
        else:
            records = self.answer_figures(run, losses, answers["texts"], prompt_set.references, fields)
        if "followed" in answers and (instructions := self.instruction_file):
            records += rule_figures(instructions.read(run.data), answers["followed"], fields, run.predictions)
        return records

    def _class_figures(
        self,
        texts: Sequence[str],
        references: Sequence[str],
        labels: Sequence[str],
        fields: RecordFields,
        predictions: dict[str, str],
    ) -> list[ResultRecord]:
        """Returns the figures of answers that name a class."""
        predicted = np.array([class_of(text, labels) for text in texts], np.int64)
        truth = [labels.index(reference) for reference in references]
        add_predictions(predictions, {"answer": predicted}, fields)
        named_share = proportion(predicted != NO_CLASS, np.random.default_rng(self.seed))
        quality = quality_figures(predicted, truth, ("accuracy",), len(labels), self.seed)
        return make_records(quality | with_half_widths({"answers that name a class": named_share}), **fields)


def method_of(name: str, entry: Mapping[str, Any]) -> SanitizerMethod:
    """Returns the variant's sanitizer. Raises UsageError with the variant's name if it is not a sanitizer by tokens."""
    values = dict(entry)
    if "sanitizer" not in values:
        raise UsageError(f"{name} has no sanitizer", "name one, such as rnm, or leave the entry empty")
    with naming_entry(name):
        defence = sanitizer_of(str(values.pop("sanitizer")), values, None)
    if defence.by != "tokens":
        raise UsageError(f"{name} replaces words, and prompts are sanitized by tokens", 'say by = "tokens"')
    return defence.method


def class_of(answer: str, labels: Sequence[str]) -> int:
    """Returns the number of the one label that an answer names as a word, in any case; NO_CLASS if not exactly one."""
    answer_words = set(re.findall(r"\w+", answer.lower()))
    named_classes = [index for index, label in enumerate(labels) if label.lower() in answer_words]
    return named_classes[0] if len(named_classes) == 1 else NO_CLASS
