"""Write vectors/: known answers with their intermediate values, one scenario a file.

    python reference/write_vectors.py

The answers come from the literal programs beside this file, key files included (key_files.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import aliases as literal_aliases
import key as literal_key
import key_files
import noise as literal_noise
import obfuslm as literal_obfuslm
import responses as literal_responses

VECTORS = Path(__file__).parent.parent / "vectors"
ROOT = bytes(range(32))
DIGEST = "sha256:" + "ab" * 32


def write(name: str, about: str, **content: object) -> None:
    (VECTORS / f"{name}.json").write_text(json.dumps({"about": about, **content}, indent=1) + "\n", "utf-8")


def derivations() -> None:
    labels = ("permutation", "noise/embedding")
    subkeys = {label: literal_key.subkey(ROOT, DIGEST, label).hex() for label in labels}
    source = literal_key.words(bytes.fromhex(subkeys["permutation"]))
    write(
        "key-derivation",
        "sub-keys by HKDF, the key's identifier, the ChaCha20 words of one sub-key, two permutations from it, and "
        "Laplace noise from the other",
        root=ROOT.hex(),
        model_digest=DIGEST,
        subkeys=subkeys,
        identifier=literal_key.subkey(ROOT, DIGEST, "identifier")[:16].hex(),
        words=[next(source) for _ in range(20)],
        permutation_12=literal_key.permutation(bytes.fromhex(subkeys["permutation"]), 12),
        permutation_12_pinned_1_7=literal_key.permutation(bytes.fromhex(subkeys["permutation"]), 12, (1, 7)),
        laplace=literal_key.laplace(bytes.fromhex(subkeys["noise/embedding"]), 10),
    )


def obfuslm() -> None:
    rng = np.random.default_rng(2025)
    table = np.round(rng.normal(size=(5, 4)).repeat(6, axis=0) + 0.6 * rng.normal(size=(30, 4)), 3)
    order = rng.permutation(30)
    clusters = literal_obfuslm.embed_cluster(table[order], 4, 0.8)
    key = literal_key.subkey(ROOT, DIGEST, "noise/embedding")
    noise = np.array(literal_key.laplace(key, sum(len(c) ** 2 for c in clusters)))
    w = literal_obfuslm.weight_synth(table[order], clusters, 1.0, noise)
    write(
        "obfuslm",
        "k = 4, epsilon = 1, beta = 0.8, leftover = paper, noise of key-derivation's root; rows in visiting order",
        table=table.tolist(),
        order=order.tolist(),
        clusters=[[int(order[i]) for i in c] for c in clusters],
        noise=noise.tolist(),
        mixed=(w @ table[order]).tolist(),
    )


def aliases() -> None:
    """A key of 9 tokens, of which 0 and 4 have one id, and the table that it makes."""
    n, r, single = 9, 3, {0, 4}
    places = literal_aliases.slots(n, r, single)
    sigma = literal_key.permutation(literal_key.subkey(ROOT, DIGEST, "permutation"), len(places), (4,))
    order = literal_key.permutation(literal_key.subkey(ROOT, DIGEST, "order/embedding"), n)
    rng = np.random.default_rng(2026)
    table = np.round(rng.normal(size=(n, 4)), 3)
    clusters = [[1, 5, 3], [8, 2, 6, 7]]
    labels = ["noise/embedding", "noise/embedding/1", "noise/embedding/2"]
    count = sum(len(one) ** 2 for one in clusters)
    noises = [np.array(literal_key.laplace(literal_key.subkey(ROOT, DIGEST, one), count)) for one in labels]
    write(
        "key-aliases",
        "three ids for each of 9 tokens but 0 and 4, id 4 pinned: the slots, their permutation, the order in which "
        "clusters are begun, and the table that given clusters make at epsilon = 1, the noise of each alias from a "
        "sub-key of its own",
        root=ROOT.hex(),
        model_digest=DIGEST,
        copies=r,
        single=sorted(single),
        slots=[list(one) for one in places],
        sigma=sigma,
        ids=[[sigma[slot] for slot, (token, _) in enumerate(places) if token == one] for one in range(n)],
        order=order,
        table=table.tolist(),
        clusters=clusters,
        labels=labels,
        noises=[one.tolist() for one in noises],
        scrambled=literal_aliases.scrambled(table, clusters, 1.0, noises, single, sigma).tolist(),
    )


def rounded_noise() -> None:
    key = literal_key.subkey(ROOT, DIGEST, "noise")
    cases = [
        {"law": law, "ratio": ratio, "samples": literal_noise.samples(key, 16, ratio, tail)}
        for law, tail in (("gaussian", literal_noise.gaussian_tail), ("laplace", literal_noise.laplace_tail))
        for ratio in (0.5, 3.25, 2.0**24 * 1.5)
    ]
    write("noise", "exact samples of round(ratio Z) from the key stream of one sub-key", key=key.hex(), cases=cases)


def responses() -> None:
    key, values, ids = literal_key.subkey(ROOT, DIGEST, "responses"), [2, 5, 7, 11], [7, 3, 2, 11, 5, 5] * 4
    cases = [
        {"epsilon": one, "weight": literal_responses.weight(one), "sent": literal_responses.sent(key, one, values, ids)}
        for one in (0.1, 1.0, 3.0)
    ]
    tokens = list(range(100, 100 + len(ids)))
    text = literal_responses.key_of_text(key, tokens)
    of_a_text = {"tokens": tokens, "epsilon": 1.0, "sent": literal_responses.sent(text, 1.0, values, ids)}
    write(
        "responses", "ids exchanged by randomised response over four values, from the key stream of one sub-key; and "
        "those of a text of these original tokens, from the text's own key stream under that sub-key",
        key=key.hex(), values=values, ids=ids, cases=cases, text=of_a_text,
    )  # fmt: skip


def rows() -> None:
    """Training rows: three ids and two, of a conversation, for a model that has token types."""
    tensors = {
        "lengths": [3, 2],
        "input_ids": [7, 300, 5, 70_000, 9],
        "token_labels": [-100, 300, 5, -100, 9],
        "token_type_ids": [0, 0, 1, 0, 0],
    }
    header: dict[str, object] = {"__metadata__": {"format": "rows/1"}}
    data = b""
    for name, numbers in tensors.items():
        width, dtype = (1, "I8") if name == "token_type_ids" else (4, "I32")
        begin = len(data)
        data += b"".join(number.to_bytes(width, "little", signed=True) for number in numbers)
        header[name] = {"dtype": dtype, "shape": [len(numbers)], "data_offsets": [begin, len(data)]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write(
        "rows-1",
        "training rows for causal-lm: the tensors, the file in hex, and the ids and labels of each row",
        tensors=tensors,
        file=(len(text).to_bytes(8, "little") + text + data).hex(),
        rows=[[[7, 300, 5], [-100, 300, 5]], [[70_000, 9], [-100, 9]]],
    )


if __name__ == "__main__":
    derivations()
    rows()
    rounded_noise()
    responses()
    obfuslm()
    aliases()
    key_files.write_all(write, ROOT, DIGEST)
