"""`python enron_jsonl.py sentences.json OUT.jsonl`: a JSON list of texts as JSON Lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    source, out = map(Path, sys.argv[1:])
    texts = json.loads(source.read_text("utf-8"))
    rows = texts["train"] if isinstance(texts, dict) else texts
    out.write_text(
        "".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows if row.strip()), "utf-8"
    )
