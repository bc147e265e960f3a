"""Recipes of generated answers before and after fine-tuning: quality, and who can read them (ObfusLM, Tables 3 and 6).

**Table 6** compares "the metrics between original texts and inference results observed by the client or the attacker".
Its column for the client is Table 3's figure for ObfusLM (Alpaca 70.93, Databricks 57.18), the likeness of the client's
answers to the data set's. So the original texts are the data set's answers, for the attacker too. An attacker whose
text is 60 % as similar to them as the client's may have read 60 % of it, all that matters, or common words only. So the
attacker's text is also compared with the client's, token by token and by ROUGE ("of the client's").

Answers are greedy and generated once for each model, and the attackers read these ids. The attacks are the catalogue's.
ERA+ starts from the candidates that cluster-solve and matching find in the uploaded table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedModel

from milkglass import device
from milkglass.attacks.assignment import guess_by_rank
from milkglass.attacks.embeddings.cluster_solve import ClusterSolve
from milkglass.attacks.embeddings.matching import Matching
from milkglass.attacks.hidden_states.era import ERA
from milkglass.attacks.hidden_states.era_plus import ERAPlus
from milkglass.client.codec.codec import Codec
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.kinds.fine_tuning import FineTuningRecipe
from milkglass.experiments.recipe import from_entries
from milkglass.experiments.record import ResultRecord, make_records
from milkglass.experiments.runs import RunContext, TrainedVariant, pack_answers, seeded_codec
from milkglass.metrics import ifeval, text
from milkglass.metrics.interval import with_half_widths
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.view import Model
from milkglass.rows.examples import Example, read_examples
from milkglass.sequences import Ids, Sequences
from milkglass.server.jobs.data import PaddingCollator, TrainingDataset
from milkglass.server.spec import Status
from milkglass.threat.budget import Budget
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Candidates, Knowledge
from milkglass.threat.observations import Outputs, Transcript, Weights
from milkglass.threat.truth import Truth, score

PROMPTS_PER_BATCH, PROMPTS_PER_GPU_BATCH = 8, 64  # prompts answered at a time; a GPU takes as long for many as for few
ROUGE_MEASURES = ("rouge-1", "rouge-l")
RowValues = NDArray[np.float64]  # (rows,)
RecordFields = Mapping[str, str]  # the values of `variant`, `when` and `note` in records


@dataclass(frozen=True)
class GeneratedAnswers:
    """Holds generated answers to prompts.

    Attributes:
        prompts: the scrambled ids of the prompts.
        ids: the scrambled ids of the answers.
        references: the data set's own answers.
    """

    prompts: Sequences
    ids: Sequences
    references: Sequence[str]


@dataclass(frozen=True)
class InstructionFile:
    """Reads prompts whose answers are checked by rule, as in CMIF's Figure 3.

    Attributes:
        file: IFEval's input_data.jsonl.
        prompts: how many of its first prompts are used.
        new_tokens: the most tokens of each answer.
    """

    file: str
    prompts: int
    new_tokens: int

    def __post_init__(self) -> None:
        if self.prompts < 1 or self.new_tokens < 1:
            raise UsageError("instructions has no prompts, or answers of no tokens", "give 1 or more of both")

    def read(self, data: Path) -> list[ifeval.Prompt]:
        """Reads the prompts from the folder of data sets.

        Raises:
            UsageError: the file does not exist, or is not IFEval's.
        """
        with data_refs.files_of(data, self.file)[0].open(encoding="utf-8") as lines:
            try:
                rows = [json.loads(line) for line in islice(lines, self.prompts)]
            except ValueError:
                raise UsageError(f"{self.file} is not JSON Lines", "give IFEval's input_data.jsonl") from None
        if not all(isinstance(row, dict) for row in rows):
            raise UsageError(f"{self.file} has a line that is not a JSON object", "give IFEval's input_data.jsonl")
        return [ifeval.Prompt.of(row) for row in rows]


@dataclass(frozen=True, kw_only=True)
class GeneratorTuningRecipe(FineTuningRecipe):
    """Fine-tunes decoders, which then generate answers. Subclasses implement `grade_variants`.

    Attributes:
        evaluation: `answers`, how many validation prompts are answered; `new_tokens`, the most tokens of each answer.
        instructions: fields of `InstructionFile`; empty: no answers are checked by rule.
    """

    instructions: Mapping[str, Any] = field(default_factory=dict)

    task = "causal-lm"
    evaluation_names: ClassVar[tuple[str, ...]] = ("answers", "new_tokens")
    rouge_measures: ClassVar[tuple[str, ...]] = ("rouge-1", "rouge-2", "rouge-l")

    @property
    def instruction_file(self) -> InstructionFile | None:
        """Returns the file of prompts whose answers are checked by rule, or None if the recipe names none."""
        return from_entries(InstructionFile, self.instructions) if self.instructions else None

    def about(self) -> dict[str, Any]:
        return {**super().about(), **({"instructions": self.instructions} if self.instructions else {})}

    def check(self) -> None:
        super().check()
        _ = self.instruction_file

    def answer_figures(
        self,
        run: RunContext,
        losses: tuple[RowValues, RowValues],
        texts: Sequence[str],
        references: Sequence[str],
        fields: RecordFields,
    ) -> list[ResultRecord]:
        """Returns the mean loss of a token, and ROUGE between answers and references in percent.

        Args:
            losses: (rows,) the sum over each row's tokens, and (rows,) the number of these tokens.
            texts: the answers.
            references: the data set's answers to the same prompts.
            fields: the fields of every record.
        """
        scores = text.scores_by_text(texts, references)
        records = loss_figures(losses, self.seed, fields, run.predictions)
        return records + mean_figures(
            {name: scores[name] for name in self.rouge_measures}, self.seed, fields, run.predictions
        )

    def measure(self, run: RunContext) -> list[ResultRecord]:
        if self.instruction_file:  # before hours of training
            self.instruction_file.read(run.data)
        return super().measure(run)


@dataclass(frozen=True, kw_only=True)
class GenerationRecipe(GeneratorTuningRecipe):
    """Fine-tunes decoders: measures their answers before and after, and what attackers read of the answers."""

    rouge_measures = ROUGE_MEASURES

    def grade_variants(
        self, run: RunContext, base: Checkpoint, variants: list[TrainedVariant], statuses: Mapping[str, Status]
    ) -> list[ResultRecord]:
        """Returns the loss and ROUGE of each variant, and what attackers read of its answers.

        Loss (nats a token of the answers) and ROUGE F (percent) are before and after training; attackers read the
        answers after.
        """
        records: list[ResultRecord] = []
        held_out = data_refs.rows_file(run.data, self.data["validation"], run.out / "data")
        for variant in variants:
            run.log(f"{variant.name}: answers before and after, and what attackers read of them")
            codec = seeded_codec(variant.key, base.folder, "evaluation")
            for when, folder in (("before", variant.model_folder), ("after", variant.job_folder / "result")):
                model = load_generator(folder)
                rows = TrainingDataset(
                    variant.job_folder / "validation.safetensors", "causal-lm", self.training.max_length
                )
                answers = greedy_answers(model, codec, held_out, self.evaluation)
                texts, fields = [codec.decode(ids) for ids in answers.ids], {"variant": variant.name, "when": when}
                records += self.answer_figures(run, row_losses(model, rows), texts, answers.references, fields)
            records += attack_figures(self.seed, base, variant, codec, answers)
            if instructions := self.instruction_file:
                run.log(f"{variant.name}: instructions")
                records += instruction_figures(
                    model, codec, instructions.read(run.data), instructions.new_tokens, fields, run.predictions
                )
        return records


def instruction_figures(
    model: PreTrainedModel, codec: Codec, prompts: Sequence[ifeval.Prompt], new_tokens: int, fields: RecordFields,
    predictions: dict[str, str],
) -> list[ResultRecord]:  # fmt: skip
    """Returns IFEval's accuracies of the model's answers in percent, such as "ifeval prompt strict".

    Args:
        model: answers the prompts.
        codec: the codec of the model's ids.
        prompts: IFEval's prompts.
        new_tokens: the most tokens of each answer.
        fields: the fields of every record.
        predictions: receives how many instructions of each prompt are followed strictly.
    """
    return rule_figures(prompts, instruction_answers(model, codec, prompts, new_tokens), fields, predictions)


def instruction_answers(
    model: PreTrainedModel, codec: Codec, prompts: Sequence[ifeval.Prompt], new_tokens: int
) -> list[str]:
    """Returns the model's greedy answers to IFEval's prompts."""
    prompt_ids = [codec.encode_chat([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    return [codec.decode(ids) for ids in greedy_ids(model, prompt_ids, new_tokens)]


def rule_figures(
    prompts: Sequence[ifeval.Prompt], texts: Sequence[str], fields: RecordFields, predictions: dict[str, str]
) -> list[ResultRecord]:
    """Returns IFEval's accuracies of answers in percent.

    Args:
        prompts: IFEval's prompts.
        texts: the answer to each prompt.
        fields: the fields of every record.
        predictions: receives how many instructions of each prompt are followed strictly.
    """
    scores = ifeval.score(prompts, texts)
    add_predictions(predictions, {"ifeval strict": scores.strict_counts}, fields)
    return make_records(
        with_half_widths({f"ifeval {name}": measure for name, measure in scores.measures.items()}), **fields
    )


def load_generator(folder: Path) -> PreTrainedModel:
    """Loads the decoder of a folder in fp32, on the device."""
    return device.move(
        AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
        ).eval()
    )


def reference_answers(examples: Sequence[Example]) -> list[str]:
    """Returns the last message of each conversation: the data set's answer."""
    return [str(example.messages[-1]["content"]) for example in examples]


