"""The tokens of a named prefix in every family's chat template: every prompt with it begins with them."""

from typing import Any

import pytest

from tests.cpu.family_templates import FAMILY_TEMPLATES, FamilyTemplate
from tests.pure.prefix_requests import (
    APIS,
    EXAMPLES,
    NESTED,
    PATH,
    QUESTION,
    SYSTEM,
    body,
    cache_of,
    inlined,
)
from tests.pure.server_bench import ServerBench, run
from tests.pure.tool_loop import tokenizer_of

DEFINITIONS: dict[str, dict[str, Any]] = {
    "all": {"system": SYSTEM, "tools": [NESTED], "messages": EXAMPLES},
    "system": {"system": SYSTEM, "tools": [NESTED]},
    "document": {"messages": [{"role": "user", "content": SYSTEM}]},
}
# What a tokenizer may merge with what the template writes before it.
TEXTS = ("Who?", "\n\nWho?", " 1", "```py\n")


@pytest.mark.parametrize("family", FAMILY_TEMPLATES, ids=lambda family: family.name)
def test_every_prompt_begins_with_the_tokens_of_its_prefix(family: FamilyTemplate) -> None:
    """Whatever the first message begins with, in each API; and it is the prompt of the parts inlined."""
    bench = ServerBench(tokenizer=tokenizer_of(family.name), page_size=4, pool_tokens=32_768)

    async def prompt_of(path: str, request: dict[str, Any]) -> Any:
        answer = await bench.post(path, request)
        return cache_of(answer), bench.ended[-1].request.prompt

    async def main() -> None:
        async with bench.running():
            for name, definition in DEFINITIONS.items():
                made = (await bench.post(PATH, {"name": name} | definition)).json
                assert made["pinned_tokens"] == made["tokens"] // 4 * 4 > 0
                for path in APIS:
                    for text in TEXTS:
                        question = [{"role": "user", "content": text}]
                        usage, prompt = await prompt_of(path, body(path, question, prefix=name))
                        assert prompt.named.num_shared == made["tokens"], (name, path, text)
                        assert usage["prefix"]["read"] >= made["pinned_tokens"]
                    _, named = await prompt_of(path, body(path, QUESTION, prefix=name))
                    _, plain = await prompt_of(path, inlined(path, definition))
                    assert named.ids == plain.ids, (name, path)

    run(main())
