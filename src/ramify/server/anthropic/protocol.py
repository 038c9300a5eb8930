"""Request types of the Messages API. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ramify.server.openai.protocol import MAX_MESSAGES, Name, NonNegativeInt, UnitInterval

VERSION_HEADER = "anthropic-version"  # Anthropic's clients send it with every request


class CacheControl(Struct):
    """Pin the prompt up to the end of this block."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(Struct):
    """A block of a message's content; text, tool_use, tool_result and thinking are served."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class InputMessage(Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class InputTool(Struct):
    """A tool that the model may call; only tools that the client runs are served."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Struct):
    """Whether the model must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class DiagnosticsParam(Struct):
    """Ask why the prompt of an earlier message was not read from the cache."""

    previous_message_id: Name | None = None


class Thinking(Struct):
    """Whether the model thinks first. Not passed on: here the chat template decides."""

    type: Name
    budget_tokens: int | None = None


class OutputFormat(Struct):
    """The JSON schema that the answer must match."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """Options of the answer."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: Name
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Block] | None = None
    tools: Annotated[list[InputTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None


class MessageRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: NonNegativeInt  # 0: compute and cache the prompt only
    stream: bool | None = None
    temperature: UnitInterval | None = None
    top_p: UnitInterval | None = None
    top_k: int | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=16)]
        | None
    ) = None
    diagnostics: DiagnosticsParam | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    speed: str | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
