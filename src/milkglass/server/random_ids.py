"""Makes the random identifiers of files, models, jobs and answers."""

from __future__ import annotations

import secrets


def new_id(prefix: str) -> str:
    """Returns the prefix, a hyphen and 24 random hexadecimal digits, such as "file-0f3c..."."""
    return f"{prefix}-{secrets.token_hex(12)}"
