"""What `print(llm.cache)`, `llm.cache.tree()` and the reprs of engines and sessions show."""

from __future__ import annotations

import threading
from typing import Any

from ramify.engine.async_llm import AsyncLLM
from ramify.engine.description import EngineDescription, summary
from ramify.engine.llm import LLM
from ramify.params import SamplingParams
from tests.pure.engine_bench import Bench
from tests.pure.server_bench import ServerBench, tokenizer_with

STEM = list(range(1, 13))  # three pages
ONE = SamplingParams(max_tokens=1)


def served(**options: Any) -> LLM:
    return LLM.from_core(Bench(**options).core)


def test_the_tree_is_drawn_with_branches_below_their_node() -> None:
    """A node for each line, indented below the tokens that come before."""
    llm = served()
    llm.generate([[*STEM, 20, 21, 22, 23, 9], [*STEM, 30, 31, 32, 33, 9]], ONE)
    llm.generate([[*STEM, 30, 31, 32, 33, 9], [*STEM, 30, 31, 32, 33, *STEM]], ONE, tenant="ann")

    assert repr(llm.cache.tree()).splitlines() == [
        "├─ 12 tokens · 1 hit · ids 1 2 3 4 5 6 7 8",
        "│  ├─ 4 tokens · 0 hits · ids 20 21 22 23",
        "│  └─ 4 tokens · 0 hits · ids 30 31 32 33",
        "└─ 16 tokens · 1 hit · tenant ann · ids 1 2 3 4 5 6 7 8",
        "   └─ 12 tokens · 0 hits · tenant ann · ids 1 2 3 4 5 6 7 8",
    ]
    assert str(llm.cache.tree(1)).splitlines()[-1] == "… and 4 more nodes, with fewer hits"


def test_printing_the_cache_shows_its_state_and_its_tree() -> None:
    """`print(llm.cache)` begins with its repr; an empty cache says so."""
    llm = served()
    empty = str(llm.cache)
    llm.generate([STEM], ONE)

    assert empty == f"{CACHE_REPR.format(0, '0 nodes')}\nnothing is cached"
    assert repr(llm.cache) == CACHE_REPR.format(3, "1 node")
    assert str(llm.cache).startswith(f"{CACHE_REPR.format(3, '1 node')}\n└─ 12 tokens")


CACHE_REPR = "<CacheView: {} of 1,024 pages of 4 tokens in use, {}, hit rate 0%>"


def test_a_repr_neither_waits_nor_raises_while_another_thread_computes() -> None:
    """A debugger may look at a cache at any time."""
    bench = Bench()
    llm, shown = LLM.from_core(bench.core), list[str]()

    def look(_: object) -> int:
        thread = threading.Thread(target=lambda: shown.append(repr(llm.cache)))
        thread.start()
        thread.join(60)
        return 7

    bench.device.next_token = look
    llm.generate([STEM], ONE)

    assert shown == ["<CacheView: in use by another thread>"]


def test_texts_of_prompts_move_no_cursor() -> None:
    """Control characters of a prompt are spaces, and a long text is cut."""
    bench = ServerBench()
    llm = LLM.from_core(bench.core, tokenizer_with(None))
    llm.generate(["Hello\x1b[2J there,\nwho lives in Rome? " * 9], ONE)

    [line] = repr(llm.cache.tree()).splitlines()

    assert "Hello" in line
    assert line.isprintable()
    assert len(line) < 120


def test_engines_and_sessions_say_what_they_are() -> None:
    """Their reprs name the model, sizes, and the length of a session."""
    llm = served()
    sizes = "exact, context 2,048 tokens, pool 4,096 tokens in pages of 4"
    session = llm.session([1, 2, 3, 4, 5, 6])
    session.generate(ONE)

    assert repr(llm) == f"<LLM: an engine without a checkpoint, {sizes}>"
    assert repr(AsyncLLM.from_core(Bench().core)).startswith("<AsyncLLM: an engine without")
    assert repr(session) == "<Session: 7 tokens>"
    llm.close()
    assert repr(llm) == "<LLM: closed>"


def test_a_model_is_named_in_the_repr() -> None:
    """Of an engine with a checkpoint, name and dtype come first; of a conversation, its messages."""
    bench = ServerBench()
    llm = LLM.from_core(bench.core, tokenizer_with(None))
    session = llm.session(messages=[{"role": "user", "content": "Who?"}])

    shown = summary(llm.config, EngineDescription(vocab_size=9, dtype="bfloat16"))

    assert shown.startswith("ramify-tiny, bfloat16, exact, context 2,048 tokens, pool 8,192 tokens")
    assert repr(session) == "<Session: 1 message, 0 tokens>"
