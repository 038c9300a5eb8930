"""Answers of a server that calls tools or follows a format, over a device that draws at random."""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from ramify.engine.async_llm import AsyncLLM
from ramify.errors import InvalidParamsError
from ramify.params import SamplingParams
from ramify.server.errors import ApiError
from ramify.server.grammars.constraint import AnswerConstraints, CallChoice, OfferedTool
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, chat, run

pytest.importorskip("llguidance", reason="llguidance is missing: the extra 'structured'")

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
# A device that draws at random would reason for ever.
WITHOUT_REASONING = TOOL_TEMPLATE.replace("<think>", "").replace("</think>", "")
DIGIT = {"type": "integer", "minimum": 1, "maximum": 9}
DEF = {"$defs": {"item": DIGIT}}
TOOLS: list[tuple[str, dict[str, Any]]] = [
    ("first", DEF | {"properties": {"n": {"$ref": "#/$defs/item"}}, "required": ["n"]}),
    (
        "second",
        {
            "$defs": {"item": {"enum": ["red", "blue"]}},
            "properties": {"kind": {"$ref": "#/$defs/item"}},
            "required": ["kind"],
        },
    ),
]


def function(name: str, schema: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **fields}}


def ask(
    *calls: tuple[str, dict[str, Any]], template: str | None = WITHOUT_REASONING
) -> tuple[list[Answer], ServerBench]:
    bench = ServerBench(chat_template=template)

    async def main() -> list[Answer]:
        async with bench.running():
            return [await bench.post(path, body) for path, body in calls]

    return run(main()), bench


def is_valid(name: str, arguments: Mapping[str, Any]) -> bool:
    if name == "first":
        return arguments.keys() == {"n"} and arguments["n"] in range(1, 10)
    return arguments.keys() == {"kind"} and arguments["kind"] in ("red", "blue")


