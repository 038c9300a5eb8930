"""Linear layers in torch: the ways to compute x @ weight.T + bias, and the choice of a batch-invariant one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exactness import (
    BLOCK_ROWS,
    EXTRA_ROWS,
    FP32_ROW_MULTIPLE,
    MANY_ROWS,
    PROBE_ROW_COUNTS,
    Exactness,
    ProbeStore,
    batch_variant_row_counts,
    dtype_name,
    matmul_needs_blocks,
    pad_to_tiles,
)
from ramify.errors import ConfigError
from ramify.models.ops.probe import cancelled_rows, random_rows
from ramify.models.ops.protocol import RowOp
from ramify.models.ops.quantized import QuantizedWeight, Weight, as_tensor

# The number of rows for which oneDNN lays out packed weights. Of 1, 16, 64 and 512, 16 was never
# slower beyond noise, at any number of rows (measured, AVX2, 896 x 4864 and 4864 x 896).
ONEDNN_PACK_ROWS = 16
# Row counts to probe, fewer for large matrices; each set has a count that is split between threads.
PROBE_COUNTS = (
    PROBE_ROW_COUNTS,
    (*range(1, 10), 11, 15, 16, 24, 33, 127, 512),
    (1, 2, 5, 16, 64),
)
# Per matrix: about 1 s on two AVX2 cores, once per machine.
PROBE_MULTIPLY_ADDS = 80e9


class TorchLinear:
    """x @ weight.T + bias by one strategy of `TORCH_LINEARS`."""

    def __init__(self, weight: Weight, bias: Tensor | None = None, *, strategy: str) -> None:
        """Bind the weight to a strategy; `onednn` copies it into its layout.

        Args:
            weight: [out_width, in_width], any float dtype; if quantised, dequantised in each call.
            bias: [out_width] of the same dtype.
            strategy: a key of `TORCH_LINEARS`.

        Raises:
            ConfigError: the strategy is unknown, or does not support this weight.
        """
        if strategy not in TORCH_LINEARS:
            raise ConfigError(
                f"linear strategy {strategy!r} is unknown; known are {', '.join(TORCH_LINEARS)}"
            )
        reason = strategy_supports(strategy, weight)
        if reason is not None:
            raise ConfigError(f"linear strategy {strategy!r} cannot be used here: {reason}")
        self.strategy = strategy
        self.out_width = len(weight)
        self._run = TORCH_LINEARS[strategy](weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_width] -> [rows, out_width], in the dtype of the weight."""
        if x.shape[0] == 0:
            return x.new_empty((0, self.out_width))
        return self._run(x)


def _onednn(weight: Weight, bias: Tensor | None) -> RowOp:
    matrix = as_tensor(weight).contiguous()
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(matrix, ONEDNN_PACK_ROWS)  # noqa: SLF001

    def run(x: Tensor) -> Tensor:
        out = torch.ops.mkldnn._linear_pointwise(x, packed_weight, bias, "none", [], "")  # noqa: SLF001
        return cast(Tensor, out)

    return run


def _padded(weight: Weight, bias: Tensor | None) -> RowOp:
    def run(x: Tensor) -> Tensor:
        missing = -x.shape[0] % FP32_ROW_MULTIPLE
        if missing == 0:
            return F.linear(x, as_tensor(weight), bias)
        return F.linear(F.pad(x, (0, 0, 0, missing)), as_tensor(weight), bias)[: x.shape[0]]

    return run


def _blocks(weight: Weight, bias: Tensor | None) -> RowOp:
    weight = pad_to_tiles(weight) if isinstance(weight, Tensor) else weight

    def run(x: Tensor) -> Tensor:
        matrix, num_rows = pad_to_tiles(as_tensor(weight)), x.shape[0]
        blocks = F.pad(pad_to_tiles(x), (0, 0, 0, -num_rows % BLOCK_ROWS)).split(BLOCK_ROWS)
        return torch.cat([F.linear(block, matrix, bias) for block in blocks])[:num_rows]

    return run


def _row_by_row(weight: Weight, bias: Tensor | None) -> RowOp:
    def run(x: Tensor) -> Tensor:
        matrix = as_tensor(weight)
        return torch.cat([F.linear(row, matrix, bias) for row in x.split(1)])

    return run


def _plain(weight: Weight, bias: Tensor | None) -> RowOp:
    return lambda x: F.linear(x, as_tensor(weight), bias)


TORCH_LINEARS: dict[str, Callable[[Weight, Tensor | None], RowOp]] = {
    # oneDNN with weights packed once
    "onednn": _onednn,
    # F.linear, rows padded to a multiple of FP32_ROW_MULTIPLE
    "padded": _padded,
    # F.linear of BLOCK_ROWS rows per call, the last ones padded: always one shape, so one kernel
    "blocks": _blocks,
    # F.linear per row: independent by construction, reads the weight once per row
    "row_by_row": _row_by_row,
    # F.linear: rows independent in bfloat16 without AMX, not in float32
    "plain": _plain,
}


def strategy_supports(strategy: str, weight: Weight) -> str | None:
    """None if the strategy supports this weight, else the reason."""
    return onednn_supports(weight) if strategy == "onednn" else None


