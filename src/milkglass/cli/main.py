"""The command line's front door: the list of commands, and what becomes of an error.

Exit codes: 0 done, 2 used wrongly, 3 the model, 4 the key, 5 the text or data, 6 the server or the way to it, 7 the
server's own trouble (`serve`), 130 interrupted, 1 anything else.

Heavy libraries are imported inside the commands: `milkglass --help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from milkglass.cli import audit, codec, demo, finetune, inference, jobs, key, reproduce, serve
from milkglass.cli.federated import commands as federated
from milkglass.cli.obfuscation import models, obfuscate, upload, verify
from milkglass.cli.sanitization import sanitize
from milkglass.cli.split import commands as split
from milkglass.cli.ui.terminal import note, report
from milkglass.errors import MilkglassError, UsageError

INTERRUPTED = 130


class Commands(TyperGroup):
    """Turns every error into words (or JSON) on stderr and an exit code; no traceback shows what a user typed."""

    def invoke(self, ctx: Any) -> Any:
        words = [*getattr(ctx, "_protected_args", []), *ctx.args]
        as_json = "--json" in (words[: words.index("--")] if "--" in words else words)
        try:
            return super().invoke(ctx)
        except MilkglassError as error:
            report(error, as_json)
            code = error.exit_code
        except KeyboardInterrupt:
            note("interrupted")
            code = INTERRUPTED
        except UnicodeError:
            report(UsageError("the input is not UTF-8 text", "convert it to UTF-8"), as_json)
            code = UsageError.exit_code
        except BrokenPipeError:
            raise  # anyone who read our output has enough; typer leaves quietly
        except OSError as error:
            name = f" ({error.filename})" if error.filename else ""
            report(MilkglassError(f"{(error.strerror or 'input or output failed').lower()}{name}"), as_json)
            code = MilkglassError.exit_code
        except typer.Abort:
            code = INTERRUPTED
        except Exception as error:
            # typer's own usage errors carry a message for people; anything else is a fault of ours and stays loud.
            message = getattr(error, "format_message", None)
            if not (as_json and callable(message)):
                raise
            report(UsageError(str(message()), "see --help"), as_json)
            code = UsageError.exit_code
        raise typer.Exit(code)


app = typer.Typer(
    name="milkglass",
    cls=Commands,
    help="Fine-tune and run language models on machines that you don't trust: only scrambled token ids cross the wire.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(expected: bool) -> None:
    if expected:
        from importlib.metadata import version

        typer.echo(f"milkglass {version('milkglass')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune and run language models on machines that you don't trust: only scrambled token ids cross the wire."""


for group in (
    models,
    obfuscate,
    verify,
    codec,
    sanitize,
    serve,
    split,
    federated,
    upload,
    finetune,
    jobs,
    inference,
    audit,
    key,
    reproduce,
    demo,
):
    group.register(app)


def main() -> None:
    app(args=sys.argv[1:], prog_name="milkglass")


if __name__ == "__main__":
    main()