@torch.inference_mode()
def row_losses(
    model: PreTrainedModel, rows: TrainingDataset | Sequence[dict[str, Any]], batch_size: int = PROMPTS_PER_BATCH
) -> tuple[RowValues, RowValues]:
    """Returns (rows,) the sum of the cross-entropies over the tokens with a label, and (rows,) their number."""
    collate = PaddingCollator(model.config.pad_token_id or 0)
    losses, tokens = list[torch.Tensor](), list[torch.Tensor]()
    for start in range(0, len(rows), batch_size):
        batch = collate([rows[i] for i in range(start, min(start + batch_size, len(rows)))])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        logits, expected = model(**batch).logits[:, :-1].transpose(1, 2), labels[:, 1:]
        token_losses = torch.nn.functional.cross_entropy(logits, expected, ignore_index=-100, reduction="none")
        losses.append(token_losses.sum(1))
        tokens.append((expected != -100).sum(1))
    return device.array(torch.cat(losses).double()), device.array(torch.cat(tokens).double())


def add_predictions(
    predictions: dict[str, str], values_by_measure: Mapping[str, NDArray[Any]], fields: RecordFields
) -> None:
    """Adds each measure's values to `predictions`, packed, under the name of the record with these fields.

    Args:
        predictions: receives the packed values.
        values_by_measure: for each measure (rows,) its values.
        fields: the fields of the record.
    """
    for measure, values in values_by_measure.items():
        record = ResultRecord(measure=measure, value=0.0, **fields)  # type: ignore[arg-type]
        predictions[record.name] = pack_answers(values)


