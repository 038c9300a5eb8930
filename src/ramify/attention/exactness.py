"""Probe whether an operation is batch-invariant on this machine, and remember the verdicts.

A cache hit must not change an answer, so the bits of a row may depend neither on the number of
rows in a call nor on its index among them. Libraries do not promise that. The probe runs an
operation at many row counts; its verdict is stored per machine, library version, thread count,
shape and dtype.
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
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

# 1..16 because libraries switch kernels there: float32 F.linear differs at 1-3, 5-7 and 9-11 rows
# with AVX2 and AVX-512. The others are near sizes at which work is split among threads.
PROBE_ROW_COUNTS = (*range(1, 17), 24, 31, 32, 33, 64, 100, 127, 128, 257, 512)
# Part of a verdict's key: a stronger probe ignores the verdicts of the version before.
PROBE_VERSION = 2
# Rows of a float32 matmul have the same bits at all multiples of 8 rows (measured: AVX2, AVX-512).
FP32_ROW_MULTIPLE = 8
# Rows of a matmul where kernels depend on their number: AMX multiplies 16 or 32 at a time.
BLOCK_ROWS = 32
# Of the instructions in /proc/cpuinfo: x86's and Arm's for vectors and matrices.
VECTOR_FLAGS = ("amx", "asimd", "avx", "bf16", "f16c", "fma", "fphp", "i8mm", "sme", "sve")
TILE_WIDTH = 32  # elements of a row that AMX reads at a time in bfloat16
# A small row count is tried at several offsets, which cover `MANY_ROWS` rows: one output in thousands
# shows a difference. `FEW_ROWS` where a row of the result has `WIDE` elements or more.
MANY_ROWS, FEW_ROWS, WIDE = 64, 16, 2**15
EXTRA_ROWS = 9  # beyond the largest count, so that it too is tried at two offsets
CPU = torch.device("cpu")
BATCHED, ROW_BY_ROW = "batched", "row_by_row"  # strategies: all rows in one call, a call per row


@dataclass(frozen=True, slots=True)
class Exactness:
    """The strategy chosen for an operation, and why."""

    operation: str
    shape: tuple[int, ...]  # without the rows
    dtype: str
    strategy: str
    reason: str


def batch_variant_row_counts(
    op: Callable[[Tensor], Tensor], rows: Tensor, counts: Sequence[int] = PROBE_ROW_COUNTS
) -> tuple[int, ...]:
    """The row counts at which a row's bits differ from those in a call of all rows.

    Args:
        op: [n, ...] -> [n, ...]; output row i belongs to input row i.
        rows: [total, ...], random: structured values can hide differences.
        counts: each from 1 to `total`.

    Each count is tried at offset 0 and further on, a small count at several offsets.
    """
    total = rows.shape[0]
    reference = _bits(op(rows))
    num_rows = MANY_ROWS if reference[0].numel() < WIDE else FEW_ROWS
    differing = []
    for count in counts:
        steps = range(5 * count + 3, 5 * count + 3 + max(count, num_rows), count)
        for start in sorted({0, *(step % (total - count + 1) for step in steps)}):
            bits = _bits(op(rows[start : start + count]))
            if not torch.equal(bits, reference[start : start + count]):
                differing.append(count)
                break
    return tuple(differing)


def probe_batch_invariance(
    op: Callable[..., Tensor],
    args: Sequence[Tensor],
    counts: Sequence[int],
    strategy: str = BATCHED,
) -> tuple[str, str]:
    """The strategy of a row operation, `strategy` or else `ROW_BY_ROW`, and the reason.

    Args:
        op: called with slices of all `args`; they and its result are tensors [rows, ...].
        counts: as for `batch_variant_row_counts`.
    """

    def run(indices: Tensor) -> Tensor:
        rows = slice(int(indices[0]), int(indices[-1]) + 1)
        return op(*(arg[rows] for arg in args))

    differing = batch_variant_row_counts(run, torch.arange(len(args[0])), counts)
    if not differing:
        return strategy, "rows agree at every count tried"
    return ROW_BY_ROW, f"{strategy}: rows differ at {', '.join(map(str, differing))} rows"


def row_by_row(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `op` to run one row per call: slow, and batch-invariant by construction.

    All arguments and the result are tensors [rows, ...].
    """

    def by_row(*args: Tensor) -> Tensor:
        # `split` of no rows is one part without rows
        return torch.cat([op(*row) for row in zip(*(arg.split(1) for arg in args), strict=True)])

    return by_row


