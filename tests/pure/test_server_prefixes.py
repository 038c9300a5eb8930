"""Named prefixes: the beginning of a conversation under a name, computed, pinned, and used in every API."""

import asyncio
import random
from typing import Any

import pytest

from ramify.engine.cache_admin.warmup import PUBLIC
from tests.budget import examples
from tests.pure.prefix_requests import (
    APIS,
    CHAT,
    DEFINITIONS,
    EXAMPLES,
    FLAT,
    FUNCTION,
    KEYS,
    MESSAGES,
    NESTED,
    PATH,
    QUESTION,
    RESPONSES,
    SYSTEM,
    TOOLS,
    answer_of,
    body,
    cache_of,
    define,
    error_of,
    inlined,
)
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, gated, run


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("path", APIS)
def test_an_answer_is_that_of_the_text_inlined(path: str, name: str) -> None:
    """The very tokens: a server that has the name, and one whose request has the parts."""
    definition = DEFINITIONS[name]
    if path == RESPONSES and name == "tools":
        definition = {"tools": [FLAT]}

    async def main() -> tuple[Answer, Answer, Answer]:
        async with with_name.running(), without.running():
            defined = await define(with_name, **definition)
            named = await with_name.post(path, body(path, QUESTION, prefix="desk"))
            return defined, named, await without.post(path, inlined(path, definition))

    with_name, without = (ServerBench(chat_template=TOOL_TEMPLATE) for _ in range(2))
    defined, named, plain = run(main())

    assert answer_of(named) == answer_of(plain)
    prompts = [bench.ended[-1].request.prompt.ids for bench in (with_name, without)]
    assert prompts[0] == prompts[1]
    assert "x-ramify-warning" not in named.headers
    used = cache_of(named)["prefix"]
    assert used["tokens"] == defined.json["tokens"] > 16
    # Whole pages were computed when the name was made; part of a page may be copied as well.
    assert used["read"] >= used["tokens"] // 16 * 16 == defined.json["pinned_tokens"]


def test_a_prefix_stays_under_pressure() -> None:
    """Requests of others need every page of the pool several times; its pages are read whole."""
    bench = ServerBench(pool_tokens=2048, max_model_len=1024)

    async def main() -> list[Answer]:
        async with bench.running():
            defined = await define(bench, system=SYSTEM)
            for number in range(12):
                await bench.post("/v1/completions", {"prompt": [number + 5] * 900, "max_tokens": 1})
            return [defined, await bench.post(CHAT, body(CHAT, QUESTION, prefix="desk"))]

    defined, answer = run(main())

    assert bench.core.cache.stats().evicted_pages > 2 * 128
    assert cache_of(answer)["prefix"]["read"] == defined.json["tokens"] // 16 * 16


@pytest.mark.parametrize("ttl_s", [None, 600.0])
def test_a_prefix_whose_pages_are_gone_is_computed_and_pinned_by_its_next_use(
    ttl_s: float | None,
) -> None:
    """As after new weights, or a pin that has expired: the name stays."""
    bench = ServerBench()

    async def main() -> list[Answer]:
        async with bench.running():
            await define(bench, system=SYSTEM, ttl_s=ttl_s)
            await bench.llm.cache.end_pins("")
            await bench.llm.cache.clear()
            gone = await bench.call("GET", f"{PATH}/desk")
            request = body(CHAT, QUESTION, prefix="desk")
            used = [await bench.post(CHAT, request) for _ in range(2)]
            pins = await bench.llm.cache.pins()
            assert [pin.ttl_s for pin in pins] == [ttl_s]
            return [gone, *used, await bench.call("GET", f"{PATH}/desk")]

    gone, first, second, back = run(main())

    assert gone.json["pinned_tokens"] == cache_of(first)["prefix"]["read"] == 0
    whole = gone.json["tokens"] // 16 * 16
    assert cache_of(second)["prefix"]["read"] >= whole == back.json["pinned_tokens"]


