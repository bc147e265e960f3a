"""A tokenizer that `tokenizers` alone reads gives what transformers' AutoTokenizer gives, for every kind of folder."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from milkglass.errors import ModelError
from milkglass.models import tokenizer as tokenizer_module
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import Tokenizer, load_tokenizer
from milkglass.models.tokenizer_kinds import KIND_OF_TYPE, KINDS, NAMED_TOKENS
from tests.tiny import TEXTS as TRAINING
from tests.tiny import tokenizer as tiny_tokenizer

OLD_MODELS = Path(__file__).parents[1] / "fixtures" / "old" / "models"
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|endoftext|>"]
TEXTS = [
    "A plain sentence, with marks: it isn't hard .",
    "  two  spaces\tand a\nline, and one at the end ",
    "Größe, naïve, ÅNGSTRÖM, e\u0301 and \ufb01 ligature",
    "日本語のテキスト and 中文 and 한국어, عربى, हिन्दी",
    "🙂🙃 emoji \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "[CLS] text [SEP] <s> and </s> <|im_start|>user<|im_end|> <unk><mask> <pad>",
    "x", " ", "", "\n\n", "1234567 3.14 a_b-c/d\\e", "\u0000\u200b\ufeff odd", "don't we'll they'd I'm you're",
    "word" * 300, "▁meta ▁ ## ##ing", "New York <extra> <|tool|> nospace<extra>next",
]  # fmt: skip


def same(folder: Path, load: Callable[[Path], Tokenizer] = load_tokenizer) -> Tokenizer:
    """The folder's tokenizer, after it was compared with transformers' in all that Milkglass asks of one."""
    ours, theirs = load(folder), AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.all_special_tokens == theirs.all_special_tokens and ours.all_special_ids == theirs.all_special_ids
    assert {n: repr(t) for n, t in ours.added_tokens_decoder.items()} == {
        n: repr(t) for n, t in theirs.added_tokens_decoder.items()
    }
    assert ours.added_tokens_encoder == theirs.added_tokens_encoder and ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs) and ours.model_max_length == theirs.model_max_length
    assert ours.chat_template == theirs.chat_template
    for name, pair in itertools.product(NAMED_TOKENS, (False, True)):
        assert getattr(ours, name + "_id" * pair) == getattr(theirs, name + "_id" * pair), name
    for pair in (False, True):
        assert ours.num_special_tokens_to_add(pair) == theirs.num_special_tokens_to_add(pair)
    for literal, special, cut in itertools.product((None, False, True), (False, True), (None, 7)):
        options = {"split_special_tokens": literal, "add_special_tokens": special, "truncation": cut is not None}
        for pairs in (None, list(reversed(TEXTS))):
            one = ours(
                TEXTS, pairs, max_length=cut, return_offsets_mapping=True, return_special_tokens_mask=True, **options
            )
            other = theirs(
                TEXTS,
                pairs,
                max_length=cut,
                verbose=False,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                **options,
            )
            assert one["input_ids"] == other["input_ids"] and one["offset_mapping"] == other["offset_mapping"]
            assert one.get("token_type_ids") == other.get("token_type_ids")
            assert one["special_tokens_mask"] == other["special_tokens_mask"]
    alone, also = ours(TEXTS[0], TEXTS[1]), theirs(TEXTS[0], TEXTS[1])
    assert alone["input_ids"] == also["input_ids"]
    ids = [theirs(text, verbose=False)["input_ids"] for text in TEXTS] + [list(range(min(len(theirs), 400)))]
    for row, skip, clean in itertools.product(ids, (False, True), (None, False, True)):
        options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": clean}
        assert ours.decode(row, **options) == theirs.decode(row, **options)
    assert ours.batch_decode(ids) == theirs.batch_decode(ids)
    assert ours.convert_ids_to_tokens(ids[0]) == theirs.convert_ids_to_tokens(ids[0])
    return ours


# --- folders that exist -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ref", ["demo:minilm", "demo:smollm2"])
def test_embedded_models(ref: str) -> None:
    same(resolve_model(ref))


@pytest.mark.parametrize("name", ["bert", "llama-tied", "llama-untied"])
def test_models_of_an_earlier_version(name: str) -> None:
    same(OLD_MODELS / name)


# --- every kind -------------------------------------------------------------------------------------------------------
def word_piece() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(TRAINING * 3 + TEXTS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL))
    return made


def byte_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet)
    made.train_from_iterator(TRAINING * 3 + TEXTS, trainer)
    return made


def pieces() -> tokenizers.Tokenizer:
    """BPE over SentencePiece's words, falling back to bytes."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    made.train_from_iterator(TRAINING * 3, trainers.BpeTrainer(vocab_size=700, special_tokens=tokens))
    return made


