"""Figures of engines with cache tiers, for `benchmarks/tiers.py --only restart,break-even,write-through,slow`."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from engines.models import TITLES, write_model
from tier_surroundings import drop_page_cache

from ramify.engine.core import EngineCore
from ramify.engine.execution.local_executor import LocalExecutor
from ramify.engine.execution.prefill_probe import step_model
from ramify.engine.llm import LLM
from ramify.engine.tier_parts import TierParts
from ramify.kv.offload import MoverThreads
from ramify.kv.page_bytes import PageBytes
from ramify.kv.stores.memory import FaultyStore, MemoryStore, StoreFaults
from ramify.kv.stores.page_store import PageStore
from ramify.params import SamplingParams

PAGE = 16
QUESTION = 32  # tokens behind a shared prefix
SETTLE_S = 60.0
SLOW_CALL_S, SLOW_BYTES_PER_S = 0.2, 1e6
# By this file computing is so slow that every load pays.
ALWAYS_LOAD = {"step_s": 0.0, "token_s": 1.0, "read_s": 0.0}
Ranges = dict[str, dict[str, float]]


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Random token ids; the vocabularies of all models have them."""
    return random.Random(seed).choices(range(3, 500), k=num_tokens)


def question(seed: int) -> list[int]:
    """The end of a prompt, that no other has."""
    return prompt_of(QUESTION, 1_000_000 + seed)


