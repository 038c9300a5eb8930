"""The tables of output formats: how families write tool calls and reasoning, one row each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ramify.server.model_dialects.harmony import HARMONY_MARKS, harmony_answer
from ramify.server.model_dialects.json_calls import fenced_calls, json_calls
from ramify.server.model_dialects.literal_calls import gemma_calls, pythonic_calls
from ramify.server.model_dialects.named_calls import (
    deepseek_calls,
    kimi_calls,
    line_calls,
    mistral_calls,
)
from ramify.server.model_dialects.parser import AnswerSyntax, CallForm, ReasoningMarks
from ramify.server.model_dialects.tagged_calls import CallTags, KeyEnd, tagged_calls
from ramify.server.model_dialects.writer import new_call_id, new_short_call_id


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of a family's tool calls."""

    name: str
    forms: tuple[CallForm, ...] = ()
    # The family's chat template contains all of one of these sets.
    templates: tuple[tuple[str, ...], ...] = ()
    # Marks that no other text contains: where they delimit nothing, they are dropped.
    hidden: tuple[str, ...] = ()
    # Further marks, which are text where they delimit nothing.
    inner: tuple[str, ...] = ()
    # Texts that only calls begin with, beside the marks of `forms`.
    openings: tuple[str, ...] = ()
    # The mark after a call; "" if there is none, or others may follow it.
    end: str = ""
    aliases: tuple[str, ...] = ()  # names of other servers
    answer: AnswerSyntax | None = None  # if calls are not just marked parts of the text
    new_id: Callable[[], str] = new_call_id


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The format of a family's reasoning: the marks between it and the answer."""

    name: str
    marks: ReasoningMarks
    templates: tuple[tuple[str, ...], ...] = ()
    hidden: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    answer: AnswerSyntax | None = None


def _fenced(*infos: str) -> tuple[CallForm, ...]:
    return tuple(CallForm(f"```{info}", partial(json_calls, end="```")) for info in infos)


COHERE_TEXT_MARKS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
BARE = CallForm("", json_calls, first="{[")
# Bare JSON behind other text.
UNMARKED = tuple(
    CallForm(f'{{{blank}"{key}"', json_calls, is_part=True)
    for key in ("name", 'type": "function')
    for blank in ("", " ", "\n", "\n  ", "\n    ")
)
BARE_PYTHONIC = CallForm("", pythonic_calls, first="[")
QWEN_TAGS = CallTags(
    call="<function=",
    name_end=">",
    parameter="<parameter=",
    key_ends=(KeyEnd((">",)),),
    value_end="</parameter>",
    call_end="</function>",
    end="</tool_call>",
    strips_newlines=True,
)
SEED_TAGS = replace(QWEN_TAGS, end="</seed:tool_call>", strips_newlines=False)
UNMARKED_QWEN_TAGS = replace(QWEN_TAGS, call="")
GLM_TAGS = CallTags(
    name_end="\n",
    parameter="<arg_key>",
    key_ends=(KeyEnd(("</arg_key>", "<arg_value>")),),
    value_end="</arg_value>",
    call_end="</tool_call>",
)
MINIMAX_TAGS = CallTags(
    call='<invoke name="',
    name_end='">',
    parameter='<parameter name="',
    key_ends=(KeyEnd(('">',)),),
    value_end="</parameter>",
    call_end="</invoke>",
    end="</minimax:tool_call>",
)
DSML_TAGS = CallTags(
    call='<｜DSML｜invoke name="',
    name_end='">',
    parameter='<｜DSML｜parameter name="',
    key_ends=(
        KeyEnd(('" string="true">',), is_string=True),
        KeyEnd(('" string="false">',), is_string=False),
    ),
    value_end="</｜DSML｜parameter>",
    call_end="</｜DSML｜invoke>",
    end="</｜DSML｜function_calls>",
)

