"""Requests that are small for what they make a server do, or what they leave in its memory."""

import gc
import json
from typing import Any

import pytest

from ramify.server.errors import ApiError
from ramify.server.history.expiring_store import ExpiringStore
from ramify.server.http.json_limits import MAX_CONTAINERS
from ramify.server.http.request_body import decode_body
from ramify.server.openai.protocol import ChatRequest
from ramify.server.run import frozen_heap
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
    assert caught.value.message.startswith('" - at `[[[')


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
        assert answer.json["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
        assert "more than 64 levels deep" in answer.json["error"]["message"]

    run(main())


def test_stored_items_are_as_few_as_those_of_one_body() -> None:
    """What many requests stored is not decoded if it exceeds the limits of one: 400 says so.

    It can still be listed.
    """

    async def main() -> None:
        bench = ServerBench()
        async with bench.running():
            message = {"role": "user", "content": "x"}
            body: dict[str, Any] = {"input": [LARGE_ITEM, message], "max_output_tokens": 1}
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


def test_an_item_keeps_its_place_whatever_ids_clients_send() -> None:
    """An id that the server would give next, sent by a client, does not replace an item."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            name = (await bench.post("/v1/conversations", {})).json["id"]
            ids = [f"msg_{name.removeprefix('conv_')}_i{number}" for number in (2, 4, 5, None)]
            items = [{"role": "user", "content": text} for text in "abcd"]
            for item, given in zip(items[:3], ids, strict=False):
                item["id"] = given
            path = f"/v1/conversations/{name}/items"
            for batch in ([items[0], *items[3:] * 2, *items[1:3]], items[3:] * 3):
                added = await bench.post(path, {"items": batch})
                assert added.status == 200
            kept = (await bench.call("GET", f"{path}?order=asc")).json["data"]

        texts = [item["content"][0]["text"] for item in kept]
        assert texts == ["a", "d", "d", "b", "c", "d", "d", "d"]
        assert len({item["id"] for item in kept}) == 8

    run(main())


def test_a_turn_without_room_in_its_conversation_is_refused() -> None:
    """Every turn that is answered is kept, until one is refused: none is lost unseen."""

    async def main() -> None:
        bench = ServerBench()
        bench.service.conversations = ExpiringStore(max_tenant_bytes=200_000)
        async with bench.running():
            name = (await bench.post("/v1/conversations", {})).json["id"]
            file = {"type": "input_file", "file_data": "x" * 40_000}
            message = {"role": "user", "content": [file]}
            body = {"input": [message], "max_output_tokens": 1, "conversation": name}
            num_kept = []
            while (answer := await bench.post(RESPONSES, body)).status == 200:
                conversation = bench.service.conversations.get("", name)
                assert conversation is not None
                num_kept.append(len(conversation.items))
        assert num_kept == [2, 4, 6, 8][: len(num_kept)]
        assert len(num_kept) > 1
        assert (answer.status, answer.json["error"]["param"]) == (400, "conversation")
        assert "no room" in answer.json["error"]["message"]

    run(main())


def test_the_collector_looks_at_what_requests_made_only() -> None:
    """While the server serves, what was there before is in no generation; afterwards it is again."""
    before = [object] * 1

    with frozen_heap():
        after = [object] * 1
        tracked = {id(value) for value in gc.get_objects()}
        num_frozen = gc.get_freeze_count()

    assert id(after) in tracked
    assert id(before) not in tracked
    assert num_frozen > 10_000
    assert gc.get_freeze_count() == 0