def unigram() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    made.train_from_iterator(
        TRAINING * 3 + TEXTS, trainers.UnigramTrainer(vocab_size=200, special_tokens=tokens, unk_token="<unk>")
    )
    return made


FILES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "TokenizersBackend": byte_level, "BertTokenizer": word_piece, "DistilBertTokenizer": word_piece,
    "RobertaTokenizer": byte_level, "XLMRobertaTokenizer": unigram, "GPT2Tokenizer": byte_level,
    "LlamaTokenizer": pieces, "Qwen2Tokenizer": byte_level, "GemmaTokenizer": pieces,
    "MPNetTokenizer": word_piece,
}  # fmt: skip
TYPES = {
    "TokenizersBackend": "smollm3", "BertTokenizer": "bert", "DistilBertTokenizer": "distilbert",
    "RobertaTokenizer": "roberta", "XLMRobertaTokenizer": "xlm-roberta", "GPT2Tokenizer": "gpt2",
    "LlamaTokenizer": "llama", "Qwen2Tokenizer": "qwen3", "GemmaTokenizer": "gemma",
    "MPNetTokenizer": "mpnet",
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "lengths": {"model_max_length": 77, "clean_up_tokenization_spaces": True, "truncation_side": "left"},
    "spaces": {"add_prefix_space": True, "legacy": True, "do_lower_case": False, "tokenize_chinese_chars": False},
    "no spaces": {"add_prefix_space": False, "legacy": False, "strip_accents": False, "trim_offsets": False},
    "ends": {"add_bos_token": True, "add_eos_token": True, "split_special_tokens": True},
    "tokens": {
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "image_token": "<image>",
        "chat_template": [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}],
    },
    "added": {
        "added_tokens_decoder": {
            "900": {"content": "<extra>", "lstrip": True, "rstrip": False, "normalized": True, "special": False},
            "901": {"content": "<|tool|>", "lstrip": False, "rstrip": True, "normalized": False, "special": True},
        },
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": True},
        "extra_special_tokens": {"audio_token": "<audio>"},
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    },
    "null": {"mask_token": None, "max_len": 20, "extra_special_tokens": ["<one>", "<two>"]},
}


@cache
def trained(kind: str) -> str:
    return FILES[kind]().to_str()


