"""`milkglass verify`: check that a scrambled model is what its key says, and holds nothing more."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass.cli.ui.options import AsJson, KeyOptions, original, require_folder, with_options
from milkglass.cli.ui.terminal import bars, emit, note
from milkglass.errors import CorruptCheckpoint, KeyForOtherModel

if TYPE_CHECKING:
    from milkglass.client.key.key import Key


@with_options
def verify(
    out: Annotated[Path, typer.Argument(help="A folder that `obfuscate` wrote.")],
    *,
    key: KeyOptions,
    as_json: AsJson = False,
) -> None:
    """Check that OUT is the key's model, scrambled, and holds nothing that it shouldn't."""
    from milkglass.client.obfuscate.preflight import assumed, require_sound
    from milkglass.client.obfuscate.verify import verify as check

    require_folder(out, "give the folder that `milkglass obfuscate` wrote")
    opened = key.open()
    opened.key.require_whole()
    _require_its_key(out, opened.key)
    base = original(key.model or opened.key.info.model)
    require_sound(base)
    if said := assumed(base):
        note(said)
    if not as_json:
        note("scrambling the original again in memory, to compare; this takes about as long as `obfuscate`")
    with bars(as_json) as stage:
        opened.key.require_model(base.digest(stage("check the model", sum(t.bytes for t in base.tensors.values()))))
        checks = check(base, opened.key, out, stage)
    passed = all(one.passed for one in checks)
    emit(
        as_json,
        {"out": str(out), "passed": passed, "checks": [asdict(one) for one in checks]},
        "\n".join(f"{'ok  ' if one.passed else 'FAIL'}  {one.name}: {one.detail}" for one in checks),
    )
    if not passed:
        failed = ", ".join(one.name for one in checks if not one.passed)
        raise CorruptCheckpoint(f"{out} fails: {failed}", "don't upload it; make it again with `milkglass obfuscate`")


def _require_its_key(out: Path, key: Key) -> None:
    """Told at once, and not as a folder full of wrong tensors."""
    from milkglass.client.layout import KEY_ID
    from milkglass.client.remote.responses import fits
    from milkglass.models.checkpoint import read_json

    config = out / "config.json"
    info = read_json(config).get(KEY_ID) if config.is_file() else None
    if fits({"key_id": info}, key) is False:
        raise KeyForOtherModel(f"{out} was scrambled with another key than this one", "give the key it was made with")
