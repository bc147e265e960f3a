"""Tiny models of three layers, what a client shares of a step with one, and the truth that a guess is graded by.

Three layers, since the last one's gradients are special: where a class is read off one position, only that has a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MPNetConfig,
    Qwen3Config,
    RobertaConfig,
)

from milkglass.sequences import Sequences
from milkglass.threat.guess import Guess
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Gradients, Transcript
from milkglass.threat.training_step import SharedStep, Task, add_lora_adapters, pad_texts
from milkglass.threat.truth import Truth, score
from tests.tiny import BERT, LLAMA, VOCAB

DEEP = {"num_hidden_layers": 3}
CONFIGS = {
    "bert": lambda: BertConfig(**{**BERT, **DEEP}),
    "roberta": lambda: RobertaConfig(**{**BERT, **DEEP, "pad_token_id": 1, "bos_token_id": 0}),
    "mpnet": lambda: MPNetConfig(**{**BERT, **DEEP, "pad_token_id": 1, "bos_token_id": 0}),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
    "llama-tied": lambda: LlamaConfig(**LLAMA | DEEP, tie_word_embeddings=True),
    "llama-untied": lambda: LlamaConfig(**LLAMA | DEEP, tie_word_embeddings=False),
    "gemma2": lambda: Gemma2Config(**LLAMA | DEEP),
    "qwen3": lambda: Qwen3Config(**LLAMA | DEEP, tie_word_embeddings=True),
}


@cache
def step(name: str, task: Task = "classification", lora: int | None = None) -> SharedStep:
    """Random weights from a fixed seed, biases and norms not at their defaults; not to be changed."""
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    kind = AutoModelForCausalLM if task == "next-token" else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = kind.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
        if lora is not None:
            add_lora_adapters(module, lora)
    return SharedStep(module.eval(), task)


@dataclass(frozen=True)
class Shared:
    """batches: of texts, as ids."""

    step: SharedStep
    batches: tuple[tuple[tuple[int, ...], ...], ...]
    transcript: Transcript
    knowledge: Knowledge
    truth: Truth

    def graded(self, guess: Guess) -> dict[str, float]:
        found = score(guess, self.truth, np.random.default_rng(0)).measures
        return {name: one.value for name, one in found.items()}


def shared(one: SharedStep, batches: Sequence[Sequence[Sequence[int]]], lengths: bool = True, seed: int = 0) -> Shared:
    """What clients share of a step with each batch of texts; the classes are drawn from the seed."""
    rng = np.random.default_rng(seed)
    seen, labels = [], []
    for number, texts in enumerate(batches):
        ids, mask = pad_texts(texts, 0)
        classes = rng.integers(0, 2, len(texts))
        targets = torch.from_numpy(classes) if one.task == "classification" else None
        seen.append(Gradients(one.gradient(ids, mask, targets), len(texts), number))
        labels += classes.tolist()
    sent = Sequences.of(text for texts in batches for text in texts)
    size = len(one.table)
    every = np.ones(size, np.bool_)
    sizes = np.array([len(texts) for texts in batches])
    truth = Truth(np.arange(size), every, every, lambda ids: " ".join(map(str, ids)), sent, batch_sizes=sizes)
    known = Knowledge(step=one, labels=np.array(labels), lengths=sent.lengths if lengths else None)
    frozen = tuple(tuple(tuple(text) for text in texts) for texts in batches)
    return Shared(one, frozen, Transcript(tuple(seen), size), known, truth)
