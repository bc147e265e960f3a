"""The whole result of an audit. `audit.json` contains it, and the page is made from it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from milkglass.audit.metadata_leakage import MetadataLeakage
from milkglass.audit.outcome import AttackResult, nan_as_none

VERSION = 1
# The names of `Audit`'s fields in audit.json, where they differ
JSON_NAMES = {
    "promise": "kept", "text_count": "texts", "token_count": "tokens", "public_tokens": "public",
    "vocab_size": "vocabulary", "results": "cells", "findings": "warnings", "tokens_to_reach": "spent",
    "mean_cosine": "distortion", "metadata": "anyway", "id_information": "rate",
}  # fmt: skip
Level = Literal["most", "much", "some", "unknown"]


@dataclass(frozen=True)
class Finding:
    """Explains a rule that applied, in the words of the page.

    Attributes:
        title: the finding's heading.
        raised_if: the rule, with its figure.
        explanation: why it is so.
        change: what helps, or that nothing does.
    """

    title: str
    raised_if: str
    explanation: str
    change: str


@dataclass(frozen=True)
class TokenReading:
    """Holds a token of an example, as it was read.

    Attributes:
        text: the token as the attacker reads it.
        right: whether the attacker reads it correctly.
        original: the token that was sent.
        joined: whether `text` continues the word before it, without a blank.
    """

    text: str
    right: bool
    original: str
    joined: bool = False


@dataclass(frozen=True)
class ReadExample:
    """Shows a private text as the strongest attack reads it.

    Attributes:
        original: the text, without special tokens.
        pieces: the text's tokens as they are read.
        sent: the ids that crossed for the text, special ones too; empty if hidden states are sent.
        sent_text: the text that crossed in place of this one; "" where none did, or it is not known.
    """

    original: str
    pieces: tuple[TokenReading, ...]
    sent: tuple[int, ...] = ()
    sent_text: str = ""

    @property
    def right_count(self) -> int:
        """Returns how many tokens the attacker reads correctly."""
        return sum(piece.right for piece in self.pieces)


@dataclass(frozen=True)
class BudgetPoint:
    """Holds one point of the key's budget.

    Attributes:
        adversary: the attacker.
        tokens: how many tokens were sent under the key.
        running: the share of all tokens that is read.
        content: the share of content tokens that is read.
    """

    adversary: str
    tokens: int
    running: float
    content: float


@dataclass(frozen=True)
class IdInformation:
    """Holds how much an id can reveal if it stands for many tokens (`findings.id_information`).

    Attributes:
        ids: m', the number of ids.
        most_bits: the most bits that an id can reveal of a token; log2 m' if ids are sent unchanged.
        bits: the bits for a token of the private texts, by the frequency of each id; special tokens do not count.
        epsilon: the guarantee of the exchange of ids where they occur. None: they are sent unchanged.
    """

    ids: int
    most_bits: float
    bits: float
    epsilon: float | None = None


@dataclass(frozen=True)
class Audit:
    """Holds the result of an audit: what each attack read, the findings, and the verdict.

    If hidden states are sent, not ids, `promise` and `tokens_to_reach` are empty and `metadata` is None.

    Attributes:
        model: the public model's name.
        scheme: the defence and its parameters.
        text_count: how many texts were sent.
        token_count: how many tokens were sent.
        public_tokens: how many tokens of text each attacker has.
        vocab_size: the number of ids.
        seconds: how long the audit took.
        promise: what the scheme promises, and where it does not hold: what `ClusterReport.document` returns.
        verdict: some sentences; the first is for a person who decides.
        level: how grave the verdict is (report/verdict.py).
        unfinished: titles of attacks that did not end and may read more; a larger budget resumes them.
        adversaries: what each attacker has, in words.
        best: the attack that reads most. None: none reads anything.
        results: the result of each attack by each attacker.
        floors: what is recovered without an attack: by a "random guess" of each token, by the "commonest token" and the
            "commonest content token" of the attacker's own text, and "same words f1", "... recall" and "...
            precision" of the same words for every text (metrics/recovery.floor_bag_scores).
        findings: the findings, in the order of `findings.all_findings`.
        examples: random texts as the strongest attack reads them.
        curve: what the strongest attack reads of growing parts of the text.
        tokens_to_reach: for each adversary, after how many tokens the strongest attack passes 10, 25 and 50 % of the
            content tokens, as far as it does.
        mean_cosine: the mean cosine of the mixed embeddings with the original ones, 1 if they are unchanged
            (`findings.mean_cosine_with_originals`); nan if the server has no table, or a wider one.
        metadata: what ids reveal without an attack.
        seed: decided which half was attacked, and every random draw.
        id_information: how much an id can reveal. None: an id stands for one token.
        notice: what a reader must know first; "" for most defences.
    """

    model: str
    scheme: Mapping[str, Any]
    promise: Mapping[str, Any]
    text_count: int
    token_count: int
    public_tokens: Mapping[str, int]
    vocab_size: int
    seconds: float
    verdict: str
    level: Level
    unfinished: tuple[str, ...]
    adversaries: Mapping[str, str]
    best: AttackResult | None
    results: tuple[AttackResult, ...]
    floors: Mapping[str, float]
    findings: tuple[Finding, ...]
    examples: tuple[ReadExample, ...]
    curve: tuple[BudgetPoint, ...]
    tokens_to_reach: Mapping[str, Mapping[str, int]]
    mean_cosine: float
    metadata: MetadataLeakage | None
    seed: int
    id_information: IdInformation | None
    notice: str = ""

    def max_measured_tokens(self, adversary: str) -> int:
        """Returns the largest number of tokens on the curve of an attacker."""
        return max((point.tokens for point in self.curve if point.adversary == adversary), default=0)

    @property
    def nominal_k(self) -> int | None:
        """Returns k if the scheme has this parameter and promises that a guess is right once in k, else None."""
        k = int(self.scheme.get("k") or 0) if self.promise else 0
        return k if k > 1 else None

    def to_json(self) -> dict[str, Any]:
        """Returns audit.json, whose names are those of JSON_NAMES."""
        metadata = None if self.metadata is None else self.metadata.to_json()
        fields = {JSON_NAMES.get(name, name): value for name, value in {**asdict(self), "metadata": metadata}.items()}
        result: dict[str, Any] = nan_as_none({"milkglass_audit": VERSION, **fields})
        return result
