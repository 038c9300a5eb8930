"""Time to first token of a question with another ending: part of a page copied, or computed.

    python benchmarks/partial_pages.py                            ramify-tiny and random models S and M
    python benchmarks/partial_pages.py --models M --rounds 30

A prompt is cached; the next one leaves it inside a page, behind 1 to 15 tokens of it, and has 4 tokens
of its own. Two engines, one with `partial_pages` and one without, take turns in each round. `copy` is
the time of one `KVPool.copy_pages`, `plan` the least time of `planner.plan` for such a prompt.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from array import array
from collections import defaultdict
from pathlib import Path

from engines.models import MODELS, write_model

from ramify import LLM, SamplingParams
from ramify.attention.planner import RadixSequence

PAGE, PREFIX, OWN = 16, 512, 4
SHARED = (1, 2, 4, 8, 15)
FIRST = SamplingParams(max_tokens=1, ignore_eos=True)
SCRATCH = Path(__file__).parents[1] / "build" / "bench-models"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", default="ramify-tiny,S,M")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    columns = " | ".join(f"{count} tokens" for count in SHARED)
    print(f"| model | copy, us | plan on, off, us | {columns} |")
    print("|---|---:|---:|" + "---:|" * len(SHARED))
    for name in args.models.split(","):
        print(row_of(name, args.dtype, args.rounds), flush=True)


def row_of(name: str, dtype: str, rounds: int) -> str:
    """A line of the table: least ms to the first token off → on, and the median of on / off."""
    path = write_model(SCRATCH, name, dtype) / dtype if name in MODELS else Path(name)
    engines = {
        is_on: LLM(path, partial_pages=is_on, page_size=PAGE, kv_cache_tokens=64 * PREFIX)
        for is_on in (False, True)
    }
    rng = random.Random(1)
    vocab = min(llm.core.vocab_size for llm in engines.values())
    seconds: dict[tuple[int, bool], list[float]] = defaultdict(list)
    for _ in range(rounds):
        cached = [rng.randrange(3, vocab) for _ in range(PREFIX + PAGE)]
        for llm in engines.values():
            llm.generate([cached], FIRST)
        for count in SHARED:
            prompt = cached[: PREFIX + count] + [rng.randrange(3, vocab) for _ in range(OWN)]
            for is_on in rng.sample([False, True], 2):
                begin = time.perf_counter()
                engines[is_on].generate([prompt], FIRST)
                seconds[count, is_on].append(time.perf_counter() - begin)
    cells = [
        f"{copy_us(engines[True]):.0f}",
        f"{plan_us(engines[True]):.0f}, {plan_us(engines[False]):.0f}",
    ]
    for count in SHARED:
        off, on = seconds[count, False], seconds[count, True]
        ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
        ms = [1e3 * min(values) for values in (off, on)]
        cells.append(f"{ms[0]:.2f} → {ms[1]:.2f} ({ratio:.2f})")
    return f"| {name} | {' | '.join(cells)} |"


def copy_us(llm: LLM) -> float:
    """The median time of a copy of one page, each from another page."""
    spent = []
    for page in range(200):
        begin = time.perf_counter()
        llm.core.executor.copy_pages([(page, page + 300)])
        spent.append(time.perf_counter() - begin)
    llm.cache.clear()
    return 1e6 * statistics.median(spent)


def plan_us(llm: LLM) -> float:
    """The least time of a plan for a prompt that leaves a cached one, one of 64 siblings, in a page."""
    planner, spent = llm.core.planner, []
    for number in range(64):
        llm.generate([[*range(3, PREFIX // 4), 3 + number, *range(3, 3 + PAGE)]], FIRST)
    for _ in range(300):
        sequence = RadixSequence(array("i", [*range(3, PREFIX // 4), 100, 101, 102]))
        begin = time.perf_counter()
        planner.plan([sequence])
        spent.append(time.perf_counter() - begin)
        planner.release([sequence])
    return 1e6 * min(spent)


if __name__ == "__main__":
    main()
