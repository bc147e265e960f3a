"""Finds characters that are escaped as in HTML, and replaces them."""

from __future__ import annotations

import html
import re
from dataclasses import replace

from milkglass.rows.examples import Example

# Such as "&amp;" and "&#39;", or what is left where "&" was removed: "#39;", "quot;". Of "&amp;amp;" only the first
HTML_ESCAPE_PATTERN = re.compile(r"(?:&|(?<![;&]))#\d{2,5};|(?:&|(?<![;&\w]))(?:amp|lt|gt|quot|apos|nbsp);")


def first_escape(text: str) -> str:
    """Returns the first escape of a text; "" if it has none."""
    match = HTML_ESCAPE_PATTERN.search(text)
    return match.group() if match else ""


def unescape(text: str) -> str:
    """Returns a text with the characters in place of their escapes. A no-break space becomes a space."""
    return HTML_ESCAPE_PATTERN.sub(lambda match: html.unescape("&" + match.group().removeprefix("&")), text).replace(
        "\N{NO-BREAK SPACE}", " "
    )


def unescape_example(example: Example) -> Example:
    """Returns a row whose texts, or the contents of its messages, have no escapes. A label is as it was."""
    return replace(
        example,
        text=unescape(example.text),
        pair=None if example.pair is None else unescape(example.pair),
        messages=tuple(
            {**message, "content": unescape(content)} if isinstance(content := message.get("content"), str) else message
            for message in example.messages
        ),
    )
