"""The benchmarked cores, in the order of the table rows."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

import numpy as np

from core.blocks import load_atom, load_vllm
from core.contract import Entry, Loaded, Tokens, round_up
from core.ours import load_forgetful, load_hash, load_lru, load_native, load_radix, load_subscribed
from core.phyai import load_phyai
from core.trees import load_mini_sglang, load_sglang

OURS = "ramify"  # what all ratios refer to
NATIVE = "ramify-native"


class OnePass:
    """No cache: compares and copies the bytes once, as a yardstick for the other cores."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._ids = np.arange(num_pages, dtype=np.int32)
        self._page_size = page_size

    def prepare(self, prompt: Tokens, output: Tokens) -> list[Tokens]:
        return [prompt, prompt.copy(), np.concatenate([prompt, output])]

    def match(self, request: list[Tokens]) -> int:
        np.array_equal(request[0], request[1])
        return 0

    def alloc(self, request: list[Tokens]) -> None:
        request.append(self._ids[: round_up(len(request[2]), self._page_size)].copy())

    def insert(self, request: list[Tokens]) -> None:
        request += [request[2].copy(), request[3].copy()]

    def read_pages(self, request: list[Tokens]) -> list[int]:
        return []

    def path_pages(self, request: list[Tokens]) -> list[int]:
        return []

    def evict(self, num_pages: int) -> None: ...

    def check(self) -> None: ...


def _load_one_pass(_: Path) -> Loaded:
    return Loaded(OnePass, importlib.import_module("numpy").__version__)


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(NATIVE, "**Ramify**, radix tree, as installed (compiled)", load_native, NATIVE),
        Entry(OURS, "**Ramify**, radix tree, plain Python", load_radix),
        Entry("ramify-subscribed", "Ramify, radix, with an event subscriber", load_subscribed),
        Entry("ramify-forgetful", "Ramify, radix, nothing remembered of evictions", load_forgetful),
        Entry("ramify-lru", "Ramify, radix, as the peers: lru, nothing remembered", load_lru),
        Entry(
            "ramify-hash-native",
            "Ramify, hash index, as installed (compiled)",
            partial(load_native, index="hash"),
            NATIVE,
        ),
        Entry("ramify-hash", "Ramify, hash index", load_hash),
        Entry("phyai", "phyai (C++)", load_phyai),
        Entry("sglang-rust", "SGLang, Rust core", partial(load_sglang, kind="rust")),
        Entry("sglang-radix", "SGLang RadixCache (Python)", partial(load_sglang, kind="radix")),
        Entry("sglang-python", "SGLang unified, Python core", partial(load_sglang, kind="python")),
        Entry("mini-sglang", "mini-sglang", load_mini_sglang),
        Entry("vllm-sha256", "vLLM, sha256", partial(load_vllm, algorithm="sha256")),
        Entry("vllm-xxhash", "vLLM, xxhash", partial(load_vllm, algorithm="xxhash")),
        Entry("atom", "ATOM", load_atom),
        Entry("one-pass", "(no cache: one pass over the bytes in numpy)", _load_one_pass),
    )
}
