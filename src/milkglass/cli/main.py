"""The command line's entry point: the list of commands, and the exit code of each error.

Exit codes: 0 done, 2 used wrongly, 3 the model, 4 the key, 5 the text or data, 6 the server or the way to it, 7 the
server's own trouble (`serve`), 8 an enclave or attested hardware, 130 interrupted, 1 anything else.

A command and its libraries are imported when the command is used (`cli/commands.py`).
"""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any

import typer

from milkglass.cli.commands import LazyGroup
from milkglass.cli.ui.terminal import INTERRUPT_EXIT_CODE, MAX_CELL_CHARACTERS, note_after_interrupt, report_error
from milkglass.errors import MilkglassError, UsageError
from milkglass.extras import missing_extra_error
from milkglass.system import close_memory_unless_debugged, set_library_defaults

HELP = (
    "Measure what a machine that you don't trust reads of the text that you send it, and what each protection costs. "
    "Then use the model in the way that you choose."
)

FULL_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # of a disk, a quota and a limit of a file


class CommandGroup(LazyGroup):
    """Turns errors into words (or JSON) on stderr and an exit code.

    Only a bug has a traceback, which shows no values of variables.
    """

    def invoke(self, ctx: Any) -> Any:
        """Runs the command that the context names."""
        arguments = [*getattr(ctx, "_protected_args", []), *ctx.args]
        as_json = "--json" in (arguments[: arguments.index("--")] if "--" in arguments else arguments)
        try:
            return super().invoke(ctx)
        except MilkglassError as error:
            report_error(error, as_json)
            code = error.exit_code
        except KeyboardInterrupt:
            note_after_interrupt("interrupted")
            code = INTERRUPT_EXIT_CODE
        except UnicodeError:
            report_error(UsageError("the input is not UTF-8 text", "convert it to UTF-8"), as_json)
            code = UsageError.exit_code
        except BrokenPipeError:
            raise  # the reader of the output has closed it; typer ends the process quietly
        except OSError as error:
            report_error(file_error(error), as_json)
            code = MilkglassError.exit_code
        except ModuleNotFoundError as error:
            if (missing_extra := missing_extra_error(error, ctx.invoked_subcommand or "milkglass")) is None:
                raise
            report_error(missing_extra, as_json)
            code = missing_extra.exit_code
        except typer.Abort:
            code = INTERRUPT_EXIT_CODE
        except Exception as error:
            # typer's own usage errors have a message for people; anything else is a bug, whose traceback is shown
            if (value_error := option_value_error(error)) is not None:
                report_error(value_error, as_json)
                raise typer.Exit(value_error.exit_code) from None
            message = getattr(error, "format_message", None)
            if not (as_json and callable(message)):
                raise
            report_error(UsageError(str(message()), "see --help"), as_json)
            code = UsageError.exit_code
        raise typer.Exit(code)


def file_error(error: OSError) -> MilkglassError:
    """Returns an OSError as an error for the user.

    If the disk is full, it names the file that was written, not the source.
    """
    is_full = error.errno in FULL_DISK_ERRNOS
    name = (error.filename2 or error.filename) if is_full else error.filename
    place = f" ({name})" if name else ""
    hint = "free some space, or give a place on another disk" if is_full else ""
    return MilkglassError(f"{(error.strerror or 'input or output failed').lower()}{place}", hint)


def option_value_error(error: Exception) -> UsageError | None:
    """Returns the error of an option whose value pydantic refused, or None for any other error.

    The message names the value, which typer's message, in pydantic's words, leaves out.
    """
    param, cause = getattr(error, "param", None), error.__cause__
    if param is None or cause is None:
        return None
    from pydantic import ValidationError

    if not isinstance(cause, ValidationError):
        return None
    from milkglass.server.spec import requirement_of

    first_error = cause.errors()[0]
    name, rule = max(param.opts, key=len), requirement_of(first_error)
    value = str(first_error["input"])[:MAX_CELL_CHARACTERS]
    is_text = not value.isascii() or not value.replace(".", "", 1).lstrip("-").isdigit()
    value_text = repr(value) if is_text else value
    return UsageError(f"{name}: {rule}" if repr(value) in rule else f"{name} is {value_text}, {rule}", "see --help")


app = typer.Typer(
    name="milkglass",
    cls=CommandGroup,
    help=HELP,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    """Prints the version and ends the command, if --version is set."""
    if is_requested:
        from importlib.metadata import version

        typer.echo(f"milkglass {version('milkglass')}")
        raise typer.Exit


@app.callback(help=HELP)
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Takes the options of `milkglass` itself."""


def main() -> None:
    """Runs the command that the process's arguments name."""
    close_memory_unless_debugged()  # for every command, since most hold a key, a passphrase or text
    set_library_defaults()
    app(args=sys.argv[1:], prog_name="milkglass")


if __name__ == "__main__":
    main()
