"""Embeddings, scores and reranking: vectors of texts, and their cosine similarities.

The checkpoint's files say how hidden states become a vector (`ramify.models.configs.pooling`).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.responses import Response

from ramify.counts import counted
from ramify.engine.embedding import embedding_of, embedding_params
from ramify.errors import PromptTooLongError
from ramify.outputs import RequestOutput
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest, total_usage
from ramify.server.history.stored_requests import HistoryEntry, fingerprint
from ramify.server.openai.chat_response import usage_json
from ramify.server.openai.completions import check_prompts, prompt_ids, prompt_paths
from ramify.server.openai.protocol import EmbeddingsRequest, RerankRequest, ScoreRequest
from ramify.server.prompts.jobs import stop_if_abandoned
from ramify.server.prompts.renderer import RenderedPrompt
from ramify.server.service import RequestService

MAX_INPUTS = 2048  # as OpenAI's
Vectors = NDArray[np.float32]


async def embeddings(context: RequestContext) -> Response:
    """POST /v1/embeddings: a vector for each input."""
    request = await context.body(EmbeddingsRequest)
    inputs = _inputs(request.input, "input")
    service = context.service
    _check_dimensions(request.dimensions, service.embedding_size)
    texts = _prefixed(service.pooling.prompt_text(request.prompt_name), inputs)
    params = prompt_paths(request.input, inputs, "input")
    outputs, usage = await embed_inputs(context, request.model, texts, params)
    vectors = [
        embedding_of(
            output, num_dims=request.dimensions, is_normalised=service.pooling.is_normalised
        )
        for output in outputs
    ]
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, request)}
        for index, vector in enumerate(vectors)
    ]
    model = context.service.check_model(request.model)
    return context.json({"object": "list", "data": data, "model": model, "usage": usage})


async def score(context: RequestContext) -> Response:
    """POST /v1/score: the cosine similarity of each pair of texts."""
    request = await context.body(ScoreRequest)
    first, second = _inputs(request.text_1, "text_1"), _inputs(request.text_2, "text_2")
    if len(first) not in (1, len(second)):
        raise ApiError(
            400,
            f"text_1 has {counted(len(first), 'text')} and text_2 {len(second)}; give one text_1 for all, or "
            "one for each text_2",
            param="text_1",
        )
    names = prompt_paths(request.text_1, first, "text_1")
    names += prompt_paths(request.text_2, second, "text_2")
    texts = _prefixed(context.service.pooling.prompt_text(None), [*first, *second])
    outputs, usage = await embed_inputs(context, request.model, texts, names)
    vectors = np.stack([embedding_of(output) for output in outputs])
    scores = np.sum(vectors[: len(first)] * vectors[len(first) :], axis=1)
    data = [
        {"object": "score", "index": index, "score": float(value)}
        for index, value in enumerate(scores)
    ]
    model = context.service.check_model(request.model)
    return context.json({"object": "list", "data": data, "model": model, "usage": usage})


async def rerank(context: RequestContext) -> Response:
    """POST /v1/rerank: documents by their cosine similarity to the query, the nearest first."""
    request = await context.body(RerankRequest)
    if not request.documents:
        raise ApiError(400, "there is no document", param="documents")
    texts = [_document_text(*item) for item in enumerate(request.documents)]
    pooling = context.service.pooling
    inputs = [
        *_prefixed(pooling.role_text("query"), [request.query]),
        *_prefixed(pooling.role_text("document", "passage", "corpus"), texts),
    ]
    names = ["query", *(f"documents[{number}]" for number in range(len(texts)))]
    outputs, usage = await embed_inputs(context, request.model, inputs, names)
    vectors = np.stack([embedding_of(output) for output in outputs])
    scores = vectors[1:] @ vectors[0]
    order = np.argsort(-scores, kind="stable")[: request.top_n]
    results = [
        {
            "index": int(index),
            "relevance_score": float(scores[index]),
            **({"document": {"text": texts[index]}} if request.return_documents else {}),
        }
        for index in order
    ]
    model = context.service.check_model(request.model)
    return context.json({"model": model, "results": results, "usage": usage})


def _prefixed(prefix: str, inputs: Sequence[Any]) -> list[Any]:
    """Inputs with the checkpoint's prompt before each text; token ids and empty texts as they are."""
    return [prefix + item if isinstance(item, str) and item else item for item in inputs]


