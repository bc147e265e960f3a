"""Maps texts to the ids, and the text, of their shadows: GHOST (Feng et al., ASIA CCS '26).

The ids are the result, special tokens included, and go into the model unchanged. The text is how they read; a tokenizer
may split it otherwise (docs/papers/ghost.md). The start of a sentence is drawn by a generator of the seed and the
sentence, so that neither the other sentences nor their order change a result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from milkglass import papers
from milkglass.errors import EmptyText, IdOutOfRange, TooLong, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.tokenizer import token_limit
from milkglass.noise.stream import Stream
from milkglass.papers import Paper
from milkglass.sanitizers.ghost.search import (
    Shadows,
    ShadowSearchSettings,
    find_shadows,
    lemmas_of,
    load_or_find_shadows,
    search_digest,
)
from milkglass.sanitizers.ghost.selection import SelectedShadow, SelectionSettings, draw_shadows, nearest, select
from milkglass.sanitizers.ghost.states import HeadlessModel
from milkglass.sanitizers.table import open_table, table_of
from milkglass.sequences import Ids, Sequences


@dataclass(frozen=True, eq=False)
class Shadow:
    """Holds a text's shadow.

    Attributes:
        original: (t,) the text's own ids.
        text: how the shadow reads.
        choice: the shadow's ids, and how they were selected.
    """

    original: Ids = field(repr=False)
    text: str = field(repr=False)
    choice: SelectedShadow

    @property
    def ids(self) -> Ids:
        return self.choice.ids


@dataclass(frozen=True, eq=False)
class Ghost:
    """Replaces the tokens of texts by their shadows, by GHOST over one model.

    Nothing is guaranteed: anyone can try texts and see whether they give a similar shadow.

    Attributes:
        folder: the model's folder.
        name: what reports call the model.
        digest: the digest of the search.
        tokenizer: the model's own.
        candidates: each token's shadows.
        network: computes hidden states. None: they are not needed.
        limit: the most tokens of a text.
        seed: decides the random starts. Whoever has it can see whether a text gives exactly this shadow.
        search_settings, selection: the parameters of the search and of the selection.
        cuts_texts: whether a text of more tokens loses its end. Otherwise it is refused.
    """

    folder: Path = field(repr=False)
    name: str
    digest: str = field(repr=False)
    tokenizer: Any = field(repr=False)
    candidates: Shadows = field(repr=False)
    network: HeadlessModel | None = field(repr=False)
    limit: int
    seed: int = field(repr=False)
    search_settings: ShadowSearchSettings = ShadowSearchSettings()
    selection: SelectionSettings = SelectionSettings()
    cuts_texts: bool = False

    paper: ClassVar[Paper] = papers.GHOST.with_deviations(
        "The overlap of neighbourhoods is a share of k, as in the published code, not a number of tokens.",
        "The search ends at k + 100 neighbours, as in the published code; tokens that fall back are reported.",
        "Special tokens, [UNK] and [unusedN] are their own shadows and no other token's.",
        "Hidden states are compared without padding; the published code's loss depends on the longest text.",
        "A selection stops after a sweep that changes little, as in the published code, not after a position.",
        "Lemmas are compared in small letters. The result is ids: text that is decoded may be cut otherwise.",
    )

    @classmethod
    def open(
        cls, folder: Path, search_settings: ShadowSearchSettings = ShadowSearchSettings(),
        selection: SelectionSettings = SelectionSettings(), seed: int = 0, name: str | None = None,
        cache_folder: Path | None = None,
    ) -> Ghost:  # fmt: skip
        """Opens GHOST for a model folder.

        Args:
            folder: the model's folder.
            search_settings: the parameters of the search.
            selection: the parameters of the selection.
            seed: decides the random starts.
            name: what reports call the model. None: the folder's name.
            cache_folder: where searches are cached. None: Milkglass's cache.

        Raises:
            BadTable, UnsupportedModel: the model cannot be used.
            UsageError: k does not fit the vocabulary.
        """
        tokenizer, vectors = open_table(folder)
        table = table_of(tokenizer, vectors, name or folder.name)
        texts = tokenizer.batch_decode([[i] for i in range(min(len(tokenizer), len(vectors)))])
        texts += [""] * (len(vectors) - len(texts))

        def make() -> Shadows:
            lemmas = lemmas_of(table.words, texts, search_settings.language) if search_settings.lemma else None
            return find_shadows(table, lemmas, search_settings)

        digest = search_digest(table, texts, search_settings)
        shadows = load_or_find_shadows(digest, len(table), make, cache_folder)
        network = HeadlessModel.open(folder) if selection.way == "states" else None
        limit = token_limit(folder, tokenizer)
        return cls(folder, table.name, digest, tokenizer, shadows, network, limit, seed, search_settings, selection)

    def shadows(self, ids: Sequences) -> Sequences:
        """Returns each sequence's shadow, of the same length. Raises IdOutOfRange, TooLong."""
        return Sequences.of(choice.ids for choice in self.choices(ids))

    def choices(self, ids: Sequences) -> list[SelectedShadow]:
        """Returns each sequence's shadow and how it was selected.

        Raises IdOutOfRange, TooLong; if shadows are selected by hidden states also EmptyText, and UsageError without a
        network.
        """
        if ids.ids.size and not 0 <= ids.ids.min() <= ids.ids.max() < len(self.candidates):
            raise IdOutOfRange(f"an id is outside 0 to {len(self.candidates) - 1}", "give ids of this model")
        _require_short(ids, self.limit)
        originals = [*ids]
        if self.selection.way == "nearest":
            return [SelectedShadow(nearest(original, self.candidates)) for original in originals]
        starts = [draw_shadows(original, self.candidates, self._stream(original)) for original in originals]
        if self.selection.way == "random":
            return [SelectedShadow(shadow_ids) for shadow_ids in starts]
        if self.network is None:
            raise UsageError("no model was opened for a selection by hidden states", "use Ghost.open")
        if (ids.lengths == 0).any():
            raise EmptyText.of(int((ids.lengths == 0).argmax()), "has no token", "leave empty texts out")
        return select(self.network, self.candidates, originals, starts, self.selection)

    def sanitize(self, texts: Sequence[str]) -> list[Shadow]:
        """Returns each text's shadow. Raises EmptyText, TooLong with the text's number, from 1."""
        originals = self.encode(texts)
        choices = self.choices(originals)
        return [Shadow(ids, self.read(choice.ids), choice) for ids, choice in zip(originals, choices, strict=True)]

    def encode(self, texts: Sequence[str]) -> Sequences:
        """Returns token ids, special ones included. What looks like a special token in a text is treated as text.

        Raises EmptyText, TooLong with the text's number, from 1.
        """
        return encode(self.tokenizer, texts, self.limit, self.cuts_texts)

    def read(self, ids: Ids) -> str:
        """Returns ids as text, without special tokens."""
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False).strip()

    def document(self) -> dict[str, Any]:
        """Returns the parameters, for a report."""
        parameters = {"search": self.search_settings.document(), "selection": self.selection.document()}
        return {"method": "ghost", "model": self.name, **parameters}

    def job_digest(self, parts: list[Any], seed: int | None) -> str:
        """Returns a digest of what is sanitized, the model, the parameters and the seed, if there is one."""
        base = Checkpoint.open(self.folder)
        identity = [*parts, base.digest(), base.config, self.digest, self.document(), seed]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def _stream(self, ids: Ids) -> Stream:
        """Returns the stream of the random start of a sentence (t,)."""
        return Stream.of_seed("ghost", self.seed, ids.astype("<i8").tobytes())


