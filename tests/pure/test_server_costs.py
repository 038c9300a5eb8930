"""Requests that are small for what they make a server do, or what they leave in its memory."""

import json

import pytest

from ramify.server.errors import ApiError
from ramify.server.http.json_limits import MAX_CONTAINERS
from ramify.server.http.wire import decode_body
from ramify.server.openai.protocol import ChatRequest
from ramify.server.unserved_fields import MAX_NAMED, UnknownFieldLog, unknown_warning
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench, chat, run

RESPONSES = "/v1/responses"
# An item that no prompt has, and that a conversation keeps.
LARGE_ITEM = {"type": "web_search_call", "action": [[]] * (MAX_CONTAINERS - 1000)}


def test_a_value_that_looks_like_a_path_is_not_searched_for_steps() -> None:
    """The path of an error is msgspec's own, not one that a client wrote into the value.

    2 MB of brackets took hours before.
    """
    value = " - at `" + "[" * 2_000_000
    body = json.dumps(chat("x", prompt_cache_retention=value)).encode()

    with pytest.raises(ApiError) as caught:
        decode_body(body, ChatRequest)

    assert caught.value.param == "prompt_cache_retention"
    assert caught.value.message.startswith("Invalid enum value ' - at `[[[")


@pytest.mark.parametrize("arguments", ["[" * 5000, '{"a":' * 900 + "1" + "}" * 900])
def test_arguments_nested_too_deep_are_the_clients_fault(arguments: str) -> None:
    """JSON inside of a string has the limits of a body: 400, and the field is named."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "y"},
    ]

    async def main() -> None:
        bench = ServerBench(chat_template=TOOL_TEMPLATE)
        async with bench.running():
            answer = await bench.post("/v1/chat/completions", {"messages": messages})
        assert answer.status == 400
        assert answer.json["error"]["param"] == "messages[1].tool_calls[0].arguments"
        assert "more than 64 levels deep" in answer.json["error"]["message"]

    run(main())


def test_stored_items_are_as_few_as_those_of_one_body() -> None:
    """What many requests stored is not decoded if it exceeds the limits of one: 400 says so.

    It can still be listed.
    """

    async def main() -> None:
        bench = ServerBench()
        async with bench.running():
            body = {"input": [LARGE_ITEM, {"role": "user", "content": "x"}]}
            body |= {"max_output_tokens": 1}
            first = await bench.post(RESPONSES, body)
            chained = body | {"previous_response_id": first.json["id"]}
            second = await bench.post(RESPONSES, chained)
            third = await bench.post(
                RESPONSES, chained | {"previous_response_id": second.json["id"]}
            )
            listed = await bench.call("GET", f"{RESPONSES}/{second.json['id']}/input_items")

            conversation = (await bench.post("/v1/conversations", {})).json["id"]
            path = f"/v1/conversations/{conversation}/items"
            added = [await bench.post(path, {"items": [LARGE_ITEM]}) for _ in range(2)]
            named = await bench.post(RESPONSES, {"input": "x", "conversation": conversation})

        assert (first.status, second.status, third.status) == (200, 200, 400)
        assert third.json["error"]["param"] == "previous_response"
        assert "what is stored has more than" in third.json["error"]["message"]
        assert [item["type"] for item in listed.json["data"]] == [
            "message",
            "web_search_call",
            "message",
            "message",
            "web_search_call",
        ]
        assert [answer.status for answer in added] == [200, 200]
        assert (named.status, named.json["error"]["param"]) == (400, "conversation")

    run(main())


def test_references_decode_what_they_name() -> None:
    """Items beside those that a request refers to do not count: their owner may be large."""

    async def main() -> None:
        bench = ServerBench()
        async with bench.running():
            conversation = (await bench.post("/v1/conversations", {})).json["id"]
            path = f"/v1/conversations/{conversation}/items"
            large = [
                (await bench.post(path, {"items": [LARGE_ITEM]})).json["first_id"] for _ in range(2)
            ]
            message = {"role": "user", "content": "x"}
            small = (await bench.post(path, {"items": [message]})).json["first_id"]
            statuses = []
            for names in ([small], [*large, small]):
                items = [{"type": "item_reference", "id": name} for name in names]
                body = {"input": items, "max_output_tokens": 1}
                statuses.append((await bench.post(RESPONSES, body)).status)

        assert statuses == [200, 400]

    run(main())


def test_many_unknown_fields_are_counted_not_named() -> None:
    """Of 100,000 unknown fields a warning and the log name the first, whatever comes after."""
    names = [f"field{index}" for index in range(100_000)]
    log = UnknownFieldLog()

    warning = unknown_warning(names)
    log.report(names, "/v1/chat/completions")

    assert warning.endswith(f"field{MAX_NAMED - 1} and {100_000 - MAX_NAMED} more")
    assert len(log._names) == MAX_NAMED
