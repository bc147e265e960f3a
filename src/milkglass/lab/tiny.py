"""Tiny random models with a real tokenizer, on which methods are checked."""

from __future__ import annotations

from pathlib import Path

TEXTS = (
    "the nurse called about the results of the test on monday",
    "please move my appointment to friday afternoon",
    "the invoice for the scan is wrong, it says 120 and not 80",
    "my father has a fever since yesterday and cannot eat",
)
TOKENS = 300
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
SHAPE = {
    "vocab_size": TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 130, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def save(model_type: str, kind: str, folder: Path) -> Path:
    """Writes a tiny random model of a type that transformers knows, and a byte-level tokenizer. Returns the folder.

    Args:
        model_type: as in config.json, such as "bert".
        kind: "encoder" or "decoder".
        folder: where both are written.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (AutoModelForMaskedLM if kind == "encoder" else AutoModelForCausalLM).from_config(
            AutoConfig.for_model(model_type, **SHAPE)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)  # biases and norms away from their defaults
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([*TEXTS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        cls_token="<s>", sep_token="</s>", model_max_length=128,
    ).save_pretrained(folder)  # fmt: skip
    return folder
