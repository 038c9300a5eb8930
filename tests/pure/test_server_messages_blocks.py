"""Content blocks of the Messages API in the prompt."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.server.anthropic.blocks import HIDDEN_TYPES, SERVER_CALL_TYPES
from ramify.server.anthropic.protocol import InputMessage
from ramify.server.anthropic.turns import read_messages
from ramify.server.conversation.parts import media_of
from ramify.server.prompts.content_placeholders import PLACEHOLDER_NOUNS
from ramify.server.prompts.role_order import joined
from tests.budget import examples
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench

pytest.importorskip("starlette")

IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
IMAGE_TEXT = "[image: not served by this model]"
DOCUMENT_TEXT = "[document: not served by this model]"


def rendered(
    *messages: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Template messages of a conversation, and its blocks that became placeholders."""
    talk = read_messages(msgspec.convert(list(messages), list[InputMessage]))
    unserved = [(media.path, media.kind) for media in media_of(talk)]
    return joined([item for message in talk for item in message.as_template()]), unserved


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {"type": "text", "media_type": "text/plain", "data": "D"},
            },
            "T\nC\nD",
        ),
        (
            {
                "type": "document",
                "source": {"type": "content", "content": [text("a"), IMAGE, text("b")]},
            },
            f"a\n{IMAGE_TEXT}\nb",
        ),
        ({"type": "document", "source": {"type": "content", "content": "a"}}, "a"),
        (
            {
                "type": "document",
                "title": "T",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"},
            },
            f"T\n{DOCUMENT_TEXT}",
        ),
        ({"type": "document", "source": {"type": "url", "url": "http://x"}}, DOCUMENT_TEXT),
        (
            {
                "type": "search_result",
                "source": "http://x",
                "title": "T",
                "content": [text("a"), text("b")],
            },
            "T\nhttp://x\na\nb",
        ),
        (IMAGE, IMAGE_TEXT),
        (
            {"type": "container_upload", "file_id": "f"},
            "[file: not served by this model]",
        ),
        (
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
            '[called web_search: {"query": "q"}]',
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": [
                    {
                        "type": "web_search_result",
                        "title": "T",
                        "url": "http://x",
                        "encrypted_content": "zzz",
                    }
                ],
            },
            "T\nhttp://x",
        ),
        (
            {
                "type": "web_search_tool_result",
                "tool_use_id": "s",
                "content": {
                    "type": "web_search_tool_result_error",
                    "error_code": "unavailable",
                },
            },
            "error: unavailable",
        ),
        (
            {
                "type": "bash_code_execution_tool_result",
                "tool_use_id": "s",
                "content": {
                    "type": "bash_code_execution_result",
                    "stdout": "out",
                    "stderr": "err",
                    "return_code": 1,
                    "content": [],
                },
            },
            "out\nerr",
        ),
        (
            {
                "type": "web_fetch_tool_result",
                "tool_use_id": "s",
                "content": {
                    "type": "web_fetch_result",
                    "url": "http://x",
                    "content": {"type": "document", "source": {"type": "text", "data": "D"}},
                },
            },
            "http://x\nD",
        ),
        (
            {
                "type": "mcp_tool_use",
                "id": "m",
                "name": "list",
                "server_name": "files",
                "input": {},
            },
            "[called list: {}]",
        ),
        (
            {"type": "mcp_tool_result", "tool_use_id": "m", "content": [text("a")]},
            "a",
        ),
        (
            {
                "type": "tool_search_tool_result",
                "tool_use_id": "s",
                "content": {
                    "type": "tool_search_tool_search_result",
                    "tool_references": [{"type": "tool_reference", "tool_name": "Read"}],
                },
            },
            "[tool: Read]",
        ),
        ({"type": "compaction", "content": "So far."}, "So far."),
        ({"type": "compaction", "content": None}, ""),
        ({"type": "redacted_thinking", "data": "x"}, ""),
    ],
)
def test_a_block_has_text(block: dict[str, Any], expected: str) -> None:
    """Between two texts of a message; blocks that say nothing leave no blank line."""
    [message], unserved = rendered(user(text("before"), block, text("after")))

    pieces = [piece for piece in ("before", expected, "after") if piece]
    assert message == {"role": "user", "content": "\n".join(pieces)}
    assert bool(unserved) == ("not served" in expected)
    assert all(path.startswith("messages[0].content[1]") for path, _ in unserved)


def test_results_of_tools_may_have_no_text() -> None:
    """No content, an empty list, or an image, which is a placeholder."""
    contents: list[Any] = [None, [], "", [IMAGE]]
    result = {"type": "tool_result", "tool_use_id": "t"}
    blocks = [result, *(result | {"content": content} for content in contents)]

    messages, unserved = rendered(user(*blocks))

    assert [message["content"] for message in messages] == ["", "", "", "", IMAGE_TEXT]
    assert {message["role"] for message in messages} == {"tool"}
    assert unserved == [("messages[0].content[4].content[0]", "image")]


