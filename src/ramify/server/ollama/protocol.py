"""Request types of Ollama's API. Unknown fields are ignored; of a message and a tool, silently."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ramify.server.openai.protocol import (
    MAX_MESSAGES,
    CacheSalt,
    Name,
    NonNegativeInt,
    NumLogprobs,
    Penalty,
    Priority,
    Tool,
    TopK,
    UnitInterval,
)

# Below 0: no limit, whichever number it is; 0: compute and cache the prompt.
NumPredict = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
StopTexts = Annotated[list[Annotated[str, Meta(max_length=4096)]], Meta(max_length=4096)]
RepeatPenalty = Annotated[float, Meta(gt=0, le=10)]


class ModelOptions(Struct, kw_only=True):
    """`options` of a request: those that are honoured; see `options` for the others."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: TopK | None = None
    top_p: UnitInterval | None = None
    min_p: UnitInterval | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None  # below 0: drawn
    num_predict: NumPredict | None = None
    stop: str | StopTexts | None = None  # empty ones are left out
    repeat_penalty: RepeatPenalty | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1)] | None = None  # 0: no penalties
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: NonNegativeInt | None = None


# A dictionary, as the names of unknown options are for a warning; described as `ModelOptions`.
OptionsField = Annotated[
    dict[str, Any],
    Meta(
        extra_json_schema={
            "properties": msgspec.json.schema(ModelOptions)["$defs"]["ModelOptions"]["properties"]
        }
    ),
]


class OllamaFunctionCall(Struct):
    """The function and the arguments of a tool call."""

    name: Name
    arguments: Any = None  # an object; the text of one from some clients
    index: int | None = None


class OllamaToolCall(Struct):
    """A tool call in an assistant's message."""

    function: OllamaFunctionCall
    id: Name | None = None


class OllamaMessage(Struct):
    """A message of a conversation."""

    role: Name
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: Name | None = None  # of the tool whose result this is
    tool_call_id: Name | None = None
    name: Name | None = None


class ModelRequest(Struct, kw_only=True):
    """Fields of requests that run the model."""

    model: Name | None = None  # None: 400
    options: OptionsField | None = None
    keep_alive: float | str | None = None


class AnswerRequest(ModelRequest, kw_only=True):
    """Fields of requests that get an answer; the last five are Ramify's."""

    stream: bool | None = None  # None: true
    format: str | dict[str, Any] | None = None  # "json", or a JSON schema
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    cache_salt: CacheSalt | None = None
    session_id: Name | None = None
    end_session: bool | None = None
    priority: Priority | None = None


class OllamaChatRequest(AnswerRequest, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    prefix: Name | None = None  # that the messages follow; Ramify's
    tools: list[Tool] | None = None


class GenerateRequest(AnswerRequest, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    context: list[int] | None = None  # of an earlier answer
    raw: bool | None = None
    images: list[Any] | None = None  # refused: they are of the turn to answer
    suffix: str | None = None  # refused
    template: str | None = None  # refused


class EmbedRequest(ModelRequest, kw_only=True):
    """POST /api/embed."""

    input: str | list[str] | None = None
    truncate: bool | None = None  # None: true
    dimensions: NonNegativeInt | None = None  # 0: all


class EmbeddingRequest(ModelRequest, kw_only=True):
    """POST /api/embeddings, the older form of /api/embed."""

    prompt: str | None = None


class ShowRequest(Struct, kw_only=True):
    """POST /api/show."""

    model: Name | None = None
    name: Name | None = None  # older name of `model`
    verbose: bool | None = None
