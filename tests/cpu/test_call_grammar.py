"""Calls follow their tools' schemas in each family's own form, and everything else stays free."""

import contextlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.logits.logits_processors import GrammarMatcher
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import DeadEndError, InvalidParamsError
from ramify.params import StructuredOutput
from ramify.server.model_dialects.call_grammar import AnswerBegin, AnswerGrammars
from ramify.server.model_dialects.call_syntax import CALL_SYNTAXES
from ramify.server.model_dialects.events import ArgumentsDelta, CallStart, TextDelta
from ramify.server.model_dialects.lark_rules import MAX_CALLS, AddedTokens, CallableTool
from ramify.server.model_dialects.output_format import named
from ramify.server.model_dialects.parser import ReasoningMarks
from tests.budget import examples
from tests.cpu.family_calls import (
    END,
    MARKED,
    VARIANTS,
    call_text,
    encoded,
    grammars,
    is_allowed,
    num_accepted,
    start,
    tokenizer,
    tools_of,
)

pytest.importorskip("llguidance", reason="llguidance is missing: the extra 'structured'")

THINK = ReasoningMarks(("<think>",), ("</think>",))

SCALARS: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "text": ({"type": "string"}, st.text("ab é\\", max_size=5)),
    "number": ({"type": "integer"}, st.integers(-99, 99)),
    "flag": ({"type": "boolean"}, st.booleans()),
    "kind": ({"enum": ["red", "blue"]}, st.sampled_from(["red", "blue"])),
    "list": (
        {"type": "array", "items": {"type": "integer"}},
        st.lists(st.integers(0, 9), max_size=3),
    ),
    "nested": (
        {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]},
        st.just({"a": None}),
    ),
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """Schemas of two tools, `first` and `second`, and a valid call of the first or the second."""
    schemas = []
    for _ in range(2):
        names = draw(st.lists(st.sampled_from(list(SCALARS)), unique=True, max_size=4))
        required = [name for name in names if draw(st.booleans())]
        properties = {name: SCALARS[name][0] for name in names}
        schemas.append({"type": "object", "properties": properties, "required": required})
    index = draw(st.integers(0, 1))
    chosen = schemas[index]
    arguments = {
        name: draw(SCALARS[name][1])
        for name in chosen["properties"]
        if name in chosen["required"] or draw(st.booleans())
    }
    arguments = dict(draw(st.permutations(list(arguments.items()))))
    return schemas, ("first", "second")[index], arguments


def is_valid(schema: Mapping[str, Any], value: object) -> bool:
    """An oracle for the schemas of `calls`."""
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    kind = kinds.get(schema["type"], type(None))
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return False
    if isinstance(value, list):
        return all(is_valid(schema["items"], item) for item in value)
    if isinstance(value, dict):
        return value.keys() <= schema["properties"].keys() and all(
            is_valid(schema["properties"][name], value[name])
            if name in value
            else name not in schema.get("required", ())
            for name in schema["properties"]
        )
    return True


