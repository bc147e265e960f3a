"""Finds each token's shadows, near in embedding and far in meaning, as GHOST does (section 3.3, Algorithm 1).

N(t, k) are the k tokens of the largest cosine with t, without t. A neighbour t' of t is not its shadow if

    |N(t, k) & N(t', k)| / k > overlap        indirect similarity
    t is in N(t', k)                          direct similarity: t' is in N(t, k) anyway
    t and t' have one lemma                   lemma similarity

Each rule can be left out (Table 7). A token that keeps no neighbour is searched again with k + 10, ... k + 100. If it
still keeps none, it falls back to its k neighbours unfiltered, and is reported.

Deviations from the paper: the overlap is a share of k, as in the published code and as its threshold of 0.1 requires,
not a number of tokens; the paper widens the search without end. Special tokens, [unusedN] and rows without a token
are their own shadows and no other token's.

A search is cached under the digest of the table, the tokenizer and the parameters, as safetensors in `ghost/` of
Milkglass's cache. It follows from a public model and is not secret.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.models.array_cache import ArrayCache, Arrays, digest_of
from milkglass.nearest.all_rows import nearest
from milkglass.nearest.select import require_k
from milkglass.parameters import limited_field, require
from milkglass.sanitizers.table import SPACE_MARKERS, Ids, Mask, WordVectors
from milkglass.system import core_count

PIECE_MARKER = "##"  # WordPiece's mark of a token that continues a word
NeighbourIds = NDArray[np.int32]
WIDENING_STEP = 10  # neighbours by which the search is widened (Algorithm 1, line 18)
MAX_WIDENING = 100  # the most neighbours by which it is widened: the published code's limit
TOKENS_AT_A_TIME = 64  # tokens filtered at a time
FORMAT = "milkglass-shadows/1"
# The arrays of a file in the cache by their stored names: the fields of `Shadows`, with "fallen" for `fell_back`
ARRAY_DTYPES = {"ids": np.int32, "starts": np.int64, "reach": np.int32, "fallen": np.bool_}


def word_marker(tokens: Sequence[str]) -> str | None:
    """Returns the most frequent of PIECE_MARKER and SPACE_MARKERS, or None if no token has one."""
    counts = {
        mark: sum(token.startswith(mark) and len(token) > len(mark) for token in tokens)
        for mark in (PIECE_MARKER, *SPACE_MARKERS)
    }
    commonest = max(counts, key=lambda mark: counts[mark])
    return commonest if counts[commonest] else None


def is_word_start(tokens: Sequence[str]) -> NDArray[np.bool_]:
    """Returns (n,) whether each token, as its vocabulary spells it, begins a word."""
    mark = word_marker(tokens)
    if mark is None:
        return np.ones(len(tokens), np.bool_)
    return np.array([token.startswith(mark) for token in tokens]) != (mark == PIECE_MARKER)


def lemmas_of(tokens: Sequence[str], texts: Sequence[str], language: str = "en") -> NDArray[np.int64]:
    """Returns (n,) numbers, equal for tokens that are forms of one word (GHOST, sections 2.2 and 3.3).

    A token that begins a word has the lemma of its text by simplemma's dictionary. A token that continues a word is its
    own lemma. Words are compared in lower case. Pieces are recognised by the marker that most of a vocabulary's marked
    tokens have: WordPiece marks pieces (##ing); SentencePiece and byte-level BPE mark what begins a word, so that
    tokens without a mark are pieces. A vocabulary without markers has whole words only.

    Raises UsageError if simplemma lacks the language.
    """
    require_language(language)
    from simplemma import lemmatize

    numbers: dict[str, int] = {}
    lemma_numbers = np.empty(len(tokens), np.int64)
    for row, (token, text, begins_word) in enumerate(zip(tokens, texts, is_word_start(tokens), strict=True)):
        word = text.strip().lower()
        lemma = lemmatize(word, language).lower() if begins_word and word else token.lower()
        lemma_numbers[row] = numbers.setdefault(lemma, len(numbers))
    return lemma_numbers


def require_language(language: str) -> None:
    """Raises UsageError if there are no lemmas of a language."""
    from simplemma.strategies.dictionaries.dictionary_factory import SUPPORTED_LANGUAGES

    if language not in SUPPORTED_LANGUAGES:
        raise UsageError(
            f"there are no lemmas of the language {language!r}", f"languages: {', '.join(sorted(SUPPORTED_LANGUAGES))}"
        )


@dataclass(frozen=True)
class ShadowSearchSettings:
    """Holds the parameters of the search. The defaults are the paper's (5.5, A.1).

    Attributes:
        k: the number of neighbours, 1 to n - 1.
        overlap: the largest share of their k neighbours that a token and its shadow may have in common: tau_o, from 0
            to 1.
        indirect, direct, lemma: whether this similarity excludes a neighbour.
        language: the language of the lemmas, such as "en".
    """

    k: int = limited_field(70, least=1, hint="70 is the paper's choice")
    overlap: float = limited_field(0.1, most=1, hint="0.1 is the paper's choice")
    indirect: bool = True
    direct: bool = True
    lemma: bool = True
    language: str = "en"

    def __post_init__(self) -> None:
        require(self)
        if self.lemma:
            require_language(self.language)

    def document(self) -> dict[str, Any]:
        """Returns the settings as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Shadows:
    """Holds the shadows of every token, in one array.

    Attributes:
        ids: (total,) the shadows of token 0, of token 1, ..., nearest first.
        starts: (n + 1,) where each token's shadows begin.
        reach: (n,) how many neighbours were examined; 0: the token is its own shadow.
        fell_back: (n,) whether no neighbour passed, so that the first k are all shadows.
    """

    ids: NDArray[np.int32] = field(repr=False)
    starts: Ids = field(repr=False)
    reach: NDArray[np.int32] = field(repr=False)
    fell_back: Mask = field(repr=False)

    def __len__(self) -> int:
        return len(self.reach)

    def of(self, token: int) -> Ids:
        """Returns the shadows of this token; a special token's own id."""
        return self.ids[self.starts[token] : self.starts[token + 1]].astype(np.int64)

    @property
    def is_fixed(self) -> Mask:
        """Returns (n,) which tokens are their own shadows."""
        return self.reach == 0


def find_shadows(table: WordVectors, lemmas: Ids | None, settings: ShadowSearchSettings) -> Shadows:
    """Returns the shadows of every row of a table.

    Args:
        table: the words and their vectors.
        lemmas: (n,) the lemma's number of each token. None: `settings.lemma` must be False.
        settings: the parameters of Algorithm 1.

    Raises:
        UsageError: k does not fit the table, or lemmas are missing.
    """
    if settings.lemma and (lemmas is None or lemmas.shape != (len(table),)):
        raise UsageError(f"lemmas are missing for a table of {len(table)} tokens", "give one number a token")
    tokens = table.candidates
    require_k(settings.k, len(tokens) - 1, lowest=1)
    lemma_of_token = lemmas[tokens] if settings.lemma and lemmas is not None else None
    max_width = min(settings.k + MAX_WIDENING, len(tokens) - 1)
    nearest_lists = nearest(table.vectors[tokens], max_width)[0]  # all that may be asked for, at once
    lists, reach = [nearest_lists[place, :0] for place in range(len(tokens))], np.zeros(len(tokens), np.int32)
    without_shadows = np.arange(len(tokens))
    for k in range(settings.k, nearest_lists.shape[1] + WIDENING_STEP, WIDENING_STEP):
        width = min(k, nearest_lists.shape[1])
        is_kept = _is_shadow(nearest_lists[:, :width], without_shadows, lemma_of_token, settings)
        reach[without_shadows] = width
        for row in np.flatnonzero(is_kept.any(1)).tolist():
            lists[without_shadows[row]] = nearest_lists[without_shadows[row], :width][is_kept[row]]
        without_shadows = without_shadows[~is_kept.any(1)]
        if not len(without_shadows):
            break
    has_fallen_back = np.zeros(len(tokens), np.bool_)
    has_fallen_back[without_shadows] = True
    for place in without_shadows.tolist():
        lists[place] = nearest_lists[place, : settings.k]
    return _by_token(table, [tokens[neighbours] for neighbours in lists], reach, has_fallen_back)


def _is_shadow(nearest_lists: NeighbourIds, places: Ids, lemmas: Ids | None, settings: ShadowSearchSettings) -> Mask:
    """Returns (tokens, k) which neighbours of these tokens are shadows. `nearest_lists` is (m, k)."""
    blocks = [places[start : start + TOKENS_AT_A_TIME] for start in range(0, len(places), TOKENS_AT_A_TIME)]
    with ThreadPoolExecutor(core_count()) as pool:
        return np.concatenate([*pool.map(lambda block: _filter_block(nearest_lists, block, lemmas, settings), blocks)])


def _filter_block(nearest_lists: NeighbourIds, rows: Ids, lemmas: Ids | None, settings: ShadowSearchSettings) -> Mask:
    """Returns (rows, k) which neighbours of these rows pass the tests of lemmas, of direct and of indirect similarity.

    `settings` says which of the two similarity tests are made.
    """
    neighbours = nearest_lists[rows]
    is_shadow = np.ones(neighbours.shape, np.bool_) if lemmas is None else lemmas[neighbours] != lemmas[rows, None]
    if settings.direct:  # the cheaper reason first: the others are asked only where it leaves a neighbour
        row, column = np.nonzero(is_shadow)
        is_shadow[row, column] = (nearest_lists[neighbours[row, column]] != rows[row, None]).all(1)
    if settings.indirect:
        is_member = np.zeros((len(rows), len(nearest_lists)), np.uint8)
        np.put_along_axis(is_member, neighbours, 1, 1)
        row, column = np.nonzero(is_shadow)
        member_positions = nearest_lists[neighbours[row, column]]  # (pairs, k)
        member_positions += (row.astype(np.int32) * np.int32(len(nearest_lists)))[:, None]
        is_shadow[row, column] = (
            is_member.ravel().take(member_positions).sum(1, dtype=np.int32) / neighbours.shape[1] <= settings.overlap
        )
    return is_shadow


def _by_token(table: WordVectors, lists: list[Ids], reach: NDArray[np.int32], has_fallen_back: Mask) -> Shadows:
    """Returns the shadows by token id. Special tokens are their own shadows."""
    n = len(table)
    shadows_of_tokens = [np.array([token]) for token in range(n)]
    for token, shadows in zip(table.candidates.tolist(), lists, strict=True):
        shadows_of_tokens[token] = shadows
    starts = np.concatenate([[0], np.cumsum([len(shadows) for shadows in shadows_of_tokens])]).astype(np.int64)
    reach_by_token, fell_back = np.zeros(n, np.int32), np.zeros(n, np.bool_)
    reach_by_token[table.candidates], fell_back[table.candidates] = reach, has_fallen_back
    return Shadows(np.concatenate(shadows_of_tokens).astype(np.int32), starts, reach_by_token, fell_back)


# --- kept on disk -----------------------------------------------------------------------------------------------------


def search_digest(table: WordVectors, texts: Sequence[str], settings: ShadowSearchSettings) -> str:
    """Returns 64 hex digits of all that a search depends on. `texts` is what each token reads as."""
    digested = [
        FORMAT,
        [WIDENING_STEP, MAX_WIDENING],
        version("simplemma"),  # the dictionary
        settings.document(),
        list(table.words),
        list(texts),
        table.vectors.shape,
    ]
    return digest_of(digested, table.vectors, table.candidates.astype(np.int64))


def load_or_find_shadows(digest: str, size: int, make: Callable[[], Shadows], folder: Path | None = None) -> Shadows:
    """Returns the shadows of `size` tokens from the cache, or finds and stores them.

    Args:
        digest: what `search_digest` returned.
        size: the number of tokens.
        make: finds the shadows.
        folder: the cache's folder. None: that of Milkglass's cache.

    Raises:
        CorruptCheckpoint: the file in the cache is damaged.
    """
    cache = ArrayCache("ghost", ARRAY_DTYPES, folder)
    arrays = cache(digest, lambda: _arrays_of(make()), lambda stored: _is_complete(_shadows_of(stored), size))
    return _shadows_of(arrays)


def _arrays_of(shadows: Shadows) -> Arrays:
    """Returns the arrays of shadows by their stored names."""
    return {"ids": shadows.ids, "starts": shadows.starts, "reach": shadows.reach, "fallen": shadows.fell_back}


def _shadows_of(arrays: Arrays) -> Shadows:
    """Returns the shadows that stored arrays hold."""
    return Shadows(arrays["ids"], arrays["starts"], arrays["reach"], arrays["fallen"])


def _is_complete(shadows: Shadows, size: int) -> bool:
    """Returns whether every token has shadows, all of them tokens."""
    if not (shadows.starts.shape == (size + 1,) and shadows.reach.shape == shadows.fell_back.shape == (size,)):
        return False
    if shadows.starts[0] != 0 or shadows.starts[-1] != len(shadows.ids) or not (np.diff(shadows.starts) > 0).all():
        return False
    return bool(shadows.ids.min() >= 0 and shadows.ids.max() < size)
