"""Anthropic's Messages API as Claude Code uses it."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ramify.server.anthropic.protocol import CacheControl, InputTool
from ramify.server.anthropic.tools import CLIENT_TOOLS, tool_set
from ramify.server.errors import ApiError
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench, run

pytest.importorskip("starlette")

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
EPHEMERAL = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
MCP_NAME = "mcp__files:server/read.file-" + "x" * 228  # 256 characters
MARK = CacheControl("ephemeral", "1h")
SERVER_TOOLS: list[dict[str, Any]] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
    {"type": "mcp_toolset", "mcp_server_name": "files"},
    {"type": "browser_toolset_20260801", "configs": {}},
]


def a_tool(name: str = "Read", **fields: Any) -> dict[str, Any]:
    return {"name": name, "description": "Reads a file.", "input_schema": SCHEMA} | fields


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request of one user message, or of these messages."""
    talk = list(messages) or [{"role": "user", "content": "Hello"}]
    return {"model": "tiny", "max_tokens": 4, "messages": talk} | fields


def claude_code_body() -> dict[str, Any]:
    """A request with what Claude Code sends in its second turn, and more output than the context."""
    return {
        "model": "tiny",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
        "betas": ["claude-code-20250219"],
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"},
            {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}},
        ],
        "tools": [
            a_tool("Read", eager_input_streaming=True, strict=False),
            a_tool("mcp__files__list", defer_loading=True, input_examples=[{"path": "a"}]),
            a_tool("plugin:files/stat", type="custom"),
            {"type": "bash_20250124", "name": "bash"},
            {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
            {"type": "web_search_20250305", "name": "web_search", "cache_control": EPHEMERAL},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>Today.</system-reminder>"},
                    {"type": "text", "text": ""},
                    {"type": "text", "text": "Read a."},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Let me read.", "signature": "c2ln"},
                    {"type": "redacted_thinking", "data": "eHh4"},
                    {"type": "text", "text": "I read it."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "bash", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [
                            {"type": "text", "text": "a file"},
                            {"type": "image", "source": {"type": "base64", "data": "AAAA"}},
                            {"type": "tool_reference", "tool_name": "mcp__files__list"},
                        ],
                    },
                    {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "The user is away."}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Go on.", "cache_control": EPHEMERAL}],
            },
        ],
    }


def scripted(bench: ServerBench, text: str) -> Callable[[Sequence[int]], int]:
    """A next token that makes the first answer of a bench this text."""
    ids = list(bench.service.tokenizer.encode(text, add_special_tokens=False))
    ids += [min(bench.service.tokenizer.eos_token_ids)]
    starts: list[int] = []

    def next_token(context: Sequence[int]) -> int:
        starts.append(len(context))
        return ids[min(len(context) - starts[0], len(ids) - 1)]

    return next_token


def test_a_request_of_claude_code_is_streamed() -> None:
    """Also with `?beta=true`; the events have Anthropic's order, and nothing of the body is lost."""

    async def main() -> None:
        async with ServerBench(chat_template=TOOL_TEMPLATE, pool_tokens=1600).running() as bench:
            headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
            request = claude_code_body()
            answer = await bench.call("POST", "/v1/messages?beta=true", request, headers=headers)
            assert answer.status == 200, answer.body
            kinds = [event["type"] for event in answer.events]
            assert kinds[:2] == ["message_start", "ping"]
            assert kinds[-2:] == ["message_delta", "message_stop"]
            assert b'event: ping\ndata: {"type":"ping"}\n\n' in answer.body
            assert not [event for event in answer.events if event["type"] == "error"]

            prompt = bench.ended[0].request.prompt.text
            pieces = (
                '"name": "mcp__files__list"',
                '"name": "plugin:files/stat"',
                '"name": "bash"',
                '"insert_text"',
                "You are an agent.\nBe short.",
                "Today.</system-reminder>\nRead a.",
                "<think>Let me read.</think>I read it.",
                "a file\n[image: not served by this model]\n[tool: mcp__files__list]",
                "The user is away.",
                "Go on.",
            )
            places = [prompt.find(piece) for piece in pieces]
            assert places == sorted(places)
            assert places[0] >= 0
            assert "cch=" not in prompt
            assert "web_search" not in prompt
            # One at the tools, though the tool that has it is left out.
            assert len(bench.ended[0].request.prompt.breakpoints) == 4
            warning = answer.headers["x-ramify-warning"]
            for piece in ("web_search", "image content", "context_management"):
                assert piece in warning

            counted = await bench.post("/v1/messages/count_tokens", request)
            assert counted.json == {"input_tokens": len(bench.ended[0].request.prompt.ids)}
            assert counted.headers["x-ramify-warning"] == warning

    run(main())


