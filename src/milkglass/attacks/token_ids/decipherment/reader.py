"""Reads texts of public ids with a causal language model, whose tokenizer may be another one.

A model with another vocabulary reads *text*, so public ids are spelled. Each has a fixed row of the reader's ids after
a space, and another where it continues a word (`##` pieces, punctuation that joins what precedes it, whatever follows
an opening bracket). A text is the concatenation of these rows. So the state before each public id is known, and the
*first* of its reader's ids is judged. If the reader is the public model, each id spells itself.

    ratio(place, b) = h . H[first(b)] - log mean over other places of softmax(h' . H)[first(b)]

h is the reader's state before the place, H its head. Up to a constant for each place this is the logarithm of
P(first(b) | what precedes) / P(first(b)), since a token that is common everywhere reveals nothing about this place. A
spelling from pieces is not always the one on which the reader was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from milkglass import device
from milkglass.attacks import work
from milkglass.attacks.forward import batches, body, places, public_head, stack, why_no_head
from milkglass.attacks.token_ids.decipherment.bigrams import Floats
from milkglass.models.families import family_of
from milkglass.models.file_names import TOKENIZER
from milkglass.models.resolve import EMBEDDED, is_available_offline, resolve_model
from milkglass.models.view import Model
from milkglass.sequences import Ids, Sequences
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF
from milkglass.threat.knowledge import require_known

CLINGING = frozenset(".,;:!?')]}%")  # characters that are written without a space before them
OPENING = frozenset("'([{$#")  # characters that are written without a space after them
WINDOW_TOKENS = 256  # a longer text is read in parts
MIN_PROBABILITY = 1e-7  # added to each id's mean probability, so that its logarithm is finite
PLACES_AVERAGED = 512  # places over which the probabilities of ids are averaged
IDS_AT_A_TIME = 1024  # ids read in one run of the model


@dataclass(frozen=True)
class Spelling:
    """Spells public ids in the reader's ids.

    Attributes:
        rows: the reader's ids for every public id, in two lists: after a space, and joined to what precedes.
        first_ids: (2, n) the first of the reader's ids in each row of both lists.
        clings, opens: (n,) whether a public id is joined to what precedes it, and to what follows it.
        is_silent: (n,) whether a public id is spelled as nothing.
    """

    rows: tuple[list[Ids], list[Ids]]
    first_ids: Ids
    clings: NDArray[np.bool_]
    opens: NDArray[np.bool_]
    is_silent: NDArray[np.bool_]

    @classmethod
    def identity(cls, size: int) -> Spelling:
        """Returns the spelling in which each of n = `size` public ids is the reader's own id."""
        rows = list(np.arange(size, dtype=np.int64)[:, None])
        all_false = np.zeros(size, np.bool_)
        return cls((rows, rows), np.tile(np.arange(size, dtype=np.int64), (2, 1)), all_false, all_false, all_false)

    @classmethod
    def from_tokenizers(cls, tokenizer: Tokenizer, reader: Tokenizer, size: int, anchor: int) -> Spelling:
        """Returns the spelling of one tokenizer's ids by another.

        Args:
            tokenizer: that of the public ids.
            reader: the reader's.
            size: n, the number of public ids.
            anchor: a public id that is a word. The text that another id adds after it shows how that id is written.
        """
        anchor_length = len(tokenizer.decode([anchor]))
        added = [text[anchor_length:] for text in tokenizer.decode_batch([[anchor, i] for i in range(size)])]
        stripped = [text.strip() for text in added]
        special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special and i < size]
        silent = np.array([not text for text in stripped], np.bool_)
        silent[special] = True
        rows = tuple(
            [np.array(encoding.ids, np.int64) for encoding in reader.encode_batch(texts, add_special_tokens=False)]
            for texts in ([f" {text}" for text in stripped], stripped)
        )
        silent |= np.array([not len(a) or not len(b) for a, b in zip(*rows, strict=True)], np.bool_)
        first = np.array([[row[0] if len(row) else 0 for row in column] for column in rows], np.int64)
        clings = np.array(
            [not a.startswith(" ") or b in CLINGING for a, b in zip(added, stripped, strict=True)], np.bool_
        )
        return cls((rows[0], rows[1]), first, clings, np.array([b in OPENING for b in stripped], np.bool_), silent)

    def spell(self, ids: Ids, begin: int) -> tuple[Ids, Ids, NDArray[np.bool_]]:
        """Spells a text (t,) of public ids in the reader's ids, after the id `begin`.

        Returns:
            The reader's ids; (t,) the place of the reader's id that predicts each public id, NO_BELIEF for one that is
                not spelled; (t,) whether each follows one after which no space is written.
        """
        rows, predicting_places, joined = [np.array([begin])], np.full(len(ids), NO_BELIEF), []
        length, is_joined = 1, True
        for index, token in enumerate(ids.tolist()):
            joined.append(is_joined)
            if token == NO_BELIEF or self.is_silent[token]:
                continue
            row = self.rows[int(is_joined or self.clings[token])][token]
            predicting_places[index] = length - 1
            length += len(row)
            is_joined = bool(self.opens[token])
            rows.append(row)
        return np.concatenate(rows), predicting_places, np.array(joined, np.bool_)