class Figures:
    """Makes engines of one checkpoint.

    Args:
        arguments: of `benchmarks/tiers.py`.
        model: S, M, L or XS.
        kv_tokens: of each pool.
    """

    def __init__(self, arguments: argparse.Namespace, model: str, kv_tokens: int) -> None:
        self.model, self.dtype = arguments.model or model, arguments.dtype
        scratch = arguments.scratch or Path(tempfile.gettempdir()) / "ramify-models"
        self.path = write_model(scratch, self.model, self.dtype) / self.dtype
        self.kv_tokens = -(-kv_tokens // PAGE) * PAGE
        self.directory: Path = arguments.dir
        self.rounds: int = arguments.rounds
        self.is_quiet: bool = arguments.json

    def open(self, **options: Any) -> LLM:
        """An engine; its pool holds `kv_tokens`."""
        length = min(8192, self.kv_tokens)
        sizes: dict[str, Any] = {
            "page_size": PAGE,
            "kv_cache_tokens": self.kv_tokens,
            "max_model_len": length,
        }
        return LLM(self.path, dtype=self.dtype, **sizes, **options)

    def report(self, title: str, samples: dict[str, list[float]], unit: str = "ms") -> Ranges:
        """Print and return the median, lowest and highest of each figure, in seconds or as a ratio."""
        scale = 1e3 if unit == "ms" else 1.0
        ranges = {
            name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
            for name, values in samples.items()
        }
        if not self.is_quiet:
            print(f"\n{title}; {TITLES[self.model]}, {self.dtype}, {self.rounds} rounds")
            for name, values in ranges.items():
                low, median, high = (values[key] * scale for key in ("low", "median", "high"))
                print(f"{name:44} {median:10.3f} {unit:<3} ({low:.3f} … {high:.3f})", flush=True)
        return ranges

    def note(self, text: str) -> None:
        """Print a line."""
        if not self.is_quiet:
            print(text, flush=True)


@contextmanager
def tier_directory(figures: Figures) -> Iterator[dict[str, Any]]:
    """The options of an engine with a disk tier in a directory of its own."""
    with tempfile.TemporaryDirectory(dir=figures.directory) as root:
        yield {"cache_dir": Path(root) / "pages", "cache_disk": "20GB"}


def ttft_s(llm: LLM, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token of a prompt, and its tokens that came from a tier."""
    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    assert output.metrics.ttft_s is not None
    return output.metrics.ttft_s, sum(output.cache.tier_tokens.values())


def settle(core: EngineCore) -> None:
    """Wait until every page that is to be written is."""
    tiering, end_s = core.tiering, time.monotonic() + SETTLE_S
    assert tiering is not None
    while tiering.num_buffers_in_use or tiering.has_copies_left:
        if time.monotonic() > end_s:
            sys.exit(f"pages were not written within {SETTLE_S:.0f} s; use another --dir")
        tiering.wait_for_buffers()
        tiering.tend()


def restart(arguments: argparse.Namespace) -> dict[str, Any]:
    """The first request after a restart: 4,096 tokens from the page cache, from disk, and computed."""
    num_tokens = arguments.prefix or 4096
    figures = Figures(arguments, "M", num_tokens + 4 * QUESTION)
    samples: dict[str, list[float]] = {}
    for number in range(figures.rounds):
        prefix = prompt_of(num_tokens, number)
        with tier_directory(figures) as options:
            with figures.open(**options) as llm:  # writes its pages when it ends
                ttft_s(llm, [*prefix, *question(1)])
            for name, tier in (("page cache", options), ("disk", options), ("no tier", {})):
                if name == "disk":
                    drop_page_cache(options["cache_dir"])
                with figures.open(**tier) as llm:
                    seconds, num_loaded = ttft_s(llm, [*prefix, *question(2)])
                if bool(tier) != (num_loaded >= num_tokens - PAGE):
                    figures.note(f"{name}: {num_loaded} of {num_tokens} tokens came from the tier")
                samples.setdefault(name, []).append(seconds)
    ranges = figures.report(
        f"Time to first token of the first request after a start, {num_tokens} tokens shared",
        samples,
    )
    ratios = {
        f"computing / {name}": [
            computed / loaded
            for computed, loaded in zip(samples["no tier"], samples[name], strict=True)
        ]
        for name in ("page cache", "disk")
    }
    return {"ttft_s": ranges, "ratios": figures.report("... as a ratio", ratios, "x")}


def break_even(arguments: argparse.Namespace, url: str) -> dict[str, Any]:
    """Loading and computing prefixes of growing length, from disk and from a shared store."""
    lengths = [num_pages for num_pages in (1, 2, 4, 8, 16, 32, 64) if num_pages * PAGE <= 4096]
    figures = Figures(arguments, "M", 2 * PAGE * sum(lengths) + 4096)
    report: dict[str, Any] = {}
    with ExitStack() as stack:
        options = stack.enter_context(tier_directory(figures))
        cost = options["cache_dir"].parent / "cost.json"
        cost.write_text(json.dumps(ALWAYS_LOAD), "utf-8")
        plain = stack.enter_context(figures.open())
        tiers = {"disk": options} | ({"store": {"cache_store": url}} if url else {})
        for name, tier in tiers.items():
            with figures.open(**tier) as estimated:
                for num_pages in lengths:  # twice, so that the pages are written
                    for number in range(2):
                        ttft_s(
                            estimated, [*prompt_of(num_pages * PAGE, num_pages), *question(number)]
                        )
                settle(estimated.core)
            with figures.open(**tier) as estimated:
                assert estimated.core.tiering is not None
                estimated.core.tiering.wait_for_probes(SETTLE_S)
                [speed] = estimated.core.tiering.speeds().values()
            with figures.open(**tier, cache_cost=cost) as loading:
                report[name] = _compare_lengths(figures, name, lengths, loading, plain)
            figures.note(
                f"{name}: the engine says: pays from {speed.pays_from} pages; {speed.reason}"
            )
            report[name]["engine"] = {"pays_from": speed.pays_from, "reason": speed.reason}
    return report


def _compare_lengths(
    figures: Figures, name: str, lengths: Sequence[int], loading: LLM, computing: LLM
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {}
    engines = {f"{name}": loading, "computed": computing}
    for number in range(figures.rounds + 1):
        for num_pages in lengths:
            prompt = [*prompt_of(num_pages * PAGE, num_pages), *question(100 + number)]
            for kind, llm in engines.items():
                llm.core.cache.clear()  # the pool's, not the tier's
                seconds, num_loaded = ttft_s(llm, prompt)
                if number:  # the first round warms up
                    samples.setdefault(f"{num_pages:3} pages, {kind}", []).append(seconds)
                if kind != "computed" and num_loaded != num_pages * PAGE:
                    figures.note(f"{num_loaded} of {num_pages * PAGE} tokens came from {name}")
    ranges = figures.report(f"Time to first token by length of a prefix on {name}", samples)
    pays = [
        num_pages
        for num_pages in lengths
        if ranges[f"{num_pages:3} pages, {name}"]["median"]
        < ranges[f"{num_pages:3} pages, computed"]["median"]
    ]
    figures.note(f"{name}: measured: loading is sooner at {pays or 'no'} pages")
    return {"ttft_s": ranges, "sooner_at_pages": pays}


def write_through(arguments: argparse.Namespace) -> dict[str, Any]:
    """Throughput and step times with and without a tier, in turns, over prompts that are used twice."""
    figures = Figures(arguments, "S", 16384)
    num_tokens = arguments.prefix or 512
    samples: dict[str, list[float]] = {}
    num_copied = 0.0
    with ExitStack() as stack:
        options = stack.enter_context(tier_directory(figures))
        names = ("without", "without again", "with a tier")
        engines = {
            name: stack.enter_context(figures.open(**(options if name == names[2] else {})))
            for name in names
        }
        for number in range(figures.rounds + 1):
            prefixes = [prompt_of(num_tokens, 8 * number + index) for index in range(4)]
            turns = names[number % 3 :] + names[: number % 3]
            runs = {name: _serve_twice(engines[name].core, prefixes) for name in turns}
            num_copied += runs[names[2]]["pages copied"]
            if not number:  # the first round warms up
                continue
            for name in names[1:]:
                for what in ("seconds", "median step", "p99 step"):
                    ratio = runs[name][what] / runs["without"][what]
                    samples.setdefault(f"{what}, {name} / without", []).append(ratio)
        tiering = engines[names[2]].core.tiering
        assert tiering is not None
        written = tiering.counts.written.get("disk", 0)
    ranges = figures.report(f"4 prefixes of {num_tokens} tokens, each used twice", samples, "x")
    figures.note(f"{written} pages were written; {num_copied:.0f} were copied within the seconds")
    return {"ratios": ranges, "written_pages": written}


def _serve_twice(core: EngineCore, prefixes: Sequence[Sequence[int]]) -> dict[str, float]:
    """Answer each prefix with two questions, the second ones after the first; the seconds of all, and of a step."""
    params, steps = SamplingParams(max_tokens=24, ignore_eos=True), list[float]()
    num_before = core.tiering.counts.queued if core.tiering is not None else 0
    begin_s = time.perf_counter()
    for number in range(2):
        for prefix in prefixes:
            core.add_request([*prefix, *question(number)], params)
        while core.has_unfinished:
            step_s = time.perf_counter()
            core.step()
            steps.append(time.perf_counter() - step_s)
    seconds = time.perf_counter() - begin_s
    p99 = sorted(steps)[min(len(steps) - 1, int(len(steps) * 0.99))]
    figures = {"seconds": seconds, "median step": statistics.median(steps), "p99 step": p99}
    figures["pages copied"] = 0.0
    if core.tiering is not None:
        figures["pages copied"] = core.tiering.counts.queued - num_before
        settle(core)
    return figures


def slow(arguments: argparse.Namespace) -> dict[str, Any]:
    """Stores of 200 ms and 1 MB/s, at growing hit rates: time to first token beside no tier."""
    num_tokens = arguments.prefix or 1024
    figures = Figures(arguments, "S", 4 * num_tokens)
    prefix = prompt_of(num_tokens, 0)
    report: dict[str, Any] = {}
    with figures.open() as llm:
        for tier in ("disk", "remote"):
            samples: dict[str, list[float]] = {}
            tiered, _owner = _slow_core(llm, tier, prefix)
            cores = {"with": tiered, "without": _core_over(llm, None)}
            for number in range(figures.rounds):
                for percent in (0, 25, 50, 75, 100):
                    num_known = num_tokens * percent // 100
                    rest = prompt_of(num_tokens - num_known, 100 * number + percent + 1)
                    prompt = [*prefix[:num_known], *rest, *question(2 + number)]
                    seconds: dict[str, float] = {}
                    for name, core in cores.items():
                        core.cache.clear()
                        seconds[name] = _first_token_s(core, prompt)
                    ratio = seconds["with"] / seconds["without"]
                    samples.setdefault(f"{percent:3} % in the {tier} tier", []).append(ratio)
            assert tiered.tiering is not None
            totals = tiered.tiering.totals()
            ranges = figures.report("Time to first token, slow tier / no tier", samples, "x")
            figures.note(", ".join(f"{name} {count}" for name, count in totals.items() if count))
            report[tier] = {"ratios": ranges, "totals": totals}
    return report


def _slow_core(llm: LLM, tier: str, prefix: Sequence[int]) -> tuple[EngineCore, EngineCore]:
    """A core over a slow store that has the pages of a prefix, and the one whose end would close it.

    A disk's index is in memory all the same.
    """
    device = PageBytes(llm.engine.runner.pool)
    store = MemoryStore(device.page_bytes, len(prefix) // PAGE + 64)
    store.tier = tier
    filling = _core_over(llm, store)
    for number in range(2):  # used twice, so that its pages are written
        _first_token_s(filling, [*prefix, *question(number)])
    settle(filling)
    faulty = FaultyStore(store, StoreFaults(call_s=SLOW_CALL_S, bytes_per_s=SLOW_BYTES_PER_S))
    if tier == "disk":
        faulty.has_many = store.has_many  # type: ignore[method-assign]
    core = _core_over(llm, faulty)
    return core, filling


def _core_over(llm: LLM, store: PageStore | None) -> EngineCore:
    """A further core over the pool and the model of an engine, with one store or none.

    The cores of one pool overwrite each other's pages: clear the cache of each before its turn.
    """
    engine, parts = llm.engine, None
    if store is not None:
        parts = TierParts(
            device=PageBytes(engine.runner.pool),
            stores=(store,),
            mover=MoverThreads([store]),
            step_model=step_model(llm.config, engine.runner, engine.model_config),
            distant=store.tier if store.tier == "remote" else "",
        )
    executor = LocalExecutor(engine.runner)
    return EngineCore(llm.config, executor, vocab_size=engine.model_config.vocab_size, tiers=parts)


def _first_token_s(core: EngineCore, prompt: Sequence[int]) -> float:
    begin_s = time.perf_counter()
    core.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    while core.has_unfinished:
        core.step()
    return time.perf_counter() - begin_s


FIGURES: dict[str, Callable[..., dict[str, Any]]] = {
    "restart": restart,
    "break-even": break_even,
    "write-through": write_through,
    "slow": slow,
}
