"""Vectors of texts: /api/embed, and its older form /api/embeddings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from ramify.engine.embedding import embedding_of
from ramify.server.context import RequestContext
from ramify.server.ollama.names import check_model
from ramify.server.ollama.protocol import EmbeddingRequest, EmbedRequest
from ramify.server.ollama.response import NS
from ramify.server.openai.embeddings import embed_inputs
from ramify.server.prompts.jobs import stop_if_abandoned
from ramify.server.request_fields.unsupported_fields import UnsupportedFields
from ramify.server.service import RequestService

FIELDS = UnsupportedFields(ignored=frozenset({"shift"}))


async def embed(context: RequestContext) -> Response:
    """POST /api/embed: a vector of length 1 for each input."""
    arrived_s = time.monotonic()
    request = await context.body(EmbedRequest, FIELDS)
    service = context.service
    model = check_model(request.model, service)
    texts = [request.input] if isinstance(request.input, str) else request.input or []
    if texts in ([], [""]):  # clients have a model loaded so
        return context.json({"model": model, "embeddings": []})
    prefix = service.pooling.prompt_text(None)
    inputs: Sequence[Any] = [prefix + text if text else text for text in texts]
    if request.truncate is not False:
        inputs = await context.in_prompt_thread(_truncated, inputs, service)
    is_list = isinstance(request.input, list)
    paths = [f"input[{index}]" if is_list else "input" for index in range(len(texts))]
    outputs, usage = await embed_inputs(context, None, inputs, paths)
    size, wanted = service.embedding_size, request.dimensions or None
    num_dims = None if wanted is None or (size is not None and wanted >= size) else wanted
    vectors = [
        embedding_of(output, num_dims=num_dims, is_normalised=True).tolist() for output in outputs
    ]
    return context.json(
        {
            "model": model,
            "embeddings": vectors,
            "total_duration": max(1, round((time.monotonic() - arrived_s) * NS)),
            "load_duration": 1,
            "prompt_eval_count": usage["prompt_tokens"],
            **({"ramify_cache": usage["ramify_cache"]} if "ramify_cache" in usage else {}),
        }
    )


async def embeddings(context: RequestContext) -> Response:
    """POST /api/embeddings: the vector of one text."""
    request = await context.body(EmbeddingRequest, FIELDS)
    service = context.service
    check_model(request.model, service)
    if not request.prompt:
        return context.json({"embedding": []})
    text = service.pooling.prompt_text(None) + request.prompt
    inputs: Sequence[Any] = await context.in_prompt_thread(_truncated, [text], service)
    [output], _ = await embed_inputs(context, None, inputs, ["prompt"])
    vector = embedding_of(output, is_normalised=service.pooling.is_normalised)
    return context.json({"embedding": vector.tolist()})


def _truncated(texts: Sequence[str], service: RequestService) -> list[Any]:
    """The texts; of those that the context does not hold, the token ids of their beginning.

    A special token that the tokenizer puts at the end stays there: the vector may be its own.
    """
    most, tokenizer = service.max_request_len - 1, service.tokenizer
    max_chars = most * (service.max_prompt_bytes // service.max_model_len)
    inputs: list[Any] = []
    for text in texts:
        stop_if_abandoned()
        if len(text.encode("utf-8", "replace")) <= most:  # a token has a byte at least
            inputs.append(text)
            continue
        ids = tokenizer.encode(text[:max_chars]).tolist()
        end = [token for token in ids[-1:] if token in tokenizer.special_token_ids]
        inputs.append(ids if len(ids) <= most else ids[: most - len(end)] + end)
    return inputs
