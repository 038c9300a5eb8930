"""A loop of calls and results computes its new messages, with reasoning in the history and without."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from ramify.server.prompts.next_turns import common_prefix
from tests.cpu.family_templates import FamilyTemplate
from tests.pure.tool_loop import (
    PAGE_SIZE,
    PATHS,
    REASONING_FAMILIES,
    LoopServer,
    LoopStep,
    ToolLoop,
    run_loop,
)

# The most tokens of a prompt that the next one may replace: what the template opens of the answer.
MAX_OPENING = 8
of_family = pytest.mark.parametrize("family", REASONING_FAMILIES, ids=lambda family: family.name)
[QWEN3] = [family for family in REASONING_FAMILIES if family.name == "qwen3"]


def assert_only_new_is_computed(steps: Sequence[LoopStep]) -> None:
    """Each step computes what follows the prompt before it, and a page at most."""
    for before, step in pairwise(steps):
        shared = common_prefix(before.prompt, step.prompt)

        assert len(before.prompt) - shared <= MAX_OPENING
        assert step.num_computed < len(step.prompt) - shared + PAGE_SIZE
        assert step.num_written > 0
        assert step.reason not in ("cold", None)


@of_family
@pytest.mark.parametrize("has_reasoning", [True, False], ids=["reasoning", "none"])
def test_a_loop_with_calls_of_its_own_computes_its_new_messages(
    family: FamilyTemplate, has_reasoning: bool
) -> None:
    """Whether the history has reasoning or not, in all three APIs."""
    for api in ("chat", "messages", "responses"):
        steps = run_loop(family, api, num_steps=4, has_reasoning=has_reasoning, uses_answers=False)

        assert_only_new_is_computed(steps)


@of_family
def test_a_loop_that_returns_the_answers_computes_its_new_messages(family: FamilyTemplate) -> None:
    """The server's own calls come back, whole or by `previous_response_id`."""
    for api in PATHS:
        assert_only_new_is_computed(run_loop(family, api, num_steps=4))


@pytest.mark.parametrize("name", ["qwen3", "glm4_moe", "deepseek_v32", "kimi_k2_thinking"])
@pytest.mark.parametrize("api", PATHS)
def test_an_answer_that_comes_back_is_read(name: str, api: str) -> None:
    """Where the template writes an answer as the model does, its tokens are read, thoughts too.

    A step computes the results and a page at most.
    """
    [family] = [family for family in REASONING_FAMILIES if family.name == name]
    steps = run_loop(family, api, num_steps=4)

    for before, step in pairwise(steps):
        context = before.prompt + before.answer[:-1]
        assert common_prefix(context, step.prompt) > len(context) - 4
        assert step.num_computed < len(step.prompt) - len(context) + 4 + PAGE_SIZE
        assert step.reason == "new_turn"


def test_a_question_after_a_loop_reads_the_prompt_before_its_thoughts() -> None:
    """Qwen3's template drops the thoughts then; what precedes them is in the cache as well."""

    async def main() -> tuple[int, int, dict[str, object]]:
        server, loop = (
            LoopServer(QWEN3),
            ToolLoop(QWEN3, "chat", has_reasoning=True, uses_answers=True),
        )
        async with server.running():
            for step in range(3):
                loop.add(step, (await server.post(PATHS["chat"], loop.body())).json)
            before = server.ended[-1].request.prompt.ids
            loop._messages += [{"role": "user", "content": "And in Oslo?"}]
            last = await server.post(
                PATHS["chat"],
                loop.body()
                | {"prompt_cache_options": {"comparison_response_id": server.ended[-1].id}},
            )
        usage = last.json["usage"]["ramify_cache"]
        shared = common_prefix(before, server.ended[-1].request.prompt.ids)
        return usage["read"], shared, last.json["prompt_cache_diagnostics"]

    num_read, num_shared, diagnostics = asyncio.run(main())

    assert num_read == num_shared
    assert num_read > 0
    assert diagnostics == {"type": "cache_hit"}
