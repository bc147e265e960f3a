"""How a browser gets into the page: with a code of one use, which it exchanges for a key of its own.

A browser keeps addresses and a tab's storage in its profile. What is kept there opens nothing later: the code is used
up, and the page's key ends with the command. The API key never reaches the browser.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

from milkglass.errors import Unauthorized
from milkglass.progress import Log, no_log

BYTES = 24  # of randomness


def _drawn() -> str:
    return secrets.token_urlsafe(BYTES)


@dataclass
class OneTimeCode:
    """Attributes:
    code: what opens the page next, once.
    key: what the page gives from then on, until the command ends.
    renewed: called with the code that follows one that was used.
    """

    code: str = field(default_factory=_drawn, repr=False)
    key: str = field(default_factory=_drawn, repr=False)
    renewed: Log = field(default=no_log, repr=False)

    def exchange(self, given: str) -> str:
        """The page's key. Raises Unauthorized for a code that is wrong, or was used."""
        if not hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self.code.encode()):
            hint = "open the address that milkglass ui printed last"
            raise Unauthorized("the code of this address is wrong, or was used", hint)
        self.code = _drawn()
        self.renewed(self.code)
        return self.key
