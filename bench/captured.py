"""Judges recorded traffic without the key, and compares the figures with an audit that has the client itself.

    python -m bench.captured rows.csv --rows 400 --work 60        writes recipes/results/captured.json

For each defence the real client half sends the rows once. What crossed goes into a captured file, which is attacked as
`milkglass audit --captured` does it, and as `audit_defence` does it with both halves and the same private half.
A figure is missing where an attack does not apply. Those that both have are compared: "figures that agree" differ by
MAX_APART at most.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from milkglass import files
from milkglass.attacks.catalogue import ATTACKS
from milkglass.audit import captured
from milkglass.audit.defence_scene import scene_of
from milkglass.audit.run import run
from milkglass.audit.scene import ALIKE, Scene
from milkglass.defences.catalogue import defence_of
from milkglass.defences.masked_text import MaskingClient
from milkglass.defences.undisturbed import Undisturbed
from milkglass.experiments.recipe import CUT_REASON
from milkglass.experiments.record import ResultRecord
from milkglass.experiments.runs import code_version
from milkglass.hidden_states.mechanism import HalvesTraining
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer
from milkglass.models.view import Model
from milkglass.papers import Paper
from milkglass.rows.data_file import DataFile
from milkglass.rows.examples import read_texts
from milkglass.sequences import Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.defence import Client, Defence, LabelledTexts, Server
from milkglass.threat.observations import Activations, Observation, Tokens, Weights
from tests.plugin.milkglass_example.shifted import Shifted

OUT = Path(__file__).parents[1] / "recipes" / "results" / "captured.json"
SECRET = bytes(range(32))
CAPTURED, WITH_MODEL, WITH_CLIENT = "captured", "captured, with the server's model", "with the client"
HOUSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"masked": True},
    "rnm": {"sanitizer": "rnm", "epsilon": 3.0},
    "obfuslm": {"k": 10, "epsilon": 0.1},
    "coarse": {"scheme": "coarse", "symbols": 16},
}
STATES_LAYERS = 1  # layers that the control runs whose states cross
VECTOR_WIDTH = 50  # numbers of each vector of the outside tables
MAX_APART = 0.1  # percentage points: two figures that differ by no more agree


@dataclass(frozen=True)
class Cipher(Defence):
    """A defence from outside, which shares no code with those of the house: id i is sent as (7 i + 1,000) mod n."""

    name: ClassVar[str] = "cipher"
    paper: ClassVar[Paper | None] = None

    def document(self) -> dict[str, Any]:
        return {"name": self.name}

    def refusal(self, base: Checkpoint) -> str | None:
        return None

    def split(self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path) -> tuple[Any, Any]:
        files.make_private_dir(folder)
        return CipherClient(load_tokenizer(base.folder), len(Model.open(base.folder).table)), CipherServer(folder)

    def load(self, base: Checkpoint, client_folder: Path, server_folder: Path) -> tuple[Any, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class CipherClient(Client):
    tokenizer: Any
    size: int

    def send(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Observation, ...]:
        return (Tokens(Sequences.of((7 * np.array(one) + 1000) % self.size for one in self._ids(texts))),)

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = self.tokenizer(list(texts), truncation=True)["input_ids"]
        return found

    def save(self, folder: Path) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class VectorTable(Cipher):
    """A defence from outside: each token is sent as a vector of its own, of another width than the model's.

    The server and the attacker do not know the table of vectors, which a fixed seed decides.

    Attributes:
        noise: the standard deviation of Gaussian noise on each number that is sent, where the vectors have 1.
    """

    noise: float = 0.0
    name: ClassVar[str] = "vector-table"

    def split(self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path) -> tuple[Any, Any]:
        client, server = super().split(base, corpus, secret, folder)
        return VectorTableClient(client.tokenizer, client.size, self.noise), server


@dataclass(frozen=True)
class CipherServer(Server):
    """A server whose disk the attacker has not."""

    folder: Path

    def stored_observations(self) -> tuple[Observation, ...]:
        return ()

    def answer(self, sent: tuple[Observation, ...]) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class VectorTableClient(CipherClient):
    noise: float

    def send(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> tuple[Observation, ...]:
        rng, ids = np.random.default_rng(3), self._ids(texts)
        table = rng.normal(size=(self.size, VECTOR_WIDTH))
        vectors = table[np.concatenate([np.array(one) for one in ids])]
        vectors = vectors + self.noise * rng.normal(size=vectors.shape)
        lengths = np.array([len(one) for one in ids], np.int64)
        return (Activations(torch.from_numpy(vectors.astype(np.float32)), lengths, 0),)


def defences() -> dict[str, Defence]:
    house = {name: defence_of(entry) for name, entry in HOUSE.items()}
    untrained = HalvesTraining(max_steps=1, max_length=256)  # what the layers send is read, and no answer is asked for
    house["states"] = Undisturbed(training=untrained, layer=STATES_LAYERS)
    outside = {
        "cipher (outside)": Cipher(), "vector table (outside)": VectorTable(),
        "vector table with noise (outside)": VectorTable(0.1),
    }  # fmt: skip
    return {**house, "shifted (plugin)": Shifted(), **outside}


def recorded(client: Client, texts: Sequence[str], path: Path) -> Path:
    """Writes what the client sends for each text: replaced text, ids, or vectors in files of their own."""
    field, sent = "sent", list[Any]()
    if isinstance(client, MaskingClient):
        sent += client.prepare(texts)
    for observation in [] if sent else client.send(texts):
        if isinstance(observation, Tokens):
            sent += [ids.tolist() for ids in observation.ids]
        elif isinstance(observation, Activations):
            field = "sent_file"
            for states in observation.hidden.split(observation.lengths.tolist()):
                sent.append(f"{len(sent)}.npy")
                np.save(path.parent / sent[-1], states.numpy())
    rows = (json.dumps({"text": text, field: one}) + "\n" for text, one in zip(texts, sent, strict=True))
    path.write_text("".join(rows), "utf-8")
    return path


def attacked(scene: Scene, names: Sequence[str], work: float, seed: int) -> Iterator[ResultRecord]:
    """Yields the share of tokens that each attack reads, in percent."""
    chosen = {name: ATTACKS[name] for name in names}
    for cell in run(scene, chosen, None, Budget.of_work(work), seed).results:
        if cell.state == "done" and (share := cell.measures.get("tokens top-1")) is not None:
            half_width = 50 * (share.high - share.low)
            yield ResultRecord(
                measure="tokens top-1", value=100 * share.value, attack=cell.attack, attacker=cell.adversary,
                half_width=None if math.isnan(half_width) else half_width,
                undefined=CUT_REASON if math.isnan(half_width) else "",
            )  # fmt: skip


def audits(
    base: Checkpoint, defence: Defence, texts: Sequence[str], names: Sequence[str], work: float, seed: int
) -> Iterator[ResultRecord]:
    """Yields the figures of the two or three audits of one defence; `when` says what the auditor had."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        client, server = defence.split(base, LabelledTexts(texts, [0, 1] * (len(texts) // 2)), SECRET, home / "server")
        rows = captured.read_captured(recorded(client, texts, home / "captured.jsonl"))
        order = np.random.default_rng(seed).permutation(len(texts))
        private, others = ([texts[i] for i in part] for part in (order[: len(texts) // 2], order[len(texts) // 2 :]))
        layer = STATES_LAYERS if isinstance(defence, Undisturbed) else 0
        scenes = {CAPTURED: captured.captured_scene(base, rows, seed, layer)}
        if rows[0].kind == "ids" and any(isinstance(one, Weights) for one in server.stored_observations()):
            served = Checkpoint.open(server.folder)
            scenes[WITH_MODEL] = captured.captured_scene(base, rows, seed, served=served)
        scenes[WITH_CLIENT] = scene_of(base, client, server, private, {ALIKE: others})
        for what_auditor_had, scene in scenes.items():
            for record in attacked(scene, names, work, seed):
                yield replace(record, when=what_auditor_had)


def agreement(records: Sequence[ResultRecord]) -> tuple[int, int]:
    """Returns how many figures of captured traffic the audit with the client has too, and how many of them agree.

    Where the server's model is known, it is given: the client's half and the server's are together then, too.
    """
    by_auditor = {
        when: {(one.attack, one.attacker): one.value for one in records if one.when == when}
        for when in (CAPTURED, WITH_MODEL, WITH_CLIENT)
    }
    seen, audited = by_auditor[WITH_MODEL] or by_auditor[CAPTURED], by_auditor[WITH_CLIENT]
    shared = [name for name in seen if name in audited]
    return len(shared), sum(abs(seen[name] - audited[name]) <= MAX_APART for name in shared)


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--model", default="demo:minilm")
    parser.add_argument("--rows", dest="count", type=int, default=800)
    parser.add_argument("--work", type=float, default=120.0, help="for the attacks of one audit, in seconds of a core")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="names with commas between")
    parser.add_argument("--attacks", default=",".join(ATTACKS), help="names with commas between")
    parser.add_argument("--out", type=Path, help="needed with --only, which measures a part")
    given = parser.parse_args(words)
    if given.only and given.out is None:
        parser.error("--only measures a part: give it an --out of its own")
    base = Checkpoint.open(resolve_model(given.model))
    texts = [one.text for one in read_texts(DataFile(given.rows))][: given.count]
    chosen = [one for one in defences() if not given.only or one in given.only.split(",")]
    made, started, figures = code_version(), time.monotonic(), list[ResultRecord]()
    for name in chosen:
        of_defence = list[ResultRecord]()
        for record in audits(base, defences()[name], texts, given.attacks.split(","), given.work, given.seed):
            of_defence.append(replace(record, variant=name))
            print(f"{name}, {record.attack}, {record.attacker}, {record.when}: {record.value:.1f} %", flush=True)
        counts = zip(("figures of both", "figures that agree"), agreement(of_defence), strict=True)
        figures += [*of_defence, *(ResultRecord(measure=noun, value=count, variant=name) for noun, count in counts)]
        print(f"{name}: {figures[-1].value:.0f} of {figures[-2].value:.0f} figures agree", flush=True)
    settings = {"model": given.model, "texts": len(texts), "work": given.work, "seed": given.seed}
    document = {
        "recipe": (given.out or OUT).stem,
        **settings,
        "made": made,
        "seconds": round(time.monotonic() - started),
    }
    document["figures"] = [record.round_to(1).to_json() for record in figures]
    files.write(given.out or OUT, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