def written(folder: Path, kind: str, settings: dict[str, Any], model_type: str = "", text: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(text or trained(kind), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **settings}), "utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type or TYPES[kind]}), "utf-8")
    return folder


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads no tokenizer for us."""

    def refuse(folder: Path) -> Tokenizer:
        raise AssertionError(f"{folder} was left to transformers")

    monkeypatch.setattr(tokenizer_module, "_read_by_transformers", refuse)


def test_there_is_a_file_for_every_kind() -> None:
    assert set(FILES) == set(KINDS) == set(TYPES) and set(KIND_OF_TYPE.values()) <= set(KINDS)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "settings",
    [pytest.param(one, marks=[pytest.mark.slow] if number % 2 else []) for number, one in enumerate(SETTINGS)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_under_each_setting(kind: str, settings: str, tmp_path: Path) -> None:
    same(written(tmp_path / "model", kind, SETTINGS[settings]))


@pytest.mark.parametrize("model_type", [*KIND_OF_TYPE, "llama", "smollm3"])
@pytest.mark.parametrize(
    "stated",
    [
        "",
        "LlamaTokenizerFast",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("PreTrainedTokenizerFast", "Qwen2Tokenizer")),
    ],
)
def test_which_kind_is_taken(model_type: str, stated: str, tmp_path: Path) -> None:
    """By the digest of what is built: each kind would build another tokenizer of these."""
    kind = next((kind for kind, own in TYPES.items() if own == model_type), KIND_OF_TYPE.get(model_type, ""))
    folder = written(
        tmp_path / "model", kind or "LlamaTokenizer", {"tokenizer_class": stated} if stated else {}, model_type
    )
    if not stated:
        (folder / "tokenizer_config.json").unlink()
    same(
        folder, tokenizer_module._read_tokenizer
    )  # some of these cannot read what they wrote, and are refused afterwards


@pytest.mark.usefixtures("alone")
def test_ends_truncation_and_padding_of_the_file(tmp_path: Path) -> None:
    made = byte_level()
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    made.enable_truncation(9, stride=2, direction="left")
    made.enable_padding(pad_id=0, pad_token="<pad>", length=20)
    made.add_tokens([AddedToken("New York", normalized=True, single_word=True)])
    for kind in ("TokenizersBackend", "GPT2Tokenizer"):
        same(written(tmp_path / kind, kind, {}, text=made.to_str()))


@pytest.mark.usefixtures("alone")
def test_files_of_older_versions(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "BertTokenizer", {})
    token = {"content": "[CLS]", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"cls_token": token, "unk_token": "[UNK]", "additional_special_tokens": ["<a>", "<b>"]}), "utf-8"
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<extra>": 500, "<a>": 501}), "utf-8")
    same(folder)


@pytest.mark.usefixtures("alone")
def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', "utf-8")
    assert same(tmp_path).template(with_tools=True) == tiny_tokenizer().chat_template
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("with tools", "utf-8")
    both = same(tmp_path)
    assert both.template(with_tools=True) == "with tools" and both.template() == tiny_tokenizer().chat_template


# --- folders that only transformers reads -----------------------------------------------------------------------------
def test_a_vocabulary_alone_is_left_to_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("demo:minilm"), folder)
    (folder / "tokenizer.json").unlink()
    assert same(folder)("a text")["input_ids"] == load_tokenizer(resolve_model("demo:minilm"))("a text")["input_ids"]


def test_what_only_transformers_reads_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "model", "BertTokenizer", {"tokenizer_class": "ElectraTokenizer"})
    assert same(folder)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ModelError) as caught:
        load_tokenizer(folder)
    assert "milkglass[" in (caught.value.hint or "")


# --- threads ----------------------------------------------------------------------------------------------------------
class Probe:
    """A tokenizer of the library whose calls meet, or time out, and which notes settings that change during a call."""

    encode_special_tokens = False

    def __init__(self) -> None:
        self.both_inside, self.changed = threading.Barrier(2), False

    def no_padding(self) -> None:
        pass

    def no_truncation(self) -> None:
        pass

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        literal = self.encode_special_tokens
        if texts == ["long"]:
            self.both_inside.wait(20)
        else:
            time.sleep(0.01)
        self.changed |= self.encode_special_tokens != literal
        return []

    def decode(self, ids: list[int], skip: bool) -> str:
        self.both_inside.wait(20)
        return ""


def test_threads_that_need_different_settings_are_in_the_tokenizer_in_turn() -> None:
    """Its settings are kept between calls: with special tokens read, another thread's text could end itself."""
    probe = Probe()
    read = Tokenizer(probe)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda index: read(["a"], split_special_tokens=bool(index % 2)), range(12)))
    assert not probe.changed


def test_an_answer_is_decoded_while_a_long_text_is_encoded() -> None:
    """Streams of a proxy must not stop for as long as another request's prompt takes."""
    probe = Probe()
    read = Tokenizer(probe)
    with ThreadPoolExecutor(1) as thread:
        encoded = thread.submit(read, ["long"])
        assert read.decode([1], clean_up_tokenization_spaces=False) == ""  # both are inside, or the barrier breaks
        encoded.result()


def test_settings_that_could_not_be_set_are_set_again() -> None:
    class Failing(Probe):
        attempts = 0

        def no_truncation(self) -> None:
            self.attempts += 1
            if self.attempts == 1:
                raise ValueError("once")

    probe = Failing()
    read = Tokenizer(probe)
    with pytest.raises(ValueError, match="once"):
        read(["a"])
    read(["a"])
    read(["a"])
    assert probe.attempts == 2
