"""`RankGroup`: the ranks of tensor parallelism, and the sums and gathers that they make together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ramify.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

LEAD = 0  # the rank that samples


def share(total: int, rank: int, size: int) -> tuple[int, int]:
    """First index of a rank's share of `total`, and the one behind its last; shares differ by 1 at most."""
    return total * rank // size, total * (rank + 1) // size


class RankGroup:
    """One rank's view of all ranks. Every rank makes the same calls in the same order.

    Args:
        process_group: of `torch.distributed`.
        in_order: sums are in rank order, rounded once from float32: they depend neither on how a library
            adds nor on the number of rows.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, rank: int, size: int, *, in_order: bool
    ) -> None:
        self._process_group, self.rank, self.size = process_group, rank, size
        self.in_order = in_order

    def share(self, total: int) -> tuple[int, int]:
        """See `share`: that of this rank."""
        return share(total, self.rank, self.size)

    def add_up(self, part: Tensor) -> Tensor:
        """Sum over ranks of tensors of one shape and dtype: the same bits on every rank. May overwrite `part`."""
        if not part.numel():
            return part
        if not self.in_order:
            self._process_group.allreduce([part]).wait()
            return part
        parts = self._gather(part)
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def join_columns(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Columns of all ranks side by side, [rows, sum(counts)].

        Args:
            part: [rows, counts[rank]].
        """
        if not len(part):
            return part
        widest = max(counts)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        parts = self._gather(padded.contiguous())
        return torch.cat([x[:, :n] for x, n in zip(parts, counts, strict=True)], 1)

    def any(self, flags: Tensor) -> Tensor:
        """Whether a flag is true on any rank: [n] bool."""
        if not len(flags):
            return flags
        any_rank: Tensor = self._gather(flags.to(torch.uint8)).bool().any(0)
        return any_rank

    def _gather(self, part: Tensor) -> Tensor:
        """Tensors of all ranks, [size, *shape], by rank."""
        part = part.contiguous()
        gathered = part.new_empty((self.size * len(part), *part.shape[1:]))
        # Of the public calls each needs the default group, of which a process has one.
        self._process_group._allgather_base(gathered, part).wait()  # noqa: SLF001
        by_rank: Tensor = gathered.unflatten(0, (self.size, -1))
        return by_rank


def connect(
    folder: Path, rank: int, size: int, device: torch.device, *, exact: bool, timeout_s: float
) -> RankGroup:
    """Meet the other ranks; waits for them.

    No default group of `torch.distributed` is made: a program may have its own, and several engines.

    Args:
        folder: the same for all ranks, on one machine; empty before.
        timeout_s: of this call, and of every sum and gather.

    Raises:
        ConfigError: torch cannot connect processes.
        RuntimeError: another rank did not come.
    """
    import torch.distributed as dist

    if not dist.is_available():
        raise ConfigError(
            f"tensor_parallel_size={size} needs torch.distributed, which this torch is built without; "
            "use 1, or another build of torch"
        )
    # Half of what follows has no public type.
    c10d: Any = dist
    timeout = timedelta(seconds=timeout_s)
    store = c10d.FileStore(str(folder / "ranks"), size)
    store.set_timeout(timeout)
    if device.type == "cuda":
        # NCCL's own answer to a rank that hangs is to end the process. The engine's comes before
        # (`RankProcesses`), and 2 is to end the communicator only.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = 10 * timeout  # noqa: SLF001
        group = c10d.ProcessGroupNCCL(store, rank, size, options)
    else:
        options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        local = c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        options._devices = [local]  # noqa: SLF001
        group = c10d.ProcessGroupGloo(store, rank, size, options)
    # Gloo adds float32 as it likes too, and in bfloat16 it rounds every partial sum.
    return RankGroup(group, rank, size, in_order=exact or device.type == "cpu")
