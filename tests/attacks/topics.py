"""A small language, and models that know it, for attacks that have a language model read.

Every third token is of the sentence's topic, between two fillers that say nothing, so that no topic can be seen in
neighbours one or two apart. Each word exists once a topic. In half of the words the four are of very different
frequency, in the others of the same.
"""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from milkglass.models.view import Model
from milkglass.sequences import Sequences

TOPICS, WORDS, FILLERS, FIRST = 4, 16, 16, 2
N = FIRST + FILLERS + TOPICS * WORDS  # the topics' words come last, word by word
ALIKE = range(WORDS // 2, WORDS)  # the words that are as frequent in every topic


def word(number: int, topic: int) -> int:
    return FIRST + FILLERS + number * TOPICS + topic


def written(sentences: int, seed: int) -> Sequences:
    rng = np.random.default_rng(seed)
    odds = np.ones((TOPICS, WORDS))
    for number in range(WORDS // 2):
        odds[:, number] = np.roll([4.0, 1.6, 0.6, 0.2], number)
    odds /= odds.sum(1, keepdims=True)
    made = []
    for _ in range(sentences):
        topic = int(rng.integers(TOPICS))
        ids = rng.integers(FIRST, FIRST + FILLERS, 24)
        ids[::3] = [word(int(rng.choice(WORDS, p=odds[topic])), topic) for _ in range(8)]
        made.append(np.array([0, *ids, 1]))
    return Sequences.of(made)


def trained(size: int, texts: Sequences, steps: int = 100, fillers: bool = False, seed: int = 0) -> LlamaForCausalLM:
    """One layer is enough: words of a topic go together. fillers: whether it learns how likely they are as well; which
    one comes nobody could tell."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=size, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=1,
                tie_word_embeddings=False, initializer_range=0.1,
            )
        )  # fmt: skip
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.from_numpy(texts.ids.reshape(len(texts), -1))
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        some = ids[torch.from_numpy(rng.integers(len(ids), size=64))]
        wanted = some if fillers else torch.where(some >= FIRST + FILLERS, some, -100)
        loss = model(input_ids=some, labels=wanted).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


def view(model: torch.nn.Module, folder: Path | None = None) -> Model:
    return Model(dict(model.state_dict()), model.config.to_dict(), folder)


def names(size: int) -> list[str]:
    return ["[CLS]", "[SEP]", *("w" + "".join("abcdefghij"[int(digit)] for digit in f"{i:03}") for i in range(2, size))]


def encoder_in(folder: Path) -> Model:
    """A BERT whose tokenizer knows the language's words by name."""
    own = Tokenizer(models.WordPiece({name: i for i, name in enumerate(names(N))}, unk_token="[SEP]"))
    own.decoder = decoders.WordPiece()
    own.add_special_tokens(["[CLS]", "[SEP]"])
    own.save(str(folder / "tokenizer.json"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return view(BertModel(BertConfig(vocab_size=N, **small)), folder)


def reader_in(folder: Path, llama: LlamaForCausalLM) -> Path:
    """A model with a vocabulary of its own: the same words, numbered the other way round."""
    other = Tokenizer(models.WordLevel({name: N - 1 - i for i, name in enumerate(names(N))}, unk_token="[SEP]"))
    other.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    other.save(str(folder / "tokenizer.json"))
    turned = copy.deepcopy(llama)
    for rows in (turned.model.embed_tokens.weight, turned.lm_head.weight):
        rows.data = rows.data.flip(0).contiguous()
    turned.config.bos_token_id = N - 1
    turned.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return encoder_in(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, llama: LlamaForCausalLM) -> Path:
    """Of the module's own `llama`."""
    return reader_in(tmp_path_factory.mktemp("reader"), llama)
