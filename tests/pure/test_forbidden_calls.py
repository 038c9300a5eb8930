"""`tool_choice: "none"`: the tools stay in the prompt, which stays cached, and no call begins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.cpu.family_templates import FAMILY_TEMPLATES, FamilyTemplate
from tests.pure.test_prompt_segments import body_of
from tests.pure.tool_loop import SCHEMA, LoopServer

FUNCTION = {"name": "find", "description": "Who lives there. " * 10, "parameters": SCHEMA}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
FAMILIES = {family.name: family for family in FAMILY_TEMPLATES}
# Openings that are one token, that are text, and a format without any.
TOKEN, TEXT, BARE = FAMILIES["deepseek_v31"], FAMILIES["qwen3"], FAMILIES["phi3"]


def request(path: str, *, forbids: bool, **fields: Any) -> dict[str, Any]:
    """A request with a tool, which may be called or not."""
    choice: Any = {"type": "none"} if path == "/v1/messages" else "none"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = body_of(path, "Be brief. " * 20, [FUNCTION]) | {limit: 300} | fields
    return body | {"tool_choice": choice} if forbids else body


def answers(
    family: FamilyTemplate, path: str, *, drops: bool = False, **fields: Any
) -> tuple[LoopServer, list[dict[str, Any]]]:
    """Answers of a model that tries to call: where it may, and where it must not."""

    async def main() -> tuple[LoopServer, list[dict[str, Any]]]:
        server = LoopServer(family)
        server.service.drops_forbidden_tools = drops
        payloads = []
        async with server.running():
            for forbids in (False, True):
                response = await server.post(path, request(path, forbids=forbids, **fields))
                assert response.status == 200, response.body
                payloads.append(response.json)
        return server, payloads

    return asyncio.run(main())


def has_call(payload: dict[str, Any]) -> bool:
    """Whether a response of any API has a call."""
    if "choices" in payload:
        return bool(payload["choices"][0]["message"].get("tool_calls"))
    items = payload.get("content") or payload.get("output") or []
    return any(item["type"] in ("tool_use", "function_call") for item in items)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("family", [TOKEN, TEXT, BARE], ids=lambda family: family.name)
def test_tools_stay_and_no_call_begins(family: FamilyTemplate, path: str) -> None:
    """The prompt is that of a request that may call, and is read from the cache."""
    server, (free, bound) = answers(family, path)

    before, after = (generation.request.prompt for generation in server.ended)
    usage = server.ended[1].cache
    assert (has_call(free), has_call(bound)) == (True, False)
    assert before.ids == after.ids
    assert usage is not None
    assert usage.computed <= server.service.page_size
    output = server.ended[1].output
    assert output is not None
    openings = server.service.output_format.call_openings
    assert not any(opening in output.completions[0].text for opening in openings)
    assert any(opening in family.answer for opening in openings) == (family is not BARE)


@pytest.mark.parametrize("path", PATHS)
def test_tools_are_left_out_if_the_operator_says_so(path: str) -> None:
    """Then the prompt has no tools, and the answer is free."""
    server, (_, bound) = answers(TEXT, path, drops=True)

    assert not has_call(bound)
    assert "Who lives there." not in server.ended[1].request.prompt.text
    assert server.ended[1].request.params.banned_sequences == ()


def test_words_that_the_client_bans_stay_banned() -> None:
    """Calls are forbidden beside them."""
    server, _ = answers(TEXT, PATHS[0], bad_words=["lamp"])

    free, bound = (generation.request.params.banned_sequences for generation in server.ended)
    assert set(free) < set(bound)


def test_a_format_forbids_calls_by_itself() -> None:
    """An answer that must match a pattern needs no further limits."""
    server, (_, bound) = answers(TEXT, PATHS[0], guided_choice=["yes", "no"])

    assert bound["choices"][0]["message"]["content"] in ("yes", "no")
    assert server.ended[1].request.params.banned_sequences == ()


@pytest.mark.parametrize("drops", [False, True])
def test_tools_that_are_not_allowed_stay_in_the_prompt(drops: bool) -> None:
    """`allowed_tools` keeps the prompt, and no other tool is called. Or they are left out."""
    seek = {"type": "function", "strict": False, **FUNCTION, "name": "seek"}
    body = request(PATHS[2], forbids=False)
    body["tools"] = [{"type": "web_search"}, *body["tools"], seek]
    choice = {
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "seek"}],
    }  # fmt: skip

    async def main() -> tuple[LoopServer, dict[str, Any]]:
        server = LoopServer(TEXT)
        server.service.drops_forbidden_tools = drops
        async with server.running():
            assert (await server.post(PATHS[2], body)).status == 200
            response = await server.post(PATHS[2], body | {"tool_choice": choice})
            assert response.status == 200, response.body
        return server, response.json

    server, payload = asyncio.run(main())

    before, after = (generation.request.prompt for generation in server.ended)
    calls = [item for item in payload["output"] if item["type"] == "function_call"]
    assert all(call["name"] == "seek" for call in calls)
    assert (before.ids == after.ids) != drops
    tools = [segment.path for segment in after.segments if segment.path.startswith("tools")]
    assert tools == (["tools[2]"] if drops else ["tools[1]", "tools[2]"])