def test_forced_calls_are_valid_in_each_api() -> None:
    """`required` and a name give calls of the schemas, two tools with a definition of one name."""
    tools = [function(*tool) for tool in TOOLS]
    theirs = [{"name": name, "input_schema": schema} for name, schema in TOOLS]
    bodies: list[tuple[str, dict[str, Any]]] = []
    for seed in range(6):
        options = {"tools": tools, "seed": seed, "max_tokens": 300, "parallel_tool_calls": False}
        bodies.append((CHAT, chat("go", tool_choice="required", **options)))
    named = {"type": "function", "function": {"name": "second"}}
    bodies.append((CHAT, chat("go", tools=tools, tool_choice=named, max_tokens=300)))
    bodies.append(
        (
            MESSAGES,
            chat("go", model="tiny", max_tokens=300, tools=theirs)
            | {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        )
    )

    *answers, by_name, message = ask(*bodies)[0]

    for answer in (*answers, by_name):
        [choice] = answer.json["choices"]
        [call] = choice["message"]["tool_calls"]
        called = call["function"]
        assert is_valid(called["name"], json.loads(called["arguments"]))
    assert by_name.json["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "second"
    [block] = message.json["content"]
    assert is_valid(block["name"], block["input"])


def test_an_answer_with_tools_and_a_format_is_either() -> None:
    """With `response_format` and tools, each answer is JSON of the schema or a valid call."""
    answer_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": DIGIT}}
    options = {"response_format": answer_format, "tools": [function(*tool) for tool in TOOLS]}
    bodies = [(CHAT, chat("go", seed=seed, max_tokens=300, **options)) for seed in range(16)]

    answers, _ = ask(*bodies)

    kinds = set()
    for answer in answers:
        choice = answer.json["choices"][0]
        message = choice["message"]
        kinds.add("tool_calls" in message)
        # A random model may go on calling until the last call is cut off.
        num_whole = len(message.get("tool_calls", ())) - (choice["finish_reason"] == "length")
        for call in message.get("tool_calls", ())[: max(num_whole, 0)]:
            called = call["function"]
            assert is_valid(called["name"], json.loads(called["arguments"]))
        if "tool_calls" not in message:
            assert int(message["content"]) in range(1, 10)
    assert kinds == {True, False}


def test_what_a_tool_cannot_enforce_is_told_or_refused() -> None:
    """A warning header names the tool and the keyword; `strict` is a 400 that names both."""
    schema = {"properties": {"a": {"type": "array", "uniqueItems": True}}}
    lenient, strict, external, dead = ask(
        (CHAT, chat("go", max_tokens=2, tools=[function("f", schema)])),
        (CHAT, chat("go", max_tokens=2, tools=[function("f", schema, strict=True)])),
        (CHAT, chat("go", max_tokens=2, tools=[function("f", {"$ref": "http://x/y"})])),
        (
            CHAT,
            chat("go", max_tokens=2, tools=[function("f", {"type": "object", "anyOf": [False]})]),
        ),
    )[0]

    assert lenient.status == 200
    assert "tools[0].properties.a: uniqueItems" in lenient.headers["x-ramify-warning"]
    assert strict.status == 400
    assert strict.json["error"]["param"] == "tools[0].properties.a.uniqueItems"
    assert external.status == 200
    assert "tools[0]: $ref: 'http://x/y'" in external.headers["x-ramify-warning"]
    assert dead.status == 200
    assert "tools[0]: its schema is not enforced" in dead.headers["x-ramify-warning"]


class _SlowEngine:
    """Compiles nothing: what is compiled together is too much, and each schema takes long."""

    num_compiled = 0

    def compile_grammar(self, params: SamplingParams, tenant: str) -> None:
        self.num_compiled += 1
        if params.structured is not None and params.structured.grammar is not None:
            raise InvalidParamsError("grammar", "given", "simpler")
        time.sleep(0.05)


def test_schemas_that_take_long_do_not_hold_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tools are tried one by one for a bounded time; the rest have free arguments, or are refused."""
    monkeypatch.setattr("ramify.server.grammars.constraint.TRY_S", 0.2)
    bench, engine = ServerBench(chat_template=TOOL_TEMPLATE), _SlowEngine()
    constraints = AnswerConstraints(
        cast(AsyncLLM, engine), bench.service.tokenizer, bench.service.output_format
    )
    tools = [OfferedTool(f"f{i}", {"type": "object"}, f"tools[{i}]") for i in range(100)]
    arguments: dict[str, Any] = {"prompt_end": "", "tenant": "", "answer_format": None}
    warnings: list[str] = []
    began = time.monotonic()

    spec = constraints.of_answer(tools, CallChoice(), **arguments, warnings=warnings)

    assert spec is None
    assert time.monotonic() - began < 2
    assert engine.num_compiled < 20
    assert warnings[-2] == "tools[99]: its schema is not enforced: simpler: they take too long"
    tools[99] = replace(tools[99], strict=True)
    with pytest.raises(ApiError, match="take too long"):
        constraints.of_answer(tools, CallChoice(), **arguments, warnings=[])


SCHEMA_TEXT = json.dumps(DIGIT)
LETTERS = "root ::= [a-c]{2,3}"
WORDS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"json": DIGIT}}, "[1-9]"),
    ({"structured_outputs": {"json": SCHEMA_TEXT}}, "[1-9]"),
    ({"structured_outputs": {"regex": "a{3}b"}}, "aaab"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"structured_outputs": {"grammar": LETTERS}}, "[a-c]{2,3}"),
    ({"guided_json": DIGIT}, "[1-9]"),
    ({"guided_json": SCHEMA_TEXT}, "[1-9]"),
    ({"guided_regex": "a{3}b"}, "aaab"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"guided_grammar": LETTERS}, "[a-c]{2,3}"),
    ({"json_schema": SCHEMA_TEXT}, "[1-9]"),
    ({"json_schema": DIGIT}, "[1-9]"),
    ({"ebnf": LETTERS}, "[a-c]{2,3}"),
    ({"grammar": LETTERS}, "[a-c]{2,3}"),
    (
        {
            "response_format": {
                "type": "json_object",
                "schema": {"properties": {}, "type": "object"},
            }
        },
        r"\{\s*\}",
    ),
]


def test_the_words_of_other_servers_mean_the_same() -> None:
    """Each way to ask for a format gives an answer in it, in both completion endpoints."""
    options = {"max_tokens": 200, "temperature": 1.0, "seed": 1}
    bodies = [
        body
        for words, _ in WORDS
        for body in (
            (CHAT, chat("go", **words, **options)),
            (COMPLETIONS, {"prompt": "go"} | words | options),
        )
    ]

    answers, _ = ask(*bodies, template=None)

    for index, answer in enumerate(answers):
        words, pattern = WORDS[index // 2]
        assert answer.status == 200, (words, answer.body)
        [choice] = answer.json["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(pattern, text), (words, text)


@pytest.mark.parametrize(
    ("words", "param"),
    [
        ({"guided_regex": "a", "regex": "b"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"json_schema": "[" * 100000}, "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ],
)
def test_a_format_that_is_none_or_several_is_refused(words: dict[str, Any], param: str) -> None:
    """400 with the field's name."""
    [answer], _ = ask((CHAT, chat("go", **words)))
    assert answer.status == 400
    assert answer.json["error"]["param"] == param


def test_without_a_compiler_tools_work_unconstrained() -> None:
    """Where nothing can be compiled, optional calls are free, and forced ones are a 400 that says why."""
    bench = ServerBench(chat_template=TOOL_TEMPLATE)
    bench.core.lifecycle.grammar_compiler = None
    tools = [function(*tool) for tool in TOOLS]

    async def main() -> list[Answer]:
        async with bench.running():
            bodies = (
                chat("go", max_tokens=3, tools=tools, tool_choice=choice)
                for choice in ("auto", "required")
            )
            return [await bench.post(CHAT, body) for body in bodies]

    free, forced = run(main())

    assert free.status == 200
    assert "x-ramify-warning" not in free.headers
    assert forced.status == 400
    assert "no tokenizer" in forced.json["error"]["message"]


def test_a_refused_format_is_named_in_the_words_of_the_request() -> None:
    """A regular expression that cannot be read behind reasoning: a 400 that quotes it, not our grammar."""
    bodies = [
        (CHAT, chat("go", structured_outputs={"regex": r"\bcat"})),
        (CHAT, chat("go", guided_regex=r"cat\Z")),
    ]

    answers = ask(*bodies, template=TOOL_TEMPLATE)[0]

    for answer, field in zip(answers, ("structured_outputs.regex", "guided_regex"), strict=True):
        error = answer.json["error"]
        assert answer.status == 400
        assert error["param"] == field
        assert "cat" in error["message"]
        assert "start:" not in error["message"]
        assert "%llguidance" not in error["message"]
