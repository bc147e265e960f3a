"""Evaluation loss and ROUGE-1 of generated answers, before and after fine-tuning (ObfusLM, Table 3)."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch
from rouge_score.rouge_scorer import RougeScorer
from transformers import AutoModelForCausalLM, PreTrainedModel

from milkglass.checkpoint import Checkpoint
from milkglass.client.codec import Codec
from milkglass.client.dataset import read_examples
from milkglass.experiments.recipe import Recipe, Variant
from milkglass.server.data import Collate, Rows

BATCH = 8


def measure(recipe: Recipe, base: Checkpoint, variants: list[Variant], data: Path) -> dict[str, float]:
    """For each variant: loss (nats a token of the answers) and ROUGE-1 F (percent), before and after."""
    found: dict[str, float] = {}
    for variant in variants:
        codec = Codec.open(variant.key, base.folder)
        for when, folder in (("before", variant.model), ("after", variant.job / "result")):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            rows = Rows(variant.job / "validation.parquet", "causal-lm", recipe.training.max_length)
            found[f"loss, {variant.name} {when}"] = loss(model, rows)
            found[f"rouge-1, {variant.name} {when}"] = rouge(model, codec, data / recipe.data["validation"], recipe)
    return found


@torch.inference_mode()
def loss(model: PreTrainedModel, rows: Rows) -> float:
    """Mean cross-entropy over the tokens that carry a label."""
    collate = Collate(model.config.pad_token_id or 0)
    total, count = 0.0, 0
    for start in range(0, len(rows), BATCH):
        batch = collate([rows[i] for i in range(start, min(start + BATCH, len(rows)))])
        labels = batch.pop("labels")
        logits = model(**batch).logits[:, :-1].flatten(0, 1)
        wanted = labels[:, 1:].flatten()
        total += float(torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum"))
        count += int((wanted != -100).sum())
    return total / count


@torch.inference_mode()
def rouge(model: PreTrainedModel, codec: Codec, path: Path, recipe: Recipe) -> float:
    """Greedy answers to the first prompts of the file against the references."""
    examples = list(islice(read_examples(path), recipe.evaluation["answers"]))
    prompts = [codec.encode_chat(example.messages[:-1]) for example in examples]
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    scores = []
    for start in range(0, len(prompts), BATCH):
        group = prompts[start : start + BATCH]
        width = max(map(len, group))
        ids = torch.full((len(group), width), model.config.pad_token_id or 0)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(group):  # on the left, so that all answers begin at one place
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            mask[row, width - len(prompt) :] = 1
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=recipe.evaluation["new_tokens"],
            do_sample=False,
            pad_token_id=model.config.pad_token_id,
        )
        for row, example in zip(out[:, width:], examples[start : start + BATCH], strict=True):
            answer = codec.decode(row.numpy())
            scores.append(scorer.score(example.messages[-1]["content"], answer)["rouge1"].fmeasure)
    return 100 * sum(scores) / len(scores)
