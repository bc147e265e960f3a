"""Cut an Alpaca file (a JSON list of instruction, input, output) into train.jsonl and validation.jsonl, its last rows.

Rows whose question is longer than 400 characters are left out: within the recipe's 192 tokens no answer might be left.

python recipes/split_alpaca.py alpaca_5000.json OUT_FOLDER [HELD_OUT]      HELD_OUT: how many last rows (64)
"""

import json
import sys
from pathlib import Path

HELD_OUT, LONGEST = 64, 400

held_out = int(sys.argv[3]) if len(sys.argv) > 3 else HELD_OUT
rows = json.loads(Path(sys.argv[1]).read_text("utf-8"))
rows = [row for row in rows if row["output"].strip() and len(row["instruction"] + row["input"]) <= LONGEST]
folder = Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
for name, part in (("train", rows[:-held_out]), ("validation", rows[-held_out:])):
    lines = (json.dumps(row, ensure_ascii=False) for row in part)
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
