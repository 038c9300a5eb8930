"""The table of call syntaxes: what a call looks like, for a grammar to force; one row a family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto


class Slot(Enum):
    """A part of a call whose text varies."""

    SPACE = auto()  # optional white space
    NAME = auto()
    QUOTED_NAME = auto()  # as a JSON string
    ARGUMENTS = auto()  # a JSON object
    PARAMETERS = auto()  # one after the other, see `ParameterSyntax`
    INDEX = auto()  # of the call, a number
    CALL_ID = auto()  # a JSON string or number
    TEXT = auto()  # any, up to the text or mark that comes next


@dataclass(frozen=True, slots=True)
class Delimiter:
    """A text that is one special token, if the tokenizer has such a token."""

    text: str


@dataclass(frozen=True, slots=True)
class Maybe:
    """Pieces that may be left out."""

    pieces: tuple[str | Delimiter | Slot, ...]


Piece = str | Delimiter | Slot | Maybe


@dataclass(frozen=True, slots=True)
class ParameterSyntax:
    """Syntax of a parameter outside of JSON: texts as they are, other values as JSON."""

    begin: str
    after_name: tuple[Piece, ...]
    end: str
    strips_newlines: bool = False  # around a text: one at each side is none of it
    after_name_of_text: tuple[Piece, ...] = ()  # if texts are told from other values there


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """Syntax of a family's calls: `begin call (separator call)* end`.

    `begin`, or `call` where that is empty, begins with the mark of a call, up to the first slot. Calls
    without a mark cannot be told from text until they are complete.
    """

    call: tuple[Piece, ...]
    begin: tuple[Piece, ...] = ()
    separator: tuple[Piece, ...] = (Slot.SPACE,)
    end: tuple[Piece, ...] = ()
    resumes: bool = False  # text may follow
    parameters: ParameterSyntax | None = None
    before: tuple[Piece, ...] = ()  # what an answer with nothing but calls begins with
    before_text: tuple[Piece, ...] = ()  # what comes before the text of an answer, after `before`
    # The syntax is of models whose chat template contains this.
    template_has: str = ""

    @property
    def mark(self) -> tuple[str | Delimiter, ...]:
        """The mark at the beginning of a call; empty if there is none."""
        mark: list[str | Delimiter] = []
        for piece in self.begin or self.call:
            if not isinstance(piece, str | Delimiter):
                break
            mark.append(piece)
        return tuple(mark) if any(isinstance(piece, Delimiter) for piece in mark) else ()


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


_ARROW = Delimiter("<｜tool▁sep｜>")
_DSML = Delimiter("｜DSML｜")


def _deepseek(*call: Piece, template_has: str = "") -> CallSyntax:
    return CallSyntax(
        begin=(Delimiter("<｜tool▁calls▁begin｜>"), _SPACE),
        call=(Delimiter("<｜tool▁call▁begin｜>"), *call, Delimiter("<｜tool▁call▁end｜>")),
        end=(_SPACE, Delimiter("<｜tool▁calls▁end｜>")),
        template_has=template_has,
    )


def _tagged(mark: str, end: str, *, strips_newlines: bool) -> CallSyntax:
    """A call between two marks: `<function=f><parameter=key>value</parameter></function>`."""
    return CallSyntax(
        (
            *(Delimiter(mark), _SPACE, "<function=", Slot.NAME, ">", _SPACE, Slot.PARAMETERS),
            *("</function>", _SPACE, Delimiter(end)),
        ),
        resumes=True,
        parameters=ParameterSyntax(
            "<parameter=", (">",), "</parameter>", strips_newlines=strips_newlines
        ),
    )


HERMES = CallSyntax((_TOOL_CALL, _SPACE, *json_call(), _SPACE, _END_TOOL_CALL), resumes=True)

# Name of a row of `CALL_FORMATS` → how its calls are written, the first that the template has. The
# other rows write arguments as Python or other literals; their forced calls are bare JSON, which
# every parser reads, and their optional calls are not constrained.
CALL_SYNTAXES: dict[str, tuple[CallSyntax, ...]] = {
    "harmony": (
        CallSyntax(
            (
                *(Delimiter("<|channel|>"), "commentary to=functions.", Slot.NAME),
                *(Maybe((" json",)), Maybe((" ",)), Maybe((Delimiter("<|constrain|>"), "json"))),
                *(Delimiter("<|message|>"), Slot.ARGUMENTS, Delimiter("<|call|>")),
            ),
            separator=(Delimiter("<|start|>"), "assistant"),
            before=(
                Maybe(
                    (
                        *(Delimiter("<|channel|>"), "analysis", Delimiter("<|message|>")),
                        *(Slot.TEXT, Delimiter("<|end|>"), Delimiter("<|start|>"), "assistant"),
                    )
                ),
            ),
            before_text=(Delimiter("<|channel|>"), "final", Delimiter("<|message|>")),
        ),
    ),
    "mistral": (
        CallSyntax(
            (Delimiter("[TOOL_CALLS]"), Slot.NAME, Delimiter("[ARGS]"), Slot.ARGUMENTS),
            template_has="[ARGS]",
        ),
        _json_list("[TOOL_CALLS]"),
    ),
    "deepseek_v32": (
        CallSyntax(
            begin=("<", _DSML, "function_calls>", _SPACE),
            call=(
                *("<", _DSML, 'invoke name="', Slot.NAME, '">', _SPACE, Slot.PARAMETERS),
                *("</", _DSML, "invoke>"),
            ),
            end=(_SPACE, "</", _DSML, "function_calls>"),
            parameters=ParameterSyntax(
                '<｜DSML｜parameter name="',
                ('" string="false">',),
                "</｜DSML｜parameter>",
                after_name_of_text=('" string="true">',),
            ),
        ),
    ),
    "deepseek_v3": (
        _deepseek(
            *("function", _ARROW, Slot.NAME, "\n```json\n", Slot.ARGUMENTS, "\n```"),
            template_has="```json",
        ),
        _deepseek(Slot.NAME, _ARROW, Slot.ARGUMENTS),
    ),
    "kimi_k2": (
        CallSyntax(
            begin=(Delimiter("<|tool_calls_section_begin|>"),),
            call=(
                *(Delimiter("<|tool_call_begin|>"), "functions.", Slot.NAME, ":", Slot.INDEX),
                *(Delimiter("<|tool_call_argument_begin|>"), Slot.ARGUMENTS),
                Delimiter("<|tool_call_end|>"),
            ),
            separator=(),
            end=(Delimiter("<|tool_calls_section_end|>"),),
        ),
    ),
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
    "command_r": (
        CallSyntax(
            begin=("Action:", _SPACE, "```json", _SPACE, "[", _SPACE),
            call=json_call("tool_name", "parameters"),
            separator=(_SPACE, ",", _SPACE),
            end=(_SPACE, "]", _SPACE, "```"),
        ),
    ),
    "glm4": (CallSyntax((Slot.NAME, "\n", Slot.ARGUMENTS)),),
    "glm": (
        CallSyntax(
            (_TOOL_CALL, Slot.NAME, _SPACE, Slot.PARAMETERS, _END_TOOL_CALL),
            resumes=True,
            parameters=ParameterSyntax(
                "<arg_key>", ("</arg_key>", _SPACE, "<arg_value>"), "</arg_value>"
            ),
        ),
    ),
    "seed_oss": (_tagged("<seed:tool_call>", "</seed:tool_call>", strips_newlines=False),),
    "qwen3_coder": (_tagged("<tool_call>", "</tool_call>", strips_newlines=True),),
    "minimax_m2": (
        CallSyntax(
            begin=(Delimiter("<minimax:tool_call>"), _SPACE),
            call=('<invoke name="', Slot.NAME, '">', _SPACE, Slot.PARAMETERS, "</invoke>"),
            end=(_SPACE, Delimiter("</minimax:tool_call>")),
            parameters=ParameterSyntax('<parameter name="', ('">',), "</parameter>"),
        ),
    ),
    "hunyuan": (_json_list("<tool_calls>", "</tool_calls>"),),
    "nemotron": (_json_list("<TOOLCALL>", "</TOOLCALL>"),),
    "phi4": (
        # A word of other texts too: no mark.
        replace(_json_list(""), begin=("functools[", _SPACE), template_has="functools["),
        _json_list("<|tool_call|>", "<|/tool_call|>"),
    ),
    "granite": (
        replace(_json_list("<|tool_call|>"), template_has="<|tool_call|>"),
        HERMES,
    ),
    "smollm3": (HERMES,),
    "hermes": (HERMES,),
    "llama3_json": (
        CallSyntax(
            begin=(Delimiter("<|python_tag|>"),),
            call=json_call(arguments_key="parameters"),
            separator=(";", _SPACE),
        ),
    ),
    "json": (CallSyntax(json_call()),),
}
JSON_SYNTAX = CALL_SYNTAXES["json"][0]


def find_syntax(call_format: str, template: str) -> CallSyntax | None:
    """The first syntax of a row of `CALL_FORMATS` that fits the chat template; None without any."""
    syntaxes = CALL_SYNTAXES.get(call_format, ())
    return next((syntax for syntax in syntaxes if syntax.template_has in template), None)