# A template belongs to the first row that it fits.
CALL_FORMATS = (
    CallFormat(
        "harmony",
        templates=(("<|channel|>", "<|start|>"),),
        hidden=HARMONY_MARKS,
        openings=("to=functions.",),
        aliases=("openai", "gpt-oss"),
        answer=harmony_answer,
    ),
    CallFormat(
        "mistral",
        (CallForm("[TOOL_CALLS]", mistral_calls), BARE),
        templates=(("[TOOL_CALLS]",),),
        hidden=("[TOOL_CALLS]",),
        # `[ARGS]` is also what usage texts of commands say.
        inner=("[ARGS]", "[CALL_ID]"),
        new_id=new_short_call_id,
    ),
    CallFormat(
        "deepseek_v32",
        (CallForm("<｜DSML｜function_calls>", partial(tagged_calls, tags=DSML_TAGS)),),
        templates=(("｜DSML｜",),),
        hidden=("｜DSML｜",),
        aliases=("deepseekv32",),
    ),
    CallFormat(
        "deepseek_v3",
        (CallForm("<｜tool▁call▁begin｜>", deepseek_calls),),
        templates=(("<｜tool▁call▁begin｜>",), ("<｜tool▁calls▁begin｜>",)),
        hidden=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ),
        openings=("<｜tool▁calls▁begin｜>",),
        aliases=("deepseek_v31", "deepseek_r1", "deepseekv3", "deepseekv31"),
    ),
    CallFormat(
        "kimi_k2",
        (CallForm("<|tool_call_begin|>", kimi_calls),),
        templates=(("<|tool_call_begin|>",),),
        hidden=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        openings=("<|tool_calls_section_begin|>",),
    ),
    CallFormat(
        "cohere",
        (CallForm("<|START_ACTION|>", partial(json_calls, end="<|END_ACTION|>")),),
        templates=(("<|START_ACTION|>",),),
        hidden=("<|START_ACTION|>", "<|END_ACTION|>", *COHERE_TEXT_MARKS),
        aliases=("cohere_command3", "cohere_command4"),
    ),
    CallFormat(
        "command_r",
        (CallForm("Action:", fenced_calls),),
        templates=(("<|START_OF_TURN_TOKEN|>", "Action:"),),
    ),
    CallFormat(
        "gemma4",
        (CallForm("<|tool_call>", partial(gemma_calls, quotes=('<|"|>',), end="<tool_call|>")),),
        templates=(("<|tool_call>",),),
        hidden=("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    CallFormat(
        "functiongemma",
        (
            CallForm(
                "<start_function_call>",
                partial(gemma_calls, quotes=("<escape>",), end="<end_function_call>"),
            ),
        ),
        templates=(("<start_function_call>",),),
        hidden=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    CallFormat(
        "glm",
        (CallForm("<tool_call>", partial(tagged_calls, tags=GLM_TAGS)),),
        templates=(("<tool_call>", "<arg_key>"),),
        inner=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        aliases=("glm45", "glm47"),
    ),
    CallFormat(
        "glm4",
        (CallForm("", line_calls),),
        templates=(("[gMASK]", "metadata"),),
    ),
    CallFormat(
        "seed_oss",
        (CallForm("<seed:tool_call>", partial(tagged_calls, tags=SEED_TAGS)),),
        templates=(("<seed:tool_call>",),),
        inner=("</seed:tool_call>",),
    ),
    CallFormat(
        "minimax_m2",
        (CallForm("<minimax:tool_call>", partial(tagged_calls, tags=MINIMAX_TAGS)),),
        templates=(("<minimax:tool_call>",),),
        inner=("</minimax:tool_call>",),
    ),
    CallFormat(
        "qwen3_coder",
        (
            CallForm("<tool_call>", partial(tagged_calls, tags=QWEN_TAGS)),
            # Without the mark, as the model writes now and then.
            CallForm("<function=", partial(tagged_calls, tags=UNMARKED_QWEN_TAGS)),
        ),
        templates=(("<tool_call>", "<function="),),
        inner=("</tool_call>",),
        aliases=("qwen3_xml", "mimo", "step3p5"),
    ),
    CallFormat(
        "hunyuan",
        (CallForm("<tool_calls>", partial(json_calls, end="</tool_calls>")),),
        templates=(("<tool_calls>",),),
        inner=("</tool_calls>",),
        aliases=("hunyuan_a13b", "jamba"),
    ),
    CallFormat(
        "nemotron",
        (CallForm("<TOOLCALL>", partial(json_calls, end="</TOOLCALL>")),),
        templates=(("<TOOLCALL>",),),
        inner=("</TOOLCALL>",),
        aliases=("nemotron_json",),
    ),
    CallFormat(
        "phi4",
        (
            CallForm("<|tool_call|>", partial(json_calls, end="<|/tool_call|>")),
            CallForm("functools", json_calls),
        ),
        templates=(("<|/tool_call|>",), ("<|tool|>",), ("functools[",)),
        hidden=("<|tool_call|>", "<|/tool_call|>"),
        openings=("functools[",),
        aliases=("phi4_mini_json",),
    ),
    CallFormat(
        "granite",
        (
            CallForm("<|tool_call|>", json_calls),
            CallForm("<tool_call>", partial(json_calls, end="</tool_call>")),
        ),
        templates=(("<|tool_call|>",), ("<|start_of_role|>", "<tool_call>")),
        inner=("</tool_call>",),
        hidden=("<|tool_call|>",),
        aliases=("granite4",),
    ),
    CallFormat(
        "lfm2",
        (CallForm("<|tool_call_start|>", partial(pythonic_calls, end="<|tool_call_end|>")),),
        templates=(("<|tool_call_start|>",),),
        hidden=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    CallFormat(
        "olmo3",
        (CallForm("<function_calls>", partial(pythonic_calls, end="</function_calls>")),),
        templates=(("<function_calls>",),),
    ),
    CallFormat(
        "smollm3",
        (
            CallForm("<tool_call>", partial(json_calls, end="</tool_call>")),
            CallForm("<code>", partial(pythonic_calls, end="</code>")),
        ),
        templates=(("<tool_call>", "<code>"),),
        inner=("</tool_call>",),
    ),
    CallFormat(
        "hermes",
        (
            CallForm("<tool_call>", partial(json_calls, end="</tool_call>")),
            # As Qwen2.5-Coder writes, whose template asks for the mark above.
            CallForm("<tools>", partial(json_calls, end="</tools>")),
            BARE,
            *_fenced("json", "xml"),
            *UNMARKED,
        ),
        templates=(("<tool_call>",),),
        inner=("</tool_call>",),
        end="</tool_call>",
        aliases=("qwen", "qwen25", "qwen2_5", "qwen3"),
    ),
    CallFormat(
        "llama4_pythonic",
        (
            CallForm("<|python_start|>", partial(pythonic_calls, end="<|python_end|>")),
            BARE_PYTHONIC,
        ),
        templates=(("<|python_start|>",), ("[func_name1(",)),
        hidden=("<|python_start|>", "<|python_end|>"),
        aliases=("pythonic", "llama3_pythonic"),
    ),
    CallFormat(
        "llama3_json",
        (CallForm("<|python_tag|>", json_calls), BARE, *_fenced("json"), *UNMARKED),
        templates=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        hidden=("<|python_tag|>",),
        aliases=("llama3", "llama4_json"),
    ),
    CallFormat(
        "gemma",
        (
            CallForm("```tool_code", partial(pythonic_calls, end="```")),
            CallForm("```tool_call", partial(json_calls, end="```")),
            *_fenced("json"),
            BARE_PYTHONIC,
            CallForm("", json_calls, first="{"),
        ),
        templates=(("<start_of_turn>",),),
    ),
    CallFormat("json", (BARE, *_fenced("json", "tool_call"), *UNMARKED)),
)

THINK = ReasoningMarks(("<think>",), ("</think>",))
GRANITE_MARKS = ReasoningMarks(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
)
NO_MARKS = ReasoningMarks()
REASONING_FORMATS = (
    ReasoningFormat(
        "harmony",
        NO_MARKS,
        templates=(("<|channel|>", "<|start|>"),),
        hidden=HARMONY_MARKS,
        aliases=("openai_gptoss", "gpt-oss"),
        answer=harmony_answer,
    ),
    ReasoningFormat(
        "mistral",
        ReasoningMarks(("[THINK]",), ("[/THINK]",)),
        templates=(("[THINK]",),),
        hidden=("[THINK]", "[/THINK]"),
        aliases=("magistral",),
    ),
    ReasoningFormat(
        "cohere",
        ReasoningMarks(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
        templates=(("<|START_THINKING|>",),),
        hidden=("<|START_THINKING|>", "<|END_THINKING|>", *COHERE_TEXT_MARKS),
        aliases=("cohere_command3", "cohere_command4"),
    ),
    ReasoningFormat(
        "gemma4",
        ReasoningMarks(("<|channel>thought",), ("<channel|>",)),
        templates=(("<|channel>", "<channel|>"),),
        hidden=("<|channel>thought", "<channel|>"),
    ),
    ReasoningFormat(
        "seed_oss",
        ReasoningMarks(("<seed:think>",), ("</seed:think>",)),
        templates=(("<seed:think>",),),
    ),
    ReasoningFormat("granite", GRANITE_MARKS, templates=(("Here is my thought process:",),)),
    ReasoningFormat(
        "granite33",
        THINK,
        templates=(("<think></think>", "<response></response>"),),
        hidden=("<response>", "</response>"),
    ),
    ReasoningFormat(
        "hunyuan",
        THINK,
        templates=(("<think>", "<answer>"),),
        hidden=("<answer>", "</answer>"),
        aliases=("hunyuan_a13b",),
    ),
    ReasoningFormat(
        "think",
        THINK,
        templates=(("</think>",),),
        aliases=(
            "deepseek_r1",
            "deepseek_v3",
            "qwen3",
            "glm45",
            "glm47",
            "kimi_k2",
            "minimax_m2",
            "mimo",
            "nemotron_v3",
            "olmo3",
            "step3",
            "step3p5",
            "deepseek-r1",
        ),
    ),
    ReasoningFormat("none", NO_MARKS),
)
