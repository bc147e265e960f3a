"""`milkglass split classify` and `split audit`: both halves at work, and under attack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from milkglass.cli.ui.columns import ColumnOptions
from milkglass.cli.ui.options import (
    AllowHttp,
    AsJson,
    AuditOptions,
    Certificate,
    ModelRef,
    ServerOptions,
    TokenFile,
    original,
    refuse_unused,
    require_folder,
    with_options,
)
from milkglass.cli.ui.terminal import bars, note, show_classified
from milkglass.cli.ui.text_input import to_classify
from milkglass.errors import UsageError
from milkglass.rows.lines import named, paired

if TYPE_CHECKING:
    from milkglass.split.client import Answer
    from milkglass.split.spec import EncoderInfo

Client = Annotated[Path, typer.Argument(metavar="CLIENT", help="The client's half, written by `split train`.")]


# --- classify ---------------------------------------------------------------------------------------------------------
@with_options
def classify(
    client: Client,
    url: Annotated[str | None, typer.Option(help="The split server, such as http://127.0.0.1:8421.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The server's half, run here as well, in place of --url.")] = None,
    text: Annotated[list[str] | None, typer.Option("--text", help="A text; repeatable.")] = None,
    pair: Annotated[list[str] | None, typer.Option("--pair", help="The second text of each, in order.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A text a line, a JSON object with a text, or a table.")
    ] = None,
    model: ModelRef = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
    *,
    columns: ColumnOptions,
    as_json: AsJson = False,
) -> None:
    """Classify texts: the first layers run here, hidden states cross, a line "label <tab> probability" for each."""
    if (url is None) == (folder is None):
        raise UsageError("give --url or --folder, one of them", "--url for a server, --folder to run both halves here")
    if (text is None) == (file is None):
        raise UsageError("give --text or --file, one of them", "without either there is nothing to classify")
    if folder is not None:
        ways = {"--token-file": token_file, "--certificate": certificate, "--allow-http": allow_http}
        refuse_unused("with --folder, which asks no server", ways)
    refuse_unused("to classify: labels are not read", {"--label-column": columns.label_column})
    rows = to_classify(text, file, columns)
    texts, pairs = [row.text for row in rows], paired(rows, pair)
    require_folder(client, "give the client's half that `milkglass split train` wrote")
    from milkglass.client.results import Classified
    from milkglass.split.client import ClientHalf, require_sendable
    from milkglass.split.folders import client_about

    about = client_about(client)
    base = original(model or about.model)  # its tokenizer, and the layers that were not trained
    with named(rows):
        require_sendable(client, about, base, texts, pairs)
    with _answering(url, folder, token_file, certificate, allow_http) as (info, answer), bars(as_json) as stage:
        half = ClientHalf.open(client, base, about, sending=len(rows))
        progress = stage("classify", len(rows))
        shares = half.classify(texts, pairs, info, answer, progress)
    results = [
        Classified(about.names[int(one.argmax())], dict(zip(about.names, one.tolist(), strict=True))) for one in shares
    ]
    show_classified(results, as_json)


@contextmanager
def _answering(
    url: str | None, folder: Path | None, token_file: Path | None, certificate: Path | None, allow_http: bool
) -> Iterator[tuple[EncoderInfo, Answer]]:
    """The server half's information, and what answers frames: over HTTP, or in this process."""
    if folder is not None:
        require_folder(folder, "give the server's half that `milkglass split train` wrote")
        from milkglass.split.server import ServerHalf

        half = ServerHalf.open(folder)
        yield half.info, half.answer
        return
    from milkglass.split.client import Wire

    with ServerOptions(str(url), token_file, certificate, allow_http).open() as remote:
        wire = Wire(remote.connection)
        yield wire.info(), wire.answer


# --- audit ------------------------------------------------------------------------------------------------------------
@with_options
def audit(
    context: typer.Context,
    client: Client,
    server: Annotated[Path, typer.Argument(metavar="SERVER", help="The server's half, written by `split train`.")],
    *,
    audited: AuditOptions,
    columns: ColumnOptions,
    model: ModelRef = None,
    as_json: AsJson = False,
) -> None:
    """Attack what the client's half sends for your texts, and write what is recovered into the folder OUT.

    Nothing is sent anywhere, and the client's count of sent texts is unchanged.
    """
    from milkglass.cli.audit import attacked, print_audit, require_audit

    require_audit(audited.out, audited.budget, audited.text, audited.public)
    for folder in (client, server):
        require_folder(folder, "give the two halves that `milkglass split train` wrote")
    files = audited.files(columns)
    from milkglass.hidden_states.catalogue import restored
    from milkglass.hidden_states.client import EncoderClient
    from milkglass.hidden_states.halves import described
    from milkglass.split import audit_scene
    from milkglass.split.folders import require_one_split

    about = require_one_split(client, server)
    base = original(model or about.model)
    defence = restored(about.method, about.parameters, about.training)
    half, other = defence.load(base, client, server)
    assert isinstance(half, EncoderClient)
    staged = audit_scene.build(base, about, half, other, files)
    if staged.left_out:
        note(f"{staged.left_out:,} texts are longer than {half.reader.limit} tokens, cannot be sent, and are left out")
    if about.pairs:
        note("this model reads pairs; each text is attacked as if it were sent without its second one")
    decides = {
        "halves": about.server, "parameters": dict(about.parameters), "sent": described(client)["sent"],
        **audited.decides(), **columns.decides(),
    }  # fmt: skip
    done = attacked(lambda stage: staged.scene, decides, audited.out, audited.budget, audited.seed, as_json)
    print_audit(context, done, audited.out, as_json)
