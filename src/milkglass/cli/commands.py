"""The commands by name. A command's module is imported when the command is used, so that `milkglass --help` is quick.

To add a command, write a file and add a line to COMMANDS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup


@dataclass(frozen=True)
class CommandEntry:
    """Describes a command, or a group of commands, of the command line, and loads it.

    Attributes:
        name: the name that users type.
        module: the module in `milkglass.cli` that defines it. A command is the function of the same name with _ in
            place of -; a group is the `typer.Typer` with _commands behind the name.
        summary: what `milkglass --help` says of it, on one line of 80 columns.
        is_group: whether it is a group of commands.
    """

    name: str
    module: str
    summary: str
    is_group: bool = False

    def load(self) -> Any:
        """Imports the command's module and returns the command, as typer makes it."""
        module = import_module(f"milkglass.cli.{self.module}")
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
        attribute = self.name.replace("-", "_")
        if self.is_group:
            app.add_typer(getattr(module, f"{attribute}_commands"), name=self.name)
        else:
            app.command(self.name)(getattr(module, attribute))
        return typer.main.get_group(app).commands[self.name]


COMMANDS = {
    entry.name: entry
    for entry in (
        CommandEntry("compare", "compare", "Compare the ways of using a model on your own rows."),
        CommandEntry("data", "data", "Write a file of yours, or a data set, as clean JSON Lines."),
        CommandEntry("audit", "audit", "Attack your own model, key and text."),
        CommandEntry("obfuscate", "obfuscate", "Scramble a model into a folder."),
        CommandEntry("verify", "scrambled", "Check that a folder is the key's model, scrambled."),
        CommandEntry("export", "scrambled", "Write a scrambled model for an engine."),
        CommandEntry("encode", "codec", "Turn text into scrambled ids."),
        CommandEntry("decode", "codec", "Turn scrambled ids into text."),
        CommandEntry("sanitize", "sanitize", "Replace the words of texts by others."),
        CommandEntry("serve", "serve", "Start the server."),
        CommandEntry("upload", "models", "Upload a scrambled model or training rows."),
        CommandEntry("uploads", "models", "List what was uploaded to the server."),
        CommandEntry("models", "models", "List a server's models, or the public models here."),
        CommandEntry("finetune", "finetune", "Fine-tune a scrambled model on your rows."),
        CommandEntry("jobs", "jobs", "List the server's fine-tuning jobs."),
        CommandEntry("job", "jobs", "Show a fine-tuning job's state."),
        CommandEntry("train-config", "scrambled", "Write a configuration for another trainer."),
        CommandEntry("classify", "inference", "Classify texts."),
        CommandEntry("generate", "inference", "Generate text, shown while it is generated."),
        CommandEntry("chat", "inference", "Talk with a model, a line a turn."),
        CommandEntry("proxy", "proxy", "Answer OpenAI's API: text in front, ids behind."),
        CommandEntry("ui", "proxy", "Like proxy, with a page of what the provider sees."),
        CommandEntry("key", "key", "Show, back up and rotate keys.", is_group=True),
        CommandEntry("split", "split", "Cut a model in two: layers here, layers there.", is_group=True),
        CommandEntry("federated", "federated", "Train with other sites and keep your texts.", is_group=True),
        CommandEntry("attest", "attest", "Verify the hardware behind an address.", is_group=True),
        CommandEntry("reproduce", "reproduce", "Run the recipe of a table or figure of a paper."),
        CommandEntry("conformance", "conformance", "Check the methods of an installed package."),
        CommandEntry("demo", "demo", "Show the whole job on invented messages."),
    )
}


class LazyCommands(Mapping[str, Any]):
    """Finds commands by name. Each is imported when it is first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = COMMANDS[name].load()
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class LazyGroup(TyperGroup):
    """Lists the commands of COMMANDS without importing any."""

    def __init__(self, **attributes: object) -> None:
        super().__init__(**attributes)  # type: ignore[arg-type]
        self.commands = LazyCommands()  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of a name, or None. An error of its import names the command."""
        if cmd_name not in COMMANDS:
            return None
        ctx.invoked_subcommand = cmd_name  # typer sets it after the import
        return self.commands[cmd_name]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Writes the commands with their summaries."""
        with formatter.section("Commands"):
            formatter.write_dl([(entry.name, entry.summary) for entry in COMMANDS.values()])
