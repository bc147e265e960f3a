"""Builds the scene of an audit of two halves: what the client sends for the user's texts, and what the server stores.

A random half of the texts is private. The other half is the text of an attacker who has text like the user's, as in an
audit of a key (audit/key_scene.py). Second texts of pairs are left out: each text is sent alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from milkglass.audit.defence_scene import scene_of
from milkglass.audit.key_scene import AuditFiles
from milkglass.audit.scene import ALIKE, OTHER, Scene, require_enough_texts, require_texts
from milkglass.errors import CodecError
from milkglass.hidden_states.client import EncoderClient
from milkglass.hidden_states.tokens import PublicTokenizer
from milkglass.models.checkpoint import Checkpoint
from milkglass.rows.data_file import Source
from milkglass.rows.examples import examples_of
from milkglass.split import folders
from milkglass.split.client import are_short_enough
from milkglass.threat.defence import Server


@dataclass(frozen=True)
class SplitScene:
    """Holds a scene, and the number of texts of the user's file that are too long to be sent."""

    scene: Scene
    left_out_count: int


def encoder_scene(
    base: Checkpoint, description: folders.ClientDescription, client: EncoderClient, server: Server, files: AuditFiles
) -> SplitScene:
    """Builds the scene of an audit of two halves of `base`.

    Raises:
        UsageError: there is too little text for an audit.
        CodecError: a text cannot be read.
    """
    texts = read_texts(files.text, files.max_rows)
    private_texts, alike_texts = private_and_other_texts(_sendable_texts(client.reader, texts), files)
    attackers = {} if files.public is None else {OTHER: _sendable_texts(client.reader, read_texts(files.public, None))}
    attackers[ALIKE] = alike_texts
    scene = scene_of(base, client, server, private_texts, attackers)
    require_texts(scene, attackers)
    scheme = {"name": description.method, **description.parameters}
    scene = replace(scene, scheme=scheme, model=description.model)
    return SplitScene(scene, len(texts) - len(private_texts) - len(alike_texts))


def read_texts(source: Source, max_texts: int | None) -> list[str]:
    """Reads the texts of a user's file, at most `max_texts`. Raises CodecError for conversations."""
    examples = examples_of(source, max_texts)
    if any(example.messages for example in examples):
        raise CodecError(f"{source.name} holds conversations", 'a classifier reads {"text": ...}')
    return [example.text for example in examples]


def _sendable_texts(reader: PublicTokenizer, texts: Sequence[str]) -> list[str]:
    """Returns the texts that are short enough to be sent. The others reveal nothing."""
    return [text for text, is_sendable in zip(texts, are_short_enough(reader, texts), strict=True) if is_sendable]


def private_and_other_texts(texts: Sequence[str], files: AuditFiles) -> tuple[list[str], list[str]]:
    """Returns a random half of the texts, which is private, and the others. Raises UsageError if there are too few."""
    require_enough_texts(texts, files.text.name)
    order = np.random.default_rng(files.seed).permutation(len(texts)).tolist()
    middle = len(order) // 2
    return [texts[number] for number in order[:middle]], [texts[number] for number in sorted(order[middle:])]
