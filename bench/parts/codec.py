"""Text to scrambled ids and back, beside the tokenizer alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from frame.figure import Figure
from frame.rounds import interleaved
from frame.texts import tickets
from tokenizers import Tokenizer

from milkglass.client.codec.codec import Codec
from milkglass.client.key.generate import new_key
from milkglass.models.checkpoint import Checkpoint
from milkglass.models.resolve import resolve_model
from milkglass.models.tokenizer import load_tokenizer


def measure(quick: bool) -> Iterator[Figure]:
    base = Checkpoint.open(resolve_model("demo:minilm"))
    codec = Codec.open(new_key(base, "demo:minilm", None, base.digest()), base.folder)
    bare, raw = load_tokenizer(base.folder), _raw(base.folder)
    texts = tickets(300 if quick else 5_000)
    rounds = 2 if quick else 5
    ids = codec.encode(texts).ids
    plain = [codec.inverse[one].tolist() for one in ids]
    assert plain == bare(texts)["input_ids"], "both sides must read the texts alike"
    assert codec.decode_batch(ids) == [bare.decode(one, skip_special_tokens=True) for one in plain]
    # The same threads for both: the tokenizers library has a pool of its own, of all cores.
    threads, about = torch.get_num_threads(), f"{len(texts):,} texts, {sum(map(len, ids)):,} tokens"

    ours, other = interleaved(lambda: codec.encode(texts), lambda: bare(texts)["input_ids"], rounds)
    yield Figure("speed of encoding", ours, other, "transformers' fast tokenizer", "at least", 0.9, dtype="int32",
                 threads=threads, note=about)  # fmt: skip
    ours, other = interleaved(lambda: codec.encode(texts), lambda: [one.ids for one in raw.encode_batch(texts)], rounds)
    yield Figure("speed of encoding, against the Rust library", ours, other, "tokenizers' encode_batch", "at least",
                 dtype="int32", threads=threads, note=about)  # fmt: skip

    def decoded() -> list[str]:
        return [bare.decode(one, skip_special_tokens=True) for one in plain]

    ours, other = interleaved(lambda: codec.decode_batch(ids), decoded, rounds)
    what = "transformers' fast tokenizer"
    yield Figure("speed of decoding", ours, other, what, "at least", 0.9, dtype="int32", note=about)


def _raw(folder: Path) -> Tokenizer:
    result = Tokenizer.from_file(str(folder / "tokenizer.json"))
    result.no_padding()
    result.no_truncation()
    return result
