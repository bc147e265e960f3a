"""`milkglass proxy`: any program that speaks OpenAI's API, in front of any engine that serves a scrambled model."""

from __future__ import annotations

from milkglass.cli.proxy.options import EndpointOptions
from milkglass.cli.ui.options import KeyOptions, ServerOptions, with_options
from milkglass.cli.ui.terminal import note, say


@with_options
def proxy(*, endpoint: EndpointOptions, key: KeyOptions, server: ServerOptions) -> None:
    """Answer OpenAI's API on this machine: text in front, scrambled ids behind.

    Point an application's base URL at it, such as http://127.0.0.1:8422/v1. What cannot be kept private is refused.
    Without --api-key-file any API key is taken, from this machine alone. A network's address needs --cert and
    --tls-key, too.
    """
    door = endpoint.door()
    upstream = endpoint.upstream(server)
    unlocked = key.open()
    from milkglass.client.session import codec_of
    from milkglass.proxy.run import run

    def ready(url: str, models: list[str]) -> None:
        say(f"milkglass proxy: listening on {url}/v1; models: {', '.join(models)}")
        note('next: OpenAI(base_url="' + url + '/v1", api_key="any")')

    run(unlocked, codec_of(unlocked, key.model), upstream, endpoint.serves or (), door, ready, note)
