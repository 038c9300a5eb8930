"""Reasoning, text and calls are separated in an answer, however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import ConfigError
from ramify.server.model_dialects import OutputFormat, detect, named
from ramify.server.model_dialects.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from ramify.server.model_dialects.table import CALL_FORMATS, REASONING_FORMATS, CallFormat

TOOLS = ("add", "look_up")
CALL = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
ARGUMENTS = '{"a": 1, "b": [2, "}"]}'
OTHER = '{"name": "look_up", "parameters": {"q": "é <tool_call>"}}'
OTHER_ARGUMENTS = '{"q": "é <tool_call>"}'


def summary(events: list[OutputEvent]) -> list[tuple[str, ...]]:
    """Events as (kind, content), neighbouring deltas joined; a call is (name, arguments, state)."""
    parts: list[tuple[str, ...]] = []
    for event in events:
        match event:
            case CallStart(name, _):
                parts.append(("call", name, "", "open"))
            case ArgumentsDelta(text):
                call, name, arguments, state = parts[-1]
                parts[-1] = (call, name, arguments + text, state)
            case CallEnd(is_complete):
                call, name, arguments, _ = parts[-1]
                parts[-1] = (call, name, arguments, "complete" if is_complete else "cut")
            case TextDelta(text) | ReasoningDelta(text):
                kind = "text" if isinstance(event, TextDelta) else "reasoning"
                before = parts.pop()[1] if parts and parts[-1][0] == kind else ""
                parts.append((kind, before + text))
    return parts


def parsed(
    form: OutputFormat, text: str, cuts: list[int], *, prompt_end: str = "", forced: bool = False
) -> list[tuple[str, ...]]:
    """Feed a text in pieces that end at `cuts`; returns the summary of all events."""
    parser = form.new_parser(TOOLS, prompt_end=prompt_end, forced=forced)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    events = [event for start, end in pairwise(places) for event in parser.feed(text[start:end])]
    return summary(events + parser.feed("", is_last=True))


HARMONY = named("harmony", "harmony")
HERMES, LLAMA3, JSON = named("hermes", "think"), named("llama3_json"), named("json")
MISTRAL = named("mistral", "mistral")
ADD, LOOK_UP = (
    ("call", "add", ARGUMENTS, "complete"),
    ("call", "look_up", OTHER_ARGUMENTS, "complete"),
)
CASES = [
    (HERMES, f"See.\n<tool_call>\n{CALL}\n</tool_call>", [("text", "See."), ADD]),
    (HERMES, f"\n<tool_call>{CALL}</tool_call>\n <tool_call>{OTHER}</tool_call>\n", [ADD, LOOK_UP]),
    (HERMES, "\n <tool_call>{}</tool_call>\n", [("text", "\n <tool_call>{}</tool_call>\n")]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n\nDone. ", [ADD, ("text", "Done. ")]),
    (HERMES, "no < tool_call> here", [("text", "no < tool_call> here")]),
    (HERMES, "<tool_call>no</tool_call> x", [("text", "<tool_call>no</tool_call> x")]),
    (HERMES, '<tool_call>{"name": "rm"}', [("text", '<tool_call>{"name": "rm"}')]),
    (HERMES, f"<tool_call>{CALL}", [ADD]),
    (HERMES, f"<tool_call>{CALL[:39]}", [("call", "add", CALL[29:39], "cut")]),
    (HERMES, f"<tool_call>{CALL}</tool_", [ADD]),
    (
        HERMES,
        f"<think>\nI <tool_call>{CALL}</tool_call>\n</think>\n\nYes.",
        [("reasoning", f"I <tool_call>{CALL}</tool_call>"), ("text", "Yes.")],
    ),
    (HERMES, "a <think>b</think>", [("text", "a <think>b</think>")]),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, {OTHER}]", [ADD, LOOK_UP]),
    (
        MISTRAL,
        f"[THINK]Hm[/THINK]ok[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]look_up[CALL_ID]12[ARGS]{OTHER_ARGUMENTS}",
        [("reasoning", "Hm"), ("text", "ok"), ADD, LOOK_UP],
    ),
    (MISTRAL, f'[TOOL_CALLS][{CALL[:-1]}, "id": "ab', [ADD]),
    (MISTRAL, f"[TOOL_CALLS][{CALL}, ", [ADD]),
    (MISTRAL, f'[TOOL_CALLS][{CALL}, {{"name": "rm"', [ADD, ("text", ', {"name": "rm"')]),
    (MISTRAL, "[TOOL", [("text", "[TOOL")]),
    (MISTRAL, f"[{CALL}]", [ADD]),
    (MISTRAL, '[{"a": 1}]', [("text", '[{"a": 1}]')]),
    (MISTRAL, '[TOOL_CALLS]{"a": 1}', [("text", '{"a": 1}')]),
    (LLAMA3, CALL, [ADD]),
    (LLAMA3, f"<|python_tag|>{CALL}; {OTHER}", [ADD, LOOK_UP]),
    (LLAMA3, '{"a": 1}', [("text", '{"a": 1}')]),
    (JSON, f" \n{CALL}", [ADD]),
    (JSON, "plain {text}", [("text", "plain {text}")]),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_cuts_change_nothing(
    form: OutputFormat, text: str, expected: list[tuple[str, ...]], cuts: list[int]
) -> None:
    """Any cut of an answer gives the same reasoning, text and calls."""
    assert parsed(form, text, cuts) == expected


# What the families' templates write around calls and reasoning.
TEMPLATES = [
    ("hermes", "think", "{{ '<tool_call>\\n{\"name\": \"' }}{{ content.split('</think>')[-1] }}"),
    (
        "hermes",
        "none",
        "<tool_call>{'arguments': <args-dict>, 'name': <function-name>}</tool_call>",
    ),
    ("qwen3_coder", "none", "<tool_call>\n<function=example_function_name>\n<parameter=example>"),
    ("glm", "think", "<tool_call>{name}\n<arg_key>{key}</arg_key>{{ '<think></think>' }}"),
    ("seed_oss", "seed_oss", "{%- set a = '<seed:tool_call>' -%}{%- set b = '<seed:think>' -%}"),
    ("minimax_m2", "think", "{%- set a = '<minimax:tool_call>' -%}{{- '<think>' ~ '</think>' }}"),
    ("mistral", "none", "{{- '[TOOL_CALLS]' }}{{ raise_exception('Tool call IDs should be') }}"),
    ("mistral", "mistral", "[THINK]Your thoughts[/THINK]{{- '[TOOL_CALLS]' + name + '[ARGS]' }}"),
    (
        "deepseek_v3",
        "none",
        "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>'}}",
    ),
    (
        "deepseek_v3",
        "think",
        "{% set content = content.split('</think>')[-1] %}<｜tool▁calls▁begin｜>",
    ),
    ("deepseek_v32", "think", "{%- set dsml_token = '｜DSML｜' -%}{%- set end = '</think>' -%}"),
    ("kimi_k2", "none", "<|tool_calls_section_begin|>{{ '<|tool_call_begin|>' }}"),
    ("cohere", "cohere", "<|START_THINKING|>{{ plan }}<|END_THINKING|><|START_ACTION|>["),
    ("harmony", "harmony", "{{- '<|start|>assistant<|channel|>analysis<|message|>' }}"),
    (
        "gemma4",
        "gemma4",
        "{{- '<|tool_call>call:' }}{%- for p in t.split('<channel|>') %}'<|channel>'",
    ),
    ("functiongemma", "none", "<start_of_turn>model\n<start_function_call>call:"),
    ("gemma", "none", "{{ '<start_of_turn>' + role }}"),
    ("phi4", "none", "{{- '<|tool|>' + tools + '<|/tool|>' -}}"),
    ("phi4", "none", "in this format: <|tool_call|>{}<|/tool_call|>"),
    ("granite", "none", "start_of_role<|tool_call|>"),
    (
        "granite",
        "granite",
        "<|start_of_role|><tool_call> Here is my thought process: Here is my response:",
    ),
    ("hunyuan", "hunyuan", "<tool_calls>[ <think> </think> <answer>"),
    ("nemotron", "none", "<TOOLCALL>[{{ call }}]</TOOLCALL>"),
    ("lfm2", "none", "<|tool_call_start|>[func()]<|tool_call_end|>"),
    ("olmo3", "none", "<function_calls>{{ call }}</function_calls>"),
    (
        "llama4_pythonic",
        "none",
        "[func_name1(params_name1=params_value1, params_name2=2), func_name2()]",
    ),
    ("llama3_json", "none", "<|start_header_id|>{{- '<|python_tag|>' + name }}"),
    ("llama3_json", "none", '<|start_header_id|>{"name": function name, "parameters": dictionary}'),
    ("json", "none", "{% for message in messages %}<|im_start|>{{ message.role }}{% endfor %}"),
]


@pytest.mark.parametrize(("calls", "reasoning", "template"), TEMPLATES)
def test_the_template_tells_the_format(calls: str, reasoning: str, template: str) -> None:
    """Formats of calls and reasoning are detected from the chat template."""
    form = detect(template)

    assert (form.calls.name, form.reasoning.name) == (calls, reasoning)


def test_tables_are_consistent() -> None:
    """Names are unique, and no mark that a parser looks for is the beginning of another."""
    for rows in (CALL_FORMATS, REASONING_FORMATS):
        names = [name for row in rows for name in (row.name, *row.aliases)]
        assert len(names) == len(set(names))
    for calls in CALL_FORMATS:
        for reasoning in REASONING_FORMATS:
            form = OutputFormat(calls, reasoning)
            marks = {*form.kept_special_tokens, *(call.mark for call in calls.forms if call.mark)}
            assert not [
                (mark, longer) for mark, longer in permutations(marks, 2) if longer.startswith(mark)
            ]


def test_special_tokens_are_kept_if_they_are_marks() -> None:
    """A mark that the tokenizer has as a special token is kept, and dropped where it delimits nothing."""
    form = detect("<tool_call></think>", special_tokens=["<think>", "</tool_call>", "<|im_end|>"])

    assert set(form.kept_special_tokens) == {"<think>", "</tool_call>"}
    assert parsed(form, "a </tool_call>b", []) == [("text", "a b")]
    assert parsed(HERMES, "a </tool_call>b", []) == [("text", "a </tool_call>b")]


THOUGHT = ("call", "add", '{"a": "<think>"}', "complete")
BEGUN = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("form", "prompt_end", "text", "expected"),
    [
        (
            HERMES,
            BEGUN + "<think>\n",
            "\nHm.\n</think>\nYes",
            [("reasoning", "Hm."), ("text", "Yes")],
        ),
        (HERMES, BEGUN + "<think>\n", "<think>Hm", [("reasoning", "Hm")]),
        (HERMES, BEGUN + "<think>Let", " me", [("reasoning", "me")]),
        (HERMES, BEGUN + "<think>\n\n</think>\n", "Yes", [("text", "Yes")]),
        (
            HERMES,
            BEGUN + "<think>\n\n</think>\n",
            "<think>a</think>b",
            [("reasoning", "a"), ("text", "b")],
        ),
        (HERMES, BEGUN + f"<tool_call>{CALL[:35]}", CALL[35:] + "</tool_call>", [ADD]),
        (HERMES, BEGUN + '<tool_call>{"name": "rm', '"}</tool_call>', [("text", '"}</tool_call>')]),
        (HERMES, BEGUN + f"<tool_call>{CALL}</tool_call>", "a", [("text", "a")]),
        (HERMES, BEGUN + f"<think>I <tool_call>{CALL[:9]}", "a", [("reasoning", "a")]),
        (
            HERMES,
            BEGUN + '<tool_call>{"name": "add", "arguments": {"a": "<think>',
            '"}}',
            [THOUGHT],
        ),
        (MISTRAL, f"[TOOL_CALLS]add[ARGS]{ARGUMENTS} So", " be it.", [ADD, ("text", "be it.")]),
        (HARMONY, "<|start|>assistant", "<|channel|>final<|message|>a", [("text", "a")]),
        (HARMONY, "<|start|>assistant<|channel|>analysis", "<|message|>a", [("reasoning", "a")]),
        (HARMONY, "<|start|>assistant<|channel|>final<|message|>a", "b", [("text", "b")]),
        (HARMONY, "<|start|>assistant", "no header", [("text", "no header")]),
        (
            HARMONY,
            '<|start|>assistant<|channel|>commentary to=functions.add<|message|>{"a": 1,',
            ' "b": [2, "}"]}',
            [ADD],
        ),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_an_answer_continues_its_prompt(
    form: OutputFormat,
    prompt_end: str,
    text: str,
    expected: list[tuple[str, ...]],
    cuts: list[int],
) -> None:
    """What the template or a prefill has begun goes on: reasoning, a header or a call."""
    assert parsed(form, text, cuts, prompt_end=prompt_end) == expected


@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda calls: calls.name)
def test_a_forced_call_is_bare_json(calls: CallFormat) -> None:
    """A forced call is parsed as bare JSON too, whatever the model's own format."""
    form = named(calls.name, "none")

    assert parsed(form, CALL, [3], forced=True) == [ADD]
    assert parsed(form, f"[{CALL}, {OTHER}]", [3, 40], forced=True) == [ADD, LOOK_UP]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('"arguments": null, "name": "add"', None),
        ('"name": "add", "arguments": null', "{}"),
        ('"name": "add", "arguments": ""', "{}"),
        ('"name": "add"', "{}"),
        ('"id": "call_1", "type": "function", "name": "add", "index": 0', "{}"),
        (
            '"arguments": {"arguments": {"name": "x"}}, "name": "add"',
            '{"arguments": {"name": "x"}}',
        ),
        (r'"name": "add", "arguments": "{\"a\": \"\\n\ud83d\ude00\"}"', '{"a": "\\n😀"}'),
        (r'"name": "add", "arguments": "{\"a\": \"\\ud800\"} "', r'{"a": "\ufffd"} '),
        (
            r'"name": "add", "arguments": "{\"a\": \"\\ud83d\\ude00\\ud83d"',
            r'{"a": "\ud83d\ude00\ufffd',
        ),
        (r'"name": "add", "arguments": "{\"a\": \"\\u12"', r'{"a": "\u12'),
        (
            r'"name": "\u0061dd", "arguments": {"a": "\u00e9\ud83d\ude00"}',
            r'{"a": "\u00e9\ud83d\ude00"}',
        ),
        (r'"name": "add", "arguments": {"a": "\ud83d x \ude00"}', r'{"a": "\ufffd x \ufffd"}'),
        (r'"name": "add", "arguments": {"a": "\"}</tool_call>{"}', r'{"a": "\"}</tool_call>{"}'),
        ('"name": "add", "arguments": [1]', None),
        ('"name": "add", "arguments": 1', None),
        ('"name": "add", "arguments": "text"', None),
        ('"name": "add", "other": {}', None),
        ('"name": ["add"]', None),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=8))
