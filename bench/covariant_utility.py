"""How useful a model is without fine-tuning: IFEval's prompts, graded by rules, and ROUGE of summaries of DialogSUM.

A scrambled model is asked as a client asks it: the key's codec makes scrambled ids of the chat, and text of the answer.
Answers are greedy, with a KV cache, in batches of 8 padded on the left: of SmolLM2 they were the same one at a time,
for 8 prompts and 8 dialogues. One ends with the model's end-of-turn id, or after 192 tokens (IFEval) or 64 (a summary):
rules that ask for longer answers therefore fail, of every model alike. A prompt or dialogue stands alone in a
conversation, after the template's own system message. The first rows of a file are taken.

Measures are from 0 to 1, each with a bootstrap interval of 95 % over prompts or dialogues: IFEval's four accuracies by
metrics/ifeval.py, and the F of ROUGE-1 and ROUGE-L by metrics/text.py, against the first of a dialogue's three
summaries. Prompt, metrics and generation are those of experiments/kinds/generation.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from milkglass.client.codec.codec import Codec
from milkglass.experiments.kinds.generation import ROUGE_MEASURES, InstructionFile, greedy_ids
from milkglass.metrics import ifeval, text
from milkglass.metrics.interval import Interval
from milkglass.rows.sets.catalogue import dataset_named

IFEVAL_TOKENS, SUMMARY_TOKENS = 192, 64  # new ones, at most, of an answer


@dataclass(frozen=True)
class Questions:
    """What each variant is asked.

    Attributes:
        prompts: IFEval's.
        dialogues: requests for a summary.
        references: a summary of each dialogue, by a person.
    """

    prompts: tuple[ifeval.Prompt, ...] = ()
    dialogues: tuple[str, ...] = ()
    references: tuple[str, ...] = ()

    @classmethod
    def read(cls, prompts: Path | None, prompt_rows: int, dialogues: Path | None, dialogue_rows: int) -> Questions:
        """prompts: IFEval's input_data.jsonl; dialogues: DialogSUM's test.jsonl; None: none of them. Raises UsageError
        or CodecError for a file that cannot be read, or is another one."""
        asked = InstructionFile(prompts.name, prompt_rows, IFEVAL_TOKENS).read(prompts.parent) if prompts else []
        pairs = summaries(dialogues, dialogue_rows) if dialogues else []
        return cls(tuple(asked), tuple(one for one, _ in pairs), tuple(one for _, one in pairs))


def summaries(file: Path, rows: int) -> list[tuple[str, str]]:
    """Of the first rows the request, with the instruction of milkglass/rows/sets before the dialogue, and a summary."""
    layout = dataset_named("dialogsum").splits["test"][0]
    found = [layout.build(place, row) for place, row in islice(layout.read_rows(file), rows)]
    return [(one.messages[0]["content"], one.messages[1]["content"]) for one in found if one is not None]


def utility(folder: Path, codec: Codec, asked: Questions) -> dict[str, Interval]:
    """By "rouge-1", "rouge-l" and "ifeval strict, prompts" and alike. folder: of the model that codec's ids are for."""
    if not (asked.prompts or asked.dialogues):
        return {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result: dict[str, Interval] = {}
    if asked.dialogues:
        written = answers(model, codec, asked.dialogues, SUMMARY_TOKENS)
        likeness = text.mean_similarity(written, asked.references, np.random.default_rng(0))
        result |= {name: likeness[name] for name in ROUGE_MEASURES}
    if asked.prompts:
        written = answers(model, codec, [one.text for one in asked.prompts], IFEVAL_TOKENS)
        for name, found in ifeval.score(asked.prompts, written).measures.items():
            unit, how = name.split()
            result[f"ifeval {how}, {unit}s"] = found
    return result


def answers(model: PreTrainedModel, codec: Codec, texts: Sequence[str], new_tokens: int) -> list[str]:
    """Raises ValueError for a model that does not stop where the codec's text ends: it is another key's."""
    stops = model.generation_config.eos_token_id
    if codec.stop_ids.tolist() != ([stops] if isinstance(stops, int) else stops):
        raise ValueError("the model ends its answers with another id than the codec's")
    asked = [codec.encode_chat([{"role": "user", "content": one}]) for one in texts]
    order = np.argsort([len(one) for one in asked], kind="stable")  # less padding in a batch
    written = codec.decode_batch(greedy_ids(model, [asked[place] for place in order], new_tokens))
    return [written[place] for place in np.argsort(order)]
