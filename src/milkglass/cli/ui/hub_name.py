"""What a command keeps of the model that it was given, and says of it."""

from __future__ import annotations

from pathlib import Path

from milkglass.cli.ui.terminal import note


def kept_name(model: str, folder: Path) -> str:
    """The absolute folder, the embedded model, or the hub id with its commit, reported where it was not given."""
    from milkglass.models.resolve import recorded

    name = recorded(model, folder)
    if "@" in name and name != model and not Path(model).expanduser().is_dir():
        note(f"{model} is {name}")
    return name