@pytest.mark.parametrize(("family", "template"), VARIANTS)
@settings(max_examples=4, deadline=None)
@given(call=calls(), has_marks=st.booleans())
def test_a_valid_call_in_the_familys_form_is_accepted(
    family: str,
    template: str,
    call: tuple[list[dict[str, Any]], str, dict[str, Any]],
    has_marks: bool,
) -> None:
    """Forced and optional, after reasoning and text, with marks as tokens and as text."""
    schemas, name, arguments = call
    writer, tools = grammars(family, template, has_marks=has_marks), tools_of(schemas)
    text = call_text(family, template, name, arguments)
    ids = encoded(text, has_marks=has_marks)

    for begin, before in (
        (AnswerBegin(), ""),
        (AnswerBegin(THINK, may_begin=True), "<think>a < b</think>\n\n"),
        (AnswerBegin(THINK, is_open=True), "a < b</think>"),
    ):
        longer = encoded(before, has_marks=has_marks) + ids
        forced = start(writer.forced_calls(tools, begin), has_marks=has_marks)
        assert num_accepted(forced, longer) == len(longer)
        if (family, template) in MARKED:
            optional = start(writer.optional_calls(tools, begin), has_marks=has_marks)
            shown = encoded(before + "a <[ tool\n", has_marks=has_marks) + ids
            assert num_accepted(optional, shown) == len(shown)


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize(("family", "template"), MARKED)
@pytest.mark.parametrize(
    "wrong", [{"n": "x"}, {"n": 1.5}, {"n": 1, "further": 2}, {"m": 1}, {"n": {"a": 1}}]
)
def test_a_call_that_breaks_its_schema_is_not_possible(
    family: str, template: str, wrong: dict[str, Any], has_marks: bool
) -> None:
    """Wrong types, missing and further keys and other tools are not allowed, once a call has begun."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    writer = grammars(family, template, has_marks=has_marks)
    tools = tools_of([schema, schema])

    for name, arguments in (("first", wrong), ("third", {"n": 1})):
        ids = encoded("Hm. " + call_text(family, template, name, arguments), has_marks=has_marks)
        optional = start(writer.optional_calls(tools, AnswerBegin()), has_marks=has_marks)
        assert 3 < num_accepted(optional, ids) < len(ids)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("glm", "<tool_call>second</tool_call>"),
        ("glm", "<tool_call>first<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>"),
        ("harmony", '<|channel|>commentary to=functions.first json<|message|>{"n": 1}<|call|>'),
        ("harmony", '<|channel|>commentary to=functions.first<|message|>{"n": 1}<|call|>'),
    ],
)
def test_a_variant_of_a_form_is_accepted(family: str, text: str) -> None:
    """Newer checkpoints of a family leave out what its templates write."""
    tools = tools_of([{"properties": {"n": {"type": "integer"}}}, {}])
    spec = grammars(family, "", has_marks=True).optional_calls(tools, AnswerBegin())
    ids = encoded(text, has_marks=True)
    assert num_accepted(start(spec, has_marks=True), ids) == len(ids)


@pytest.mark.parametrize(("family", "template"), MARKED)
def test_marks_need_not_be_special(family: str, template: str) -> None:
    """A mark that is an added token but no special one begins a call too, as in DeepSeek V3.2."""
    core = tokenizer(has_marks=True, are_special=False)
    wrapped = Tokenizer(core, special_tokens={}, chat_templates={})
    writer = AnswerGrammars(family, AddedTokens(wrapped.added_token_texts), template=template)
    tools = tools_of([{"properties": {"n": {"type": "integer"}}}, {}])
    spec = writer.optional_calls(tools, AnswerBegin())
    assert spec is not None
    num_tokens = core.get_vocab_size()
    compiled = GrammarCompiler(core.to_str, vocab_size=num_tokens, eos_token_ids=[END])

    for value, is_valid in ((1, True), ("x", False)):
        text = "Hm. " + call_text(family, template, "first", {"n": value})
        ids = list(core.encode(text, add_special_tokens=False).ids)
        assert (num_accepted(compiled.compile(spec), ids) == len(ids)) is is_valid


@pytest.mark.parametrize("has_marks", [True, False])
@pytest.mark.parametrize(("family", "template"), VARIANTS)
def test_arguments_come_in_any_order_once(family: str, template: str, has_marks: bool) -> None:
    """No order loses an argument; none comes twice, and the required one comes in any case."""
    properties = {name: {"type": "integer"} for name in ("a", "b", "c", "d")}
    writer = grammars(family, template, has_marks=has_marks)
    tools = tools_of([{"properties": properties, "required": ["c"]}, {"properties": properties}])

    def num_left(text: str) -> int:
        spec = writer.forced_calls(tools, AnswerBegin(), single=True)
        ids = encoded(text, has_marks=has_marks)
        return len(ids) - num_accepted(start(spec, has_marks=has_marks), ids)

    def call(name: str, *keys: str) -> str:
        return call_text(family, template, name, dict.fromkeys(keys, 1))

    for keys in ("c", "dc", "cba", "bdac", "acdb"):
        assert num_left(call("first", *keys)) == 0, keys
    assert num_left(call("second")) == 0
    assert num_left(call("second", *"dbca")) == 0
    assert num_left(call("first", *"dab")) > 0
    twice = call("second", *"dbxa").replace("x", "b")
    assert num_left(twice) > 0


END_MARKS = ("</parameter>", "</｜DSML｜parameter>", "</arg_value>", "</think>")


def walk(
    matcher: GrammarMatcher, ids: list[int], rng: random.Random, *, has_marks: bool
) -> list[int] | None:
    """Continue an answer with random allowed tokens; None if it does not end."""
    core = tokenizer(has_marks=has_marks)
    closers = encoded('"}],</>\n', has_marks=has_marks)
    for _ in range(400):
        try:
            if matcher.advance(ids):
                return ids
        except DeadEndError as error:
            raise AssertionError(core.decode(ids)) from error
        mask = matcher.token_bitmasks(ids, ())[0]
        if mask is None:  # free again: the call has ended
            return ids
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return ids
        allowed = [token for token in allowed if token != END]
        if rng.random() < 0.4:
            mark = encoded(rng.choice(END_MARKS), has_marks=has_marks)
            if num_accepted_after(matcher, ids, mark) == len(mark):
                ids = ids + mark
                continue
        closing = [token for token in closers if token in allowed]
        ids = [*ids, rng.choice(closing if closing and rng.random() < 0.6 else allowed)]
    return None


def num_accepted_after(matcher: GrammarMatcher, ids: Sequence[int], more: Sequence[int]) -> int:
    masks = matcher.token_bitmasks(ids, more)
    for position, (mask, token) in enumerate(zip(masks, more, strict=False)):
        if mask is not None and not mask[token // 8] >> (token % 8) & 1:
            return position
    return min(len(masks), len(more))


@pytest.mark.parametrize("forced", [True, False])
@pytest.mark.parametrize(("family", "template"), VARIANTS)
@settings(max_examples=5, deadline=None)
@given(call=calls(), seed=st.integers(0, 10_000), has_marks=st.booleans())
def test_whatever_is_allowed_parses_as_a_valid_call(
    family: str,
    template: str,
    forced: bool,
    call: tuple[list[dict[str, Any]], str, dict[str, Any]],
    seed: int,
    has_marks: bool,
) -> None:
    """A random walk through the masks ends in calls that the family's parser reads, all valid."""
    schemas, _, _ = call
    writer, tools = grammars(family, template, has_marks=has_marks), tools_of(schemas)
    if forced:
        spec, ids = writer.forced_calls(tools, AnswerBegin(), single=True), list[int]()
    else:
        spec = writer.optional_calls(tools, AnswerBegin(), single=True)
        if spec is None:
            return
        syntax = next(row for row in CALL_SYNTAXES[family] if row.template_has in template)
        mark = "".join(part if isinstance(part, str) else part.text for part in syntax.mark)
        ids = encoded(f"so: {mark}", has_marks=has_marks)

    answer = walk(start(spec, has_marks=has_marks), ids, random.Random(seed), has_marks=has_marks)

    if answer is None:
        return
    text = tokenizer(has_marks=has_marks).decode(answer, skip_special_tokens=False)
    parser = named(family).new_parser(
        ["first", "second"],
        prompt_end="<|start|>assistant" if family == "harmony" else "",
        forced=forced,
        schemas=dict(zip(("first", "second"), schemas, strict=True)),
    )
    events = parser.feed(text, is_last=True)
    shown = "".join(event.text for event in events if isinstance(event, TextDelta))
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert len(names) == 1, text
    assert shown.strip() == "" if forced else shown.startswith("so:"), text
    schema = schemas[("first", "second").index(names[0])]
    assert is_valid(schema, json.loads(arguments)), text


