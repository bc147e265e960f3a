"""Reads the user's rows for `milkglass obfuscate --scheme coarse`, and reports what the map lets through."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milkglass.cli.key import rate_lines
from milkglass.cli.ui.columns import ColumnOptions
from milkglass.cli.ui.terminal import note
from milkglass.client.key import usage
from milkglass.errors import UsageError

if TYPE_CHECKING:
    from milkglass.client.key.key import Key
    from milkglass.client.obfuscate.symbols import CountedTexts
    from milkglass.models.checkpoint import Checkpoint


SCHEME_NAME = "coarse"
BETTER_HINT = "for a classifier, --scheme coarse --data YOUR_ROWS makes a coarse vocabulary, of which less is read"
UNLABELLED_NOTE = "{} has no labels: the symbols follow the meaning of tokens alone"
CLASSIFIER_HINT = "train it to classify or to give scores: it cannot generate, since an id names no token"
PLAIN_MEANS_NOTE = "no --public-text: tokens are counted in {}, and all tokens of a symbol weigh alike in its row"


@dataclass(frozen=True)
class CoarseFiles:
    """Checks and reads the files of a coarse vocabulary.

    Attributes:
        data: the user's rows, from which the map is found.
        public: public text in which tokens are counted. None: they are counted in the rows.
        task: "classification" or "regression". None: decided by the labels of the rows.
        columns: the options that say how the rows are read.
    """

    data: Path | None
    public: Path | None
    task: str | None
    columns: ColumnOptions

    def require_fit(self, scheme: str | None, key: Path) -> None:
        """Raises UsageError if the files do not suit the scheme or the key.

        They need the scheme coarse and a new key, and a new key of this scheme needs the rows.
        """
        has_files = self.data is not None or self.public is not None or self.task is not None
        if has_files and scheme != SCHEME_NAME:
            raise UsageError(
                f"--data, --public-text and --task are for --scheme coarse, and the scheme is {scheme or 'obfuslm'}",
                "leave them out, or add --scheme coarse, which finds symbols from your rows",
            )
        if has_files and key.exists():
            raise UsageError(
                f"{key} exists already, and --data makes a new key with a map of its own",
                "give another --key; to scramble with the key that is there, leave --data out",
            )
        if scheme == SCHEME_NAME and not key.exists() and self.data is None:
            raise UsageError("--data is missing", "give your training rows: the symbols are found from them")

    def require(self) -> None:
        """Reads the files once, before a model is read.

        Raises UsageError if a file does not exist, CodecError if its rows cannot be read.
        """
        if self.data is not None:
            self.columns.read_training(self.data, self.task)
        self.columns.read_optional(self.public)

    def read(self, base: Checkpoint) -> CountedTexts:
        """Returns the counts of the tokens in the files, by the model's tokenizer. `data` must be set."""
        from milkglass.client.obfuscate.symbols import count_texts

        assert self.data is not None
        public = None if self.public is None else self.columns.other_file(self.public)
        texts = count_texts(base, self.columns.data_file(self.data), public, self.task)
        if texts.task is None:
            note(UNLABELLED_NOTE.format(self.data.name))
        if texts.public_counts is None:
            note(PLAIN_MEANS_NOTE.format(self.data.name))
        return texts


def measure_rate(path: Path, key: Key, base: Checkpoint, texts: CountedTexts) -> None:
    """Measures what the map of a coarse vocabulary lets through, and records the figures beside the key.

    Args:
        path: the key file.
        key: the key in it.
        base: the original model.
        texts: the counts of the tokens, from which the map was found.
    """
    from milkglass.client.codec.codec import Codec
    from milkglass.client.data.texts import token_pieces
    from milkglass.client.key.scheme import scheme_of
    from milkglass.client.obfuscate.symbol_rate import rate_of
    from milkglass.models.families import architecture_of
    from milkglass.schemes.coarse import Coarse
    from milkglass.threat.truth import content_tokens

    scheme = scheme_of(key)
    assert isinstance(scheme, Coarse)
    content = content_tokens(texts.counts, token_pieces(Codec.open(key, base.folder), len(texts.own_counts)))
    exempt = scheme.exempt_ids(texts.counts, texts.special, architecture_of(base).pinned)
    rate = rate_of(scheme, texts.counts, texts.own_counts, content, exempt)
    usage.record_rate(path, {name: float(value) for name, value in asdict(rate).items()})


def summary_lines(path: Path, key: Key, report: Any) -> list[str]:
    """Returns lines about the symbols, about their rate if it was recorded, and about the use of a decoder."""
    sizes = sorted(report.sizes)
    spread = f" of {sizes[0]:,} to {sizes[-1]:,} tokens" if sizes else ""
    symbols = f"{report.clusters:,} symbols{spread}; {report.verbatim:,} tokens have one of their own"
    rate = usage.read(path).rate
    use = [CLASSIFIER_HINT] if key.info.kind == "decoder" else []
    return [f"  {line}" for line in [symbols, *(rate_lines(rate) if rate else []), *use]]
