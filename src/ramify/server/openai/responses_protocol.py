"""Request types of the Responses API. Unknown fields are ignored, unknown values are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct

from ramify.server.openai.protocol import (
    MAX_MESSAGES,
    ContentPart,
    Metadata,
    Name,
    PositiveInt,
    PromptCacheOptions,
    Refused,
    Temperature,
    UnitInterval,
)


class InputItem(Struct):
    """An item of `input`: a message, a function call, or a call's output, by `type`."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    id: Name | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None  # of reasoning
    encrypted_content: str | None = None  # of reasoning


class FunctionTool(Struct):
    """A tool of the Responses API: a function's fields lie beside `type`."""

    type: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Struct):
    """Whether the text is free, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ChosenTool(Struct):
    """`tool_choice` of one tool, which the model must call."""

    type: str
    name: Name | None = None


class Reasoning(Struct):
    """How much the model should think."""

    effort: Name | None = None


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses."""

    model: Name | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: UnitInterval | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    include: list[str] | None = None
    # These three are refused.
    conversation: Refused = UNSET
    prompt: Refused = UNSET
    background: bool | None = None
    store: bool | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    service_tier: Name | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    user: Name | None = None