def encode(tokenizer: Any, texts: Sequence[str], limit: int, cuts_texts: bool = False) -> Sequences:
    """Returns the ids of texts, special ones included. What looks like a special token in a text is treated as text.

    Args:
        limit: the most tokens of a text.
        cuts_texts: whether a text of more tokens loses its end. Otherwise it is refused.

    Raises:
        EmptyText, TooLong: a text has no token, or too many. The message has its number, from 1.
    """
    if not texts:
        return Sequences.of([])
    truncation = {"truncation": True, "max_length": limit} if cuts_texts else {"truncation": False}
    ids = Sequences.of(tokenizer(list(texts), split_special_tokens=True, **truncation)["input_ids"])
    is_empty = ids.lengths <= tokenizer.num_special_tokens_to_add(pair=False)
    if is_empty.any():
        raise EmptyText.of(int(is_empty.argmax()), "has no token", "leave empty texts out")
    _require_short(ids, limit)
    return ids


def _require_short(ids: Sequences, limit: int) -> None:
    """Raises TooLong for the first text of more than `limit` tokens."""
    if (ids.lengths > limit).any():
        first = int((ids.lengths > limit).argmax())
        fault = f"is {ids.lengths[first]} tokens long, at most {limit} fit"
        raise TooLong.of(first, fault, "split it into shorter texts")