def loss_figures(
    losses: tuple[RowValues, RowValues], seed: int, fields: RecordFields, predictions: dict[str, str]
) -> list[ResultRecord]:
    """Returns the mean loss of a token.

    Args:
        losses: (rows,) each row's sum over its tokens, and (rows,) its number of tokens.
        seed: draws the samples from which intervals are computed.
        fields: the fields of every record.
        predictions: receives the losses.
    """
    add_predictions(predictions, {"loss": losses[0], "tokens": losses[1].astype(np.int64)}, fields)
    return make_records(
        with_half_widths({"loss": text.mean_loss(*losses, np.random.default_rng(seed))}, scale=1), **fields
    )


def mean_figures(
    scores: Mapping[str, RowValues], seed: int, fields: RecordFields, predictions: dict[str, str]
) -> list[ResultRecord]:
    """Returns the mean of each measure in percent.

    Args:
        scores: for each measure (rows,) scores from 0 to 1.
        seed: draws the samples from which intervals are computed.
        fields: the fields of every record.
        predictions: receives the scores.
    """
    add_predictions(predictions, scores, fields)
    return make_records(with_half_widths(text.mean_scores(scores, np.random.default_rng(seed))), **fields)


def greedy_answers(model: PreTrainedModel, codec: Codec, path: Path, evaluation: Mapping[str, int]) -> GeneratedAnswers:
    """Generates greedy answers to the first prompts of the file, each up to its end-of-sequence id, included."""
    examples = list(islice(read_examples(path), evaluation["answers"]))
    prompts = [codec.encode_chat(example.messages[:-1]) for example in examples]
    answers = Sequences.of(greedy_ids(model, prompts, evaluation["new_tokens"]))
    return GeneratedAnswers(Sequences.of(prompts), answers, reference_answers(examples))