def matmul_needs_blocks(dtype: torch.dtype, device: torch.device = CPU) -> bool:
    """Whether torch's matmul kernel depends on the number of rows, where a probe may miss it.

    True for bfloat16 on a CPU with AMX: of 60 random matrices of 14 to 40 columns, a probe missed it for 15
    (measured). Calls of `BLOCK_ROWS` rows all have one kernel.
    """
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return dtype == torch.bfloat16 and device.type == "cpu" and has_amx()


def pad_to_tiles(rows: Tensor) -> Tensor:
    """Rows [..., width] with zeros up to whole tiles where `matmul_needs_blocks`, else as they are.

    A tile that ends beyond a row holds the head of the next row, times zero: NaN if that is not finite.
    """
    missing = -rows.shape[-1] % TILE_WIDTH
    needs_tiles = missing and matmul_needs_blocks(rows.dtype, rows.device)
    return F.pad(rows, (0, missing)) if needs_tiles else rows


def _bits(values: Tensor) -> Tensor:
    """The bytes as integers: NaN equals NaN, and 0 differs from -0."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(sizes[values.element_size()])


def machine_key() -> str:
    """Key of probe and machine: what selects a library's kernels beside shape and dtype, as one line."""
    threads = f"{torch.get_num_threads()} threads"
    return " | ".join([f"probe {PROBE_VERSION}", *machine_parts(), threads])


def machine_parts() -> list[str]:
    """What selects a library's kernels beside shape, dtype and the number of threads."""
    parts = [
        platform.machine(),
        _cpu_name(),
        _vector_instructions(),
        torch.backends.cpu.get_cpu_capability(),
        f"torch {torch.__version__}",
        f"float32 {torch.get_float32_matmul_precision()}",
        f"onednn {torch.backends.mkldnn.is_available()} {torch.backends.mkldnn.enabled}",
    ]
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "RAMIFY_BF16_TILES"):
        if name in os.environ:
            parts.append(f"{name}={os.environ[name]}")
    return parts


@functools.cache
def _cpu_fields() -> dict[str, str]:
    """What Linux says of the first processor; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cpu_name() -> str:
    return _cpu_fields().get("model name") or platform.processor()


def _vector_instructions() -> str:
    """A hypervisor may keep some from a processor, whose name stays."""
    fields = _cpu_fields()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return " ".join(sorted(flag for flag in flags if flag.startswith(VECTOR_FLAGS)))


def cache_folder() -> Path | None:
    """`ramify` in the XDG cache directory; None where there is no home directory."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "ramify"


class ProbeStore:
    """Verdicts of earlier probes, in memory and in a JSON file.

    If the file is corrupt, unreadable or cannot be written, probes run again. Writes replace the
    file atomically, so that several processes can share it.
    """

    def __init__(self, path: Path | None, device: str = "") -> None:
        """Read the verdicts of `path`; None keeps verdicts in memory only.

        Args:
            device: part of every key; empty for the CPU.
        """
        self._path, self._device = path, device
        self._verdicts = self._read()

    @classmethod
    def default(cls) -> ProbeStore:
        """The user's store: `exactness.json` in `cache_folder`."""
        folder = cache_folder()
        return cls(None if folder is None else folder / "exactness.json")

    def on(self, device: torch.device) -> ProbeStore:
        """The verdicts of operations on a device, apart from those of the CPU and of other devices."""
        if device.type == "cpu":
            return self
        name = device.type
        if name == "cuda":
            name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
        return ProbeStore(self._path, f" | {name}")

    def verdict(
        self,
        operation: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        probe: Callable[[], tuple[str, str]],
        *,
        strategies: Sequence[str],
    ) -> Exactness:
        """Look up the verdict; if there is none, run `probe` and store its verdict.

        Args:
            probe: returns (strategy, reason).
            strategies: the usable strategies in order of preference; part of the key.
        """
        key = f"{machine_key()}{self._device} | {operation} {'x'.join(map(str, shape))} {dtype_name(dtype)}"
        key += f" of {' '.join(strategies)}"
        stored = self._verdicts.get(key)
        if stored is not None and stored.strategy in strategies:
            return stored
        strategy, reason = probe()
        verdict = Exactness(operation, tuple(shape), dtype_name(dtype), strategy, reason)
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
    """Parse an entry of the file; raises for anything malformed."""
    shape = tuple(int(size) for size in entry["shape"])
    texts = [entry[name] for name in ("operation", "dtype", "strategy", "reason")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("an entry must hold strings")
    operation, dtype, strategy, reason = texts
    return Exactness(operation, shape, dtype, strategy, reason)


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype as `Exactness.dtype` writes it: `float32`, not `torch.float32`."""
    return str(dtype).removeprefix("torch.")
