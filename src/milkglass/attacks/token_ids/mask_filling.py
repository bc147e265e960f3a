"""Guesses what stands behind masks such as <PERSON>, from what stands behind them in public text and from the context.

The attacker masks public text with the same tool, which anyone can download, and counts what each kind of mask hid. A
causal language model, which reads the text before a mask, weighs these candidates:

    score(mask, c) = log share(c | kind) + w log P(first(c) | what precedes)

first(c) is the first token of the candidate. The weight w was chosen on 80 masks of news, where whole candidates with
the words behind the mask did no better. All that was not masked is read as it is. With less time fewer masks are
weighed, and the others get the commonest candidate of their kind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from milkglass import papers
from milkglass.attacks.token_ids.decipherment.reader import CausalReader, tokenizer_of, why_no_reader
from milkglass.models.file_names import TOKENIZER
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack, Cost
from milkglass.threat.budget import Budget
from milkglass.threat.guess import NO_BELIEF, Guess
from milkglass.threat.knowledge import Knowledge, require_known
from milkglass.threat.observations import Tokens, Transcript

MASK = re.compile(r"<([A-Za-z_]{2,40})>")
TEXTS_AT_A_TIME = 64  # texts read at a time
GUESSES_PER_MASK = 3  # how many candidates are guessed for a mask


@dataclass(frozen=True)
class Mask:
    """Locates one mask in masked texts.

    Attributes:
        text_index: the index of the text.
        start, end: the mask's first place among the tokens of all texts, and the place after its last.
        kind: the kind of what was masked, in lower case, such as "person".
    """

    text_index: int
    start: int
    end: int
    kind: str


def find_masks(texts: Sequences, tokenizer: Tokenizer) -> list[Mask]:
    """Returns every mask in texts of public ids. A mask is found by its letters, whatever tokens spell it."""
    vocabulary = [
        re.sub(r"^##|[\u0120\u2581\s]", "", tokenizer.id_to_token(i) or "") for i in range(tokenizer.get_vocab_size())
    ]
    located, begin = [], 0
    for index, ids in enumerate(texts):
        letters_of_tokens = [vocabulary[token] if token < len(vocabulary) else "" for token in ids.tolist()]
        letter_ends = np.cumsum([len(letters) for letters in letters_of_tokens])
        for match in MASK.finditer("".join(letters_of_tokens)):
            first = int(np.searchsorted(letter_ends, match.start(), side="right"))
            last = int(np.searchsorted(letter_ends, match.end() - 1, side="right"))
            located.append(Mask(index, begin + first, begin + last + 1, match[1].lower()))
        begin += len(ids)
    return located


def hidden_spans(
    corpus: Sequences, sent: Sequences, origin: Ids, tokenizer: Tokenizer
) -> dict[str, Counter[tuple[int, ...]]]:
    """Returns what each kind of mask hid in text that the attacker masked, and how often.

    Args:
        corpus: the text, in public ids.
        sent: the masked text.
        origin: (total of corpus,) the place in `sent` of each token.
    """
    spans_of_kind: dict[str, Counter[tuple[int, ...]]] = {}
    starts = np.cumsum(corpus.lengths) - corpus.lengths
    for mask in find_masks(sent, tokenizer):
        start = starts[mask.text_index]
        text = slice(start, start + corpus.lengths[mask.text_index])
        sent_places, ids = origin[text], corpus.ids[text]
        masked = np.flatnonzero((sent_places >= mask.start) & (sent_places < mask.end))
        if not len(masked):
            continue
        end = int(masked[-1]) + 1
        while end < len(ids) and sent_places[end] == NO_BELIEF:  # a longer entity than its mask
            end += 1
        spans_of_kind.setdefault(mask.kind, Counter())[tuple(ids[masked[0] : end].tolist())] += 1
    return spans_of_kind


@dataclass(frozen=True)
class MaskFilling(Attack):
    """Guesses what each mask hid, by what its kind hid in public text and by the text before it.

    Attributes:
        reader: a causal model, embedded or in a folder.
        candidates: how many candidates of each kind of mask are weighed, the most frequent ones.
        weight: w of the module.
    """

    reader: str = "demo:smollm2"
    candidates: int = 200
    weight: float = 0.5

    name = "mask-filling"
    title = "Guesses of a language model behind masks"
    cost = Cost(8, per_million_sent=700, per_million_tokens=20)
    paper = papers.unpublished_method(
        "Candidates of public text for each kind of mask, weighed by a causal language model"
    )
    sees = frozenset({Tokens})
    assumes = frozenset({"public_model", "corpus", "rehearse"})

    def refusal(self, transcript: Transcript, knowledge: Knowledge) -> str | None:
        public = require_known(knowledge.public_model)
        if public.folder is None or not (public.folder / TOKENIZER).is_file():
            return "without the public model's tokenizer no mask can be found"
        if not find_masks(transcript.tokens, tokenizer_of(public.folder)):
            return "no mask such as <PERSON> is in what was sent"
        return why_no_reader(public, self.reader)

    def run(self, transcript: Transcript, knowledge: Knowledge, budget: Budget, rng: np.random.Generator) -> Guess:
        texts, corpus = transcript.tokens, require_known(knowledge.corpus)
        tokenizer = tokenizer_of(require_known(require_known(knowledge.public_model).folder))
        sent, origin = require_known(knowledge.rehearse)(corpus, 0)
        spans_of_kind = {
            kind: counts.most_common(self.candidates)
            for kind, counts in hidden_spans(corpus, sent, origin, tokenizer).items()
        }
        guess = np.full((len(texts.ids), GUESSES_PER_MASK), NO_BELIEF, np.int64)
        guess[:, 0] = texts.ids
        located = [mask for mask in find_masks(texts, tokenizer) if mask.kind in spans_of_kind]
        for mask in located:
            _write_candidates(guess, mask, [ids for ids, _ in spans_of_kind[mask.kind][:GUESSES_PER_MASK]])
        for mask, order in self._weigh(texts, located, spans_of_kind, knowledge, budget, rng):
            best = order[:GUESSES_PER_MASK].tolist()
            _write_candidates(guess, mask, [spans_of_kind[mask.kind][index][0] for index in best])
        return Guess(by_token=guess)

    def _weigh(
        self, texts: Sequences, located: Sequence[Mask], spans_of_kind: Mapping[str, list[tuple[tuple[int, ...], int]]],
        knowledge: Knowledge, budget: Budget, rng: np.random.Generator,
    ) -> Iterator[tuple[Mask, Ids]]:  # fmt: skip
        """Yields each mask with the order (c,) of its candidates, the likeliest first, until the time is over."""
        reading = texts.ids.copy()
        for mask in located:  # the commonest candidate, so that there is a place to be judged and something to follow
            reading[mask.start : mask.end] = NO_BELIEF
            reading[mask.start] = spans_of_kind[mask.kind][0][0][0]
        text_ends = np.cumsum(texts.lengths)
        for text_index, last_start in {mask.text_index: mask.start for mask in located}.items():
            reading[last_start + 1 : text_ends[text_index]] = NO_BELIEF  # nothing after a text's last mask is judged
        reader = CausalReader.of(
            require_known(knowledge.public_model), self.reader, require_known(knowledge.corpus), budget
        )
        mask_at = {mask.start: mask for mask in located}
        queue, texts_done = rng.permutation(np.unique([mask.text_index for mask in located])), 0
        no_mean = np.zeros(len(reader.head))  # no mean probability is subtracted, or rare first tokens would win
        while len(queue) and budget.left() > 0:
            text_indices, queue = queue[:TEXTS_AT_A_TIME], queue[TEXTS_AT_A_TIME:]
            text_indices = text_indices[np.argsort(texts.lengths[text_indices], kind="stable")]
            for batch in reader.read_texts(Sequences(reading, texts.lengths), text_indices):
                if budget.left() <= 0:
                    return
                starts_mask = np.isin(batch.places, list(mask_at))
                for row in np.flatnonzero(starts_mask).tolist():
                    mask = mask_at[int(batch.places[row])]
                    options = spans_of_kind[mask.kind]
                    is_row = np.zeros(len(starts_mask), np.bool_)
                    is_row[row] = True
                    first_tokens = np.array([[ids[0] for ids, _ in options]])
                    log_likelihood = reader.log_likelihood_ratio(batch.select(is_row), first_tokens, no_mean)[0]
                    prior = np.log(np.array([count for _, count in options], np.float64))
                    yield mask, np.argsort(-(self.weight * log_likelihood + prior), kind="stable")
            texts_done += len(text_indices)
            budget.progress(texts_done / max(1, texts_done + len(queue)))


def _write_candidates(guess: Ids, mask: Mask, candidates: Sequence[tuple[int, ...]]) -> None:
    """Writes candidates, the likeliest first, into a guess at the places of a mask."""
    guess[mask.start : mask.end] = NO_BELIEF
    for rank, ids in enumerate(candidates):
        leading_ids = ids[: mask.end - mask.start]
        guess[mask.start : mask.start + len(leading_ids), rank] = leading_ids
