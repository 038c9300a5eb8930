"""The Responses API as agents use it: Codex's bodies, stored items, conversations, compaction."""

from typing import Any

import pytest

from ramify.server.request_fields.opaque_text import encode_opaque
from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ServerBench, run

PATH = "/v1/responses"
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
MAIL = {
    "type": "namespace",
    "name": "mcp__mail__",
    "description": "Mails.",
    "tools": [{"type": "function", "name": "send", "parameters": {"type": "object"}}],
}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Be brief."}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA-of-another-server"},
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command":["ls"]}',
            "call_id": "c1",
        },
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "reasoning", "summary": [], "encrypted_content": encode_opaque("A patch it is.")},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin", "call_id": "c2"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "1"}},
    ],
    "tools": [
        SHELL,
        {"type": "local_shell"},
        PATCH,
        MAIL,
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client"},
        {"type": "image_generation", "output_format": "png"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "3e1b",
    "text": {"verbosity": "low"},
    "client_metadata": {"x": "y"},
    "max_output_tokens": 4,
}


def ask(question: str, **fields: Any) -> dict[str, Any]:
    return {"input": question, "max_output_tokens": 3} | fields


def bench_run(main: Any, **options: Any) -> Any:
    """Run `main(bench)` while the bench runs."""

    async def running() -> Any:
        bench = ServerBench(**options)
        async with bench.running():
            return await main(bench)

    return run(running())


def texts(items: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in items for part in item.get("content", ()) if "text" in part]


def test_a_body_of_codex_is_served_and_what_was_left_out_is_told() -> None:
    """200; the header names the skipped tools and items, and nothing that was served."""
    answer: Answer = bench_run(
        lambda bench: bench.post(PATH, CODEX), max_model_len=4096, chat_template=TOOL_TEMPLATE
    )

    assert answer.status == 200, answer.body
    assert answer.events[-1]["type"] in ("response.completed", "response.incomplete")
    warning = answer.headers["x-ramify-warning"]
    for name in ("web_search", "tool_search", "image_generation", "Lark"):
        assert name in warning, warning
    for name in ("web_search_call (1)", "ghost_snapshot (1)", "reasoning of another server (1)"):
        assert name in warning, warning
    assert "mail" not in warning and "local_shell" not in warning


def test_the_prompt_has_the_calls_and_the_tools() -> None:
    """Reasoning of this server, the patch as `input`, and the namespace joined as Codex joins it."""

    async def main(bench: ServerBench) -> str:
        seen: list[str] = []
        bench.service.listeners.append(lambda ended: seen.append(ended.request.prompt.text))
        await bench.post(PATH, CODEX)
        await bench.until_idle()
        return seen[0]

    prompt: str = bench_run(main, max_model_len=4096, chat_template=TOOL_TEMPLATE)

    assert prompt.index("Fix it.") < prompt.index('"ls"') < prompt.index("a.py")
    assert '{"input": "*** Begin"}' in prompt
    assert "mcp__mail__send" in prompt
    assert '"name": "local_shell"' in prompt


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ({"type": "web_search"}, "web_search"),
        ({"type": "function", "name": "nothing"}, "nothing"),
        ({"type": "mcp", "server_label": "x"}, "mcp"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]},
            "web_search",
        ),
        ("whatever", "whatever"),
    ],
)
def test_a_choice_that_cannot_be_served_is_refused(choice: object, named: str) -> None:
    """400 at `tool_choice`, and the message names it."""
    body = ask("Hi", tools=[SHELL, {"type": "web_search"}], tool_choice=choice)

    answer: Answer = bench_run(lambda bench: bench.post(PATH, body))

    assert answer.status == 400
    assert answer.json["error"]["param"] == "tool_choice"
    assert named in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"background": True}, 400, "background"),
        ({"prompt": {"id": "p"}}, 400, "prompt"),
        ({"previous_response_id": "a", "conversation": "b"}, 400, "conversation"),
        ({"conversation": {"id": "conv_none"}}, 404, "conversation"),
        ({"previous_response_id": "resp_none"}, 404, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_none"}]}, 404, "input[0].id"),
        ({"input": []}, 400, "input"),
        ({"input": [{"role": "user", "content": 3}]}, 400, "input[0].content"),
        ({"input": [{"type": "poem", "text": "roses"}]}, 400, "input[0].type"),
        ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
        ({"tools": [{"name": "x"}]}, 400, "tools[0].type"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "x"}]}]},
            400,
            "tools[0].tools[0].type",
        ),
    ],
)
def test_errors_name_the_field(fields: dict[str, Any], status: int, param: str) -> None:
    """One 4xx, at the field that is wrong."""
    answer: Answer = bench_run(lambda bench: bench.post(PATH, ask("Hi") | fields))

    assert (answer.status, answer.json["error"]["param"]) == (status, param), answer.body


