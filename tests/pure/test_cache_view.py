"""`llm.cache`: what an operator can inspect and change, also while requests run."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ramify.cache import CacheKey, namespace_of
from ramify.cache.key import namespace_parts
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.cache_admin.async_view import AsyncCacheView
from ramify.engine.cache_admin.view import CacheView, ClearResult
from ramify.engine.cache_admin.warmup import WarmPrompt, read_prompts
from ramify.engine.llm import LLM
from ramify.errors import ConfigError, InvalidParamsError, PinError, RequestError
from ramify.params import SamplingParams
from tests.pure.async_bench import AsyncBench, run
from tests.pure.engine_bench import Bench

STEM = list(range(1, 13))  # three pages
ONE = SamplingParams(max_tokens=1)


def served(**options: Any) -> LLM:
    return LLM.from_core(Bench(**options).core)


def test_a_cleared_prefix_takes_what_follows_it_and_leaves_what_others_share() -> None:
    """Clearing a prefix evicts its continuations, but no page that another prompt shares."""
    llm = served()
    llm.generate([[*STEM, 20, 21, 22, 23, 9], [*STEM, 30, 31, 32, 33, 9], STEM[::-1]], ONE)
    pages = llm.cache.stats().cached_pages

    first = llm.cache.clear(prefix=[*STEM, 20, 21])
    again = llm.cache.clear(prefix=[*STEM, 20, 21])
    second = llm.cache.clear(prefix=STEM)

    assert (first, again) == (ClearResult(1, 0), ClearResult(0, 0))
    assert second == ClearResult(4, 0)
    assert llm.cache.stats().cached_pages == pages - 5 == 3
    assert llm.cache.core.match(CacheKey([*STEM[::-1], 1])).num_tokens == 12
    llm.cache.check()


def test_a_prefix_may_end_inside_a_page_or_a_run() -> None:
    """A prefix that ends inside a page clears every prompt that starts with all of its tokens."""
    llm = served()
    llm.generate([[*STEM, 5], [1, 2, 9, 9, 9, 9, 9, 9, 9]], ONE)

    assert llm.cache.clear(prefix=[1, 2, 3]) == ClearResult(3, 0)
    assert llm.cache.clear(prefix=[1, 7]) == ClearResult(0, 0)
    assert llm.cache.clear(prefix=[1]) == ClearResult(2, 0)


def test_clear_by_tenant_salt_and_age() -> None:
    """`clear` evicts only the pages that match every given condition."""
    bench = Bench()
    llm = LLM.from_core(bench.core)
    llm.generate([STEM] * 3, ONE, tenant=["", "a", "a"], salt=["", "", "s"])
    bench.time += 10.0
    llm.generate([STEM[::-1]] * 2, ONE, tenant=["b", "a"])
    assert llm.cache.stats().cached_pages == 15

    assert llm.cache.clear(tenant="a", older_than_s=5).num_pages == 6
    assert llm.cache.clear(tenant="nobody").num_pages == 0
    assert llm.cache.clear(prefix=STEM[::-1], tenant="b") == ClearResult(3, 0)
    assert llm.cache.clear(older_than_s=5) == ClearResult(3, 0)
    assert llm.cache.clear(older_than_s=0) == ClearResult(3, 0)
    llm.cache.check()
    with pytest.raises(ConfigError, match="older_than_s=-1"):
        llm.cache.clear(older_than_s=-1)


def test_clear_while_requests_run_keeps_their_pages() -> None:
    """`clear` keeps the pages of running requests and returns how many it kept."""
    bench = Bench()
    llm = LLM.from_core(bench.core)
    llm.generate([STEM[::-1]], ONE)
    request = llm.add_request([*STEM, 5], SamplingParams(max_tokens=9, ignore_eos=True))
    llm.step()
    llm.step()

    assert llm.cache.clear(prefix=STEM) == ClearResult(0, 3)
    assert llm.cache.clear() == ClearResult(3, 3)
    while llm.has_unfinished():
        llm.step()

    assert len(llm.take_output(request).token_ids) == 9
    assert llm.cache.clear(prefix=STEM).num_kept == 0


def test_the_tree_tells_runs_of_pages_after_their_parents() -> None:
    """`tree` lists parents before children; with `max_nodes`, the most used nodes."""
    llm = served()
    llm.generate([[*STEM, 20, 21, 22, 23, 9], [*STEM, 30, 31, 32, 33, 9]], ONE)
    llm.generate([[*STEM, 30, 31, 32, 33, 9]], ONE)
    llm.generate([STEM[::-1]], ONE, tenant="a")

    tree = llm.cache.tree()

    assert tree.num_nodes == len(tree.nodes) == 4
    root = next(node for node in tree.nodes if node.token_ids == tuple(STEM))
    below = [node for node in tree.nodes if node.parent == root.id]
    assert [node.level for node in (root, *below)] == [0, 1, 1]
    assert (root.num_pages, root.num_children, root.start) == (3, 2, 0)
    assert {node.start for node in below} == {12}
    assert tree.nodes.index(root) < min(map(tree.nodes.index, below))
    assert [node.tenant for node in tree.nodes if node.tenant] == ["a"]
    [top] = llm.cache.tree(1).nodes
    assert top.id == root.id
    two = llm.cache.tree(2).nodes
    assert [node.token_ids[0] for node in two] == [1, 30]
    with pytest.raises(ConfigError, match="max_nodes=0"):
        llm.cache.tree(0)


def test_a_namespace_tells_its_parts() -> None:
    """`namespace_parts` inverts `namespace_of`, and is empty for any other bytes."""
    parts: dict[str, str | bytes | int] = {"base": b"\x00\xff", "tenant": "ü", "epoch": -3}

    assert namespace_parts(namespace_of(**parts)) == parts
    assert namespace_parts(b"something else") == namespace_parts(b"") == {}
    assert namespace_parts(namespace_of(**parts)[:-1]) == {}


def test_pins_explanations_and_prompts_that_cannot_be() -> None:
    """Pins and explanations take token ids; a text without a tokenizer is refused."""
    llm = served()
    with pytest.raises(PinError, match="run a request that begins with it"):
        llm.cache.pin(STEM)
    llm.generate([[*STEM, 9]], ONE, tenant="a")

    pin = llm.cache.pin(STEM, owner="me", tenant="a")

    assert pin.num_pages == 3
    assert llm.cache.pins("me") == [pin]
    assert llm.cache.clear() == ClearResult(0, 3)
    assert llm.cache.explain([*STEM, 40, 41], tenant="a").hit_tokens == 12
    assert llm.cache.explain([*STEM, 40, 41]).reason == "namespace"
    llm.cache.unpin(pin)
    assert llm.cache.clear() == ClearResult(3, 0)
    with pytest.raises(InvalidParamsError, match="tokenizer"):
        llm.cache.explain("a text")
    with pytest.raises(RequestError):
        llm.cache.clear(prefix=[-1])


def test_warming_tells_what_was_computed_and_what_was_there(tmp_path: Path) -> None:
    """`warm` counts computed and cached tokens and failed lines; an unreadable file raises."""
    llm = served()
    file = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {"token_ids": STEM},
        {"token_ids": [*STEM, 40, 41, 42, 43, 44]},
        {"token_ids": STEM, "tenant": "a"},
        {"token_ids": []},
    ]
    file.write_text("\n\n".join(map(json.dumps, lines)))

    report = llm.cache.warm(file)

    assert (report.num_prompts, report.num_failed) == (4, 1)
    assert (report.computed_tokens, report.found_tokens) == (12 + 5 + 12, 12)
    assert "0 tokens" in report.errors[0]
    again = llm.cache.warm([WarmPrompt([*STEM, 40, 41, 42, 43, 44])])
    assert (again.computed_tokens, again.found_tokens) == (1, 16)
    assert llm.cache.warm([WarmPrompt([])]).num_failed == 1
    assert llm.cache.warm([]).num_prompts == 0
    for bad in (
        '{"token_ids": [1]}\nno json',
        '{"prompt": 3}',
        '["x"]',
        '{"prompt": "a", "salt":1}',
    ):
        file.write_text(bad)
        with pytest.raises(ConfigError, match=r"prompts\.jsonl, line"):
            llm.cache.warm(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        llm.cache.warm(tmp_path / "nothing")
    with pytest.raises(InvalidParamsError):
        llm.cache.warm(3)  # type: ignore[arg-type]


def test_a_text_file_has_a_prompt_on_each_line(tmp_path: Path) -> None:
    """Each non-blank line of a text file is a prompt, even if it looks like JSON."""
    file = tmp_path / "prompts.txt"
    file.write_text('one\n\n{"prompt": "two"}\n')

    assert [prompt.prompt for prompt in read_prompts(file)] == ["one", '{"prompt": "two"}']


@pytest.mark.parametrize("odd", ["\u2028", "\u2029", "\x85", "\x0c", "\x0b", "\x1c"])
def test_only_line_feeds_end_lines(tmp_path: Path, odd: str) -> None:
    """Only line feeds separate prompts; other Unicode line breaks stay inside a prompt."""
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_bytes(f"a{odd}b\r\nc\n".encode())
    quoted = "a b" if odd < " " else f"a{odd}b"  # control characters are escaped in JSON
    lines.write_text(f'{{"prompt": "{quoted}"}}\n', "utf-8")

    assert [prompt.prompt for prompt in read_prompts(text)] == [f"a{odd}b", "c"]
    assert [prompt.prompt for prompt in read_prompts(lines)] == [quoted]


def test_the_same_calls_while_an_async_engine_serves() -> None:
    """Every cache call runs beside a streaming request and does not disturb it."""
    made = AsyncBench()

    async def main(llm: AsyncLLM) -> None:
        async with llm:
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            task = asyncio.create_task(llm.generate(STEM, params))
            warmed = await llm.cache.warm([WarmPrompt(STEM[::-1]), WarmPrompt([99])])
            assert (warmed.computed_tokens, warmed.num_failed) == (12, 1)
            pin = await llm.cache.pin(STEM[::-1], ttl_s=1000)
            assert await llm.cache.pins() == [pin]
            assert (await llm.cache.explain([*STEM[::-1], 5, 5])).hit_tokens == 12
            await llm.cache.unpin(pin)
            assert await llm.cache.clear(prefix=STEM[::-1]) == ClearResult(3, 0)
            assert (await llm.cache.tree()).nodes
            await llm.cache.check()
            assert (await llm.cache.stats()).cached_pages
            assert len((await task).token_ids) == 300

    run(main(made.llm))
    made.assert_nothing_left()


def test_both_views_have_the_same_calls() -> None:
    """CacheView and AsyncCacheView have the same methods, except `core`."""

    def calls(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert calls(CacheView) - calls(AsyncCacheView) == {"core"}
    assert calls(AsyncCacheView) <= calls(CacheView)
