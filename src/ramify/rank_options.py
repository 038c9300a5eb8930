"""Options of tensor parallelism: a model that several processes share, each with a part of every matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ramify.errors import ConfigError

MAX_RANKS = 64
MAX_TIMEOUT_S = 1e6  # 11 days


def _option(default: Any, help: str) -> Any:  # noqa: A002 - the word of typer and argparse
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSection:
    """Processes that share a model: one for each device, or on a CPU for tests."""

    tensor_parallel_size: int = _option(
        1,
        "Processes (ranks) that share the model: each has its part of every matrix and of the K/V, on a device of "
        "its own from `device` on, or a part of the CPU's cores. The number of attention heads must be a multiple.",
    )
    # the first step compiles kernels, on some ranks later than on others
    rank_timeout_s: float = _option(
        120.0,
        "The engine ends when a rank keeps the others waiting for longer, in seconds.",
    )

    def validate(self) -> None:
        """Raise ConfigError for a value outside its range, naming it, the limit, the way out."""
        size, timeout_s = self.tensor_parallel_size, self.rank_timeout_s
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_RANKS:
            raise ConfigError(
                f"tensor_parallel_size={size!r} but it must be an integer of 1 to {MAX_RANKS}"
            )
        is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
        if not is_number or not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"rank_timeout_s={timeout_s!r} but it must be above 0 and at most {MAX_TIMEOUT_S:g} seconds"
            )
