"""Request types of the Messages API. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ramify.server.openai.protocol import (
    MAX_MESSAGES,
    CacheSalt,
    Name,
    NonNegativeInt,
    Priority,
    Stops,
    ToolName,
    TopK,
    UnitInterval,
)
from ramify.server.prompts.renderer import BREAKPOINT_TTL_S

VERSION_HEADER = "anthropic-version"  # Anthropic's clients send it with every request


class CacheControl(Struct):
    """Pin the prompt up to the end of this block."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None  # None: 5m

    @property
    def ttl_s(self) -> float:
        """The lifetime in seconds after the last hit."""
        return BREAKPOINT_TTL_S[self.ttl or "5m"]


class Source(Struct):
    """Source of an image or a document: data or content; only text is read."""

    type: str
    data: str | None = None
    content: str | list[Block] | None = None


class Block(Struct):
    """A block of a message's content, or a part of one: the fields of all types that are served."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None  # of thinking; holds it if the client asked for none
    id: Name | None = None
    name: Name | None = None
    input: Any = None  # an object; the text of one from clients that send an answer back as it came
    tool_use_id: Name | None = None
    content: str | list[Block] | Block | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    # of documents and search results
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    # of what tools on Anthropic's servers returned
    tool_name: str | None = None
    tool_references: list[Block] | None = None
    url: str | None = None
    stdout: str | None = None
    stderr: str | None = None
    error_code: str | None = None


class InputMessage(Struct):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] | None = None  # None: only where the role is `system`
    clear_at: str | None = None  # `next_user_message`: not shown once such a message follows


class InputTool(Struct):
    """A tool that the model may call; `type` names those that Anthropic defines."""

    name: ToolName | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    display_width_px: int | None = None
    display_height_px: int | None = None


class ToolChoice(Struct):
    """Whether the model must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class DiagnosticsParam(Struct):
    """Ask why the prompt of an earlier message was not read from the cache."""

    previous_message_id: Name | None = None


class Thinking(Struct):
    """Whether the model thinks first (a template variable), and whether the thinking is shown."""

    type: Name
    budget_tokens: NonNegativeInt | None = None
    display: Name | None = None  # "omitted": thinking blocks have no text, only a signature


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
    prefix: Name | None = None  # that the messages follow; Ramify's
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # older name of `output_config.format`
    cache_control: CacheControl | None = None
    # These two are not served, and the client is warned.
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None


class MessageRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: NonNegativeInt  # 0: compute and cache the prompt only
    stream: bool | None = None
    temperature: UnitInterval | None = None
    top_p: UnitInterval | None = None
    top_k: TopK | None = None
    stop_sequences: Stops | None = None
    diagnostics: DiagnosticsParam | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    speed: str | None = None
    cache_salt: CacheSalt | None = None
    session_id: Name | None = None
    end_session: bool | None = None
    priority: Priority = 0
