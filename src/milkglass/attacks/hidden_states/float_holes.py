"""Reads noisy states by the numbers that floating-point noise cannot produce, which identify the input.

A state is sent as y = fl(x f + fl(s z)), with x the state of a token at its place and f the factor by which the text
was clipped. For a wrong token or factor, about one coordinate in ten of y is a number that the noise cannot produce
(`Holes`); for the right ones none is. With hundreds of coordinates one state identifies a token, whatever the noise's
width is, and with it epsilon:

    f        of all fp32 numbers between two bounds the one that the known first row of the text does not rule out
    token    at each place, of all tokens the one that its row does not rule out

Guarantees of differential privacy are about real numbers. Noise that is drawn and added on a grid, as in Milkglass, has
no holes, and no factor fits: the attack ends, or with `always` guesses nevertheless. It needs states that follow from a
token and its place alone, those of layer 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from milkglass import device, papers
from milkglass.attacks import work
from milkglass.attacks.forward import body
from milkglass.attacks.gradients.float_holes_rows import MIN_HOLE_SHARE, Floats, Holes
from milkglass.attacks.hidden_states.near_hidden import common_ends, embed_vocabulary
from milkglass.attacks.hidden_states.own_states import why_no_token_states
from milkglass.models.families import family_of
from milkglass.models.view import Model
from milkglass.noise.grid import AddedNoise
from milkglass.sequences import Ids
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Activations, Transcript

COORDINATES_AT_A_TIME = 16  # coordinates looked at before tokens are dropped
FACTORS_AT_A_TIME = 1 << 16  # factors tested at a time: their arrays fit a processor's cache
MAX_SLIPS = 1  # coordinates that may rule the right factor out: a state's last bit depends on the library that made it
MAX_COORDINATES_BEHIND = 3  # a token stays if at most so many more coordinates rule it out than the best one
MAX_FACTORS, ROWS_TRIED = 9, 2  # factors that the first row does not separate, and rows on which they are compared
PASSES_PER_TEST = 4  # passes over its numbers that one test takes, for the budget
COORDINATES_TESTED = 12  # coordinates at which a factor is tested on average, for the budget
FACTOR_STEP = 1 << 10  # where no factor fits, one of so many is tried


@dataclass(frozen=True)
class FloatHoles(Attack):
    """Reads each noisy state as the token from which floating-point noise can lead to it.

    Attributes:
        k: the number of ranks of the guess.
        patience: after so many texts without a fitting factor the attack ends, since this noise has no holes.
        always: whether to guess by the best factor even if none fits, and never to end early.
    """

    k: int = 10
    patience: int = 2
    always: bool = False

    name = "float-holes"
    title = "Holes of floating-point noise"
    paper = papers.FLOAT_HOLES.with_deviations(
        "Each token is tested against all others by hundreds of coordinates, where the paper tests one number."
    )
    sees = frozenset({Activations})
    assumes = frozenset({"public_model", "corpus", "noise"})
    min_seconds = 20.0  # seconds for one text of MiniLM

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        public_model = require_known(knowledge.public_model)
        family = family_of(public_model.config)
        if family.kind != "encoder":
            return f"{family.name} is a decoder, and states are sent by encoders"
        if any(activations.layer for activations in transcript.all(Activations)):
            return "the states follow from whole texts, and no list of texts is tried"
        if Holes(np.float32(require_known(knowledge.noise).width)).share < MIN_HOLE_SHARE:
            return "noise of this width reaches every number"
        if not len(common_ends(knowledge.corpus)[0]):
            return "public texts do not all begin with the same token"
        return why_no_token_states(transcript, public_model.width)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        first = int(common_ends(knowledge.corpus)[0][0])
        reader = _Reader(require_known(knowledge.public_model), require_known(knowledge.noise), first, self)
        guesses = [reader.read(activations, budget) for activations in transcript.all(Activations)]
        return Guess(by_token=np.concatenate(guesses))


class _Reader:
    """Reads the tokens of texts by the numbers that noise of one width cannot produce.

    Attributes:
        size: n, the number of public tokens.
        first: the id with which every text begins.
        position_offset: the position of a text's first token in the model.
        states: the states (n, d) of all tokens, by place. Only those of the place that was last asked for are kept.
    """

    def __init__(self, public: Model, noise: AddedNoise, first: int, attack: FloatHoles) -> None:
        self.size, self.first, self.attack, self.noise = len(public.table), first, attack, noise
        self.holes = Holes(np.float32(noise.width))
        self.runner = body(public, 0)
        self.position_offset = max(family_of(public.config).pinned(public.config), default=-1) + 1
        self.states: dict[int, Floats] = {}

    def read(self, activations: Activations, budget: Budget) -> Ids:
        """Returns (rows, k) public ids, NO_BELIEF for texts that time did not reach or that no factor fits."""
        rows = device.array(activations.hidden.float())
        guess = np.full((len(rows), min(self.attack.k, self.size)), NO_BELIEF, np.int64)
        text_ends, failed_count, has_found_factor = np.cumsum(activations.lengths), 0, False
        for number, (start, stop) in enumerate(zip(text_ends - activations.lengths, text_ends, strict=True)):
            is_hopeless = failed_count == self.attack.patience and not has_found_factor and not self.attack.always
            if budget.left() <= 0 or is_hopeless:
                break
            factor = self.clip_factor(rows[start:stop], budget)
            if factor is None:
                failed_count += 1
            else:
                has_found_factor = True  # there are holes
                for place in range(int(stop - start)):
                    guess[start + place] = self.least_excluded_tokens(rows[start + place], place, factor)[0]
                    budget.spend(work.elements(self.size * (rows.shape[1] + PASSES_PER_TEST * COORDINATES_AT_A_TIME)))
            budget.progress((number + 1) / len(activations.lengths))
        return guess

    def states_at(self, place: int) -> Floats:
        """Returns (n, d) the states of all tokens at a place, clipped if the defence clips rows."""
        if place not in self.states:
            states = device.array(embed_vocabulary(self.runner, self.size, place + self.position_offset))
            if self.noise.clip is not None and self.noise.clip_scope == "row":
                mean_abs = np.abs(states).mean(1, keepdims=True, dtype=np.float32)
                states = states * np.minimum(np.float32(self.noise.clip) / mean_abs, np.float32(1))
            self.states = {place: states}  # one is tens of megabytes
        return self.states[place]

    def clip_factor(self, rows: Floats, budget: Budget) -> np.float32 | None:
        """Returns the factor by which a text was clipped, from its rows (t, d), or None if none fits the first row."""
        if self.noise.clip is None or self.noise.clip_scope != "text":
            return np.float32(1)
        row = rows[0]
        factors, likeliest_factor = self._possible_factors(len(rows))
        blocks = np.array_split(factors, -(-len(factors) // FACTORS_AT_A_TIME))
        least_count, best_factors = MAX_SLIPS + 1, factors[:0]
        for block in sorted(blocks, key=lambda part: abs(float(part[0]) - likeliest_factor)):
            fitting, counts = self._fitting_factors(block, row, MAX_SLIPS)
            budget.spend(work.elements(COORDINATES_TESTED * PASSES_PER_TEST * len(block)))
            if len(counts) and counts.min() < least_count:
                least_count, best_factors = int(counts.min()), fitting[counts == counts.min()]
            if not least_count or budget.left() <= 0:
                break  # a wrong factor is almost always ruled out, so this one is right
        if not len(best_factors) and self.attack.always:
            fitting, counts = self._fitting_factors(factors[::FACTOR_STEP], row, len(row))
            best_factors = fitting[counts == counts.min()]
        return self._best_factor(best_factors, rows[1 : 1 + ROWS_TRIED]) if len(best_factors) else None

    def _best_factor(self, factors: Floats, rows: Floats) -> np.float32:
        """Returns, of factors that the first row does not separate, the one that fits the next rows best."""
        tried = factors[np.unique(np.linspace(0, len(factors) - 1, MAX_FACTORS).astype(np.int64))]
        if len(tried) == 1:
            return np.float32(tried[0])
        excluding_counts = [
            sum(self.least_excluded_tokens(row, place, factor)[1] for place, row in enumerate(rows, 1))
            for factor in tried
        ]
        return np.float32(tried[int(np.argmin(excluding_counts))])

    def _fitting_factors(self, factors: Floats, row: Floats, max_slips: int) -> tuple[Floats, NDArray[np.int32]]:
        """Returns the factors that the first row rules out by at most `max_slips` coordinates, and by how many."""
        state = self.states_at(0)[self.first]
        excluding_counts = np.zeros(len(factors), np.int32)
        for coordinate in np.argsort(-np.abs(state)):
            excluding_counts += ~self.holes.is_reachable(factors * state[coordinate], row[coordinate])
            is_kept = excluding_counts <= max_slips
            factors, excluding_counts = factors[is_kept], excluding_counts[is_kept]
        return factors, excluding_counts

    def _possible_factors(self, length: int) -> tuple[Floats, float]:
        """Returns every fp32 factor, at most 1, that a text of this length can be clipped by, and the likeliest one."""
        norms = np.linalg.norm(self.states_at(min(1, length - 1)), axis=1)
        typical_norm = np.sqrt((norms.astype(np.float64) ** 2).mean())
        row_norms = np.array([norms.max() * 1.02, norms.min() * 0.98, typical_norm])
        bounds = require_known(self.noise.clip) / np.sqrt(length) / row_norms
        low, high, middle = np.minimum(bounds, 1).astype(np.float32)
        factors = np.arange(low.view(np.int32), high.view(np.int32) + 1, dtype=np.int32).view(np.float32)
        return factors, float(middle)

    def least_excluded_tokens(self, row: Floats, place: int, factor: np.float32) -> tuple[Ids, int]:
        """Returns (k,) the tokens that a row (d,) rules out least, and how many coordinates rule out the first."""
        states, width = self.states_at(place), len(row)
        remaining, excluding_counts = np.arange(self.size), np.zeros(self.size, np.int32)
        for start in range(0, width, COORDINATES_AT_A_TIME):
            coordinates = slice(start, start + COORDINATES_AT_A_TIME)
            is_reachable = self.holes.is_reachable(states[remaining][:, coordinates] * factor, row[coordinates])
            excluding_counts[remaining] += (~is_reachable).sum(1).astype(np.int32)
            counts = excluding_counts[remaining]
            remaining = remaining[counts <= counts.min() + MAX_COORDINATES_BEHIND]
        order = remaining[np.argsort(excluding_counts[remaining], kind="stable")][: self.attack.k]
        filled: NDArray[np.int64] = np.full(min(self.attack.k, self.size), NO_BELIEF, np.int64)
        filled[: len(order)] = order
        return filled, int(excluding_counts[order[0]])
