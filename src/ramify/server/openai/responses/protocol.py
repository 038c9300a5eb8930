"""Types of the Responses API: requests, tools and input items.

Items and tools are decoded in two steps, as their types are open: first to JSON objects, then by
their `type` to one of the structs here. Unknown fields are ignored, unknown values are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct

from ramify.server.openai.protocol import (
    MAX_MESSAGES,
    CacheRetention,
    CacheSalt,
    ContentPart,
    Metadata,
    Name,
    NumLogprobs,
    PositiveInt,
    PromptCacheOptions,
    RefusedField,
    ResponseFormat,
    Temperature,
    ToolName,
    UnitInterval,
)

Items = Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)]


class MessageItem(Struct):
    """A message of the input."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart] | None = None


class CallItem(Struct):
    """A function call that the model made."""

    name: Name
    arguments: str | dict[str, Any] | None = None
    status: Name | None = None
    call_id: Name | None = None
    namespace: Name | None = None


class CustomCallItem(Struct):
    """A call of a custom tool, whose input is free text."""

    name: Name
    input: str = ""
    call_id: Name | None = None
    namespace: Name | None = None


class ActionCallItem(Struct):
    """A call of the shell or the patch tool; its arguments are `action` or `operation`."""

    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    call_id: Name | None = None
    id: Name | None = None


class WrappedOutput(Struct):
    """A call's output as an object, which older clients send."""

    content: str | list[ContentPart] | None = None


class CallOutputItem(Struct):
    """The output of a call."""

    output: str | list[dict[str, Any]] | dict[str, Any] | None = None
    status: Name | None = None
    call_id: Name | None = None
    id: Name | None = None


class TextPart(Struct):
    """A text of a reasoning item."""

    text: str = ""


class ReasoningItem(Struct):
    """Reasoning of the model: text, or an opaque text that only its maker reads."""

    content: list[TextPart] | None = None
    summary: list[TextPart] | None = None
    encrypted_content: str | None = None


class CompactionItem(Struct):
    """The summary of earlier turns, as an opaque text."""

    encrypted_content: str


class McpCallItem(Struct):
    """A call that another server ran, with its result."""

    name: Name
    server_label: Name = ""
    arguments: str | None = None
    output: str | None = None
    id: Name | None = None


class CodeCallItem(Struct):
    """A run of code that another server made, with its logs."""

    code: str | None = None
    outputs: list[dict[str, Any]] | None = None
    id: Name | None = None


class ToolsItem(Struct):
    """Tools that are added in the course of a conversation."""

    tools: list[dict[str, Any]]


class CustomFormat(Struct):
    """The grammar of a custom tool's input."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Struct):
    """A tool whose input is free text."""

    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


class NamespaceTool(Struct):
    """Tools under a common name."""

    name: ToolName
    tools: list[dict[str, Any]]
    description: str | None = None


class ShellTool(Struct):
    """The shell tool, which runs where `environment` says."""

    environment: dict[str, Any] | None = None


class ToolReference(Struct):
    """A tool that `tool_choice` names."""

    type: str
    name: Name | None = None
    namespace: Name | None = None


class AllowedTools(Struct):
    """`tool_choice` of several tools."""

    tools: list[ToolReference]
    mode: Literal["auto", "required"] = "auto"


class TextOptions(Struct):
    """Options of the answer's text."""

    format: ResponseFormat | None = None
    verbosity: Name | None = None


class Reasoning(Struct):
    """Reasoning options of a request."""

    effort: Name | None = None
    summary: Name | None = None


class ConversationReference(Struct):
    """The conversation that a request goes on with."""

    id: Name


class PromptFields(Struct, kw_only=True):
    """The fields of a request that its prompt is made of."""

    model: Name | None = None
    input: str | Items | None = None
    instructions: str | None = None
    prefix: Name | None = None  # that the items follow; not OpenAI's
    previous_response_id: Name | None = None
    conversation: Name | ConversationReference | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation; None if the request has none."""
        named = self.conversation
        return named.id if isinstance(named, ConversationReference) else named


class ResponsesRequest(PromptFields, kw_only=True):
    """POST /v1/responses."""

    max_output_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: UnitInterval | None = None
    top_logprobs: NumLogprobs | None = None
    stream: bool | None = None
    include: list[str] | None = None
    store: bool | None = None
    service_tier: Name | None = None
    metadata: Metadata | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: CacheRetention | None = None
    cache_salt: CacheSalt | None = None
    session_id: Name | None = None
    end_session: bool | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    max_tool_calls: PositiveInt | None = None  # of tools that a server runs: there are none
    stream_options: Any = None
    client_metadata: Any = None
    context_management: Any = None
    # These two are refused.
    prompt: RefusedField = UNSET
    background: bool | None = None


class InputTokensRequest(PromptFields, kw_only=True):
    """POST /v1/responses/input_tokens."""


class CompactRequest(Struct, kw_only=True):
    """POST /v1/responses/compact."""

    model: Name | None = None
    input: str | Items | None = None
    instructions: str | None = None
    prefix: Name | None = None  # that the items follow; not OpenAI's
    previous_response_id: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: CacheRetention | None = None
    service_tier: Name | None = None


class ConversationRequest(Struct, kw_only=True):
    """POST /v1/conversations."""

    items: Items | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Struct, kw_only=True):
    """POST /v1/conversations/{name}."""

    metadata: Metadata


class ConversationItemsRequest(Struct, kw_only=True):
    """POST /v1/conversations/{name}/items."""

    items: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