@pytest.mark.parametrize("has_marks", [True, False])
@settings(max_examples=examples(40), deadline=None)
@given(text=st.text("ab<tool_ca>l/ \n{[", max_size=30), seed=st.integers(0, 1000))
def test_free_text_is_free(text: str, seed: int, has_marks: bool) -> None:
    """Text without a whole mark is allowed, whatever it looks like, and may end at any place."""
    writer = grammars("hermes", "", has_marks=has_marks)
    spec = writer.optional_calls(tools_of([{}, {}]), AnswerBegin())
    text = text.replace("<tool_call>", "")
    ids = encoded(text, has_marks=has_marks)
    if has_marks:  # special tokens that mark nothing here are free too
        ids.insert(seed % (len(ids) + 1), encoded("[ARGS]", has_marks=True)[0])

    matcher = start(spec, has_marks=has_marks)

    assert num_accepted(matcher, ids) == len(ids)
    assert is_allowed(matcher, ids, END)


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 10_000), has_marks=st.booleans())
def test_drafts_and_shorter_outputs_change_no_mask(seed: int, has_marks: bool) -> None:
    """The masks of a matcher are those of a fresh one, after drafts, roll-backs and restarts."""
    rng = random.Random(seed)
    properties = {name: {"type": "integer"} for name in "mno"}
    schema = {"type": "object", "properties": properties, "required": ["n"]}
    writer = grammars("hermes", "", has_marks=has_marks)
    is_open = rng.random() < 0.5
    spec = writer.optional_calls(tools_of([schema, schema]), AnswerBegin(THINK, is_open=is_open))
    call = call_text("hermes", "", "first", {"o": 3, "n": 12, "m": 4})
    reasoning = "<tool_call> a</think>" if is_open else ""
    text = f"{reasoning}b{call}c <tool{call}<think>{call[:40]}</think>d"
    ids, matcher = encoded(text, has_marks=has_marks), start(spec, has_marks=has_marks)
    ids = ids[: num_accepted(start(spec, has_marks=has_marks), ids)]
    vocab_size = tokenizer(has_marks=has_marks).get_vocab_size()

    for _ in range(12):
        end = rng.randrange(len(ids) + 1)
        draft = ids[end : end + rng.randrange(6)]
        if draft and rng.random() < 0.3:
            draft[rng.randrange(len(draft))] = rng.randrange(vocab_size)

        masks = matcher.token_bitmasks(ids[:end], draft)

        for position, mask in enumerate(masks):
            fresh = start(spec, has_marks=has_marks)
            [expected] = fresh.token_bitmasks([*ids[:end], *draft[:position]], ())
            assert (mask is None) == (expected is None)
            assert mask is None or expected is None or np.array_equal(mask, expected)


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
def test_copies_of_definitions_are_bounded(family: str) -> None:
    """Many arguments that refer to large definitions take no memory and time beyond the limit."""
    large = {f"d{index}": {"enum": ["x" * 100]} for index in range(1000)}
    items = {"type": "array", "items": {"$ref": "#/$defs/d0"}}
    properties = {f"p{index}": items | {"minItems": index} for index in range(5000)}
    schema = {"type": "object", "properties": properties, "$defs": large}
    tools = [CallableTool("first", schema | {"additionalProperties": False})]
    writer = grammars(family, "", has_marks=True)
    began = time.process_time()

    with contextlib.suppress(InvalidParamsError):
        writer.forced_calls(tools, AnswerBegin())

    assert time.process_time() - began < 1


