"""`POST /v1/embeddings`, in OpenAI's format."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from milkglass.errors import UsageError
from milkglass.proxy.backend import Backend
from milkglass.proxy.calls.bodies import EmbeddingBody
from milkglass.proxy.calls.completions import prompts_of

MOST_INPUTS = 2048  # of one request, as OpenAI's


async def embedded(backend: Backend, body: EmbeddingBody) -> dict[str, Any]:
    """Embeds texts. Raises CodecError or UsageError before anything is sent, UnsupportedModel if the engine cannot."""
    texts = prompts_of(body.input, MOST_INPUTS)
    if any(not isinstance(one, str) for one in texts):
        raise UsageError(
            "embeddings are made of texts: ids, as some clients send them, are another tokenizer's",
            "send texts; in LangChain with check_embedding_ctx_length=False",
        )
    rows = backend.encoded([str(one) for one in texts])
    vectors = await backend.embeddings(body.model, rows)
    read = sum(map(len, rows))
    return {
        "object": "list",
        "model": backend.model(body.model).name,
        "data": [
            {"object": "embedding", "index": index, "embedding": _shown(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": read, "total_tokens": read},
    }


def _shown(vector: list[float], form: str) -> list[float] | str:
    return vector if form == "float" else base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode()
