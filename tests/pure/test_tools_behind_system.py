"""Tools behind a system prompt that changes: a warning in the miss, and an option that moves them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cpu.family_templates import FAMILY_TEMPLATES, FamilyTemplate
from tests.pure.server_bench import ServerBench
from tests.pure.test_prompt_segments import body_of
from tests.pure.tool_loop import SCHEMA, tokenizer_of

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
FAMILIES = {family.name: family for family in FAMILY_TEMPLATES}
FUNCTIONS = [
    {"name": name, "description": "Who lives there. " * 10, "parameters": SCHEMA}
    for name in ("find", "seek")
]
SYSTEMS = ("You are an agent. cwd: /home/anna", "You are an agent. cwd: /home/bert")
# Templates that write tools behind the system prompt; of these, those that can write them before it.
BEHIND = "llama qwen2 qwen3 qwen3_coder olmo3 granite32 granite33 seed_oss phi4_mini".split()
FIXED = "granite4 smollm3 exaone4 command_r hunyuan deepseek_v31 deepseek_v32 gpt_oss".split()


def misses(
    family: FamilyTemplate,
    path: str,
    *,
    tools_first: bool = False,
    page_size: int = 4,
    systems: Sequence[str] = SYSTEMS,
    earlier_tools: list[dict[str, Any]] = FUNCTIONS,
) -> tuple[ServerBench, dict[str, Any], dict[str, Any]]:
    """Usage of the second of two requests whose system prompts differ, and its explanation."""

    async def main() -> tuple[ServerBench, dict[str, Any], dict[str, Any]]:
        server = ServerBench(
            tokenizer=tokenizer_of(family.name), page_size=page_size, tools_first=tools_first
        )
        async with server.running():
            first, second = (
                body_of(path, system, tools)
                for system, tools in zip(systems, (earlier_tools, FUNCTIONS), strict=True)
            )
            assert (await server.post(path, first)).status == 200
            explained = await server.post("/v1/cache/explain", second)
            answer = await server.post(path, second)
            assert answer.status == 200, answer.body
        return server, answer.json["usage"]["ramify_cache"], explained.json

    return asyncio.run(main())


@pytest.mark.parametrize("path", PATHS)
def test_a_miss_warns_of_tools_behind_the_system_prompt(path: str) -> None:
    """It says how many tokens of tools are computed again, and what to do."""
    server, usage, explained = misses(FAMILIES["qwen3"], path)

    segments = {segment["path"]: segment for segment in explained["segments"]}
    system_end = max(segments[name]["start"] for name in segments if "tools[0]" in name)
    num_tools = segments["tools[1]"]["end"] - system_end
    warning = usage["miss"]["warning"]
    assert warning == explained["miss"]["warning"]
    assert warning.startswith("tools stand after the system prompt in this template: ")
    num_warned = int(warning.split(": ")[1].split()[0])
    assert num_tools <= num_warned <= num_tools + 40
    assert warning.endswith("or start the server with --tools-first")
    assert usage["computed"] > num_warned
    assert server.service.prompt_renderer.conventions.can_write_tools_first


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v31", "phi4_mini"])
def test_a_system_prompt_may_differ_within_its_first_page(name: str, path: str) -> None:
    """Nothing is read from the cache then, and all tools are computed again."""
    server, usage, _ = misses(
        FAMILIES[name], path, page_size=64, systems=("Anna is here.", "Bert was there, and left.")
    )

    tools = server.ended[-1].request.prompt.tools_behind_system
    assert tools is not None
    assert (usage["read"], usage["miss"]["reason"]) == (0, "diverged")
    assert f": {tools.tools_end - tools.system_end} tokens of" in usage["miss"]["warning"]


@pytest.mark.parametrize("path", PATHS)
def test_only_tools_that_the_earlier_request_had_are_computed_again(path: str) -> None:
    """It had none, or the first alone."""
    _, usage, _ = misses(FAMILIES["qwen3"], path, earlier_tools=[])
    assert usage["miss"]["reason"] == "diverged"
    assert "warning" not in usage["miss"]

    server, usage, explained = misses(FAMILIES["qwen3"], path, earlier_tools=FUNCTIONS[:1])
    tools = server.ended[-1].request.prompt.tools_behind_system
    assert tools is not None
    [first_end] = [
        segment["end"] for segment in explained["segments"] if segment["path"] == "tools[0]"
    ]
    num_warned = int(usage["miss"]["warning"].split(": ")[1].split()[0])
    assert first_end <= tools.system_end + num_warned < first_end + 4


@pytest.mark.parametrize("name", FIXED)
def test_a_warning_offers_no_option_that_the_template_has_not(name: str) -> None:
    """These templates write one system prompt, and tools behind it."""
    server, usage, _ = misses(FAMILIES[name], PATHS[0], tools_first=True)

    assert not server.service.prompt_renderer.conventions.has_tools_first
    assert usage["miss"]["warning"].endswith("move what changes to a later message")


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize("path", PATHS)
def test_tools_first_stay_cached(name: str, path: str) -> None:
    """Where the template can, tools precede the system prompt and are read when it changes."""
    server, usage, explained = misses(FAMILIES[name], path, tools_first=True)

    segments = {segment["path"]: segment for segment in explained["segments"]}
    prompt = server.ended[-1].request.prompt
    assert prompt.text.index("find") < prompt.text.index("cwd: /home/bert")
    assert prompt.text.count("cwd: /home/bert") == 1
    assert usage["read"] >= segments["tools[1]"]["end"] - 4
    assert "warning" not in usage["miss"]


def test_a_template_with_tools_first_has_no_warning() -> None:
    """GLM-4.5's template writes them before the system prompt by itself."""
    _, usage, _ = misses(FAMILIES["glm4_moe"], PATHS[0])

    assert usage["miss"]["reason"] == "diverged"
    assert "warning" not in usage["miss"]
