"""How much the decipherment reads of a text, and in what CPU time, beside the attacks that it has to beat.

    python bench/attack_decipherment.py --private a.txt --public b.txt c.tsv [--k 10] [--sentences 6900] [--tokens 0]
    python bench/attack_decipherment.py --private a.txt          # a's own rest is the public text

Files: one text a line (of a .tsv the first column, without its heading), or a JSON list of texts. The private side is
the first half of its file, or `--sentences` drawn from it; without --public the rest of it is the public one. The
groups are the true clusters of ObfusLM, with nothing said of the order inside them. `--without` solves without groups.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from milkglass.attacks.token_ids.cluster_conditional import ClusterConditional
from milkglass.attacks.token_ids.decipherment.decipherment import Decipherment
from milkglass.attacks.token_ids.tfa import TFA
from milkglass.models.resolve import resolve
from milkglass.models.view import Model
from milkglass.schemes.obfuslm import ObfusLM, zero_rows
from milkglass.sequences import Ids, Sequences
from milkglass.threat.attack import Attack
from milkglass.threat.budget import Budget
from milkglass.threat.knowledge import Candidates, Group, Knowledge
from milkglass.threat.observations import Tokens, Transcript, Weights
from milkglass.threat.truth import Truth, content_tokens, score


def texts(path: Path) -> list[str]:
    if path.suffix == ".json":
        return [str(one) for one in json.loads(path.read_text("utf-8"))]
    lines = path.read_text("utf-8").splitlines()
    return [line.split("\t")[0].strip() for line in lines[1:]] if path.suffix == ".tsv" else [x for x in lines if x]


def grouped(model: Model, sigma: Ids, special: list[int], k: int, rng: np.random.Generator) -> Candidates:
    table = model.table
    mixed = np.setdiff1d(np.flatnonzero(~zero_rows(table)), special)
    clusters = ObfusLM(k=k).cluster(table, rng.permutation(mixed))
    alone = np.setdiff1d(np.arange(len(table)), mixed)
    members = [np.sort(one) for one in clusters] + [alone[[i]] for i in range(len(alone))]
    groups = tuple(Group(np.sort(sigma[one]), one) for one in members)
    return Candidates(groups, tuple(np.zeros((len(one.rows), len(one.members))) for one in groups))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--private", type=Path, required=True)
    parser.add_argument("--public", type=Path, nargs="*", default=[])
    parser.add_argument("--model", default="demo:minilm")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--sentences", type=int, default=0, help="drawn from --private; 0: its first half")
    parser.add_argument("--tokens", type=int, default=0, help="cut the private side to about that many")
    parser.add_argument("--without", action="store_true", help="no groups")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    folder = resolve(given.model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    model = Model.open(folder)
    size = len(model.table)

    own = [np.array(one.ids, np.int64) for one in tokenizer.encode_batch(texts(given.private))]
    order = rng.permutation(len(own)) if given.sentences else np.arange(len(own))
    cut = given.sentences or len(own) // 2
    mine, rest = [own[i] for i in order[:cut]], [own[i] for i in order[cut:]]
    if given.tokens:
        mine = [mine[i] for i in rng.permutation(len(mine))]
        mine = mine[: 1 + int(np.searchsorted(np.cumsum([len(one) for one in mine]), given.tokens))]
    other = [line for path in given.public for line in texts(path)]
    public = Sequences.of([one.ids for one in tokenizer.encode_batch(other)] if other else rest)

    sigma = rng.permutation(size).astype(np.int64)
    private = Sequences.of(mine)
    special = [i for i, one in tokenizer.get_added_tokens_decoder().items() if one.special]
    transcript = Transcript((Weights(model), Tokens(private.mapped(sigma))), size)  # no attack here reads the table
    candidates = None if given.without else grouped(model, sigma, special, given.k, rng)
    pieces = [tokenizer.id_to_token(i) or "" for i in range(size)]
    counts = private.counts(size) + public.counts(size)
    truth = Truth(
        np.argsort(sigma),
        ~np.isin(np.arange(size), special),
        content_tokens(counts, pieces),
        lambda ids: tokenizer.decode(ids.tolist()),
        private.mapped(sigma),
    )
    knowledge = Knowledge(public_model=model if candidates else None, corpus=public, candidates=candidates)
    attacks: list[Attack] = [TFA(), *([ClusterConditional()] if candidates else []), Decipherment()]
    print(f"{len(private.ids)} private tokens, {len(public.ids)} public ones")
    for attack in attacks:
        began = time.process_time()
        guess = attack(transcript, knowledge, Budget(), rng)
        seconds = time.process_time() - began
        found = score(guess, truth, rng)
        shown = " ".join(
            f"{name} {100 * found[name].value:.1f}" for name in ("tokens top-1", "tokens top-3", "content top-1")
        )
        print(f"{attack.name:20} {shown}  {seconds:.1f} s of CPU time", flush=True)


if __name__ == "__main__":
    main()