def test_consecutive_messages_of_one_role_are_joined() -> None:
    """Texts, thoughts and calls of them; results of tools stay apart."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r"}

    messages, _ = rendered(
        {"role": "user", "content": "a"},
        user(text(""), text("b")),
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "h"}]},
        {"role": "assistant", "content": [text("c"), call]},
        {"role": "assistant", "content": [call]},
        user(result, result, text("d")),
    )

    assert [message["role"] for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert messages[0]["content"] == "a\nb"
    assert messages[1]["reasoning_content"] == "h"
    assert messages[1]["content"] == "c"
    assert len(messages[1]["tool_calls"]) == 2
    assert messages[4]["content"] == "d"


def test_a_cleared_system_message_is_shown_until_the_next_turn_of_the_user() -> None:
    """Others stay where they are."""
    talk = (
        {"role": "system", "content": "first"},
        {"role": "user", "content": "a"},
        {"role": "system", "content": "kept"},
        {"role": "system", "content": "cleared", "clear_at": "next_user_message"},
        {"role": "system", "output_config": {"effort": "low"}},
        {"role": "user", "content": "b"},
        {"role": "system", "content": "shown", "clear_at": "next_user_message"},
    )

    messages, _ = rendered(*talk)

    shown = [(message["role"], message["content"]) for message in messages]
    assert shown == [
        ("system", "first"),
        ("user", "a"),
        ("system", "kept"),
        ("user", "b"),
        ("system", "shown"),
    ]


def refusing_late_system(template: str) -> str:
    """A template that refuses a system message after another message."""
    return template.replace(
        "{%- for message in messages -%}",
        "{%- for message in messages -%}{%- if message.role == 'system' and not loop.first -%}"
        "{{- raise_exception('system comes first') -}}{%- endif -%}",
    )


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, refusing_late_system(TOOL_TEMPLATE)])
@pytest.mark.parametrize("prefill", ["The answer is ", " x\n", ""])
def test_a_prefill_may_end_in_white_space(template: str, prefill: str) -> None:
    """The prompt ends with it; whatever the template does with late system messages."""

    async def main() -> None:
        async with ServerBench(chat_template=template).running() as bench:
            talk = [
                {"role": "user", "content": "a"},
                {"role": "system", "content": "late"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": [text(prefill)]},
            ]
            body = {"model": "tiny", "max_tokens": 2, "messages": talk}
            answer = await bench.post("/v1/messages", body)
            assert answer.status == 200, answer.body
            prompt = bench.ended[0].request.prompt.text
            assert prompt.endswith("<|assistant|>" + prefill)
            assert "late" in prompt

    asyncio.run(main())


TEXTS = st.one_of(st.none(), st.text(max_size=8), st.sampled_from(["a", "<tool_call>", "</think>"]))
TYPES = st.sampled_from(
    [
        "text",
        "thinking",
        "tool_use",
        "tool_result",
        "document",
        "search_result",
        "tool_reference",
        "compaction",
        "web_search_tool_result",
        "hologram",
        *PLACEHOLDER_NOUNS,
        *HIDDEN_TYPES,
        *SERVER_CALL_TYPES,
    ]
)


def block_fields(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Blocks with any of the fields, whether their type has them or not."""
    content = st.one_of(TEXTS, st.lists(inner, max_size=3), inner)
    source = st.one_of(
        TEXTS,
        st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "content", "base64", "url", "file"])},
            optional={"data": TEXTS, "content": content},
        ),
    )
    return st.fixed_dictionaries(
        {"type": TYPES},
        optional={
            "text": TEXTS,
            "thinking": TEXTS,
            "id": TEXTS,
            "name": TEXTS,
            "input": st.dictionaries(st.text(max_size=3), TEXTS, max_size=2),
            "tool_use_id": TEXTS,
            "content": content,
            "source": source,
            "title": TEXTS,
            "url": TEXTS,
            "stdout": TEXTS,
            "error_code": TEXTS,
            "tool_name": TEXTS,
            "tool_references": st.lists(inner, max_size=2),
            "cache_control": st.just({"type": "ephemeral"}),
            "citations": st.none(),
        },
    )


BLOCKS = st.recursive(st.fixed_dictionaries({"type": TYPES}), block_fields, max_leaves=4)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system"]),
            "content": st.one_of(TEXTS, st.lists(BLOCKS, min_size=1, max_size=4)),
        },
        optional={"clear_at": st.sampled_from(["never", "next_user_message"])},
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module", params=[TOOL_TEMPLATE, refusing_late_system(TOOL_TEMPLATE)])
def runner(request: Any) -> Iterator[tuple[asyncio.Runner, ServerBench]]:
    """An event loop with a server whose engine runs."""
    with asyncio.Runner() as loop:
        bench = ServerBench(chat_template=request.param)
        running = bench.running()
        loop.run(running.__aenter__())
        yield loop, bench
        loop.run(running.__aexit__(None, None, None))


@settings(max_examples=examples(80), deadline=None)
@given(messages=MESSAGES)
def test_no_list_of_blocks_is_a_server_error(
    runner: tuple[asyncio.Runner, ServerBench], messages: list[dict[str, Any]]
) -> None:
    """200, or a 400 that has a message; what is counted is what would run."""
    loop, bench = runner
    body = {"model": "tiny", "max_tokens": 1, "messages": messages}

    counted = loop.run(bench.post("/v1/messages/count_tokens", body))
    answer = loop.run(bench.post("/v1/messages", body))

    assert answer.status in (200, 400), answer.body
    assert answer.status == counted.status
    if answer.status == 400:
        assert answer.json["type"] == "error"
        assert answer.json["error"]["message"]
    else:
        ids = bench.ended[-1].request.prompt.ids
        assert counted.json["input_tokens"] == len(ids)
    bench.ended.clear()
