"""Describes what is attacked: what an untrusted machine sees, the truth about it, and each attacker's knowledge.

`Scene.of` makes every scene and alone decides what each attacker has. Its input comes from a key (key_scene.py), from
two halves (defence_scene.py) or from gradients (gradient_scene.py). run.py runs the attacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field, fields, replace
from typing import Any

from milkglass.client.data.texts import EncodedTexts
from milkglass.errors import UsageError
from milkglass.schemes.mixture import ClusterReport
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Transcript
from milkglass.threat.truth import Truth

MIN_PRIVATE_TEXTS = 20  # of fewer private texts nothing can be said
MIN_ATTACKER_TEXTS = 5  # texts that each attacker with text must have left
MODEL_ONLY, OTHER, ALIKE, KNOWN = "model only", "other text", "same kind of text", "known texts"
ATTACKER_WORDS = {
    OTHER: "public text of another kind",
    ALIKE: "other text of the same kind",
    KNOWN: "other text of the same kind and knows word for word what some of what you send says",
}
NO_PROMISE = ClusterReport(1, 0, {}, 0, 0, 0)  # of a defence that is no scheme of clusters
# Fields of Knowledge that an attacker has with its text
TEXT_FIELDS = ("corpus", "pairs", "observe", "rehearse", "noise")


@dataclass(frozen=True)
class Adversary:
    """Describes an attacker: a name, what they know, and what they see.

    Attributes:
        name: the attacker's name in tables.
        words: what the attacker has, as the end of a sentence: "has the public model and no text".
        knowledge: what the attacker knows besides what they see.
        transcript: what the attacker sees. None: the scene's transcript.
    """

    name: str
    words: str
    knowledge: Knowledge
    transcript: Transcript | None = None

    @classmethod
    def without_text(cls, knowledge: Knowledge) -> Adversary:
        """Returns the attacker who has the public model and no text."""
        return cls(MODEL_ONLY, "has the public model and no text", knowledge)

    @classmethod
    def with_text(cls, name: str, knowledge: Knowledge, half: str = "the client's trained half") -> Adversary:
        """Returns an attacker with text.

        Args:
            name: the attacker's name, such as ALIKE.
            knowledge: what the attacker knows.
            half: what an attacker with `observe` can run, in words.
        """
        ability = f", and can run {half} on it" if knowledge.observe is not None else ""
        return cls(name, f"has {ATTACKER_WORDS.get(name, name)}{ability}", knowledge)


@dataclass(frozen=True)
class DefenceWords:
    """Describes a defence for a report, as Jinja templates that are filled with `scene` (report/texts.toml).

    Attributes:
        crosses: what an attacker sees of a text, such as "the hidden states that are sent"; "" for ids under a key.
        why: why that reveals text.
        change: what lowers the figures.
        notice: what a reader must know first.
        findings: the names of findings that always hold.
    """

    crosses: str
    why: str
    change: str
    notice: str = ""
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scene:
    """Holds all that a run of attacks needs, and what its report says about the defence.

    Attributes:
        transcript: what the untrusted machine sees.
        truth: grades the guesses.
        adversaries: the attackers. If there are several, the first one has no text.
        texts: the private texts, if classes of tokens are reported.
        cluster_report: how far a scheme's promise is met; `NO_PROMISE` for any other defence.
        scheme: the defence and its parameters.
        model: the public model's name.
        broken: why nobody should rely on this defence, whatever the attacks here read.
        words: what the report says about the defence. None: what it says of any that sends the same.
    """

    transcript: Transcript
    truth: Truth
    adversaries: tuple[Adversary, ...]
    texts: EncodedTexts | None = None
    cluster_report: ClusterReport = NO_PROMISE
    scheme: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    broken: str | None = None
    words: DefenceWords | None = None

    @classmethod
    def of(
        cls, transcript: Transcript, truth: Truth, first: Adversary, others: Iterable[Adversary] = (), **details: Any
    ) -> Scene:
        """Returns a scene in which every attacker has the first one's knowledge, and its own fields of `TEXT_FIELDS`.

        Args:
            first: the first attacker, who has no text if there are others.
            details: further fields of the scene.

        Raises:
            ValueError: another attacker has its own value of a field that is not in `TEXT_FIELDS`.
        """
        adversaries = [first]
        for adversary in others:
            parts = [(part, getattr(adversary.knowledge, part.name)) for part in fields(Knowledge)]
            own_knowledge = {part.name: value for part, value in parts if value is not part.default}
            if unexpected := own_knowledge.keys() - {*TEXT_FIELDS}:
                raise ValueError(f"{adversary.name} alone is given {', '.join(sorted(unexpected))}")
            adversaries.append(replace(adversary, knowledge=replace(first.knowledge, **own_knowledge)))
        return cls(transcript, truth, tuple(adversaries), **details)

    @property
    def sends_states(self) -> bool:
        """Returns whether hidden states are sent, not ids. Then there is no cipher, no key and perhaps no table."""
        return self.transcript.sends_states

    @property
    def gains_from_more_text(self) -> bool:
        """Returns whether more text under one key is read better.

        States and symbols of a known map are read text by text.
        """
        return not self.sends_states and self.symbols is None

    @property
    def symbols(self) -> Ids | None:
        """Returns (n,) the id of each public token if a known map gives many tokens one id, else None."""
        return self.adversaries[0].knowledge.symbols

    @property
    def last_corpus(self) -> Sequences | None:
        """Returns the text of the last attacker, who has most; None if no attacker has any."""
        corpora = (adversary.knowledge.corpus for adversary in reversed(self.adversaries))
        return next((corpus for corpus in corpora if corpus is not None), None)

    def seen_by(self, adversary: Adversary) -> Transcript:
        """Returns what an attacker sees."""
        return adversary.transcript or self.transcript

    def attackers_of(self, attack: Attack) -> list[Adversary]:
        """Returns the attackers who run an attack.

        They are chosen among those who see what the attack needs; if nobody does, among all, so that the reason is
        reported. The first of these runs an attack that uses no public text. All others run one that uses it; the
        first does so only if there are no others.
        """
        capable = [adversary for adversary in self.adversaries if attack.sees <= self.seen_by(adversary).kinds]
        attackers = capable or list(self.adversaries)
        reads_text = "corpus" in attack.assumes | attack.uses
        return attackers[1:] if reads_text and len(attackers) > 1 else attackers[:1]

    def truth_about(self, of_outputs: bool) -> Truth:
        """Returns the truth about what was sent, or about what was generated (`of_outputs`)."""
        return replace(self.truth, sent=self.transcript.outputs, original=None) if of_outputs else self.truth


def require_enough_texts(texts: Sized, name: str) -> None:
    """Raises UsageError if there are too few private texts. `name` says what they are, such as their file's name."""
    if len(texts) < MIN_PRIVATE_TEXTS:
        raise UsageError(
            f"{name} holds {len(texts)} of the {MIN_PRIVATE_TEXTS} texts that an audit needs",
            f"give {MIN_PRIVATE_TEXTS} or more: an attacker's share of so few says nothing",
        )


def require_texts(scene: Scene, names: Iterable[str]) -> None:
    """Raises UsageError if one of these attackers has too little text left."""
    corpora = {adversary.name: adversary.knowledge.corpus for adversary in scene.adversaries}
    for name in names:
        require_attacker_texts(name, len(corpora.get(name) or ()))


def require_attacker_texts(name: str, texts_left: int) -> None:
    """Raises UsageError if too few texts are left to the attacker of this name."""
    if texts_left < MIN_ATTACKER_TEXTS:
        raise UsageError(
            f"{texts_left} texts are left to the attacker who has {ATTACKER_WORDS.get(name, name)}, without those "
            f"that contain what you send or are part of it; {MIN_ATTACKER_TEXTS} are needed",
            "give more text, or text with fewer repetitions: with so little every attack would seem to fail",
        )
