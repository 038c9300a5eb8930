"""Ramify behind the benchmark's protocol: both indices, and with an event subscriber."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ramify
from core.contract import AbsentError, Loaded, Tokens, round_up
from ramify.cache import CacheKey, Lease, PrefixCache


@dataclass(slots=True)
class RamifyRequest:
    """Keys built before the clock starts, as a tokenizer that packs its ids would pass them."""

    prompt: CacheKey
    whole: CacheKey
    num_pages: int
    lease: Lease = field(init=False)
    hit_pages: Sequence[int] = field(init=False)  # the ids of the hit, as the lease has them
    private: Sequence[int] = field(init=False)


class RamifyCore:
    """`acquire`, `reserve`, `publish` and `release`, and nothing else on the clock."""

    def __init__(
        self, num_pages: int, page_size: int, *, subscribed: bool = False, **options: Any
    ) -> None:
        self.cache = PrefixCache(num_pages, page_size, **options)
        self._page_size = page_size
        # The place to change when the interface of events does: what makes the cache compute and
        # queue them, and what a reader does after every request.
        self._take_events = _subscribe(self.cache) if subscribed else None

    def prepare(self, prompt: Tokens, output: Tokens) -> RamifyRequest:
        return RamifyRequest(
            CacheKey(prompt.tobytes()),
            CacheKey(np.concatenate([prompt, output]).tobytes()),
            round_up(len(prompt) + len(output), self._page_size),
        )

    def match(self, request: RamifyRequest) -> int:
        request.lease = lease = self.cache.acquire(request.prompt)
        request.hit_pages = lease.pages
        return lease.num_tokens

    def alloc(self, request: RamifyRequest) -> None:
        request.private = self.cache.reserve(request.num_pages - len(request.hit_pages))

    def insert(self, request: RamifyRequest) -> None:
        cache, private = self.cache, request.private
        lease = cache.publish(request.lease, request.whole, private)
        taken = (lease.num_tokens - request.lease.num_tokens) // self._page_size
        cache.release(lease, private[taken:])
        if self._take_events is not None:
            self._take_events()

    def read_pages(self, request: RamifyRequest) -> list[int]:
        return list(request.hit_pages)

    def path_pages(self, request: RamifyRequest) -> list[int]:
        whole = len(request.whole) // self._page_size
        return [*request.hit_pages, *request.private][:whole]

    def evict(self, num_pages: int) -> None:
        self.cache.evict(num_pages)

    def check(self) -> None:
        self.cache.check()


def _subscribe(cache: Any) -> Callable[[], object]:
    take: Callable[[], object] = cache.subscribe().take
    return take


def load_radix(_: Path) -> Loaded:
    """The radix tree with the default options of `PrefixCache`."""
    return Loaded(RamifyCore, ramify.__version__)


def load_hash(_: Path) -> Loaded:
    """The flat index of chained page hashes."""
    _require_option("index")
    return Loaded(partial(RamifyCore, index="hash"), ramify.__version__)


def load_subscribed(_: Path) -> Loaded:
    """The radix tree while a subscriber takes its events: page hashes are computed."""
    if not hasattr(PrefixCache, "subscribe"):
        raise AbsentError("this version of PrefixCache has no subscribe()")
    return Loaded(partial(RamifyCore, subscribed=True), ramify.__version__)


def load_forgetful(_: Path) -> Loaded:
    """The radix tree with `ghost_pages=0`, to measure what explanations cost the hot path."""
    _require_option("ghost_pages")
    return Loaded(partial(RamifyCore, ghost_pages=0), ramify.__version__)


def load_native(folder: Path, **options: Any) -> Loaded:
    """The radix tree compiled by mypyc, from the wheel that `make native` builds."""
    module_file = importlib.import_module("ramify.cache.tree").__file__ or ""
    if not module_file.endswith(".so"):
        raise AbsentError(
            f"not compiled; unpack the wheel that `make native` builds into {folder.name}/ramify-native"
        )
    return Loaded(partial(RamifyCore, **options), ramify.__version__)


def load_lru(_: Path) -> Loaded:
    """The radix tree configured like the peers: policy `lru` and no ghost pages."""
    return Loaded(partial(RamifyCore, policy="lru", ghost_pages=0), ramify.__version__)


def _require_option(name: str) -> None:
    if name not in inspect.signature(PrefixCache).parameters:
        raise AbsentError(f"this version of PrefixCache has no option {name!r}")
