"""Data sets without classes: plain text and instructions.

Plain text: Enron's e-mail, a sentence an entry; the Open Australian Legal Corpus, a sentence of its documents an entry;
and WikiText-2 (Merity et al. 2017), a line an entry, with headings and marks (` @-@ `, `<unk>`) unchanged.
Instructions: Alpaca (Taori et al. 2023), Dolly (Conover et al. 2023), DialogSum (Chen et al. 2021) and IFEval (Zhou et
al. 2023).

DialogSum has no instructions, so one sentence, always the same, precedes each dialogue. Its test file has three
summaries of each dialogue; the first is used. IFEval has no answers: metrics/ifeval.py checks its rules.
"""

from __future__ import annotations

from functools import partial

from milkglass.rows.data_file import SUMMARISE_PROMPT
from milkglass.rows.sets.description import (
    HubDataset,
    PlainTextBuilder,
    PublicDataset,
    QuestionAnswerBuilder,
    single_file_layouts,
)
from milkglass.rows.tables import json_lines, json_list, json_objects, json_sentences, text_lines

ROUGE_METRICS = ("rouge-1", "rouge-2", "rouge-l")
HUB_TRAIN_SPLIT = {"train": "train"}


def _enron() -> PublicDataset:
    build = PlainTextBuilder()
    train = single_file_layouts(json_list, build, "sentences.json") + single_file_layouts(
        json_lines, build, "enron.jsonl"
    )
    return PublicDataset(
        "enron", "sentences of business e-mail", "text", {"train": train}, ("text",), "CC0", metrics=("perplexity",)
    )


def _legal() -> PublicDataset:
    files = single_file_layouts(json_sentences, PlainTextBuilder(), "corpus.jsonl", "sample.jsonl")
    return PublicDataset(
        "legal", "sentences of Australian law, of five words and more", "text",
        {"train": files}, ("text",), "by document, see its card", metrics=("perplexity",),
        other_folder_names=("au_legal", "open-australian-legal-corpus"),
    )  # fmt: skip


def _wikitext2() -> PublicDataset:
    build = PlainTextBuilder()
    stripped = partial(text_lines, strip=True)
    names = {"train": "train", "validation": "valid", "test": "test"}
    splits = {
        split: single_file_layouts(stripped, build, f"wiki.{name}.tokens", f"{name}.txt", f"wiki.{name}.raw")
        for split, name in names.items()
    }
    hub = HubDataset(
        "Salesforce/wikitext", "wikitext-2-v1", {name: name for name in names}, PlainTextBuilder(are_lines=True)
    )
    return PublicDataset(
        "wikitext2", "good and featured articles of Wikipedia", "text", splits, ("text",), "CC BY-SA 3.0",
        metrics=("perplexity",), hub=hub, flaws="blank lines", other_folder_names=("wikitext-2", "wikitext-2-raw"),
    )  # fmt: skip


def _alpaca() -> PublicDataset:
    build = QuestionAnswerBuilder("instruction", "output", "input", is_flawed=True)
    train = (
        *single_file_layouts(json_objects, build, "alpaca_data.json", "alpaca_data_cleaned.json", "alpaca_5000.json"),
        *single_file_layouts(json_lines, build, "train.jsonl"),
        *single_file_layouts(json_objects, build, "train.json"),
    )
    splits = {"train": train, "validation": single_file_layouts(json_lines, build, "validation.jsonl")}
    return PublicDataset(
        "alpaca", "instructions with answers written by a model", "chat", splits, ("instruction", "input", "output"),
        "CC BY-NC 4.0", (), ROUGE_METRICS, HubDataset("yahma/alpaca-cleaned", None, HUB_TRAIN_SPLIT, build),
        flaws="rows without an answer",
    )  # fmt: skip


def _dolly() -> PublicDataset:
    build = QuestionAnswerBuilder("instruction", "response", "context")
    train = (
        *single_file_layouts(json_lines, build, "databricks-dolly-15k.jsonl", "dolly_6400.jsonl", "train.jsonl"),
        *single_file_layouts(json_objects, build, "train.json"),
    )
    splits = {"train": train, "validation": single_file_layouts(json_lines, build, "validation.jsonl")}
    return PublicDataset(
        "dolly", "instructions with answers written by people", "chat", splits, ("instruction", "context", "response"),
        "CC BY-SA 3.0", (), ROUGE_METRICS, HubDataset("databricks/databricks-dolly-15k", None, HUB_TRAIN_SPLIT, build),
        other_folder_names=("databricks",),
    )  # fmt: skip


def _dialogsum() -> PublicDataset:
    build = QuestionAnswerBuilder("dialogue", "summary", prefix=SUMMARISE_PROMPT)
    build_test = QuestionAnswerBuilder("dialogue", "summary1", prefix=SUMMARISE_PROMPT)
    names = {"train": "train", "validation": "dev", "test": "test"}
    splits = {
        split: single_file_layouts(
            json_lines, build_test if split == "test" else build, f"{file}.jsonl", f"dialogsum.{file}.jsonl"
        )
        for split, file in names.items()
    }
    hub = HubDataset("knkarthick/dialogsum", None, {name: name for name in names}, build)
    return PublicDataset(
        "dialogsum", "dialogues and their summaries", "chat", splits, ("dialogue", "summary"), "CC BY-NC-SA 4.0", (),
        ROUGE_METRICS, hub, other_folder_names=("DialogSum_Data",),
    )  # fmt: skip


def _ifeval() -> PublicDataset:
    build = PlainTextBuilder("prompt")
    splits = {"train": single_file_layouts(json_lines, build, "input_data.jsonl")}
    return PublicDataset(
        "ifeval", "instructions whose answers rules can check; prompts alone", "prompts", splits, ("prompt",),
        "Apache-2.0", hub=HubDataset("google/IFEval", None, HUB_TRAIN_SPLIT, build),
    )  # fmt: skip


INSTRUCTIONS = (_alpaca(), _dolly(), _dialogsum(), _ifeval())
CORPORA = (_enron(), _legal(), _wikitext2())