@dataclass(frozen=True)
class ReadBatch:
    """Holds the reader's states at some places of texts.

    Attributes:
        places: (m,) the places among all tokens of the texts.
        states: (m, d) the state before each place.
        is_joined: (m,) whether each place is joined to what precedes it.
    """

    places: Ids
    states: torch.Tensor
    is_joined: NDArray[np.bool_]

    def select(self, is_selected: NDArray[np.bool_]) -> ReadBatch:
        """Returns the places where `is_selected` (m,) is true."""
        return ReadBatch(
            self.places[is_selected], self.states[torch.from_numpy(is_selected)], self.is_joined[is_selected]
        )


class CausalReader:
    """Reads texts of public ids with a causal model.

    Attributes:
        model: the causal model without its head.
        head: (V, d) the output embeddings of the model's V ids.
        begin: the model's id before every text.
        spelling: spells public ids in the model's ids.
        budget: counts the work.
    """

    def __init__(self, model: Model, spelling: Spelling, budget: Budget) -> None:
        begin = model.config.get("bos_token_id")
        if begin is None:
            begin = model.config.get("eos_token_id")
        self.begin = int((begin[0] if isinstance(begin, list) else begin) or 0)
        self.head, self.spelling = public_head(model), spelling
        self.model, self.budget = body(model), budget

    @classmethod
    def of(cls, public: Model, name: str, corpus: Sequences, budget: Budget) -> CausalReader:
        """Returns the public model as a reader if it is causal, else the model `name`. Call `why_no_reader` before.

        What it reads is counted in the budget.
        """
        size = len(public.table)
        if family_of(public.config).kind == "decoder":
            return cls(public, Spelling.identity(size), budget)
        folder = resolve_model(name)
        own_tokenizer = tokenizer_of(require_known(public.folder))
        common = np.argsort(-corpus.counts(size), kind="stable").tolist()
        anchor = next((token for token in common if own_tokenizer.decode([token]).isalpha()), common[0])
        spelling = Spelling.from_tokenizers(own_tokenizer, tokenizer_of(folder), size, anchor)
        return cls(Model.open(folder), spelling, budget)

    @torch.inference_mode()
    def read_texts(self, texts: Sequences, text_indices: Ids) -> Iterator[ReadBatch]:
        """Yields the states before the places of some texts of public ids.

        Args:
            texts: public ids, or NO_BELIEF at a place that is left out.
            text_indices: the indices of the texts to read.
        """
        starts = np.cumsum(texts.lengths) - texts.lengths
        max_length = min(WINDOW_TOKENS, int(getattr(self.model.config, "max_position_embeddings", WINDOW_TOKENS)))
        lines, places_in_lines, joined, public_places = [], [], [], []
        for index in text_indices.tolist():
            ids = texts.ids[starts[index] : starts[index] + texts.lengths[index]]
            line, predicting_places, joined_of_text = self.spelling.spell(ids, self.begin)
            for start in range(0, len(line), max_length):
                is_inside = (predicting_places >= start) & (predicting_places < start + max_length)
                lines.append(line[start : start + max_length])
                places_in_lines.append(predicting_places[is_inside] - start)
                joined.append(joined_of_text[is_inside])
                public_places.append(starts[index] + np.flatnonzero(is_inside))
        line_texts, predicting = Sequences.of(lines), Sequences.of(places_in_lines)
        all_places = np.concatenate([np.empty(0, np.int64), *public_places])
        all_joined = np.concatenate([np.empty(0, np.bool_), *joined])
        for line_numbers in batches(line_texts, IDS_AT_A_TIME):
            hidden = self.model(input_ids=stack(line_texts, line_numbers)).last_hidden_state
            self.budget.spend(work.forward(self.model, int(line_texts.lengths[line_numbers].sum())))
            rows = np.repeat(np.arange(len(line_numbers)), predicting.lengths[line_numbers])
            if not len(rows):
                continue
            nonempty = line_numbers[predicting.lengths[line_numbers] > 0]
            selected = np.concatenate([places(predicting, nonempty[[i]]) for i in range(len(nonempty))])
            yield ReadBatch(all_places[selected], hidden[rows, predicting.ids[selected]].float(), all_joined[selected])

    @torch.inference_mode()
    def log_mean_probability(self, states: torch.Tensor) -> Floats:
        """Returns (V,) the logarithm of the mean probability of each of the model's ids, over states (m, d)."""
        self.budget.spend(work.comparisons(states, self.head))
        total = sum((torch.softmax(part @ self.head.T, 1).sum(0) for part in states.split(64)), self.head.new_zeros(1))
        return np.log(device.array(total.double()) / max(1, len(states)) + MIN_PROBABILITY)

    @torch.inference_mode()
    def log_normaliser(self, states: torch.Tensor) -> Floats:
        """Returns (m,) the logarithm of the softmax's denominator, for states (m, d).

        It is the constant of each place that `log_likelihood_ratio` leaves out.
        """
        self.budget.spend(work.comparisons(states, self.head))
        log_sums = [torch.logsumexp(part @ self.head.T, 1) for part in states.split(64)]
        return device.array(torch.cat([states.new_zeros(0), *log_sums]).double())

    @torch.inference_mode()
    def log_likelihood_ratio(self, read: ReadBatch, options: Ids, log_mean: Floats) -> Floats:
        """Returns (m, w) the log-likelihood ratio of the module's formula, up to a constant for each place.

        Args:
            read: the states before the places.
            options: (m, w) public ids to be judged at each place.
            log_mean: (V,) from `log_mean_probability`.
        """
        joined = read.is_joined[:, None] | self.spelling.clings[options]
        first_ids = self.spelling.first_ids[joined.astype(np.int64), options]
        self.budget.spend(work.CALL_SECONDS + work.elements(first_ids.size * read.states.shape[1]))
        logits = torch.einsum("md,mwd->mw", read.states, self.head[torch.from_numpy(first_ids)])
        return device.array(logits.double()) - log_mean[first_ids]


def missing_reader(public: Model, name: str) -> str | None:
    """Returns the name of the embedded model that would read for the public model, if it is not on this machine."""
    is_needed = family_of(public.config).kind != "decoder" and name in EMBEDDED
    return name if is_needed and not is_available_offline(name) else None


def why_no_reader(public: Model, name: str) -> str | None:
    """Returns why neither the public model nor the model `name` can read the public model's ids, or None."""
    if family_of(public.config).kind == "decoder":
        return why_no_head(public)
    if public.folder is None or not (public.folder / TOKENIZER).is_file():
        return "the public model is an encoder, and without its tokenizer no other model can read for it"
    if not (is_available_offline(name) if name in EMBEDDED else (Path(name) / TOKENIZER).is_file()):
        return f"the public model is an encoder, and {name}, which would read for it, is not there"
    if name not in EMBEDDED and why_no_head(Model.open(Path(name))):
        return f"{name}, which would read for the encoder, has no head"
    return None


def tokenizer_of(folder: Path) -> Tokenizer:
    """Reads a folder's tokenizer.json, without padding and truncation."""
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