@pytest.mark.parametrize("family", ["hermes", "qwen3_coder"])
def test_128_tools_of_16_arguments_fit(family: str) -> None:
    """As many tools as agents send follow their schemas, each argument with a type of its own."""
    types = ("string", "integer", "boolean", "array")
    tools = [
        CallableTool(
            f"server_{tool}__tool_{tool}",
            {
                "type": "object",
                "properties": {f"argument_{n}": {"type": types[n % 4]} for n in range(16)},
                "additionalProperties": False,
            },
        )
        for tool in range(128)
    ]
    spec = grammars(family, "", has_marks=True).forced_calls(tools, AnswerBegin())
    text = call_text(family, "", "server_99__tool_99", {"argument_0": "a", "argument_5": 1})
    ids = encoded(text, has_marks=True)
    assert num_accepted(start(spec, has_marks=True), ids) == len(ids)


def test_calls_in_a_row_are_bounded() -> None:
    """Forced calls may be several, up to MAX_CALLS, after which the answer is complete."""
    spec = grammars("hermes", "", has_marks=True).forced_calls(tools_of([{}, {}]), AnswerBegin())
    matcher = start(spec, has_marks=True)
    call = encoded(call_text("hermes", "", "first", {}) + "\n", has_marks=True)

    assert num_accepted(matcher, (call * MAX_CALLS)[:-1]) == MAX_CALLS * len(call) - 1
    assert matcher.advance((call * MAX_CALLS)[:-1])