def test_arguments_in_odd_forms(written: str, arguments: str | None, cuts: list[int]) -> None:
    """Arguments come before the name, as a string, as null or not at all; what is no call is text."""
    text = f"<tool_call>{{{written}}}</tool_call>"

    expected = ("text", text) if arguments is None else ("call", "add", arguments, "complete")

    assert parsed(HERMES, text, cuts) == [expected]


@pytest.mark.parametrize("num_chars", range(1, 60))
def test_an_answer_may_end_anywhere(num_chars: int) -> None:
    """A cut call ends as it is: as text before its arguments, as a cut call inside them."""
    text = f"<tool_call>{CALL}</tool_call>"[:num_chars]

    [part] = parsed(HERMES, text, [])

    begin = len("<tool_call>") + CALL.index('{"a"')
    call = ("call", "add", text[begin:], "cut")
    assert part == (call if num_chars > begin else ("text", text))


def test_arguments_stream_as_they_are_written() -> None:
    """Each piece of the arguments comes out at once, and the call's name before them."""
    parser = HERMES.new_parser(TOOLS, prompt_end="")

    start = parser.feed('<tool_call>{"name": "add", "arguments": {')
    pieces = [parser.feed(text) for text in ('"a": 1', "23", ', "b": "é')]

    assert [type(event) for event in start] == [CallStart, ArgumentsDelta]
    assert pieces == [[ArgumentsDelta(text)] for text in ('"a": 1', "23", ', "b": "é')]