def test_more_output_than_there_is_room_for_is_cut() -> None:
    """`max_tokens` 32000 on a context of 256, or on a pool of 128 tokens, ends where that is full."""

    async def main(bench: ServerBench) -> Any:
        bench.device.next_token = lambda _: 40  # never an end of turn
        async with bench.running():
            return (await bench.post("/v1/messages", body(max_tokens=32000))).json

    for bench, limit in (
        (ServerBench(max_model_len=256), 256),
        (ServerBench(pool_tokens=128), 128),
    ):
        answer = run(main(bench))
        assert answer["stop_reason"] == "model_context_window_exceeded"
        usage = answer["usage"]
        # The last token's K/V needs no place in the pool.
        assert usage["input_tokens"] + usage["output_tokens"] - limit in (0, 1)


@pytest.mark.parametrize("num_words", [300, 600, 3000])
def test_a_prompt_that_is_too_long_names_the_context(num_words: int) -> None:
    """Also one that is refused before it is rendered whole; clients read the limit from the text."""

    async def main() -> None:
        async with ServerBench(max_model_len=256).running() as bench:
            message = {"role": "user", "content": "word " * num_words}
            answer = await bench.post("/v1/messages", body(message))
            assert answer.status == 400
            assert re.search(r"too long: \d+ tokens > 255 maximum", answer.body.decode())

    run(main())


@pytest.mark.parametrize("name", [MCP_NAME, "a:b/c", "f"])
def test_a_tool_of_any_name_is_called(name: str) -> None:
    """The call has the very name, streamed or not."""

    async def main() -> None:
        for stream in (False, True):
            bench = ServerBench(chat_template=TOOL_TEMPLATE)
            call = f'<tool_call>{{"name": "{name}", "arguments": {{"path": "x"}}}}</tool_call>'
            bench.device.next_token = scripted(bench, call)
            async with bench.running():
                request = body(tools=[a_tool(name)], max_tokens=1000, stream=stream)
                answer = await bench.post("/v1/messages", request)
                assert answer.status == 200, answer.body
                if stream:
                    starts = [e for e in answer.events if e["type"] == "content_block_start"]
                    [block] = [start["content_block"] for start in starts]
                else:
                    [block] = answer.json["content"]
                    assert block["input"] == {"path": "x"}
                    assert answer.json["stop_reason"] == "tool_use"
                assert (block["type"], block["name"]) == ("tool_use", name)

    run(main())


def test_names_that_are_too_long_or_blank_are_refused() -> None:
    """The error names the tool's path."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            for name in ("", "a b", MCP_NAME + "x", "ä"):
                answer = await bench.post("/v1/messages", body(tools=[a_tool("f"), a_tool(name)]))
                assert answer.status == 400
                assert answer.json["error"]["message"].startswith("tools[")

    run(main())


def test_three_hundred_tools_are_served() -> None:
    """In this API and in OpenAI's."""

    async def main() -> None:
        async with ServerBench(chat_template=TOOL_TEMPLATE, max_model_len=65536).running() as bench:
            tools = [a_tool(f"tool_{index}") for index in range(300)]
            answer = await bench.post("/v1/messages/count_tokens", body(tools=tools))
            assert answer.status == 200, answer.body
            functions = [
                {"type": "function", "function": {"name": tool["name"], "parameters": SCHEMA}}
                for tool in tools
            ]
            messages = [{"role": "user", "content": "x"}]
            answer = await bench.post("/tokenize", {"messages": messages, "tools": functions})
            assert answer.status == 200, answer.body

    run(main())


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        ("bash_20241022", "bash", {"command"}),
        ("text_editor_20250124", "str_replace_editor", {"command", "old_str", "view_range"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"file_text", "insert_line"}),
        ("memory_20250818", "memory", {"command", "old_path", "new_path"}),
        ("computer_20250124", "computer", {"action", "coordinate", "scroll_amount"}),
    ],
)
def test_tools_that_the_client_runs_are_functions(kind: str, name: str, words: set[str]) -> None:
    """With the schema that the client expects, under the name that it gave."""
    tools = tool_set([InputTool(type=kind, name=name)])

    [definition] = tools.definitions
    function = definition.function
    assert function["name"] == name
    assert words <= function["parameters"]["properties"].keys()
    assert set(function["parameters"]["required"]) <= function["parameters"]["properties"].keys()
    assert tools.skipped == ()
    [begin] = [begin for begin in CLIENT_TOOLS if kind.startswith(begin)]
    [unnamed] = tool_set([InputTool(type=kind)]).names
    assert unnamed == CLIENT_TOOLS[begin].name


