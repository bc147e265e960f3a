"""`milkglass conformance`: check the methods that an installed package adds."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from milkglass.cli.ui.options import AsJson
from milkglass.cli.ui.terminal import emit, note
from milkglass.errors import PluginError


def conformance(
    package: Annotated[str, typer.Argument(help="The package's name, as pip knows it.")], *, as_json: AsJson = False
) -> None:
    """Check every attack, scheme, sanitizer, defence, engine and family that an installed PACKAGE adds."""
    from milkglass.lab.conformance import check_package

    outcomes = []
    for outcome in check_package(package):
        outcomes.append(outcome)
        if not as_json:
            note(f"{'ok  ' if outcome.failure is None else 'FAIL'}  {outcome.group} {outcome.entry}: {outcome.check}")
            if outcome.failure is not None:
                note(f"      {outcome.failure}")
    failures = [outcome for outcome in outcomes if outcome.failure is not None]
    emit(
        as_json,
        {"package": package, "passed": not failures, "checks": [asdict(outcome) for outcome in outcomes]},
        f"{package}: {len(outcomes) - len(failures)} of {len(outcomes)} checks passed",
    )
    if failures:
        names = ", ".join(sorted({failure.entry for failure in failures}))
        raise PluginError(f"{package} fails in: {names}", "the lines above say what each check found")