def test_a_format_is_named() -> None:
    """A format goes by its own name or another server's; an unknown name lists what there is."""
    assert named("qwen25").calls.name == "hermes"
    with pytest.raises(
        ConfigError, match=r"--tool-call-parser lama: .* granite, harmony, hermes, hunyuan"
    ):
        named("lama")


def test_numbers_of_python_are_numbers_of_json() -> None:
    """Hexadecimal and grouped digits are converted; what JSON has no number for is a string."""
    parser = named("pythonic").new_parser(TOOLS, prompt_end="")

    events = parser.feed("[add(a=0x10, b=1_000, c=-.5, d=1_0e999, e=007)]", is_last=True)

    written = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert json.loads(written) == {"a": 16, "b": 1000, "c": -0.5, "d": "1_0e999", "e": "007"}


def test_a_usage_text_is_no_part_of_a_call() -> None:
    """Mistral's `[ARGS]` outside of calls is text, unless it is a special token of the model."""
    usage = "Usage: prog [OPTIONS] COMMAND [ARGS]..."

    assert parsed(MISTRAL, usage, []) == [("text", usage)]
    special = named("mistral", special_tokens=["[ARGS]"])
    assert parsed(special, usage, []) == [("text", "Usage: prog [OPTIONS] COMMAND ...")]
    assert "[ARGS]" in special.kept_special_tokens