def test_tools_that_the_server_would_run_are_left_out() -> None:
    """With a warning that names each; refused only where the choice demands one."""

    async def main() -> None:
        async with ServerBench(chat_template=TOOL_TEMPLATE).running() as bench:
            request = body(tools=[*SERVER_TOOLS, a_tool()], mcp_servers=[{"name": "files"}])
            answer = await bench.post("/v1/messages", request)
            assert answer.status == 200, answer.body
            warning = answer.headers["x-ramify-warning"]
            for tool in SERVER_TOOLS:
                assert tool.get("name", tool["type"]) in warning
            assert "mcp_servers" in warning
            assert bench.ended[0].request.prompt.text.count('"parameters"') == 1

            demanded = request | {"tool_choice": {"type": "tool", "name": "web_search"}}
            refused = await bench.post("/v1/messages", demanded)
            assert refused.status == 400
            assert refused.json["error"]["message"].startswith("tool_choice.name")
            assert "not run by this server" in refused.json["error"]["message"]
            none_left = body(tools=SERVER_TOOLS, tool_choice={"type": "any"})
            refused = await bench.post("/v1/messages", none_left)
            assert refused.status == 400
            assert (await bench.post("/v1/messages", body(tools=SERVER_TOOLS))).status == 200

    run(main())


def test_a_breakpoint_moves_to_the_tool_before() -> None:
    """If the tool that has it is left out."""
    marked = InputTool(type="web_search_20250305", name="web_search", cache_control=MARK)
    functions = [InputTool(name=name, input_schema=SCHEMA) for name in ("a", "b")]

    tools = tool_set([functions[0], marked, functions[1]])

    assert [(tool.path, tool.ttl_s) for tool in tools.definitions] == [
        ("tools[0]", 3600.0),
        ("tools[2]", None),
    ]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        (InputTool(input_schema=SCHEMA), "tools[0].name"),
        (InputTool(type="custom"), "tools[0].name"),
    ],
)
def test_a_tool_of_the_client_needs_a_name(tool: InputTool, param: str) -> None:
    """The error names the field."""
    with pytest.raises(ApiError) as caught:
        tool_set([tool])

    assert caught.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_both_names_of_the_output_format_are_served(stream: bool) -> None:
    """`output_format`, the older one, and `output_config.format`, which wins."""
    yes, no = ({"type": "json_schema", "schema": {"enum": [text]}} for text in ("yes", "no"))

    async def main() -> None:
        async with ServerBench().running() as bench:
            for fields, expected in (
                ({"output_format": yes}, '"yes"'),
                ({"output_config": {"format": yes}}, '"yes"'),
                ({"output_format": no, "output_config": {"format": yes}}, '"yes"'),
                ({"output_format": no, "output_config": {"effort": "low"}}, '"no"'),
            ):
                answer = await bench.post("/v1/messages", body(max_tokens=50, **fields))
                assert answer.json["content"][0]["text"].strip() == expected

    run(main())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/messages", 405),
        ("POST", "/api/event_logging/batch", 404),
        ("GET", "/api/hello", 404),
        ("POST", "/v1/uploads", 404),
    ],
)
def test_what_is_not_served_is_told_in_anthropics_form(method: str, path: str, status: int) -> None:
    """To a client that sends Anthropic's version header."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            headers = {"anthropic-version": "2023-06-01"}
            answer = await bench.call(method, path, b"{}", headers=headers)
            assert answer.status == status
            assert answer.json["type"] == "error"
            assert answer.json["error"]["message"]
            assert answer.json["request_id"] == answer.headers["request-id"]

    run(main())


def test_unknown_fields_are_named() -> None:
    """In the header; a body for `/v1/messages` is counted without a warning."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            request = body(stream=False, top_k=1, speed="fast", betas=["x"], fallbacks=[])
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                answer = await bench.post(path, request)
                assert answer.status == 200, answer.body
                assert "x-ramify-warning" not in answer.headers
                answer = await bench.post(path, request | {"poem": 1})
                assert "poem" in answer.headers["x-ramify-warning"]

    run(main())


@pytest.mark.parametrize("field", [b'"un\x84known":1', b'"unknown":"\x84"', b'"functions":"\x84"'])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_fields_that_are_not_utf8_are_no_server_error(path: str, field: bytes) -> None:
    """Also fields that no request type has: 200 if they are ignored, or 400."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            talk = b'"model":"tiny","max_tokens":1,"messages":[{"role":"user","content":"x"}]'
            answer = await bench.call("POST", path, b"{%s,%s}" % (talk, field))
            assert answer.status in (200, 400)

    run(main())


def test_the_root_answers_probes() -> None:
    """GET and HEAD of `/`, without a key."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            for method in ("GET", "HEAD"):
                answer = await bench.call(method, "/", headers={"accept": "*/*"})
                assert answer.status == 200

    run(main())


def test_a_temperature_above_one_is_refused() -> None:
    """As by Anthropic."""

    async def main() -> None:
        async with ServerBench().running() as bench:
            assert (await bench.post("/v1/messages", body(temperature=1))).status == 200
            answer = await bench.post("/v1/messages", body(temperature=1.1))
            assert answer.status == 400
            assert answer.json["error"]["message"].startswith("temperature")

    run(main())
