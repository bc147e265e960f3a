"""`milkglass proxy`: any program that speaks OpenAI's API, in front of any engine that serves a scrambled model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from milkglass.cli.proxy.options import EndpointOptions
from milkglass.cli.ui.options import KeyOptions, ServerOptions, with_options
from milkglass.cli.ui.passphrase import passphrase
from milkglass.cli.ui.terminal import note, say
from milkglass.errors import UsageError

if TYPE_CHECKING:
    from milkglass.client.key.file import UnlockedKey


@with_options
def proxy(*, endpoint: EndpointOptions, key: KeyOptions, server: ServerOptions) -> None:
    """Answer OpenAI's API on this machine: text in front, scrambled ids behind.

    Point an application's base URL at it, such as http://127.0.0.1:8422/v1. What cannot be kept private is refused.
    --key FOLDER takes every key file (*.mgkey) in it, under one passphrase: each model is asked with its own key.
    Without --api-key-file any API key is taken, from this machine alone. A network's address needs --cert and
    --tls-key, too.
    """
    door = endpoint.door()
    upstream = endpoint.upstream(server)
    unlocked = _opened(key)
    from milkglass.client.session import codec_of
    from milkglass.proxy.run import run

    def ready(url: str, models: list[str]) -> None:
        say(f"milkglass proxy: listening on {url}/v1; models: {', '.join(models)}")
        note('next: OpenAI(base_url="' + url + '/v1", api_key="any")')

    keys = [(one, codec_of(one, key.model)) for one in unlocked]
    run(keys, upstream, endpoint.serves or (), door, ready, note)


def _opened(key: KeyOptions) -> list[UnlockedKey]:
    """The key; of a folder every key file in it, which one passphrase opens. Raises UsageError, KeyFileError."""
    if key.key is None or not key.key.is_dir():
        return [key.open()]
    files = sorted(key.key.glob("*.mgkey"))
    if not files:
        raise UsageError(f"{key.key} holds no key file", "give a key file, or a folder of files *.mgkey")
    if key.model is not None:
        raise UsageError("--model is of one key, and a folder has several", "give one key file")
    from milkglass.client.key.file import UnlockedKey

    word = passphrase(key.passphrase_file)
    return [UnlockedKey.open(file, word) for file in files]
