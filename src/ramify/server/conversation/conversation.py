"""`Conversation`: what a request says, in no API's words."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ramify.engine.text.chat_template import with_parameters
from ramify.params import SamplingParams, StructuredOutput
from ramify.prompt_rules import AppliedRule
from ramify.server.conversation.parts import Message
from ramify.server.grammars.constraint import CallChoice
from ramify.server.prompts.renderer import MAX_BREAKPOINTS, KnownPrefix, RenderedPrompt
from ramify.server.request_fields.reasoning_options import ReasoningOptions

PREFIX_BYTES = 2048  # objects of a named prefix, whatever it holds


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model sees.

    Args:
        path: its request field: `tools[0]`.
        function: name, description, parameters and `strict`, as chat templates take them.
        ttl_s: of the breakpoint at its end; None: there is none.
    """

    path: str
    function: dict[str, Any]
    ttl_s: float | None = None

    @classmethod
    def of(cls, path: str, fields: Mapping[str, Any], ttl_s: float | None = None) -> ToolDefinition:
        """A function with these fields; those that are None are left out."""
        given = {name: value for name, value in fields.items() if value is not None}
        return cls(path, with_parameters(given), ttl_s)

    @property
    def name(self) -> str:
        """The name of the function."""
        name: str = self.function["name"]
        return name

    @property
    def as_template(self) -> dict[str, Any]:
        """The tool as chat templates take it: models were trained with the type first."""
        return {"type": "function", "function": self.function}


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Options of a request for the prompt cache.

    Args:
        salt: separates its prefixes from those of requests with another.
        session: name of the session that it is a turn of; empty: the body names none.
        ends_session: the session ends with it.
        max_breakpoints: of the messages and tools; the last are kept.
        end_ttl_s: of a further breakpoint at the end of what the next turn shares; None: there is none.
        shares_breakpoints_only: nothing behind the last breakpoint stays cached for other requests.
    """

    salt: str = ""
    session: str = ""
    ends_session: bool = False
    max_breakpoints: int = MAX_BREAKPOINTS
    end_ttl_s: float | None = None
    shares_breakpoints_only: bool = False

    def with_breakpoints(self, prompt: RenderedPrompt) -> RenderedPrompt:
        """The prompt with the breakpoints that these options allow."""
        prompt = replace(prompt, breakpoints=prompt.breakpoints[-self.max_breakpoints :])
        return prompt if self.end_ttl_s is None else prompt.with_breakpoint(self.end_ttl_s)

    def max_shared(self, prompt: RenderedPrompt) -> int | None:
        """Number of prompt tokens that may stay cached for other requests; None: all."""
        return prompt.max_shared_tokens(breakpoints_only=self.shares_breakpoints_only)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPrefix:
    """The beginning of conversations under a name: system prompt, tools, messages.

    Paths of its parts begin with `prefix:`.

    Args:
        model: the name with which it was made.
        system: where its API has it beside the messages; else the first messages have the role.
        ids: tokens that every prompt begins with which is made with it.
        ttl_s: seconds for which its pages are pinned after each use; None: until it is deleted.
        is_public: every tenant may use it.
        created: Unix seconds.
        definition: system, messages and tools as the client sent them, as JSON.
    """

    name: str
    model: str
    messages: tuple[Message, ...] = ()
    system: Message | None = None
    tools: tuple[ToolDefinition, ...] = ()
    ids: array[int] = field(default_factory=lambda: array("i"))
    ttl_s: float | None = None
    is_public: bool = False
    created: int = 0
    definition: bytes = b""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory: of the parts about as many as of the definition, twice."""
        return PREFIX_BYTES + 3 * len(self.definition) + len(self.ids) * self.ids.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A request of any API, as its reader has understood it.

    Args:
        model: its name, as the response has it.
        messages: of the request, in order.
        prefix: what the request's messages follow; `tools` has its tools already.
        system: the system prompt, where the API has it beside the messages.
        joins_roles: consecutive messages of one role are one.
        continues_answer: the last message is the beginning of the answer; None: if it is the model's.
        opens_answer: the prompt ends with the header of the answer's turn.
        known: texts with their token ids, longest first: see `PromptRenderer.chat`.
        max_prompt_tokens: the last tokens of the prompt that are kept; None: all.
        tools: functions that the model sees.
        allowed_tools: names of those that it may call; None: all.
        choice: which calls the answer may have.
        answer_format: what an answer without calls must match; None: it is free.
        format_path: the request's field that sets `answer_format`.
        reasoning: whether and how much the model thinks.
        template_variables: further variables of the chat template.
        sampling: without the answer's constraint.
        compared: options that the cache diagnostics compare, by name.
        is_prewarm: the prompt is only computed and cached.
        is_streamed: the client sees the answer while it is written.
        is_remembered: a later request may compare with this one.
        warnings: what was ignored or changed, for the client; media apart.
        applied: prompt rules that have taken text out of the system prompt.
    """

    model: str
    messages: tuple[Message, ...]
    system: Message | None = None
    prefix: NamedPrefix | None = None
    joins_roles: bool = False
    continues_answer: bool | None = False
    opens_answer: bool = True
    known: Sequence[KnownPrefix] = ()
    max_prompt_tokens: int | None = None
    tools: tuple[ToolDefinition, ...] = ()
    allowed_tools: frozenset[str] | None = None
    choice: CallChoice = field(default_factory=CallChoice)
    answer_format: StructuredOutput | None = None
    format_path: str = ""
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache: CacheOptions = field(default_factory=CacheOptions)
    compared: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    is_prewarm: bool = False
    is_streamed: bool = False
    is_remembered: bool = True
    warnings: tuple[str, ...] = ()
    applied: tuple[AppliedRule, ...] = ()

    @property
    def callable_tools(self) -> tuple[ToolDefinition, ...]:
        """The tools that the model may call."""
        if self.allowed_tools is None:
            return self.tools
        return tuple(tool for tool in self.tools if tool.name in self.allowed_tools)
