"""Ranks of tensor parallelism as threads of one process: sums and gathers without a network."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ramify.attention.backend import backend_class
from ramify.attention.exactness import ProbeStore
from ramify.engine.execution.ranks.rank_runner import RankRunner
from ramify.kv.pool import KVPool
from ramify.models.configs.sharding import rank_config
from ramify.models.kv_cache_spec import attention_spec, build_attention, kv_layout
from ramify.models.loader import load_model, read_config
from ramify.models.ops.registry import OPS
from ramify.models.ops.sharded.rank_group import RankGroup
from ramify.models.ops.sharded.sharded_ops import ShardedOps

T = TypeVar("T")
LIMIT_S = 60.0  # for the slowest rank


class Done:
    def wait(self) -> None:
        """The call has ended already."""


class ThreadRank:
    """A process group, as far as `RankGroup` uses one."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._parts, self._barrier = rank, parts, barrier

    def _allgather_base(self, gathered: Tensor, part: Tensor) -> Done:
        self._parts[self._rank] = part
        self._barrier.wait(LIMIT_S)
        torch.cat(self._parts, out=gathered)
        self._barrier.wait(LIMIT_S)
        return Done()


class RankThreads:
    """The ranks of a model, each in a thread, with a pool and attention of its own."""

    def __init__(
        self,
        path: Path,
        size: int,
        *,
        ops: str,
        num_pages: int,
        page_size: int,
        dtype: str = "float32",
        exact: bool = True,
        quantize: str = "off",
    ) -> None:
        self._threads = ThreadPoolExecutor(size)
        parts, self._barrier = [None] * size, threading.Barrier(size)
        config = read_config(path)

        def load(rank: int) -> RankRunner:
            transport: Any = ThreadRank(rank, parts, self._barrier)
            group = RankGroup(transport, rank, size, in_order=True)
            sharded: Any = OPS[ops]
            if size > 1:
                sharded = partial(ShardedOps, config=config, group=group, inner=OPS[ops])
            decoder = load_model(
                path,
                dtype=dtype,
                ops=sharded,
                exact=exact,
                quantize=quantize,
                store=ProbeStore(None),
            )
            own = rank_config(config, size)
            spec = attention_spec(own, page_size=page_size, dtype=decoder.dtype, exact=exact)
            # No other has latent attention with bits that depend on nothing else.
            name = "cpu" if ops == "cpu" or config.mla is not None else "blocked"
            backend = backend_class(name)
            attention = build_attention(own, spec, backend(spec, torch.device("cpu")))
            pool = KVPool(kv_layout(own), num_pages, page_size, dtype=decoder.dtype)
            return RankRunner(decoder, pool, attention, group)

        # One after the other: they take up the probes' time of one.
        self.runners = [load(rank) for rank in range(size)]

    def on_all(self, call: Callable[[RankRunner], T]) -> list[T]:
        """Results of a call on the runners of all ranks, at the same time."""

        def run(runner: RankRunner) -> T:
            try:
                return call(runner)
            except BaseException:
                self._barrier.abort()
                raise

        return list(self._threads.map(run, self.runners))
