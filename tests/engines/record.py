"""Writes tests/engines/recorded/: what a running engine was asked and what it answered.

    python -m tests.engines.record ENGINE VERSION URL TOKEN FOLDER

FOLDER is the scrambled model that it serves, of one Llama that `tests/engines/test_recorded.py` describes. What the
answers should be is computed with transformers, not with the engine's reader. Run it after an engine's new version.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx2
import torch
from transformers import AutoModelForCausalLM

from milkglass.engines.catalogue import ENGINES
from tests.engines.test_recorded import FOLDER, PROMPT, REQUESTS, request_of


def expected(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Greedy ids, their log-probabilities and the likeliest ones, literally."""
    end = model.generation_config.eos_token_id
    ids, rows = list(PROMPT), []
    for _ in range(asked["max_tokens"]):
        with torch.inference_mode():
            last = model(torch.tensor([ids])).logits[0, -1]
        logits = last.double().clone()
        chances = torch.log_softmax(logits, 0)
        for token, bias in asked.get("logit_bias", {}).items():
            logits[int(token)] += bias
        taken = int(logits.argmax())
        if taken in (end, *asked.get("stop_ids", [])):
            return {"ids": ids[len(PROMPT) :], "finish": "stop", "logprobs": rows}
        best = chances.argsort(descending=True)[: asked.get("logprobs") or 0].tolist()
        rows.append([[one, round(float(chances[one]), 4)] for one in (taken, *best)])
        ids.append(taken)
    return {"ids": ids[len(PROMPT) :], "finish": "length", "logprobs": rows}


def main(name: str, version: str, url: str, token: str, folder: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    headers = {"Authorization": f"Bearer {token}"}
    exchanges = []
    for title, asked in REQUESTS.items():
        call = ENGINES[name].completion("tiny", request_of(asked))
        if request_of(asked).options() - ENGINES[name].options:
            continue
        answer = httpx2.post(url + call.path, json=call.body, headers=headers, timeout=120)
        answer.raise_for_status()
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        exchanges.append(
            {"title": title, "path": call.path, "body": call.body, "events": events, "expected": expected(model, asked)}
        )
    models = httpx2.get(url + ENGINES[name].models.path, headers=headers, timeout=60).json()
    document = {"engine": name, "source": f"recorded from {version}", "models": models, "exchanges": exchanges}
    text = json.dumps(document, separators=(",", ":")).replace(str(Path(folder).resolve()), "/models/tiny")
    (FOLDER / f"{name}.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
