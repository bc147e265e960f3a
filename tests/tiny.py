"""Tiny random models of every architecture, with a real fast tokenizer, made for a test and thrown away."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MPNetConfig,
    MPNetForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from milkglass.models.families import FAMILIES

VOCAB = 300
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEXTS = [
    "the nurse called about the results of the test on monday",
    "please move my appointment to friday afternoon",
    "the invoice for the scan is wrong, it says 120 and not 80",
    "my father has a fever since yesterday and cannot eat",
]
# A template whose call for an answer has the tokens that stood before the answer in training: no blank is at its end,
# which a token of the answer would take in.
TRAINABLE_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """One of NAMES, random weights from a fixed seed, biases and norms not at their defaults."""
    torch.manual_seed(seed)
    model = BUILDERS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def _distilbert() -> PreTrainedModel:
    return DistilBertForMaskedLM(
        DistilBertConfig(vocab_size=VOCAB, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=128)
    )


def _gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2)
    )


BUILDERS = {
    "bert": lambda: BertForMaskedLM(BertConfig(**BERT)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**{**BERT, "pad_token_id": 1, "bos_token_id": 0})),
    "distilbert": _distilbert,
    "mpnet": lambda: MPNetForMaskedLM(MPNetConfig(**{**BERT, "pad_token_id": 1, "bos_token_id": 0})),
    "gpt2": _gpt2,
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "llama-untied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**LLAMA, tie_word_embeddings=False)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, tie_word_embeddings=True)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**LLAMA)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**LLAMA)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**LLAMA)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**LLAMA, tie_word_embeddings=True)),
    "xlm-roberta": lambda: XLMRobertaForMaskedLM(XLMRobertaConfig(**{**BERT, "pad_token_id": 1, "bos_token_id": 0})),
}
TYPES = {"llama-tied": "llama", "llama-untied": "llama", "gemma3": "gemma3_text"}  # of names that are not a type


def _of_type(model_type: str, kind: str) -> PreTrainedModel:
    """A model of a type that has no builder above, so that a new family is tested as soon as it is in the catalogue."""
    config = AutoConfig.for_model(model_type, **(BERT if kind == "encoder" else LLAMA))
    return (AutoModelForMaskedLM if kind == "encoder" else AutoModelForCausalLM).from_config(config)


BUILDERS |= {
    model_type: partial(_of_type, model_type, family.kind)
    for family in FAMILIES.values()
    for model_type in family.model_types
    if model_type not in {TYPES.get(name, name) for name in BUILDERS}
}
NAMES = tuple(BUILDERS)


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of about VOCAB tokens, with a chat template."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 10,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 5, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    return fast


def save(name: str, folder: Path, shard: str | None = None, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """The model and its tokenizer as a Hugging Face folder; `shard` is the largest size of a file, such as "40KB"."""
    model = build(name, seed).to(dtype)
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    tokenizer().save_pretrained(folder)
    return folder
