"""Does an operation treat a row the same whatever rows stand beside it? Asked, not assumed.

A cache hit may not change an answer, so the bits of a row may depend neither on how many rows are
in the call nor on the place of the row among them. Libraries promise nothing of the kind. Here an
operation is tried at many row counts, and the verdict is kept per machine, library version, thread
count, shape and dtype.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# 1..16 because kernels switch there (float32 F.linear differs at 1-3, 5-7 and 9-11 rows with AVX2
# and AVX-512 alike); the others sit beside the sizes at which work is split between threads.
PROBE_ROW_COUNTS = (*range(1, 17), 24, 31, 32, 33, 64, 100, 127, 128, 257, 512)
FP32_ROW_MULTIPLE = (
    8  # float32 products: rows agree among multiples of 8 (measured, AVX2 and AVX-512)
)
EXTRA_ROWS = 9  # beyond the largest count, so that it has more than one place to stand at

RowOperation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Exactness:
    """Which way of computing one operation was chosen, and why."""

    operation: str
    shape: tuple[int, ...]  # without the rows
    dtype: str
    strategy: str
    reason: str


def batch_variant_row_counts(
    op: RowOperation, rows: Tensor, counts: Sequence[int] = PROBE_ROW_COUNTS
) -> tuple[int, ...]:
    """The row counts at which some row gets other bits than among all rows.

    Args:
        op: [n, ...] -> [n, ...]; output row i belongs to input row i.
        rows: [total, ...]; values without structure, else differences can hide.
        counts: each at least 1 and at most `total`.

    Each count is tried at the first rows and at one odd place further on.
    """
    total = rows.shape[0]
    reference = _bits(op(rows))
    differing = []
    for count in counts:
        places = {0, (5 * count + 3) % (total - count + 1)}
        for start in sorted(places):
            found = _bits(op(rows[start : start + count]))
            if not torch.equal(found, reference[start : start + count]):
                differing.append(count)
                break
    return tuple(differing)


def row_by_row(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`op` one row at a time: slow, and row-independent by construction.

    Every argument is a tensor [rows, ...]; so is the result.
    """

    def by_row(*args: Tensor) -> Tensor:
        num_rows = args[0].shape[0]
        if num_rows == 0:
            return op(*args)
        return torch.cat([op(*(arg[i : i + 1] for arg in args)) for i in range(num_rows)])

    return by_row


def _bits(values: Tensor) -> Tensor:
    """The same bytes as integers, so that NaN equals itself and 0 differs from -0."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(sizes[values.element_size()])


def machine_key() -> str:
    """Everything but shape and dtype that decides which kernels run, as one line."""
    parts = [
        platform.machine(),
        _cpu_name(),
        torch.backends.cpu.get_cpu_capability(),
        f"torch {torch.__version__}",
        f"{torch.get_num_threads()} threads",
        f"float32 {torch.get_float32_matmul_precision()}",
        f"onednn {torch.backends.mkldnn.is_available()} {torch.backends.mkldnn.enabled}",
    ]
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR"):
        if name in os.environ:
            parts.append(f"{name}={os.environ[name]}")
    return " | ".join(parts)


@functools.cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return platform.processor()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor()


class ProbeStore:
    """Verdicts of earlier probes, in memory and in one JSON file.

    The file is a convenience: if it is corrupt, unreadable or cannot be written, probes run again.
    Writes replace the file in one move, so that two processes can share it.
    """

    def __init__(self, path: Path | None) -> None:
        """Verdicts live in `path`; None keeps them in memory only."""
        self._path = path
        self._verdicts: dict[str, Exactness] = {}
        for key, verdict in self._read().items():
            self._verdicts[key] = verdict

    @classmethod
    def default(cls) -> ProbeStore:
        """The store of this user: `ramify/exactness.json` below the XDG cache directory."""
        base = os.environ.get("XDG_CACHE_HOME")
        try:
            home = Path(base) if base else Path.home() / ".cache"
        except RuntimeError:  # no home directory can be found
            return cls(None)
        return cls(home / "ramify" / "exactness.json")

    def verdict(
        self,
        operation: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        probe: Callable[[], tuple[str, str]],
        *,
        strategies: Sequence[str],
    ) -> Exactness:
        """The remembered verdict, or that of `probe`, which is then remembered.

        Args:
            probe: runs the trial and returns (strategy, reason).
            strategies: those that can be used here, in the order of preference; with others, or in
                another order, it is another question.
        """
        dtype_name = str(dtype).removeprefix("torch.")
        key = f"{machine_key()} | {operation} {'x'.join(map(str, shape))} {dtype_name}"
        key += f" of {' '.join(strategies)}"
        known = self._verdicts.get(key)
        if known is not None and known.strategy in strategies:
            return known
        strategy, reason = probe()
        verdict = Exactness(operation, tuple(shape), dtype_name, strategy, reason)
        self._verdicts[key] = verdict
        self._write()
        return verdict

    def _read(self) -> dict[str, Exactness]:
        if self._path is None:
            return {}
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
            return {key: _parse(entry) for key, entry in entries.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.info("ignoring the exactness cache %s: %s", self._path, error)
            return {}

    def _write(self) -> None:
        if self._path is None:
            return
        entries = {key: asdict(v) for key, v in {**self._read(), **self._verdicts}.items()}
        scratch: str | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(dir=self._path.parent, prefix=".exactness-")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(entries, file, indent=1, sort_keys=True)
            Path(scratch).replace(self._path)
        except OSError as error:
            logger.info("cannot write the exactness cache %s: %s", self._path, error)
            if scratch is not None:
                with contextlib.suppress(OSError):
                    Path(scratch).unlink()


def _parse(entry: dict[str, Any]) -> Exactness:
    """One entry of the file; whatever is not exactly such an entry raises."""
    shape = tuple(int(size) for size in entry["shape"])
    texts = [entry[name] for name in ("operation", "dtype", "strategy", "reason")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("an entry holds something else than text")
    operation, dtype, strategy, reason = texts
    return Exactness(operation, shape, dtype, strategy, reason)