def test_a_forced_call_does_not_end_in_its_reasoning() -> None:
    """The end of sequence is not allowed before the reasoning has ended and a call has come."""
    spec = grammars("hermes", "", has_marks=True).forced_calls(
        tools_of([{}, {}]), AnswerBegin(THINK, is_open=True)
    )
    matcher = start(spec, has_marks=True)
    ids = encoded("so <tool_call> </think>", has_marks=True)

    for position in range(len(ids) + 1):
        assert not is_allowed(matcher, ids[:position], END)
    call = encoded('<tool_call>{"name": "first", "arguments": {}}</tool_call>', has_marks=True)
    assert num_accepted(matcher, ids + call) == len(ids + call)
    assert is_allowed(matcher, ids + call, END)


@pytest.mark.parametrize(
    ("answer_format", "text"),
    [
        (StructuredOutput(json_object=True), '{"x": [1]}'),
        (StructuredOutput(json_schema={"type": "integer"}), "12"),
        (StructuredOutput(regex="[a-z]+/[0-9]"), "ab/1"),
        (StructuredOutput(choice=["yes", "no"]), "yes"),
    ],
)
@pytest.mark.parametrize("family", ["hermes", "llama3_json", "json", "harmony"])
def test_an_answer_is_a_call_or_of_its_format(
    family: str, answer_format: StructuredOutput, text: str
) -> None:
    """With a format and tools, the answer is either, and nothing else."""
    writer, tools = grammars(family, "", has_marks=True), tools_of([{}, {}])
    spec = writer.forced_calls(tools, AnswerBegin(), or_format=answer_format)
    before = "<|channel|>final<|message|>" if family == "harmony" else ""

    for answer in (before + text, call_text(family, "", "second", {})):
        ids = encoded(answer, has_marks=True)
        matcher = start(spec, has_marks=True)
        assert num_accepted(matcher, ids) == len(ids)
        assert matcher.advance(ids) or is_allowed(matcher, ids, END)
    ids = encoded(before + "Hello!", has_marks=True)
    assert num_accepted(start(spec, has_marks=True), ids) < len(ids)


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"$ref": "#/$defs/count"}, "12", "x"),
        ({"allOf": [{"$ref": "#/$defs/count"}]}, "12", "x"),
        ({"enum": [1, 2]}, "2", "3"),
        ({"const": True}, "true", "x"),
        ({"anyOf": [{"anyOf": [{"type": "integer"}]}, {"type": "null"}]}, "null", "x"),
        ({"const": "red"}, "red", "12"),
        ({"$ref": "#/$defs/color"}, "red", "green"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "x", None),
    ],
)
def test_a_tagged_value_follows_its_schema_behind_references(
    schema: dict[str, Any], allowed: str, refused: str | None
) -> None:
    """Whether a value is text is decided as the parser decides it."""
    defs = {"count": {"type": "integer"}, "color": {"enum": ["red", "blue"]}}
    root = {"properties": {"a": schema}, "required": ["a"], "$defs": defs}
    spec = grammars("qwen3_coder", "<function=", has_marks=True).forced_calls(
        tools_of([root, {}]), AnswerBegin(), single=True
    )

    def is_accepted(value: str) -> bool:
        text = f"<tool_call>\n<function=first>\n<parameter=a>\n{value}\n</parameter>"
        ids = encoded(text, has_marks=True)
        return num_accepted(start(spec, has_marks=True), ids) == len(ids)

    assert is_accepted(allowed)
    assert refused is None or not is_accepted(refused)
