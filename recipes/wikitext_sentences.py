"""`python wikitext_sentences.py FILE ... OUT`: WikiText's tokenised lines as plain sentences, one a line."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def sentences(text: str) -> list[str]:
    """Without headings, short lines, unknown words and the marks that hold numbers together."""
    found = []
    for line in map(str.strip, text.splitlines()):
        if len(line) < 20 or line.startswith("="):
            continue
        plain = line.replace("@-@", "-").replace("@,@", ",").replace("@.@", ".").replace("<unk>", "")
        found += [one for one in re.split(r"(?<= [.?!]) ", plain) if len(one) > 3]
    return found


if __name__ == "__main__":
    *sources, out = map(Path, sys.argv[1:])
    lines = [one for source in sources for one in sentences(source.read_text("utf-8"))]
    out.write_text("\n".join(lines) + "\n", "utf-8")