def _document_text(number: int, document: str | dict[str, Any]) -> str:
    """The text of a document to rank: itself, or its field `text`."""
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        where = f"documents[{number}]"
        raise ApiError(
            400, f"{where} is neither a string nor an object with the string text", param=where
        )
    return text


async def embed_inputs(
    context: RequestContext,
    model: str | None,
    inputs: Sequence[Any],
    params: Sequence[str],
) -> tuple[list[RequestOutput], dict[str, Any]]:
    """An output with an embedding for each input, and the usage of all.

    Args:
        params: the field of each input, for error messages.
    """
    service = context.service
    if service.pooling.refusal is not None:
        raise ApiError(400, service.pooling.refusal, param="model")
    if len(inputs) > MAX_INPUTS:
        message = f"{len(inputs)} inputs, the limit is {MAX_INPUTS}; send several requests"
        raise ApiError(400, message, param=params[-1].partition("[")[0])
    requests = await context.in_prompt_thread(_generation_requests, inputs, params, model, service)
    generations = await context.until_done_or_disconnect(
        service.start_all(requests, context.caller, prefix="embd-")
    )
    context.generations.extend(generations)
    outputs = [
        await context.until_done_or_disconnect(generation.wait()) for generation in generations
    ]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    usage = usage_json(total_usage(generations), num_prompt, 0)
    del usage["completion_tokens"], usage["completion_tokens_details"]
    return outputs, usage


def _check_dimensions(num_dims: int | None, size: int | None) -> None:
    """Raise ApiError if a vector has not as many elements."""
    if num_dims is not None and (size is None or num_dims > size):
        size_text = "does not say how many it has" if size is None else f"has {size}"
        raise ApiError(400, f"dimensions is {num_dims}; this model {size_text}", param="dimensions")


def _generation_requests(
    inputs: Sequence[Any], params: Sequence[str], model: str | None, service: RequestService
) -> list[GenerationRequest]:
    name = service.check_model(model)
    check_prompts(inputs, service)
    sampling = embedding_params(service.pooling.mode)
    requests = []
    for text_or_ids, param in zip(inputs, params, strict=True):
        stop_if_abandoned()
        if not text_or_ids:
            raise ApiError(400, f"{param} is empty", param=param)
        ids = prompt_ids(text_or_ids, param, service, add_special_tokens=True)
        if len(ids) >= service.max_model_len:
            raise PromptTooLongError(len(ids), service.max_model_len)
        if not ids:
            raise ApiError(400, f"{param} is empty", param=param)
        entry = HistoryEntry(
            model=name,
            options={},
            messages=(fingerprint(text_or_ids),),
            prompt=RenderedPrompt(ids, num_stable_tokens=len(ids)),
            paths=(param,),
        )
        requests.append(GenerationRequest(history_entry=entry, params=sampling))
    return requests


def _inputs(value: str | list[Any], param: str) -> list[Any]:
    """The texts or lists of token ids of a field."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise ApiError(400, f"{param} is empty", param=param)
    inputs: list[Any] = [value] if all(isinstance(item, int) for item in value) else value
    if not all(isinstance(item, str | list) and item for item in inputs):
        raise ApiError(
            400, f"{param} must be texts or lists of token ids, none of them empty", param=param
        )
    return inputs


def _encoded(vector: Vectors, request: EmbeddingsRequest) -> list[float] | str:
    if request.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    values: list[float] = vector.tolist()
    return values
