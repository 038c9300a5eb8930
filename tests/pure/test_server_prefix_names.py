"""Definitions of named prefixes: names, shapes, limits, and what is refused."""

import json
from typing import Any

import pytest

from ramify.server.errors import ApiError
from ramify.server.history.named_values import NamedValues
from tests.pure.prefix_requests import (
    APIS,
    FLAT,
    NESTED,
    OF_MESSAGES,
    PATH,
    QUESTION,
    SYSTEM,
    body,
    define,
    error_of,
)
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, run

HOSTILE = [
    "",
    "..",
    "../../etc/passwd",
    "a/b",
    "a b",
    "a\n",
    "a\r\nX-Evil: 1",
    "\u0000",
    "имя",
    "\u202ename",
    "a" * 129,
    "a" * 10_000,
    "\ud800",
    "-",
]


def test_hostile_names_are_refused() -> None:
    """400 when they are made, 404 when they are used or asked for; nothing is left."""
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            for name in HOSTILE:
                made = await define(bench, name=name, system="Be kind.")
                assert made.status == 400, (name, made.body)
                if name != "\ud800":  # no JSON
                    assert (
                        json.dumps(name, ensure_ascii=False)[:-1] in error_of(made)[1]
                        or len(name) > 100
                    )
                    assert "1 to 128 characters: ASCII letters" in error_of(made)[1]
                for path in APIS:
                    used = await bench.post(path, body(path, QUESTION, prefix=name))
                    assert used.status in (400, 404), (name, used.body)
                    assert len(used.body) < 2000
            for path in ("%2e%2e", "..", "../cache", "a" * 5000, "a%00", "\xff"):
                assert (await bench.call("GET", f"{PATH}/{path}")).status == 404
                assert (await bench.call("DELETE", f"{PATH}/{path}")).status == 404
            assert (await bench.call("GET", PATH)).json == {"object": "list", "data": []}

    run(main())


class Text(str):
    """A value of as many bytes as it has characters."""

    __slots__ = ()

    @property
    def num_bytes(self) -> int:
        return len(self)


def test_limits_of_names_and_bytes_refuse_and_forget_nothing() -> None:
    """Of a tenant 400, of all 503; a replacement counts once."""
    values: NamedValues[Text] = NamedValues(
        "prefix", max_names=4, max_tenant_names=2, max_bytes=40, max_tenant_bytes=25
    )
    for name in ("a", "b", "b"):
        values.put("ann", name, Text("x" * 10))

    for tenant, name, size, status in (
        ("ann", "c", 1, 400),
        ("ann", "a", 16, 400),
        ("bob", "a", 21, 503),
        ("bob", "a", 26, 400),
    ):
        with pytest.raises(ApiError) as caught:
            values.put(tenant, name, Text("y" * size))
        assert caught.value.status == status
    values.put("bob", "a", Text("y" * 20))

    assert (len(values), values.num_bytes) == (3, 40)
    assert values.get("ann", "c") is None
    assert values.remove("ann", "a") == "x" * 10


def test_the_shapes_of_all_apis_make_the_same_prefix() -> None:
    """Tools nested, flat or with an input schema; the system prompt beside the messages or in them."""
    bench = ServerBench(chat_template=TOOL_TEMPLATE)
    message = {"role": "system", "content": SYSTEM}
    definitions: tuple[dict[str, Any], ...] = (
        {"system": SYSTEM, "tools": [NESTED]},
        {"system": SYSTEM, "tools": [FLAT]},
        {"system": SYSTEM, "tools": [OF_MESSAGES]},
        {"messages": [message], "tools": [NESTED]},
        {"messages": [message], "tools": [FLAT]},
    )

    async def main() -> list[Answer]:
        async with bench.running():
            return [
                await define(bench, name=f"p{number}", **definition)
                for number, definition in enumerate(definitions)
            ]

    assert len({answer.json["tokens"] for answer in run(main())}) == 1
    assert len({tuple(prefix.ids) for prefix in bench.service.prefixes.of("")}) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "needs system, messages or tools"),
        ({"system": "Hi", "ttl_s": 0}, "ttl_s: 0 is not possible; it must be more than 0"),
        ({"prompt": "Hi"}, "send system or messages"),
        ({"system": "Hi", "model": "other"}, "'other' is not served"),
        ({"messages": [{"role": "boss", "content": "Hi"}]}, "boss"),
        ({"tools": [{"name": "f"}]}, "function"),
        (
            {"system": "Hi", "messages": [{"role": "assistant", "tool_calls": [{}]}]},
            "tool_use",
        ),
    ],
)
def test_wrong_definitions_name_the_field(fields: dict[str, Any], words: str) -> None:
    """400 or 404, as a request with these parts would be."""
    bench = ServerBench()

    async def main() -> Answer:
        async with bench.running():
            return await define(bench, **fields)

    answer = run(main())

    assert answer.status in (400, 404), answer.body
    assert words in error_of(answer)[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_apis_without_messages_refuse_a_prefix(path: str) -> None:
    """They name the path that has it."""
    bench = ServerBench()

    async def main() -> Answer:
        async with bench.running():
            return await bench.post(path, {"model": "tiny", "prompt": "Hi", "prefix": "desk"})

    status, message = error_of(run(main()))
    assert status == 400
    assert "chat" in message
