"""The table of call syntaxes: what a call looks like, for a grammar to force; one row a family."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Slot(Enum):
    """A part of a call that is not the same text in each."""

    SPACE = auto()  # optional white space
    NAME = auto()
    QUOTED_NAME = auto()  # as a JSON string
    ARGUMENTS = auto()  # a JSON object
    PARAMETERS = auto()  # one after the other, see `ParameterSyntax`
    INDEX = auto()  # of the call, a number
    CALL_ID = auto()  # a JSON string or number


@dataclass(frozen=True, slots=True)
class Delimiter:
    """A text that is one special token where the tokenizer has it as such."""

    text: str


Piece = str | Delimiter | Slot


@dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """How a parameter is written outside of JSON: texts as they are, other values as JSON."""

    begin: str
    after_name: tuple[Piece, ...]
    end: str


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes calls: `begin call (separator call)* end`.

    `begin`, or `call` without one, begins with a delimiter that marks a call; without a delimiter,
    only a forced call can be told from text.
    """

    call: tuple[Piece, ...]
    begin: tuple[Piece, ...] = ()
    separator: tuple[Piece, ...] = (Slot.SPACE,)
    end: tuple[Piece, ...] = ()
    resumes: bool = False  # text may follow
    parameters: ParameterSyntax | None = None
    # The syntax is used only with this added token; "": with any tokenizer.
    tokenizer_has: str = ""


def json_call(name_key: str = "name", arguments_key: str = "arguments") -> tuple[Piece, ...]:
    """The pieces of `{"name": "f", "arguments": {…}}`."""
    space = Slot.SPACE
    return (
        *("{", space, f'"{name_key}"', space, ":", space, Slot.QUOTED_NAME, space, ",", space),
        *(f'"{arguments_key}"', space, ":", space, Slot.ARGUMENTS, space, "}"),
    )


_SPACE = Slot.SPACE
_TOOL_CALL, _END_TOOL_CALL = Delimiter("<tool_call>"), Delimiter("</tool_call>")


def _json_list(begin: str, end: str = "") -> CallSyntax:
    """Calls as a JSON list after a delimiter."""
    ends = (_SPACE, Delimiter(end)) if end else ()
    return CallSyntax(
        begin=(Delimiter(begin), _SPACE, "[", _SPACE),
        call=json_call(),
        separator=(_SPACE, ",", _SPACE),
        end=(_SPACE, "]", *ends),
    )


_DEEPSEEK_CALL, _DEEPSEEK_SEPARATOR = (
    Delimiter("<｜tool▁call▁begin｜>"),
    Delimiter("<｜tool▁sep｜>"),
)
_DEEPSEEK_END = Delimiter("<｜tool▁call▁end｜>")


def _deepseek(*call: Piece) -> CallSyntax:
    return CallSyntax(
        begin=(Delimiter("<｜tool▁calls▁begin｜>"), _SPACE),
        call=(_DEEPSEEK_CALL, *call, _DEEPSEEK_END),
        end=(_SPACE, Delimiter("<｜tool▁calls▁end｜>")),
    )


# Name of a row of `CALL_FORMATS` → how its calls are written, the first that the tokenizer allows.
CALL_SYNTAXES: dict[str, tuple[CallSyntax, ...]] = {
    "hermes": (
        CallSyntax((_TOOL_CALL, _SPACE, *json_call(), _SPACE, _END_TOOL_CALL), resumes=True),
    ),
    "mistral": (
        CallSyntax(
            (Delimiter("[TOOL_CALLS]"), Slot.NAME, Delimiter("[ARGS]"), Slot.ARGUMENTS),
            tokenizer_has="[ARGS]",
        ),
        _json_list("[TOOL_CALLS]"),
    ),
    "llama3_json": (
        CallSyntax(
            begin=(Delimiter("<|python_tag|>"),),
            call=json_call(arguments_key="parameters"),
            separator=(";", _SPACE),
        ),
    ),
    "json": (CallSyntax(json_call()),),
    "deepseek_v3": (
        _deepseek(
            *("function", _DEEPSEEK_SEPARATOR, Slot.NAME, "\n```json\n"),
            *(Slot.ARGUMENTS, "\n```"),
        ),
    ),
    "deepseek_v31": (_deepseek(Slot.NAME, _DEEPSEEK_SEPARATOR, Slot.ARGUMENTS),),
    "kimi_k2": (
        CallSyntax(
            begin=(Delimiter("<|tool_calls_section_begin|>"),),
            call=(
                *(Delimiter("<|tool_call_begin|>"), "functions.", Slot.NAME, ":", Slot.INDEX),
                *(Delimiter("<|tool_call_argument_begin|>"), Slot.ARGUMENTS),
                Delimiter("<|tool_call_end|>"),
            ),
            end=(Delimiter("<|tool_calls_section_end|>"),),
        ),
    ),
    "phi4_mini": (_json_list("<|tool_call|>", "<|/tool_call|>"),),
    "granite": (_json_list("<|tool_call|>"),),
    "hunyuan": (_json_list("<tool_calls>", "</tool_calls>"),),
    "cohere": (
        CallSyntax(
            begin=(Delimiter("<|START_ACTION|>"), _SPACE, "[", _SPACE),
            call=(
                *("{", _SPACE, '"tool_call_id"', _SPACE, ":", _SPACE, Slot.CALL_ID, _SPACE, ","),
                *(_SPACE, *json_call("tool_name", "parameters")[2:]),
            ),
            separator=(_SPACE, ",", _SPACE),
            end=(_SPACE, "]", _SPACE, Delimiter("<|END_ACTION|>")),
        ),
    ),
    "qwen3_coder": (
        CallSyntax(
            (
                *(_TOOL_CALL, _SPACE, "<function=", Slot.NAME, ">", _SPACE, Slot.PARAMETERS),
                *("</function>", _SPACE, _END_TOOL_CALL),
            ),
            resumes=True,
            parameters=ParameterSyntax("<parameter=", (">", _SPACE), "</parameter>"),
        ),
    ),
    "glm45": (
        CallSyntax(
            (_TOOL_CALL, Slot.NAME, _SPACE, Slot.PARAMETERS, _END_TOOL_CALL),
            resumes=True,
            parameters=ParameterSyntax(
                "<arg_key>", ("</arg_key>", _SPACE, "<arg_value>"), "</arg_value>"
            ),
        ),
    ),
}
