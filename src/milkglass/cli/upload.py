"""`milkglass upload`: hand a scrambled model, or a scrambled Parquet file, to a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from milkglass.cli.options import AllowHttp, AsJson, Certificate, ServerUrl, TokenFile, Way, Yes
from milkglass.cli.terminal import bars, confirm, emit, megabytes, moment, plain, table
from milkglass.errors import UsageError


def upload(
    path: Annotated[Path, typer.Argument(help="A folder that `obfuscate` wrote, or a scrambled Parquet file.")],
    server: ServerUrl,
    name: Annotated[str | None, typer.Option("--name", help="The model's name there  [default: a random one]")] = None,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """Upload a scrambled folder, a delta, or a Parquet file; goes on where an interrupted upload stopped.

    A folder with a tokenizer, or with a config that scrambling would have changed, is refused.
    """
    from milkglass.client.outgoing import require_scrambled

    if path.is_dir():
        require_scrambled(path)
    elif not path.is_file() or path.suffix != ".parquet":
        raise UsageError(
            f"{path} is no scrambled folder and no Parquet file",
            "give a folder that `milkglass obfuscate` wrote; `milkglass finetune` scrambles and uploads data by itself",
        )
    elif name:
        raise UsageError("--name was given for a file", "only models have names")
    way = Way(server, token_file, certificate, allow_http)
    with way.open() as remote, bars(as_json) as stage:
        if path.is_dir():
            model = remote.upload_model(path, name, stage)
            told = f"uploaded: {model}\nnext: milkglass finetune {model} DATA --key KEYFILE {way}"
            emit(as_json, {"model": model}, told)
        else:
            _require_ids_only(path)
            file = remote.upload(path, "fine-tune", stage)
            emit(as_json, {"file": file}, f"uploaded: {file}")


def uploads(
    server: ServerUrl,
    delete: Annotated[str | None, typer.Option("--delete", help="The id of a file or an upload to delete.")] = None,
    yes: Yes = False,
    token_file: TokenFile = None,
    certificate: Certificate = None,
    allow_http: AllowHttp = False,
    as_json: AsJson = False,
) -> None:
    """List the files that were uploaded to the server, and uploads that were never completed; or delete one.

    A model and a finished job need their files no longer.
    """
    with Way(server, token_file, certificate, allow_http).open() as remote:
        if delete:
            confirm(f"Delete {delete} from the server?", yes)
            remote.delete_upload(delete)
            emit(as_json, {"id": delete, "deleted": True}, f"deleted: {delete}")
            return
        files, parts = remote.files(), remote.uploads()
    emit(as_json, {"files": files, "unfinished": parts}, lambda: _words(files, parts))


def _words(files: list[dict[str, Any]], parts: list[dict[str, Any]]) -> str:
    if not files and not parts:
        return "the server has no uploads"
    rows: list[tuple[str, ...]] = [("id", "for", "size", "arrived", "made")]
    for one in [*files, *parts]:
        size, have = one.get("bytes"), one.get("received")
        part = f"{100 * have / size:.0f} %" if isinstance(have, int) and isinstance(size, int) and size else "whole"
        named = (plain(one.get("id")), plain(one.get("purpose")), megabytes(size))
        rows.append((*named, part, moment(one.get("created_at"))))
    return table(rows)


def _require_ids_only(path: Path) -> None:
    """Raises UsageError for a Parquet file with any column that could hold text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except pa.ArrowInvalid:
        raise UsageError(f"{path.name} is not Parquet", "scramble the data with `milkglass finetune`") from None
    allowed = {"input_ids", "attention_mask", "token_type_ids", "labels"}
    strange = [name for name in schema.names if name not in allowed]
    numbers = all(
        pa.types.is_integer(one.type.value_type if pa.types.is_list(one.type) else one.type)
        or (one.name == "labels" and pa.types.is_floating(one.type))  # of a regression
        for one in schema
    )
    if strange or not numbers or "input_ids" not in schema.names or schema.metadata:
        raise UsageError(
            f"{path.name} holds more than ids and labels, so it is not scrambled data",
            "scramble the data with `milkglass finetune`",
        )


def register(app: typer.Typer) -> None:
    app.command()(upload)
    app.command()(uploads)
