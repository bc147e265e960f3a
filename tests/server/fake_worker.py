"""Obeys server/spec.py and trains nothing: the job's `seed` says how it behaves. Its result is the model it was given.

Each start adds a line to `starts`, and each step one to `steps`, which a restart goes on from.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

job = Path(sys.argv[1])
spec = json.loads((job / "spec.json").read_text())
SUCCEED, FAIL, CRASH, LONG, STUBBORN, UNREADABLE, GETTING_ON = range(7)  # fake_modes.py, which this cannot import
mode = spec["hyperparameters"]["seed"]
stopped: list[int] = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))


def tell(message: str, **data: object) -> None:
    line = {"time": time.time(), "type": "metrics" if data else "message", "message": message, "data": data}
    with (job / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def finish(state: str, error: str | None = None) -> None:
    tell(f"job {state}")
    (job / "status.tmp").write_text(json.dumps({"state": state, "error": error, "trained_tokens": 7}))
    (job / "status.tmp").rename(job / "status.json")
    sys.exit(0)


with (job / "starts").open("a") as file:
    file.write(f"{os.getpid()}\n")
if mode == CRASH:
    os.kill(os.getpid(), signal.SIGKILL)
if mode == FAIL:
    finish("failed", "out of memory; lower batch_size or max_length")

if mode == UNREADABLE:
    shutil.copytree(spec["model"], job / "result")
    (job / "status.json").write_text('{"state": "succeeded", "metrics": {"eval_loss": NaN}}')
    sys.exit(0)
if mode == GETTING_ON and (lives := len((job / "starts").read_text().split())) < 5:
    (job / "checkpoints" / f"checkpoint-{lives}").mkdir(parents=True)
    (job / "checkpoints" / f"checkpoint-{lives}" / "complete").touch()
    os.kill(os.getpid(), signal.SIGKILL)

steps = job / "steps"
for step in range(
    len(steps.read_text().split()) if steps.exists() else 0, 3 if mode in (SUCCEED, GETTING_ON) else 4000
):
    if (job / "cancel").exists() and mode != STUBBORN:
        finish("cancelled")
    if stopped and mode != STUBBORN:
        (job / "saved").write_text(str(step))
        sys.exit(143)
    if (job / "release").exists():
        break
    with steps.open("a") as file:
        file.write(f"{step}\n")
    tell(f"step {step}", step=step, loss=1.0)
    time.sleep(0.05)

shutil.copytree(spec["model"], job / "result")
finish("succeeded")
