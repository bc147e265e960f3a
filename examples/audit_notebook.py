# %% [markdown]
# What does a scheme cost on your rows, and what would be read of them? Nothing here is sent anywhere.
#
#     python audit_notebook.py MODEL ROWS OUT [BUDGET]
#
# MODEL is the public model, ROWS your rows with labels, OUT a new folder, BUDGET the processor time of the attacks,
# such as 5m. Run the file as a script, or cell by cell in an editor after setting `words`. MILKGLASS_PASSPHRASE has
# the passphrase that seals the key (else a terminal is asked).

# %%
import json
import os
import subprocess
import sys
from getpass import getpass
from pathlib import Path

import milkglass
from milkglass import Checkpoint, ObfusLM, new_key, resolve_model, scramble, verify, write_key

USAGE = "usage: python audit_notebook.py MODEL ROWS OUT [BUDGET]"
words = sys.argv[1:]
if not 3 <= len(words) <= 4:
    sys.exit(USAGE)
model, rows, out = words[0], words[1], Path(words[2])
budget = words[3] if len(words) > 3 else "5m"
passphrase = os.environ.get("MILKGLASS_PASSPHRASE") or getpass("a passphrase for the new key: ")
out.mkdir(parents=True)

# %% [markdown]
# ## What it is worth
# Several ways of using the model on your rows: with nothing sent, with tokens replaced, and as it is. Each is attacked.

# %%
ways = ["--ways", "commonest,linear,rnm,plain", "--attacks", budget, "--out", out / "compare"]
command = [Path(sys.executable).with_name("milkglass"), "compare", model, rows, *ways]
done = subprocess.run([str(word) for word in (*command, "--json")], stdout=subprocess.PIPE, check=True, text=True)
compared = json.loads(done.stdout)
for way in compared["ways"]:
    read = way["reading"]["content"]["value"] if way["reading"] and way["reading"]["content"] else 0
    print(f"{way['title']}: {100 * way['quality']['value']:.1f} % right, {100 * read:.1f} % of the content words read")
print(compared["verdict"][0])

# %% [markdown]
# ## The key and the scrambled model

# %%
scheme = ObfusLM(k=4, epsilon=1.0, beta=0.9)
base = Checkpoint.open(resolve_model(model))
key = new_key(base, model, scheme, base.digest())
write_key(out / "audited.mgkey", key, passphrase)
scramble(base, key, out / "scrambled")
for check in verify(base, key, out / "scrambled"):
    print(f"{check.name}: {'passed' if check.passed else 'FAILED'}")

# %% [markdown]
# ## What is read
# A random half of the rows is attacked; the other half is what an attacker has of the same kind.

# %%
audit = milkglass.audit_key(out / "audited.mgkey", passphrase, rows, out / "audit", budget=budget)
print(f"{audit.level}: {audit.verdict}")
for cell in audit.results:
    if cell.state == "done" and "tokens top-1" in cell.measures:
        print(f"{cell.title} ({cell.adversary}): {cell.measures['tokens top-1']} of the tokens")

# %% [markdown]
# Which kinds of words the strongest attack reads, and what guessing without an attack would read.

# %%
if audit.best is not None:
    for kind, share in audit.best.by_class.items():
        print(f"{kind}: {share}")
for name, value in audit.floors.items():
    print(f"{name}: {value:.3f}")
if audit.unfinished:
    print("not finished, and may read more:", ", ".join(audit.unfinished))
print("the whole report:", out / "audit" / "audit.html")
