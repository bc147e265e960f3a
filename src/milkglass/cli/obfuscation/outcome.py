"""What `milkglass obfuscate` says when it is done: how the tables are mixed, what that is worth, what comes next."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from milkglass.cli.obfuscation import coarse
from milkglass.cli.ui.options import TOKEN_VARIABLE, KeyOptions
from milkglass.progress import duration

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey
    from milkglass.client.key.key import Key
    from milkglass.schemes.mixture import Promise

LOSS = (
    "made a new key: {path}\n"
    "  Without this file and its passphrase, models trained with it are useless, and no one can recover them.\n"
    "  Keep a copy of it somewhere safe, and never give it to the server."
)
UNTUNED = (
    "mixing has a price: as it is, the model answers with nonsense or with nothing; it is of use after fine-tuning"
)
UNMIXED = (
    "k = 1 mixes nothing: anyone who compares the tables with the published ones reads every id; k = 10 is the default"
)
PLUS = (
    "the dimensions of every layer are mixed, with a condition number of {:.3g}: the higher, the more there is to "
    "make up for in fine-tuning;\n  anyone with the public model undoes this in seconds"
)
HONEST = "obfuscation is not encryption: this makes reading harder, not impossible; THREATS.md says how much"


def done(opened: UnlockedKey, out: Path, promise: Promise, seconds: float) -> list[str]:
    from milkglass.client.key.generate import scheme_of

    key, start = opened.key, f"scrambled into {out} in {duration(seconds)}"
    if key.token_symbols is not None:
        return [start, *coarse.words(opened.path, key, promise), f"  {HONEST}"]
    if broken := scheme_of(key).broken:
        return [start, f"  {_permuted(key)}", f"  {broken}"]
    sizes = sorted(promise.sizes)
    spread = f"of {sizes[0]:,} to {sizes[-1]:,} tokens" if sizes else ""
    return [
        start,
        f"  {_permuted(key)}; mixed in {promise.clusters:,} clusters {spread}".rstrip(),
        f"  {promise.below_k:,} tokens in clusters below k = {promise.k}; "
        f"{promise.singletons:,} alone in theirs, {promise.verbatim:,} outside every cluster (permuted only)",
        *([] if promise.condition is None else [f"  {PLUS.format(promise.condition)}"]),
        f"  {HONEST}",
    ]


def _permuted(key: Key) -> str:
    tokens = len(key.first)
    if len(key.sigma) > tokens:
        return f"{tokens:,} tokens permuted, under {len(key.sigma):,} ids"
    return f"{tokens:,} tokens permuted" + (", one row a cluster" if key.shares else "")


def next_steps(
    opened: UnlockedKey, out: Path, delta: bool, passphrase_file: Path | None, data: Path | None = None,
    columns: str = "",
) -> list[str]:  # fmt: skip
    """Returns what the user must know to go on.

    Args:
        data: the rows that were given.
        columns: the options by which they are read.
    """
    from milkglass.client.key.generate import scheme_of

    opens = KeyOptions(opened.path, None, passphrase_file)
    audit = f"next: milkglass audit {opens} --text {shlex.quote(str(data or 'TEXTS'))}{columns}"
    key, folder = opened.key, shlex.quote(str(out))
    server = shlex.quote(os.environ.get("MILKGLASS_SERVER") or "URL")
    token = "" if os.environ.get(TOKEN_VARIABLE) else " --token-file FILE"
    upload = f"milkglass upload {folder} --server {server}{token}"
    answers = key.info.kind == "decoder" and scheme_of(key).k <= 1 and not key.shares  # without fine-tuning
    proxy = [f"then: milkglass proxy {opens} --server {server}{token}"] if answers else []
    if scheme_of(key).broken:
        public = [f"to try it with public text: {upload}", *proxy] if answers else []
        return [f"{audit} shows what is read", "send nothing private under this key", *public]
    lines = [f"  {UNTUNED if scheme_of(key).k > 1 or key.shares else UNMIXED}"]
    if delta:
        lines.append(
            f"  the server needs the base model {key.info.model} among its --base-models:\n    {key.model_digest}"
        )
    return [
        *lines,
        audit,
        f"then: milkglass verify {folder} {opens}",
        f"then: {upload}",
        *proxy,
    ]
