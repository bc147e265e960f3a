"""Masks names, places, numbers and similar entities before a text is sent (sanitizers/masking.py).

The model is the public one. What is not recognised is sent as it is. The attack `mask-filling` guesses what was masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from milkglass.deadline import require_time
from milkglass.defences.obfuscated_tables import copy_base, public_codec, why_unsupported
from milkglass.defences.sanitized_text import ReplacedTextClient
from milkglass.defences.token_halves import TokenServer, read_client_half
from milkglass.errors import UnsupportedModel
from milkglass.models.checkpoint import Checkpoint
from milkglass.papers import Paper, unpublished_method
from milkglass.parameters import limited_field, require
from milkglass.sanitizers.masking import analyzer, masked_parts
from milkglass.threat.defence import Defence, LabelledTexts


@dataclass(frozen=True, kw_only=True)
class MaskingClient(ReplacedTextClient):
    """Masks what Presidio recognises before a text is encoded.

    Attributes:
        least: the score from which on an entity is masked.
    """

    least: float = field(repr=False)
    _cached_parts: dict[str, tuple[list[str], list[str]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # the parts of each masked text: a comparison trains with, asks about and attacks the same rows

    def rehearsal(self, seed: int) -> MaskingClient:
        """Returns this half itself: masking draws nothing at random, so that an attacker's masks are the same."""
        return self

    def parts(self, texts: Sequence[str]) -> list[tuple[list[str], list[str]]]:
        for text in texts:
            if text not in self._cached_parts:
                require_time()
                self._cached_parts[text] = masked_parts(text, self.least)
        return [self._cached_parts[text] for text in texts]


@dataclass(frozen=True)
class MaskedText(Defence):
    """Masks what Presidio recognises. It has no guarantee: a name that is not recognised is sent.

    Attributes:
        least: the score from which on an entity is masked, from 0 to 1.
    """

    least: float = limited_field(0.35, most=1, hint="Presidio's own default is 0, which masks more that is no name")

    name: ClassVar[str] = "masked"
    paper: ClassVar[Paper | None] = unpublished_method(
        "Microsoft Presidio's recognizers, with spaCy's small English model"
    )

    def __post_init__(self) -> None:
        require(self)

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "least": self.least}

    def refusal(self, base: Checkpoint) -> str | None:
        return why_unsupported(base)

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[MaskingClient, TokenServer]:
        if reason := self.refusal(base):
            raise UnsupportedModel(reason, "choose another model")
        analyzer()  # a missing library is an error before anything is written
        copy_base(base, folder)
        return self._client(base, secret), TokenServer(folder)

    def load(self, base: Checkpoint, client_folder: Path, server_folder: Path) -> tuple[MaskingClient, TokenServer]:
        secret, _ = read_client_half(client_folder, self.document())
        return self._client(base, secret), TokenServer(server_folder)

    def _client(self, base: Checkpoint, secret: bytes) -> MaskingClient:
        return MaskingClient(public_codec(base, secret), secret, self.document(), least=self.least)