def test_tenants_see_and_use_their_own_names() -> None:
    """The same name is another prefix; an unknown one is 404, whoever else has it."""
    bench = ServerBench(keys=KEYS)

    async def main() -> list[Answer]:
        async with bench.running():
            request = body(CHAT, QUESTION, prefix="desk")
            await define(bench, "key-ann", system=SYSTEM)
            unknown = await bench.post(CHAT, request, "key-bob")
            other = await bench.call("GET", f"{PATH}/desk", key="key-bob")
            await define(bench, "key-bob", system="Bob. " + SYSTEM)
            first = await bench.post(CHAT, request, "key-bob")
            deleted = await bench.call("DELETE", f"{PATH}/desk", key="key-bob")
            listed = [
                await bench.call("GET", PATH, key=key)
                for key in ("key-ann", "key-bob", "key-admin")
            ]
            return [unknown, other, first, deleted, *listed]

    unknown, other, first, deleted, *listed = run(main())

    assert unknown.status == other.status == 404
    assert "there are none" in unknown.json["error"]["message"]
    assert cache_of(first)["prefix"]["read"] > 0
    assert deleted.json == {"name": "desk", "object": "prefix", "deleted": True}
    assert [[entry["name"] for entry in answer.json["data"]] for answer in listed] == [
        ["desk"],
        [],
        [],
    ]


def test_a_public_prefix_is_the_operators() -> None:
    """Every tenant reads its pages, whatever tenant it is; only the operator makes, sees and ends it."""
    bench = ServerBench(keys=KEYS)

    async def main() -> list[Answer]:
        async with bench.running():
            request = body(MESSAGES, QUESTION, prefix="desk")
            refused = await define(bench, "key-ann", system=SYSTEM, public=True)
            defined = await define(bench, "key-admin", system=SYSTEM, public=True)
            used = [await bench.post(MESSAGES, request, key) for key in ("key-ann", "key-bob")]
            seen = await bench.call("GET", f"{PATH}/desk", key="key-ann")
            kept = await bench.call("DELETE", f"{PATH}/desk", key="key-ann")
            gone = await bench.call("DELETE", f"{PATH}/desk", key="key-admin")
            assert not await bench.llm.cache.pins()
            return [refused, defined, *used, seen, kept, gone]

    refused, defined, ann, bob, seen, kept, gone = run(main())

    assert [answer.status for answer in (refused, kept, gone)] == [403, 403, 200]
    for answer in (ann, bob):
        assert cache_of(answer)["prefix"]["read"] >= defined.json["pinned_tokens"] > 0
    assert seen.json["public"]
    assert "system" not in seen.json


def other_tool(path: str) -> dict[str, Any]:
    tool = dict(TOOLS[path])
    if "function" in tool:
        return tool | {"function": FUNCTION | {"description": "Another."}}
    return tool | {"description": "Another."}


@pytest.mark.parametrize("path", APIS)
def test_what_stands_in_the_prefix_may_be_repeated_and_not_changed(path: str) -> None:
    """System prompt and tools: equal ones change nothing, others are 400 with the way out."""
    bench = ServerBench(chat_template=TOOL_TEMPLATE)
    system_field = {MESSAGES: "system", RESPONSES: "instructions"}.get(path)

    def with_system(text: str) -> dict[str, Any]:
        if system_field:
            return body(path, QUESTION, prefix="desk", **{system_field: text})
        return body(path, [{"role": "system", "content": text}, *QUESTION], prefix="desk")

    async def main() -> list[Answer]:
        async with bench.running():
            await define(bench, system=SYSTEM, tools=[NESTED])
            await define(bench, name="bare", messages=EXAMPLES)
            requests = [
                body(path, QUESTION, prefix="desk"),
                body(path, QUESTION, prefix="desk", tools=[TOOLS[path]]),
                with_system(SYSTEM),
                with_system("Be someone else."),
                body(path, QUESTION, prefix="desk", tools=[other_tool(path)]),
                body(path, QUESTION, prefix="desk", tools=[TOOLS[path], TOOLS[path] | {}]),
                with_system(SYSTEM) | {"prefix": "bare"},
                body(path, QUESTION, prefix="bare", tools=[TOOLS[path]]),
            ]
            return [await bench.post(path, request) for request in requests]

    plain, *same, other_system, tool, more_tools, no_system, no_tools = run(main())

    for answer in same:
        assert answer_of(answer) == answer_of(plain)
    if path == RESPONSES:  # of two tools of a name it skips the second, with a warning
        assert "is skipped" in more_tools.headers["x-ramify-warning"]
        more_tools = tool
    for answer, words in (
        (other_system, "'Be someone else.'"),
        (tool, "'weather' is not its tool 0"),
        (more_tools, "'weather' is not its tool"),
        (no_system, "no system prompt"),
        (no_tools, "has no tools"),
    ):
        status, message = error_of(answer)
        assert status == 400, message
        assert words in message
        assert "or make a prefix with" in message


