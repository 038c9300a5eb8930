"""The tables of output formats: how families write tool calls and reasoning, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ramify.server.output_formats.json_calls import json_calls
from ramify.server.output_formats.mistral_calls import mistral_calls
from ramify.server.output_formats.parser import CallForm, ReasoningMarks


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes tool calls."""

    name: str
    forms: tuple[CallForm, ...]
    # The family's chat template contains all of one of these sets.
    templates: tuple[tuple[str, ...], ...] = ()
    # Marks that no other text contains: where they delimit nothing, they are dropped.
    hidden: tuple[str, ...] = ()
    # The mark after a call; "" if there is none, or others may follow it.
    end: str = ""
    aliases: tuple[str, ...] = ()  # names of other servers


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family separates what the model thinks from its answer."""

    name: str
    marks: ReasoningMarks
    templates: tuple[tuple[str, ...], ...] = ()
    hidden: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


BARE = CallForm("", json_calls, first="{[")
HERMES_MARK = CallForm("<tool_call>", partial(json_calls, end="</tool_call>"))

# A template belongs to the first row that it fits.
CALL_FORMATS = (
    CallFormat(
        "mistral",
        (CallForm("[TOOL_CALLS]", mistral_calls), BARE),
        templates=(("[TOOL_CALLS]",),),
        hidden=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    CallFormat(
        "hermes",
        (HERMES_MARK,),
        templates=(("<tool_call>",),),
        end="</tool_call>",
        aliases=("qwen", "qwen25", "qwen2_5", "qwen3"),
    ),
    CallFormat(
        "llama3_json",
        (CallForm("<|python_tag|>", json_calls), BARE),
        templates=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        hidden=("<|python_tag|>",),
        aliases=("llama3", "llama4_json"),
    ),
    CallFormat("json", (BARE,)),
)

REASONING_FORMATS = (
    ReasoningFormat(
        "mistral",
        ReasoningMarks("[THINK]", "[/THINK]"),
        templates=(("[THINK]",),),
        hidden=("[THINK]", "[/THINK]"),
        aliases=("magistral",),
    ),
    ReasoningFormat(
        "think",
        ReasoningMarks("<think>", "</think>"),
        templates=(("</think>",),),
        aliases=("deepseek_r1", "qwen3", "deepseek-r1", "glm45"),
    ),
    ReasoningFormat("none", ReasoningMarks()),
)
