"""Recipes of kind "symbol-generation": whether a server's model on symbols helps a client's smaller model.

    data.public                          in which tokens are counted, for the map and the rows of the symbols
    client_layers = [0, 1, 2, 28, 29]    of the model, which the client keeps and tunes on the same rows by itself
    weights = [0.5, 1.0]                 w of symbol_writer.py; answers are written with the first of them
    [variants.plain]                     the server's model alone, on tokens
    [variants."64 symbols"]              parameters of a coarse vocabulary (schemes/coarse.py)

The server's own worker trains every model, with the same steps. Three answer alone: "plain"; "client", tuned; and
"public", the whole public model, which a client may run as well. Each of the two clients then answers with each server
of symbols (procedures/symbol_writer.py).

Figures are the loss in nats a token of the data set's answers, and ROUGE of greedy answers.
"symbols known" is a client that gets the true symbols, an upper bound for any server of symbols. "bits a token,
VARIANT" is the entropy of an id of the training rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from milkglass.client.codec.codec import Codec
from milkglass.client.data.texts import encode_examples
from milkglass.client.key.generate import new_key
from milkglass.client.key.key import Key
from milkglass.client.obfuscate.symbols import CountedTexts, fit_map
from milkglass.client.special_tokens import reserved_ids
from milkglass.defences.obfuscated_tables import public_codec
from milkglass.errors import UsageError
from milkglass.experiments import data_refs
from milkglass.experiments.kinds import generation
from milkglass.experiments.kinds.fine_tuning import write_job
from milkglass.experiments.kinds.generation import GeneratorTuningRecipe, RecordFields, loss_figures
from milkglass.experiments.procedures import sanitized_chats
from milkglass.experiments.procedures.layer_subset import layer_count_field, write_layer_subset
from milkglass.experiments.procedures.symbol_writer import AnsweringPair, CombinedDistribution, row_losses
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.runs import SPLITS, RunContext, TrainedVariant, seeded_secret
from milkglass.models.checkpoint import Checkpoint, end_ids
from milkglass.models.torch_model import language_model
from milkglass.noise.stream import Stream, subkey
from milkglass.rows.examples import Example, read_examples
from milkglass.schemes.coarse import Coarse
from milkglass.server.jobs.data import TrainingDataset
from milkglass.server.spec import Status

PLAIN, CLIENT, PUBLIC = "plain", "client", "public"


@dataclass(frozen=True, kw_only=True)
class SymbolGenerationRecipe(GeneratorTuningRecipe):
    """Fine-tunes decoders over symbols, and measures clients that write with them.

    Attributes:
        client_layers: the numbers of the layers that the client keeps, from 0, ascending.
        words: the most words of a row's first message; longer rows are left out. None: no limit.
        weights: the weights of the server's word (symbol_writer.py), each from 0 to 1.
        evaluation: `rows`, the held-out rows for losses; `answers`, how many of them get written answers; `new_tokens`,
            the most tokens of each answer.
    """

    client_layers: list[int]
    weights: list[float]
    words: int | None = None

    splits = (*SPLITS, PUBLIC)
    evaluation_names = ("rows", "answers", "new_tokens")
    reported_fields = ("seed", "words", "client_layers", "weights", "training", "variants", "evaluation")

    def check(self) -> None:
        super().check()
        if not self.weights or not all(0 <= weight <= 1 for weight in self.weights):
            raise UsageError(f"weights is {self.weights}", "give numbers from 0 to 1")
        if self.instructions:
            raise UsageError("instructions are not asked in symbols", "leave the table out")

    def check_variants(self) -> None:
        if [name for name, entry in self.variants.items() if not entry] != [PLAIN]:
            raise UsageError("a recipe of this kind has one variant without a scheme", "call it plain")
        if reserved_names := {CLIENT, PUBLIC} & self.variants.keys():
            raise UsageError(f"a variant is called {min(reserved_names)}", "that is the name of a client: take another")
        for name, entry in self.variants.items():
            if entry and not isinstance(self.scheme(entry), Coarse):
                raise UsageError(f"{name} has no symbols", 'say scheme = "coarse"')

    def key(self, base: Checkpoint, digest: str, parameters: Mapping[str, Any], run: RunContext) -> Key:
        scheme = self.scheme(parameters)
        if scheme is None:
            return super().key(base, digest, parameters, run)
        secret = seeded_secret(self.seed)
        counted = self._count_public_tokens(base, run)
        with_map = fit_map(base, scheme, counted, lambda label: Stream(subkey(secret, digest, label)))
        return new_key(base, self.model, with_map, digest, secret)

    def _count_public_tokens(self, base: Checkpoint, run: RunContext) -> CountedTexts:
        """Returns counts of public text alone, since the weights of the symbols' rows can be read from the table."""
        codec = public_codec(base)
        public = data_refs.load_examples(run.data, self.data[PUBLIC])
        counts = encode_examples(codec, public).original.counts(len(codec.sigma))
        special = reserved_ids(base, len(codec.sigma))
        counts[special] = 0
        return CountedTexts(None, counts, counts, special)

    def text_files(self, base: Checkpoint, run: RunContext) -> Mapping[str, Mapping[str, Path]]:
        paths = {split: run.out / "data" / f"{split}.jsonl" for split in SPLITS}
        for split, path in paths.items():
            if not path.is_file():
                rows = sanitized_chats.conversations_of(
                    data_refs.load_examples(run.data, self.data[split], run.log), "", self.words
                )
                sanitized_chats.write_chats(rows if split == "train" else rows[: self.evaluation["rows"]], path)
        return dict.fromkeys(self.variants, paths)

    def prepare_variants(self, base: Checkpoint, run: RunContext) -> list[TrainedVariant]:
        """Returns the variants, and the client's model as one more."""
        layer_count_field(base, self.client_layers)  # before anything is scrambled
        variants = super().prepare_variants(base, run)
        plain = next(variant for variant in variants if variant.is_plain)
        client = replace(plain, name=CLIENT, model_folder=run.out / f"{CLIENT}-model", job_folder=run.out / CLIENT)
        if not (client.model_folder / "config.json").is_file():
            write_layer_subset(base, self.client_layers, client.model_folder)
        write_job(self, base, self.text_files(base, run)[PLAIN], client, run.threads)
        return [*variants, client]

    def grade_variants(
        self, run: RunContext, base: Checkpoint, variants: list[TrainedVariant], statuses: Mapping[str, Status]
    ) -> list[ResultRecord]:
        """Returns the figures. One server's model is loaded at a time, beside the two clients'."""
        folders = {variant.name: variant.job_folder / "result" for variant in variants} | {PUBLIC: base.folder}
        stops = end_ids(base.folder)
        clients = {name: load_model(folders[name], stops) for name in (CLIENT, PUBLIC)}
        plain = next(variant for variant in variants if variant.name == PLAIN)
        examples = self._held_out(run)[: self.evaluation["answers"]]
        records: list[ResultRecord] = []
        for name, model in [*clients.items(), (PLAIN, load_model(folders[PLAIN], stops))]:
            run.log(f"{name}: answers alone")
            records += self._single_figures(run, base, plain, model, examples, name)
        for variant in variants:
            if variant.name in (PLAIN, CLIENT):
                continue
            codec = Codec.open(variant.key, base.folder)
            server = load_model(folders[variant.name], frozenset(codec.sigma[sorted(stops)].tolist()))
            bits = self._id_entropy(run, codec)
            records.append(ResultRecord(measure="bits a token", value=bits, variant=variant.name))
            for name, client in clients.items():
                for weight in self.weights:
                    writer = CombinedDistribution(torch.from_numpy(codec.sigma).long(), weight)
                    pair = AnsweringPair(client, server, writer, stops)
                    run.log(f"{variant.name}: {name} answers, the server's word weighs {weight}")
                    fields = {"variant": variant.name, "note": f"{name}, weight {weight:g}"}
                    known_fields = {**fields, "note": f"{name}, symbols known"} if weight == self.weights[0] else None
                    records += self._pair_figures(run, codec.without_scrambling, pair, examples, fields, known_fields)
        return records

    def _held_out(self, run: RunContext) -> list[Example]:
        return list(read_examples(run.out / "data" / "validation.jsonl"))

    def _single_figures(
        self, run: RunContext, base: Checkpoint, plain: TrainedVariant, model: Any, examples: list[Example], name: str
    ) -> list[ResultRecord]:
        """Returns the figures of one model that answers alone."""
        codec = public_codec(base)
        rows = TrainingDataset(plain.job_folder / "validation.safetensors", "causal-lm", self.training.max_length)
        prompts = [codec.encode_chat(example.messages[:-1]) for example in examples]
        texts = [codec.decode(ids) for ids in generation.greedy_ids(model, prompts, self.evaluation["new_tokens"])]
        return self.answer_figures(
            run, generation.row_losses(model, rows), texts, generation.reference_answers(examples), {"variant": name}
        )

    def _pair_figures(
        self,
        run: RunContext,
        codec: Codec,
        pair: AnsweringPair,
        examples: list[Example],
        fields: RecordFields,
        known_fields: RecordFields | None,
    ) -> list[ResultRecord]:
        """Returns the figures of a client and a server together.

        Args:
            codec: a codec of original ids.
            pair: the two models.
            examples: the rows whose answers are written.
            fields: the variant of every record, and when or a note.
            known_fields: the same for a client that gets the true symbols. None: no answers are written.
        """
        chats = [example.messages for example in self._held_out(run)]
        losses, losses_symbols_known, tokens = row_losses(pair, codec, chats, self.training.max_length)
        if known_fields is None:
            return loss_figures((losses, tokens), self.seed, fields, run.predictions)
        prompts = [torch.from_numpy(codec.encode_chat(example.messages[:-1])).long() for example in examples]
        texts = [codec.decode(pair.greedy_answer(prompt, self.evaluation["new_tokens"])) for prompt in prompts]
        records = self.answer_figures(run, (losses, tokens), texts, generation.reference_answers(examples), fields)
        return records + loss_figures((losses_symbols_known, tokens), self.seed, known_fields, run.predictions)

    def _id_entropy(self, run: RunContext, codec: Codec) -> float:
        """Returns the entropy of the ids of the training rows, in bits."""
        rows = list(read_examples(run.out / "data" / "train.jsonl"))
        counts = encode_examples(codec.without_scrambling, rows).original.counts(len(codec.sigma))
        shares = np.bincount(codec.sigma, counts)
        shares = shares[shares > 0] / shares.sum()
        return float(-(shares * np.log2(shares)).sum())


def load_model(folder: Path, stops: frozenset[int]) -> Any:
    """Returns the model of a folder, whose answers end with one of these ids."""
    model = language_model(Checkpoint.open(folder)).eval()
    model.generation_config.eos_token_id = sorted(stops)
    return model
