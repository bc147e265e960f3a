"""The command line's entry point: the list of commands, and what becomes of an error.

Exit codes: 0 done, 2 used wrongly, 3 the model, 4 the key, 5 the text or data, 6 the server or the way to it, 7 the
server's own trouble (`serve`), 130 interrupted, 1 anything else.

Heavy libraries are imported inside the commands: `milkglass --help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from milkglass.cli.attest import attests
from milkglass.cli.audit import audit
from milkglass.cli.codec import decode, encode
from milkglass.cli.compare import compare
from milkglass.cli.conformance import conformance
from milkglass.cli.data import data
from milkglass.cli.federated import federated
from milkglass.cli.finetune import finetune
from milkglass.cli.inference import chat, classify, generate
from milkglass.cli.jobs import job, jobs
from milkglass.cli.key import keys
from milkglass.cli.models import models, upload, uploads
from milkglass.cli.obfuscate import obfuscate
from milkglass.cli.proxy import proxy, ui
from milkglass.cli.reproduce import reproduce
from milkglass.cli.sanitize import sanitize
from milkglass.cli.scrambled import export, train_config, verify
from milkglass.cli.serve import serve
from milkglass.cli.split import splits
from milkglass.cli.ui.terminal import INTERRUPTED, MAX_CELL_LETTERS, note_apart, report
from milkglass.errors import MilkglassError, UsageError
from milkglass.extras import missing_extra_error
from milkglass.system import keep_private

HELP = (
    "Fine-tune and run language models on machines that you don't trust: in the main job only scrambled token ids "
    "cross the wire."
)


class Commands(TyperGroup):
    """Turns every error into words (or JSON) on stderr and an exit code; no traceback shows what a user typed."""

    def invoke(self, ctx: Any) -> Any:
        arguments = [*getattr(ctx, "_protected_args", []), *ctx.args]
        as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
        try:
            return super().invoke(ctx)
        except MilkglassError as error:
            report(error, as_json)
            code = error.exit_code
        except KeyboardInterrupt:
            note_apart("interrupted")
            code = INTERRUPTED
        except UnicodeError:
            report(UsageError("the input is not UTF-8 text", "convert it to UTF-8"), as_json)
            code = UsageError.exit_code
        except BrokenPipeError:
            raise  # whoever read the output has enough; typer leaves quietly
        except OSError as error:
            name = f" ({error.filename})" if error.filename else ""
            report(MilkglassError(f"{(error.strerror or 'input or output failed').lower()}{name}"), as_json)
            code = MilkglassError.exit_code
        except ModuleNotFoundError as error:
            if (missing_extra := missing_extra_error(error, ctx.invoked_subcommand or "milkglass")) is None:
                raise
            report(missing_extra, as_json)
            code = missing_extra.exit_code
        except typer.Abort:
            code = INTERRUPTED
        except Exception as error:
            # typer's own usage errors carry a message for people; anything else is a bug, whose traceback is shown.
            if (refusal := refused_value(error)) is not None:
                report(refusal, as_json)
                raise typer.Exit(refusal.exit_code) from None
            message = getattr(error, "format_message", None)
            if not (as_json and callable(message)):
                raise
            report(UsageError(str(message()), "see --help"), as_json)
            code = UsageError.exit_code
        raise typer.Exit(code)


def refused_value(error: Exception) -> UsageError | None:
    """Returns the error of an option's value as a sentence that names the value, or None for any other error.

    typer's own words are pydantic's, which leave the value out.
    """
    from pydantic import ValidationError

    param, cause = getattr(error, "param", None), error.__cause__
    if param is None or not isinstance(cause, ValidationError):
        return None
    from milkglass.server.spec import requirement_of

    fault = cause.errors()[0]
    name, refused, rule = max(param.opts, key=len), str(fault["input"])[:MAX_CELL_LETTERS], requirement_of(fault)
    is_text = not refused.isascii() or not refused.replace(".", "", 1).lstrip("-").isdigit()
    shown = repr(refused) if is_text else refused
    return UsageError(f"{name}: {rule}" if repr(refused) in rule else f"{name} is {shown}, {rule}", "see --help")


app = typer.Typer(
    name="milkglass",
    cls=Commands,
    help=HELP,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"milkglass {version('milkglass')}")
        raise typer.Exit


@app.callback(help=HELP)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of `milkglass` itself."""


def demo(
    out: Annotated[Path, typer.Option("--out", help="The folder to write the page and the results to.")] = Path(
        "milkglass-demo"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer steps: shows the process, not the quality.")] = False,
) -> None:
    """Compare ways, then obfuscate, serve, fine-tune and use two models, and show who saw what. Takes some minutes."""
    from milkglass.demo.run import run_demo

    run_demo(out, quick=quick)


for command in (
    *(models, obfuscate, verify, export, encode, decode, sanitize, serve, upload, uploads, finetune, compare, jobs),
    *(job, train_config, classify, generate, chat, proxy, ui, audit, reproduce, data, conformance, demo),
):
    app.command()(command)
for name, group in {"split": splits, "federated": federated, "key": keys, "attest": attests}.items():
    app.add_typer(group, name=name)


def main() -> None:
    keep_private()  # whatever the command: most hold a key, a passphrase or text
    app(args=sys.argv[1:], prog_name="milkglass")


if __name__ == "__main__":
    main()
