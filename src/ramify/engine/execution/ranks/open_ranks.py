"""Open the ranks of an engine: what cannot be shared is refused, processes are started, ranks meet."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ramify.attention.paged import PagedBackend
from ramify.config import EngineConfig, ResolvedConfig
from ramify.engine.execution.ranks.rank_processes import RankProcesses
from ramify.engine.execution.ranks.rank_runner import LeadRunner
from ramify.engine.execution.ranks.rank_spec import RankSpec, sharded
from ramify.errors import ConfigError, RankLostError
from ramify.kv.pool import KVPool
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.sharding import check_divisible
from ramify.models.decoders.decoder import CausalDecoder
from ramify.models.ops.registry import OpsFactory
from ramify.models.ops.sharded.rank_group import LEAD, RankGroup, connect


class Ranks:
    """The ranks of an engine, as rank 0 has them."""

    def __init__(self, processes: RankProcesses, group: RankGroup) -> None:
        self._processes, self._group = processes, group

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1 and up."""
        return self._processes.process_ids

    def operations(self, inner: OpsFactory, config: ModelConfig) -> OpsFactory:
        """Makes the operations of rank 0 over those of its device."""
        return sharded(inner, config, self._group)

    def runner(self, decoder: CausalDecoder, pool: KVPool, attention: PagedBackend) -> LeadRunner:
        """The runner of rank 0; waits for the other ranks to load.

        Raises:
            RankLostError: a rank has ended before.
        """
        self._processes.wait_until_loaded()
        return LeadRunner(decoder, pool, attention, self._group, self._processes)

    def weight_bytes(self) -> list[int]:
        """Bytes of the weights of ranks 1 and up."""
        return self._processes.wait_until_loaded()

    def on_loss(self, call: weakref.WeakMethod[Callable[[RankLostError], None]]) -> None:
        """Call this, while its object lives, when a rank has gone; in another thread."""
        self._processes.on_loss(call)

    def close(self) -> None:
        """End the processes of the other ranks."""
        self._processes.close()


def check_ranks(requested: EngineConfig, config: ModelConfig, device: torch.device) -> None:
    """Refuse a number of ranks that this model, machine or engine cannot have.

    Raises:
        ConfigError: names the value, the limit and the way out.
    """
    size = requested.ranks.tensor_parallel_size
    if size == 1:
        return
    check_divisible(config, size)
    if device.type == "cuda":
        first, count = device.index or 0, torch.cuda.device_count()
        if first + size > count:
            raise ConfigError(
                f"tensor_parallel_size={size} from {device} on needs cuda:{first + size - 1}, but the last "
                f"of {count} devices is cuda:{count - 1}; use at most {count - first}"
            )
    if requested.tiers.is_used:
        raise ConfigError(
            f"cache tiers copy pages of one process, and tensor_parallel_size={size}; leave the options "
            "of the tiers out, or use 1"
        )


def open_ranks(
    path: Path, config: ResolvedConfig, device: torch.device, *, ops: str, attention: str
) -> Ranks:
    """Start the processes of ranks 1 and up, and meet them. They load while rank 0 does.

    On a CPU the threads of this process become fewer, so that all ranks have a core for each.

    Args:
        path: of the checkpoint.
        ops, attention: names of the implementations.

    Raises:
        RankLostError: a process has ended before.
        ConfigError: torch cannot connect processes.
    """
    ranks = config.requested.ranks
    size, timeout_s = ranks.tensor_parallel_size, ranks.rank_timeout_s
    if device.type == "cpu":
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(min(torch.get_num_threads(), max(1, num_cores // size)))
    call_limit_s = None if device.type == "cpu" else timeout_s
    processes = RankProcesses(size, timeout_s=timeout_s, call_limit_s=call_limit_s)
    specs = [
        RankSpec(
            rank=rank,
            size=size,
            path=path,
            config=config,
            device=_device_of(device, rank),
            ops=ops,
            attention=attention,
            folder=processes.folder,
            threads=torch.get_num_threads(),
            timeout_s=timeout_s,
        )
        for rank in range(1, size)
    ]
    try:
        processes.start(specs)
        exact = config.requested.attention.exact
        meet = partial(
            connect, processes.folder, LEAD, size, device, exact=exact, timeout_s=timeout_s
        )
        return Ranks(processes, processes.run(meet))
    except BaseException:
        processes.close()
        raise


def _device_of(first: torch.device, rank: int) -> str:
    return str(first) if first.type == "cpu" else f"{first.type}:{(first.index or 0) + rank}"