@torch.inference_mode()
def greedy_ids(model: PreTrainedModel, prompts: Sequence[Ids], new_tokens: int) -> list[np.ndarray[Any, Any]]:
    """Returns the ids of the greedy answer to each prompt, up to its end-of-sequence id, included."""
    generated: list[np.ndarray[Any, Any]] = []
    batch_size = PROMPTS_PER_GPU_BATCH if device.on_gpu() else PROMPTS_PER_BATCH
    for start in range(0, len(prompts), batch_size):
        rows = [torch.from_numpy(prompt).long() for prompt in prompts[start : start + batch_size]]
        # Padding is on the left, so that all answers begin at the same position
        ids = pad_sequence(rows, True, model.config.pad_token_id or 0, "left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], True, 0, "left")
        output_ids = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=model.config.pad_token_id,
        )
        end_ids = model.generation_config.eos_token_id
        generated += [
            cut_at_stop(row, [end_ids] if isinstance(end_ids, int) else end_ids or [])
            for row in device.array(output_ids[:, ids.shape[1] :])
        ]
    return generated


def cut_at_stop(ids: np.ndarray[Any, Any], stop_ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Returns the ids up to the first of `stop_ids`, included. What follows is padding, which no server sends."""
    stop_indices = np.flatnonzero(np.isin(ids, stop_ids))
    return ids[: stop_indices[0] + 1] if len(stop_indices) else ids


# --- what attackers read ----------------------------------------------------------------------------------------------
def attack_figures(
    seed: int, base: Checkpoint, variant: TrainedVariant, codec: Codec, answers: GeneratedAnswers
) -> list[ResultRecord]:
    """Returns the figures of what the attackers read of a variant's answers.

    ERA reads every variant; on the plain one it is the control. Matching and ERA+ read scrambled variants only.

    Args:
        seed: draws each attack's random numbers and the samples from which intervals are computed.
        base: the public model, before it was scrambled.
        variant: the model that answered, with its key.
        codec: the codec of the variant's key.
        answers: the answers after training.
    """
    transcript = Transcript(
        (
            Weights(Model.open(variant.model_folder)),
            Weights(Model.open(variant.job_folder / "result"), tuned=True),
            Outputs(answers.ids, answers.prompts),
        ),
        len(codec.inverse),
    )
    knowledge = Knowledge(public_model=Model.open(base.folder), alias_count=variant.key.slots.aliases_per_token)

    def new_rng() -> np.random.Generator:
        return np.random.default_rng(seed)

    guesses = {"era": ERA()(transcript, knowledge, Budget(), new_rng())}
    if not variant.is_plain:
        candidates = table_candidates(transcript, knowledge, new_rng())
        guesses["matching"] = guess_by_rank(candidates, transcript.vocab_size)
        guesses["era+"] = ERAPlus()(transcript, replace(knowledge, candidates=candidates), Budget(), new_rng())
    records: list[ResultRecord] = []
    for attack, guess in guesses.items():
        measures = guess_figures(guess, codec, answers, new_rng())
        records += make_records(measures, attack=attack, variant=variant.name, when="after")
    return records


def table_candidates(transcript: Transcript, knowledge: Knowledge, rng: np.random.Generator) -> Candidates:
    """Returns the candidates that the table alone reveals: clusters, then the order inside them."""
    clusters = ClusterSolve().learn(transcript, knowledge, Budget(), rng)
    return Matching().learn(transcript, replace(knowledge, candidates=clusters), Budget(), rng)


def guess_figures(guess: Guess, codec: Codec, answers: GeneratedAnswers, rng: np.random.Generator) -> dict[str, float]:
    """Returns how similar the attacker's text is to the data set's answers, as in Table 6, and to the client's text.

    Figures are in percent.
    """

    def decode_visible(ids: np.ndarray[Any, Any]) -> str:
        # Without special tokens, and places of which the attacker believes nothing
        known_ids = ids[(ids >= 0) & codec.is_visible[ids]]
        return str(codec.tokenizer.decode(known_ids.tolist(), clean_up_tokenization_spaces=False))

    read_ids = Sequences(guess.for_tokens(answers.ids)[:, 0], answers.ids.lengths)
    likeness = text.mean_similarity([decode_visible(answer_ids) for answer_ids in read_ids], answers.references, rng)
    recovery = score(guess, Truth(codec.inverse, codec.is_visible, codec.is_visible, decode_visible, answers.ids), rng)
    client_measures = ("tokens top-1", "rouge-1", "rouge-l")
    client_recovery = {f"{name} of the client's": recovery[name] for name in client_measures}
    return with_half_widths({name: likeness[name] for name in ROUGE_MEASURES} | client_recovery)