def test_options_without_effect_are_accepted() -> None:
    """And come back in the response, where OpenAI's has them."""
    options = {
        "max_tool_calls": 3,
        "stream_options": {"include_obfuscation": False},
        "safety_identifier": "s",
        "user": "u",
        "metadata": {"a": "b"},
        "text": {"verbosity": "low"},
        "service_tier": "auto",
        "truncation": "auto",
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
    }

    answer: Answer = bench_run(lambda bench: bench.post(PATH, ask("Hi", **options)))

    assert answer.status == 200, answer.body
    assert "x-ramify-warning" not in answer.headers
    for name in ("max_tool_calls", "safety_identifier", "user", "metadata", "truncation"):
        assert answer.json[name] == options[name]


def test_the_items_before_a_response_come_in_pages() -> None:
    """Those of the conversation before included; `after` goes on where a page ended."""

    async def main(bench: ServerBench) -> None:
        first = (await bench.post(PATH, ask("one"))).json
        second = (await bench.post(PATH, ask("two", previous_response_id=first["id"]))).json
        path = f"{PATH}/{second['id']}/input_items"
        whole = (await bench.call("GET", f"{path}?order=asc")).json
        assert texts(whole["data"]) == ["one", *texts(first["output"]), "two"]
        assert not whole["has_more"]
        newest = (await bench.call("GET", path)).json
        assert newest["data"] == whole["data"][::-1]
        seen, after = [], ""
        while True:
            page = (await bench.call("GET", f"{path}?limit=1{after}")).json
            seen += page["data"]
            assert page["first_id"] == page["last_id"] == page["data"][0]["id"]
            if not page["has_more"]:
                break
            after = f"&after={page['last_id']}"
        assert seen == newest["data"]
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=nothing"):
            refused = await bench.call("GET", f"{path}?{query}")
            assert refused.status == 400
            assert refused.json["error"]["param"] == query.split("=")[0]

    bench_run(main)


def test_a_stored_item_can_be_referred_to() -> None:
    """An item of a response or of a conversation stands for itself; without `type` as well."""

    async def main(bench: ServerBench) -> None:
        first = (await bench.post(PATH, ask("one"))).json
        conversation = (
            await bench.post("/v1/conversations", {"items": [{"role": "user", "content": "apple"}]})
        ).json
        path = f"/v1/conversations/{conversation['id']}/items"
        [item] = (await bench.call("GET", path)).json["data"]
        references = [
            {"type": "item_reference", "id": first["output"][0]["id"]},
            {"id": item["id"]},
            {"role": "user", "content": "go on"},
        ]
        second = (await bench.post(PATH, ask("") | {"input": references})).json
        items = await bench.call("GET", f"{PATH}/{second['id']}/input_items?order=asc")
        assert texts(items.json["data"]) == [*texts(first["output"]), "apple", "go on"]
        await bench.call("DELETE", f"{PATH}/{first['id']}")
        assert (await bench.post(PATH, ask("") | {"input": references})).status == 404

    bench_run(main)


def test_a_stored_response_is_streamed_again() -> None:
    """The same events with the same numbers, from any of them on."""

    async def main(bench: ServerBench) -> None:
        events = (await bench.post(PATH, ask("Hi", stream=True, max_output_tokens=9))).events
        path = f"{PATH}/{events[0]['response']['id']}"
        assert (await bench.call("GET", f"{path}?stream=true")).events == events
        for number in range(len(events)):
            rest = await bench.call("GET", f"{path}?stream=true&starting_after={number}")
            assert rest.events == events[number + 1 :]
        assert (await bench.call("GET", f"{path}?stream=false")).json == events[-1]["response"]
        refused = await bench.call("GET", f"{path}?stream=true&starting_after=x")
        assert refused.json["error"]["param"] == "starting_after"

    bench_run(main)


