"""A scene with a server that writes its answers itself, in chats of two turns: the second repeats the first answer.

Only here is the server active. It plays against the product's own codec, so that what is measured is what a proxy or a
session sends. The letters' ids are given to it, since their frequent tokens are deciphered first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from milkglass.audit.scene import Adversary, Scene
from milkglass.client.codec.codec import Codec
from milkglass.client.codec.kept_ids import ANSWER_IDS
from milkglass.sequences import Sequences
from milkglass.threat.knowledge import Knowledge
from milkglass.threat.observations import Outputs, Tokens, Transcript
from milkglass.threat.truth import Truth

FIRST, NEXT = "hello", "go on"  # what the user says


def scene_of_answers(codec: Codec, texts: Sequence[str], keeps: bool = True) -> Scene:
    """Returns the scene of these answers, each the first of its own chat.

    Args:
        texts: what the server makes the user read, spelled letter by letter.
        keeps: whether answers come back in the ids in which they were written, as in the product; else as text.
    """
    asked = [{"role": "user", "content": FIRST}]
    prompt = codec.encode_chat(asked)
    written = [spelled(codec, text) for text in texts]
    sent = []
    for text, ids in zip(texts, written, strict=True):
        answer = {"role": "assistant", "content": text, **({ANSWER_IDS: ids} if keeps else {})}
        sent += [prompt, codec.encode_chat([*asked, answer, {"role": "user", "content": NEXT}])]
    prompts = Sequences.of([prompt] * len(texts))
    tokens = Sequences.of(sent)
    transcript = Transcript(
        (Tokens(tokens, "infer"), Outputs(Sequences.of(written), prompts)), len(codec.inverse), codec.key_id
    )
    public = Sequences.of(codec.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    inverse = np.asarray(codec.inverse, np.int64)
    truth = Truth(inverse, codec.is_visible, codec.is_visible, lambda ids: str(codec.tokenizer.decode(ids)), tokens)
    return Scene.of(transcript, truth, Adversary.without_text(Knowledge(answers=public)))


def spelled(codec: Codec, text: str) -> list[int]:
    """Returns the scrambled ids of a text, letter by letter."""
    letters = codec.tokenizer(list(text), add_special_tokens=False)["input_ids"]
    return codec.sigma[[one for letter in letters for one in letter]].tolist()
