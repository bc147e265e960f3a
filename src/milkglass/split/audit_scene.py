"""The scene of an audit of two halves: what this client sends for the user's texts, and what rests on the server.

A random half of the texts is private, the other half plays the text of an attacker with text like the user's, as in an
audit of a key (audit/scene.py). Second texts of pairs are left out: each text is sent alone.

What this module does not know: which attacks are run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from milkglass.audit.defence_scene import WHO, scene_of
from milkglass.audit.scene import LEAST, Scene, require_texts
from milkglass.client.data.texts import examples_of
from milkglass.errors import CodecError, UsageError
from milkglass.hidden_states.tokens import PublicTokenizer
from milkglass.models.checkpoint import Checkpoint
from milkglass.split import folders
from milkglass.split.client import sendable
from milkglass.threat.defence import Client, Server

OTHER = "other text"


@dataclass(frozen=True)
class SplitScene:
    """scene, and how many texts of the file cannot be sent, too long for the model."""

    scene: Scene
    left_out: int


def build(
    base: Checkpoint,
    about: folders.ClientAbout,
    client: Client,
    server: Server,
    reader: PublicTokenizer,
    text: Path,
    public: Path | None,
    most: int | None,
    seed: int,
) -> SplitScene:
    """public: text of another kind. most: how many rows are read. Raises UsageError, CodecError."""
    texts = _texts(text, most)
    sent = _sendable(reader, texts)
    if len(sent) < LEAST:
        raise UsageError(
            f"{text.name} holds {len(sent)} of the {LEAST} texts that an audit needs",
            "an attacker's share of so few says nothing",
        )
    private, alike = _halves(sent, seed)
    known = {} if public is None else {OTHER: _sendable(reader, _texts(public, None))}
    known[WHO] = alike
    scene = scene_of(base, client, server, private, known)
    require_texts(scene, known)
    info = {"name": about.method, **about.parameters}
    return SplitScene(replace(scene, scheme=info, model=about.model), len(texts) - len(sent))


def _texts(path: Path, most: int | None) -> list[str]:
    examples = examples_of(path, most)
    if any(one.messages for one in examples):
        raise CodecError(f"{path.name} holds conversations", 'a classifier reads {"text": ...}')
    return [one.text for one in examples]


def _sendable(reader: PublicTokenizer, texts: Sequence[str]) -> list[str]:
    """Those that fit: a text that is refused tells nobody anything."""
    return [text for text, fits in zip(texts, sendable(reader, texts), strict=True) if fits]


def _halves(texts: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    middle = len(order) // 2
    return [texts[i] for i in order[:middle]], [texts[i] for i in sorted(order[middle:])]