def test_nothing_can_be_cancelled() -> None:
    """400 with the reason for a stored response, 404 for another."""

    async def main(bench: ServerBench) -> None:
        stored = (await bench.post(PATH, ask("Hi"))).json["id"]
        refused = await bench.post(f"{PATH}/{stored}/cancel", {})
        assert refused.status == 400
        assert "background" in refused.json["error"]["message"]
        assert (await bench.post(f"{PATH}/resp_none/cancel", {})).status == 404

    bench_run(main)


def test_counted_tokens_are_those_of_the_prompt() -> None:
    """With tools, instructions and earlier turns; nothing runs."""

    async def main(bench: ServerBench) -> None:
        first = (await bench.post(PATH, ask("Hi"))).json["id"]
        fields = {"input": "And?", "instructions": "Be brief.", "tools": [SHELL]}
        fields["previous_response_id"] = first
        counted = await bench.post(f"{PATH}/input_tokens", fields)
        answer = (await bench.post(PATH, fields | {"max_output_tokens": 1})).json
        num_tokens = answer["usage"]["input_tokens"]
        assert counted.json == {"object": "response.input_tokens", "input_tokens": num_tokens}
        assert len(bench.ended) == 2

    bench_run(main)


def test_a_compacted_conversation_goes_on() -> None:
    """All messages of the user and one opaque item, which the next prompt has as text."""

    async def main(bench: ServerBench) -> None:
        items = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two"},
            {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": "three"},
            {"role": "user", "content": "four"},
        ]
        compacted = (await bench.post(f"{PATH}/compact", {"model": "tiny", "input": items})).json
        assert compacted["object"] == "response.compaction"
        assert [item["type"] for item in compacted["output"]] == [
            "message",
            "message",
            "compaction",
        ]
        assert texts(compacted["output"]) == ["one", "four"]
        assert compacted["usage"]["output_tokens"] > 0
        seen: list[str] = []
        bench.service.listeners.append(lambda ended: seen.append(ended.request.prompt.text))
        body = ask("") | {"input": [*compacted["output"], {"role": "user", "content": "five"}]}
        answer = await bench.post(PATH, body)
        assert answer.status == 200
        assert "x-ramify-warning" not in answer.headers
        await bench.until_idle()
        assert "Summary of the conversation" in seen[0] and "five" in seen[0]
        assert "three" not in seen[0]
        foreign = [{"type": "compaction", "encrypted_content": "gAAAA"}, *items]
        answer = await bench.post(PATH, ask("") | {"input": foreign})
        assert "compaction of another server" in answer.headers["x-ramify-warning"]

    bench_run(main, chat_template=TOOL_TEMPLATE)


def test_truncation_leaves_out_the_oldest_turns() -> None:
    """As many as needed, with a warning; instructions and the last turn stay. Without it: 400."""
    turns = [
        {"role": role, "content": f"{role} {number} " + "word " * 20}
        for number in range(12)
        for role in ("user", "assistant")
    ]
    body = ask("", instructions="RULES") | {"input": [*turns, {"role": "user", "content": "LAST"}]}

    async def main(bench: ServerBench) -> None:
        seen: list[str] = []
        bench.service.listeners.append(lambda ended: seen.append(ended.request.prompt.text))
        assert (await bench.post(PATH, body)).status == 400
        answer = await bench.post(PATH, body | {"truncation": "auto"})
        assert answer.status == 200, answer.body
        await bench.until_idle()
        assert "RULES" in seen[-1] and "LAST" in seen[-1] and "assistant 11 " in seen[-1]
        assert "user 0 " not in seen[-1]
        assert "the oldest" in answer.headers["x-ramify-warning"]
        many = {"input": [*turns * 20, {"role": "user", "content": "LAST"}], "truncation": "auto"}
        assert (await bench.post(PATH, body | many)).status == 200
        too_long = body | {"input": "word " * 2000, "truncation": "auto"}
        assert (await bench.post(PATH, too_long)).status == 400

    bench_run(main, max_model_len=512)
