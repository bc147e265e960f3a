"""Measures how similar two texts are: ROUGE-1, ROUGE-2, ROUGE-L (Lin 2004) and METEOR (Banerjee and Lavie 2005).

ROUGE is rouge-score's F-measure without stemming, as in GHOST (section 5.3) and the published gradient attacks. With
stemming, a shadow token that is another form of the original would count as the original.

METEOR is NLTK's, over words in lower case with punctuation split off on both sides: one side is often a text as it was
written and the other one that a tokenizer decoded ("film." and "film ."). It has exact and stem matches. Synonyms would
need WordNet, data that NLTK downloads and Milkglass does not include, so METEOR's third stage finds nothing: if a
defence replaces words by synonyms, this METEOR is below the published one, which counts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from milkglass.errors import UsageError
from milkglass.metrics.interval import Interval, bootstrap, quotients, ratio

MEASURES = ("rouge-1", "rouge-2", "rouge-l", "meteor")
# A word; each kana or Chinese character is a word of its own
WORD_PATTERN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


class _EmptyWordNet:
    """Stands in for WordNet, without synonyms."""

    def synsets(self, word: str) -> list[Any]:
        return []


@cache
def _rouge_scorer() -> Any:
    """Returns rouge-score's scorer, with our own tokenizer."""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=_WordTokenizer())


class _WordTokenizer:
    """Splits texts into words for rouge-score, whose own tokenizer drops every letter outside a to z."""

    def tokenize(self, text: str) -> list[str]:
        return WORD_PATTERN.findall(text.lower())


def similarity_scores(original: str, guess: str) -> tuple[float, float, float, float]:
    """Returns the four measures of a guess against the original text, in the order of MEASURES, from 0 to 1.

    Two empty texts score 1; an empty text and another one score 0.
    """
    from nltk.stem.porter import PorterStemmer
    from nltk.tokenize import wordpunct_tokenize
    from nltk.translate.meteor_score import single_meteor_score

    original_words, guess_words = wordpunct_tokenize(original), wordpunct_tokenize(guess)
    if not original_words or not guess_words:
        score = float(original_words == guess_words)
        return score, score, score, score
    scores = _rouge_scorer().score(original, guess)
    meteor = single_meteor_score(original_words, guess_words, stemmer=PorterStemmer(), wordnet=_EmptyWordNet())
    return scores["rouge1"].fmeasure, scores["rouge2"].fmeasure, scores["rougeL"].fmeasure, float(meteor)


# --- generated text: each measure with a bootstrap interval over texts ------------------------------------------------
def mean_loss(losses: NDArray[np.float64], token_counts: NDArray[np.float64], rng: np.random.Generator) -> Interval:
    """Returns the mean loss of a token, in nats; nan if there are no tokens.

    Texts are resampled, since the tokens of one text depend on each other.

    Args:
        losses: (texts,) the summed loss of each text.
        token_counts: (texts,) the number of tokens of each text.
        rng: draws the bootstrap samples of texts.

    Raises:
        UsageError: there is not one number of tokens for each text.
    """
    return _per_token(losses, token_counts, rng, lambda mean: mean)


def perplexity(losses: NDArray[np.float64], token_counts: NDArray[np.float64], rng: np.random.Generator) -> Interval:
    """Returns exp of the mean loss of a token; nan if there are no tokens. See `mean_loss`."""
    return _per_token(losses, token_counts, rng, np.exp)


def _per_token(
    losses: NDArray[np.float64],
    token_counts: NDArray[np.float64],
    rng: np.random.Generator,
    transform: Callable[[NDArray[np.float64]], NDArray[np.float64]],
) -> Interval:
    """Returns `transform` of the mean loss of a token, with its interval. See `mean_loss` for the arguments."""
    if losses.shape != token_counts.shape or losses.ndim != 1:
        raise UsageError(f"losses of shape {losses.shape} for tokens of shape {token_counts.shape}", "give one a text")

    def statistic(counts: NDArray[np.float64]) -> NDArray[np.float64]:
        return transform(quotients(counts @ losses, counts @ token_counts))

    return bootstrap(statistic, len(losses), rng)


def scores_by_text(texts: Sequence[str], references: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Returns (texts,) the score of each text, from 0 to 1, for each of MEASURES.

    Raises UsageError if there is not one reference for each text.
    """
    if len(texts) != len(references):
        raise UsageError(f"{len(texts)} texts for {len(references)} references", "give one each")
    rows = [similarity_scores(reference, text) for text, reference in zip(texts, references, strict=True)]
    return dict(zip(MEASURES, np.array(rows, np.float64).reshape(-1, len(MEASURES)).T, strict=True))


def mean_scores(scores: Mapping[str, NDArray[np.float64]], rng: np.random.Generator) -> dict[str, Interval]:
    """Returns the mean over texts of each measure, with its interval.

    Args:
        scores: for each measure (texts,) the score of each text.
        rng: draws the bootstrap samples of texts.
    """
    return {name: ratio(values, np.ones(len(values)), rng) for name, values in scores.items()}


def mean_similarity(texts: Sequence[str], references: Sequence[str], rng: np.random.Generator) -> dict[str, Interval]:
    """Returns the mean over texts of each of MEASURES.

    Raises UsageError if there is not one reference for each text.
    """
    return mean_scores(scores_by_text(texts, references), rng)