def test_a_later_system_message_may_follow() -> None:
    """It is a message like others: only the beginning belongs to the prefix."""
    bench = ServerBench()
    late = [*QUESTION, {"role": "system", "content": "Be brief."}, *QUESTION]

    async def main() -> list[Answer]:
        async with bench.running():
            await define(bench, system=SYSTEM)
            tail = body(CHAT, QUESTION, prefix="desk", truncate_prompt_tokens=20)
            return [
                await bench.post(CHAT, body(CHAT, late, prefix="desk")),
                await bench.post(CHAT, tail),
            ]

    answer, cut = run(main())

    assert cache_of(answer)["prefix"]["read"] > 0
    assert (cut.status, cut.json["error"]["param"]) == (400, "truncate_prompt_tokens")


def test_a_name_is_replaced_explicitly() -> None:
    """The same definition again is no change; another is 409 until it says so; pins follow."""
    bench = ServerBench()

    async def main() -> list[Answer]:
        async with bench.running():
            answers = [
                await define(bench, system=SYSTEM),
                await define(bench, system=SYSTEM),
                await define(bench, system="New. " + SYSTEM),
                await define(bench, system="New. " + SYSTEM, replace=True),
                await bench.call("GET", f"{PATH}/desk"),
            ]
            [pin] = await bench.llm.cache.pins()
            assert len(pin.key) == answers[-1].json["pinned_tokens"]
            await bench.call("DELETE", f"{PATH}/desk")
            assert not await bench.llm.cache.pins()
            return [*answers, await bench.call("DELETE", f"{PATH}/desk")]

    first, again, taken, replaced, shown, gone = run(main())

    assert [answer.status for answer in (first, again, taken, replaced)] == [200, 200, 409, 200]
    assert "replace: true" in taken.json["error"]["message"]
    assert shown.json["system"] == "New. " + SYSTEM
    assert gone.status == 404


def test_a_public_prefix_is_pinned_again_after_new_weights() -> None:
    """Before POST /v1/weights answers; those of tenants are by their next use."""
    bench = ServerBench()

    async def new_weights(_: str) -> None:
        for owner in ("", PUBLIC):
            await bench.llm.cache.end_pins(owner)
        await bench.llm.cache.clear()

    bench.llm.reload_weights = new_weights  # type: ignore[method-assign,assignment]

    async def main() -> list[Answer]:
        async with bench.running():
            await define(bench, name="all", system=SYSTEM, public=True)
            await define(bench, name="own", system="Mine. " + SYSTEM)
            await bench.post("/v1/weights", {"model": "second"})
            return [await bench.call("GET", f"{PATH}/{name}") for name in ("all", "own")]

    everybody, own = run(main())

    assert everybody.json["pinned_tokens"] == everybody.json["tokens"] // 16 * 16
    assert own.json["pinned_tokens"] == 0