def strategy_order(dtype: torch.dtype) -> tuple[str, ...]:
    """Strategies to try for this dtype on this machine, the fastest first."""
    if matmul_needs_blocks(dtype):
        return ("blocks",)
    if dtype == torch.bfloat16:
        return ("onednn", "plain", "blocks") if has_bf16_instructions() else ("plain", "blocks")
    # No `plain` in float32: its rows are known to differ, and a probe might miss that.
    return "onednn", "padded", "blocks"


def has_bf16_instructions() -> bool:
    """Whether this CPU has AVX-512-BF16, without which oneDNN is slow in bfloat16."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())


def onednn_supports(weight: Weight) -> str | None:
    """None if oneDNN can pack this weight, else the reason.

    The two operations are private to torch, so their existence and their result are both checked.
    """
    if isinstance(weight, QuantizedWeight):
        return f"int{weight.format.bits} codes: oneDNN would keep a dequantised copy"
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.device.type != "cpu":
        return (
            f"oneDNN packs float32 and bfloat16 on cpu, not {weight.dtype} on {weight.device.type}"
        )
    if not (torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)):
        return "torch was built without oneDNN, or it is switched off"
    for name in ("_reorder_linear_weight", "_linear_pointwise"):
        if not hasattr(torch.ops.mkldnn, name):
            return f"this torch has no mkldnn::{name}"
    sample = weight[: min(64, weight.shape[0])].contiguous()
    x = (torch.ones(3, weight.shape[1]) / math.sqrt(weight.shape[1])).to(weight.dtype)
    try:
        result = _onednn(sample, None)(x).float()
    except RuntimeError as error:
        return f"torch refuses to pack: {str(error).splitlines()[0]}"
    expected = F.linear(x.float(), sample.float())
    rounding = 1e-5 if weight.dtype == torch.float32 else 1e-2
    tolerance = rounding * float(expected.abs().max())
    if not torch.allclose(result, expected, rtol=10 * rounding, atol=tolerance):
        return "the packed product is wrong"
    return None


def choose_torch_linear(
    weight: Weight,
    bias: Tensor | None,
    *,
    exact: bool,
    store: ProbeStore,
    candidates: Sequence[str] | None = None,
) -> tuple[TorchLinear, Exactness]:
    """Bind the weight to the first strategy that passes the probe; returns it and the verdict.

    Args:
        exact: False takes the fastest strategy that supports the weight, without a probe.
        candidates: keys of `TORCH_LINEARS` to try in this order before `row_by_row`; None means
            `strategy_order(weight.dtype)`.
    """
    operation = "linear" if bias is None else "linear with bias"
    shape = (weight.shape[0], weight.shape[1])
    if candidates is None:
        candidates = strategy_order(weight.dtype)
    reasons = {name: strategy_supports(name, weight) for name in candidates}
    order = [name for name, reason in reasons.items() if reason is None]
    skipped = [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]
    if not exact:
        strategy = "onednn" if "onednn" in order else "plain"
        verdict = Exactness(operation, shape, dtype_name(weight.dtype), strategy, "exact=False")
        return TorchLinear(weight, bias, strategy=strategy), verdict
    # Every strategy passes on a constant matrix: do not store such a verdict.
    if is_constant(weight):
        store = ProbeStore(None)
    # A bias would hide the sums that cancel.
    probe_bias = None if bias is None else torch.zeros_like(bias)
    # Packing is expensive: reuse the linear that the probe built.
    built: dict[str, TorchLinear] = {}

    def probe() -> tuple[str, str]:
        failures = list(skipped)
        for strategy in order:
            built.clear()  # never two packed copies of a large matrix
            built[strategy] = TorchLinear(weight, probe_bias, strategy=strategy)
            differing = _batch_variant_counts(built[strategy], weight)
            if not differing:
                return strategy, "; ".join([*failures, "rows agree at every count tried"])
            failures.append(f"{strategy}: rows differ at {', '.join(map(str, differing))} rows")
        return "row_by_row", "; ".join(failures)

    verdict = store.verdict(
        operation, shape, weight.dtype, probe, strategies=(*order, "row_by_row")
    )
    linear = built.get(verdict.strategy) if bias is None else None
    return linear or TorchLinear(weight, bias, strategy=verdict.strategy), verdict


def is_constant(weight: Weight) -> bool:
    """Whether the first 8 rows have fewer than 8 distinct values, on which every strategy passes a probe."""
    values = weight.codes if isinstance(weight, QuantizedWeight) else weight
    return len(values[:8].unique()) < 8


def _batch_variant_counts(linear: TorchLinear, weight: Weight) -> tuple[int, ...]:
    """The row counts at which the linear is not batch-invariant; in bfloat16 tried on sums that cancel."""
    counts = probe_counts(weight)
    rows = random_rows(max(counts) + EXTRA_ROWS, weight.shape[1], weight.dtype).to(weight.device)
    if weight.dtype == torch.bfloat16:
        rows = cancelled_rows(rows, as_tensor(weight))
    return batch_variant_row_counts(linear, rows, counts)


def probe_counts(weight: Weight) -> tuple[int, ...]:
    """The largest set of PROBE_COUNTS that is affordable for a matrix of this size."""
    affordable = [
        counts
        for counts in PROBE_COUNTS
        if sum(n + max(n, MANY_ROWS) for n in counts) * weight.numel() <= PROBE_MULTIPLY_ADDS
    ]
    return affordable[0] if affordable else PROBE_COUNTS[-1]
