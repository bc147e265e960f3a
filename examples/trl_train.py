"""TRL trains a scrambled model on scrambled rows: four commands.

    python trl_train.py KEY SCRAMBLED ROWS OUT [--epochs 3] [--processes 4 | --cpu]

KEY is the key file, SCRAMBLED the folder that `milkglass obfuscate` wrote, ROWS your conversations (JSON Lines with
"messages"), OUT a new folder. OUT/provider has all that a provider needs; OUT/tuned is the trained model, which
any engine serves as it served SCRAMBLED. MILKGLASS_PASSPHRASE has the key's passphrase (else a terminal is asked).
Needs `pip install trl`, on the provider's machine alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

MILKGLASS = Path(sys.executable).with_name("milkglass")  # the command of this environment


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("key", "scrambled", "rows", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--batch-size", type=int, default=8, help="rows a step, of each process")
    parser.add_argument("--processes", type=int, default=1, help="one a GPU")
    parser.add_argument("--cpu", action="store_true", help="the trainer's machine has no GPU; one process trains")
    given = parser.parse_args()
    if given.cpu and given.processes > 1:
        parser.error("--processes is the number of GPUs: leave it out with --cpu")
    provider, tuned = given.out / "provider", given.out / "tuned"
    provider.mkdir(parents=True)

    # On the owner's machine. Only scrambled ids are in what it writes.
    rows, model, config = provider / "rows.jsonl", provider / "model", provider / "sft.yaml"
    run(MILKGLASS, "encode", "--in", given.rows, "--out", rows, "--layout", "jsonl", "--key", given.key)
    run(MILKGLASS, "export", given.scrambled, "--for", "transformers", "--out", model)
    settings = ["--epochs", given.epochs, "--batch-size", given.batch_size, "--learning-rate", given.learning_rate]
    run(MILKGLASS, "train-config", "trl", "--model", model, "--rows", rows, "--out", config, "--result", tuned,
        *settings, *(["--cpu"] if given.cpu else []))  # fmt: skip

    # On the provider's machine, which has neither the key nor Milkglass.
    device = ["--cpu"] if given.cpu else ["--multi_gpu"] if given.processes > 1 else []
    run(sys.executable, "-m", "accelerate.commands.launch", *device, "--num_machines", 1,
        "--mixed_precision", "no", "--dynamo_backend", "no", "--num_processes", given.processes,
        "-m", "trl.scripts.sft", "--config", config)  # fmt: skip

    for file in tuned.iterdir():  # engines of ids need the weights and the configuration, and refuse a tokenizer
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (
            "config.json", "generation_config.json", "model.safetensors.index.json",
        ):  # fmt: skip
            file.unlink()
    print(f"{tuned} is trained; serve it as {given.scrambled} was served, with the same key")


if __name__ == "__main__":
    main()