def test_responses_go_on_behind_a_prefix() -> None:
    """A later turn names it again, and reads the earlier one with it."""
    bench = ServerBench()

    async def main() -> list[Answer]:
        async with bench.running():
            await define(bench, system=SYSTEM)
            first = await bench.post(RESPONSES, body(RESPONSES, QUESTION, prefix="desk"))
            fields = {"prefix": "desk", "previous_response_id": first.json["id"]}
            second = await bench.post(RESPONSES, body(RESPONSES, QUESTION, **fields))
            return [first, second]

    first, second = run(main())

    usage = second.json["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] >= first.json["usage"]["input_tokens"]
    assert cache_of(second)["prefix"] == {"name": "desk"} | {
        field: cache_of(second)["prefix"]["tokens"] for field in ("tokens", "read")
    }


def test_a_compaction_reads_the_prefix() -> None:
    """The summary is of the conversation behind it; a name that is not there is 404."""
    bench = ServerBench()

    async def main() -> list[Answer]:
        async with bench.running():
            made = await define(bench, system=SYSTEM)
            fields = [{"input": QUESTION, "prefix": name} for name in ("desk", "door")]
            return [
                made,
                *[await bench.post(f"{RESPONSES}/compact", request) for request in fields],
            ]

    made, compacted, unknown = run(main())

    cached = compacted.json["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached >= made.json["pinned_tokens"] > 0
    assert unknown.status == 404


def test_names_of_the_same_pages_share_their_pin() -> None:
    """It ends with the last of them."""
    bench = ServerBench()

    async def main() -> list[int]:
        async with bench.running():
            counts = []
            for name in ("desk", "door"):
                await define(bench, name=name, system=SYSTEM)
            for name in ("desk", "door"):
                await bench.call("DELETE", f"{PATH}/{name}")
                counts.append(len(await bench.llm.cache.pins()))
            return counts

    assert run(main()) == [1, 0]


def test_what_cannot_be_pinned_is_refused_whole() -> None:
    """409 with the way out; no name, no pin and no quota is left."""
    bench = ServerBench(keys=KEYS, pool_tokens=2560, max_model_len=1024)

    async def main() -> list[Answer]:
        async with bench.running():
            answers = [
                await define(bench, "key-ann", name=f"p{number}", system=f"{number} " + SYSTEM * 2)
                for number in range(4)
            ]
            listed = await bench.call("GET", PATH, key="key-ann")
            long = await define(bench, "key-ann", name="long", system=SYSTEM * 30)
            return [*answers, listed, long]

    *answers, listed, long = run(main())

    statuses = [answer.status for answer in answers]
    assert statuses == sorted(statuses)
    assert set(statuses) == {200, 409}
    assert "delete a prefix" in answers[-1].json["error"]["message"]
    assert len(listed.json["data"]) == statuses.count(200)
    assert all(entry["pinned_tokens"] for entry in listed.json["data"])
    assert (long.status, long.json["error"]["code"]) == (400, "context_length_exceeded")


SWITCH_TEMPLATE = "{% if enable_thinking %}<|system|>Think.<|end|>{% endif %}" + TOOL_TEMPLATE


def test_a_template_that_writes_something_else_before_is_told() -> None:
    """The request is served, not pinned, and says how much of the prefix it has."""
    bench = ServerBench(chat_template=SWITCH_TEMPLATE)

    async def main() -> list[Answer]:
        async with bench.running():
            await define(bench, system=SYSTEM)
            request = body(CHAT, QUESTION, prefix="desk", enable_thinking=True)
            answer = await bench.post(CHAT, request)
            return [
                answer,
                await bench.post("/v1/cache/explain", body(CHAT, QUESTION, prefix="desk")),
            ]

    answer, explained = run(main())

    assert "an option such as" in answer.headers["x-ramify-warning"]
    assert cache_of(answer)["prefix"]["read"] < 16
    assert explained.json["prefix"]["read"] >= explained.json["prefix"]["tokens"] // 16 * 16
    assert explained.json["segments"][0]["path"].startswith("prefix:")


def test_a_request_in_flight_pins_no_prefix_that_is_gone() -> None:
    """Its first tokens come after the end of the name, and ask for the pin."""
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            gate = gated(bench)
            gate.is_open = True
            await define(bench, system=SYSTEM)
            await bench.llm.cache.end_pins("")
            gate.is_open = False
            request = asyncio.ensure_future(bench.post(CHAT, body(CHAT, QUESTION, prefix="desk")))
            while not bench.service.live.num_waiting(None):  # noqa: ASYNC110 - in a prompt thread
                await asyncio.sleep(0)
            # As a DELETE whose pins have ended before this request has its first token.
            bench.service.prefixes.remove("", "desk")
            gate.open()
            assert cache_of(await request)["prefix"]["tokens"] > 0
            assert not await bench.llm.cache.pins()

    run(main())


def test_any_interleaving_of_calls_leaves_no_pin_without_a_name() -> None:
    """Names made, replaced, used and deleted at once by two tenants; deleted, they leave nothing."""
    bench = ServerBench(keys=KEYS, pool_tokens=32_768)
    draw = random.Random(7)

    async def act(key: str) -> int:
        name, text = draw.choice(("desk", "door")), draw.choice("abc") + SYSTEM
        match draw.randrange(4):
            case 0:
                fields = {"system": text, "replace": draw.random() < 0.7}
                answer = await define(bench, key, name=name, **fields)
            case 1:
                answer = await bench.call("DELETE", f"{PATH}/{name}", key=key)
            case _:
                answer = await bench.post(CHAT, body(CHAT, QUESTION, prefix=name), key)
        return answer.status

    async def main() -> set[int]:
        statuses = set[int]()
        async with bench.running():
            for _ in range(examples(24)):
                keys = [draw.choice(("key-ann", "key-bob")) for _ in range(8)]
                statuses |= set(await asyncio.gather(*map(act, keys)))
                named = {
                    tuple(prefix.ids[: len(prefix.ids) // 16 * 16])
                    for key in ("key-ann", "key-bob")
                    for prefix in bench.service.prefixes.of(KEYS.caller(key).tenant)
                }
                pins = await bench.llm.cache.pins()
                assert {tuple(pin.key.tokens()) for pin in pins} <= named
            for key in ("key-ann", "key-bob"):
                for name in ("desk", "door"):
                    await bench.call("DELETE", f"{PATH}/{name}", key=key)
            assert not await bench.llm.cache.pins()
        return statuses

    assert {200, 404} <= run(main()) <= {200, 404, 409}
