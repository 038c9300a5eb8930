"""The layers of a dense decoder, in forms whose rows can be kept independent of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exact import (
    ROW_COUNTS,
    SPARE_ROWS,
    Exactness,
    ProbeStore,
    differing_row_counts,
    rowwise,
)
from ramify.errors import ConfigError
from ramify.models.config import RopeConfig

PAD_ROWS = 8  # float32 F.linear: rows agree among all multiples of 8 (measured, AVX2 and AVX-512)
TILE_ROWS = 16
# oneDNN picks the layout of packed weights for a number of rows. Of 1, 16, 64 and 512, 16 was never
# slower by more than the noise, at any number of rows (measured, AVX2, 896 x 4864 and back).
PACK_ROWS = 16
# Large matrices are tried at fewer counts, each set with one that is split between threads.
PROBE_COUNTS = (
    ROW_COUNTS,
    (*range(1, 10), 11, 15, 16, 24, 33, 127, 512),
    (1, 2, 5, 16, 64),
)
PROBE_MULTIPLY_ADDS = 80e9  # per matrix: about 1 s on two AVX2 cores, once per machine


class Linear:
    """x @ weight.T + bias, by one of the ways in `LINEAR_STRATEGIES`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, strategy: str) -> None:
        """Take the weight as the strategy wants it; `packed` copies it.

        Args:
            weight: [out_width, in_width], any float dtype; not copied except by `packed`.
            bias: [out_width] of the same dtype.
            strategy: a key of `LINEAR_STRATEGIES`.

        Raises:
            ConfigError: no such strategy, or it cannot be used with this weight.
        """
        if strategy not in LINEAR_STRATEGIES:
            raise ConfigError(
                f"linear strategy {strategy!r} is unknown; known are {', '.join(LINEAR_STRATEGIES)}"
            )
        if strategy == "packed":
            reason = why_not_packed(weight)
            if reason is not None:
                raise ConfigError(f"linear strategy 'packed' cannot be used here: {reason}")
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)  # noqa: SLF001
        self.strategy = strategy
        self.out_width = weight.shape[0]
        self._run = LINEAR_STRATEGIES[strategy]
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_width] -> [rows, out_width], in the dtype of the weight."""
        if x.shape[0] == 0:
            return x.new_empty((0, self.out_width))
        return self._run(x, self._weight, self._bias)


def _packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))  # noqa: SLF001


def _padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    missing = -x.shape[0] % PAD_ROWS
    if missing == 0:
        return F.linear(x, weight, bias)
    return F.linear(F.pad(x, (0, 0, 0, missing)), weight, bias)[: x.shape[0]]


def _tiled(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    missing = -x.shape[0] % TILE_ROWS
    tiles = F.pad(x, (0, 0, 0, missing)).split(TILE_ROWS)
    return torch.cat([F.linear(tile, weight, bias) for tile in tiles])[: x.shape[0]]


def _single(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.cat([F.linear(row, weight, bias) for row in x.split(1)])


def _unpadded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


LINEAR_STRATEGIES: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "packed": _packed,  # weights laid out for oneDNN once, float32 on CPU only
    "padded": _padded,  # rows filled up to a multiple of PAD_ROWS
    "tiled": _tiled,  # calls of exactly TILE_ROWS rows
    "single": _single,  # row by row: cannot fail, and reads the weight once per row
    "unpadded": _unpadded,  # as it comes: independent in bfloat16, not in float32
}


def why_not_packed(weight: Tensor) -> str | None:
    """None if oneDNN can take this weight packed, else the reason.

    The two operations are private to torch, so their presence and their result are both checked.
    """
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return f"packing is for float32 on cpu, not {weight.dtype} on {weight.device.type}"
    if not (torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)):
        return "torch was built without oneDNN, or it is switched off"
    for name in ("_reorder_linear_weight", "_linear_pointwise"):
        if not hasattr(torch.ops.mkldnn, name):
            return f"this torch has no mkldnn::{name}"
    sample = weight[: min(64, weight.shape[0])].contiguous()
    x = torch.ones(3, weight.shape[1]) / math.sqrt(weight.shape[1])
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(sample, PACK_ROWS)  # noqa: SLF001
        found = _packed(x, packed, None)
    except RuntimeError as error:
        return f"torch refuses to pack: {str(error).splitlines()[0]}"
    expected = F.linear(x, sample)
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())):
        return "the packed product is wrong"
    return None


def choose_linear(
    weight: Tensor,
    bias: Tensor | None,
    *,
    exact: bool,
    store: ProbeStore,
    candidates: Sequence[str] | None = None,
) -> tuple[Linear, Exactness]:
    """The first strategy that passes the probe, ready to use, and why it was chosen.

    Args:
        exact: if not, packed is used if possible, else F.linear as it is; nothing is tried.
        candidates: keys of `LINEAR_STRATEGIES` to try in this order before `single`; None means
            the order that is fastest for this dtype.
    """
    operation = "linear" if bias is None else "linear with bias"
    shape = (weight.shape[0], weight.shape[1])
    no_pack = why_not_packed(weight)
    if not exact:
        strategy = "unpadded" if no_pack else "packed"
        verdict = Exactness(operation, shape, _name(weight.dtype), strategy, "exact=False")
        return Linear(weight, bias, strategy=strategy), verdict
    if candidates is None:
        # In float32 F.linear is known to differ; a probe that happens to miss it must not adopt it.
        first = "packed" if weight.dtype == torch.float32 else "unpadded"
        candidates = (first, "padded", "tiled")
    skipped = [f"packed: {no_pack}"] if no_pack and "packed" in candidates else []
    order = [name for name in candidates if not (no_pack and name == "packed")]
    if len(weight[:8].unique()) < 8:  # every strategy agrees on such a matrix: do not remember it
        store = ProbeStore(None)
    built: dict[str, Linear] = {}  # packing is dear: what was built for the probe is used

    def probe() -> tuple[str, str]:
        failures = list(skipped)
        for strategy in order:
            built.clear()  # two packed copies of a large matrix need not live at once
            built[strategy] = Linear(weight, bias, strategy=strategy)
            differing = _differing(built[strategy], weight)
            if not differing:
                return strategy, "; ".join([*failures, "rows agree at every count tried"])
            failures.append(f"{strategy}: rows differ at {', '.join(map(str, differing))} rows")
        return "single", "; ".join(failures)

    verdict = store.verdict(operation, shape, weight.dtype, probe, strategies=(*order, "single"))
    linear = built.get(verdict.strategy)
    return linear or Linear(weight, bias, strategy=verdict.strategy), verdict


def _differing(linear: Linear, weight: Tensor) -> tuple[int, ...]:
    """The row counts that fail, tried on the weight itself with random rows."""
    fitting = [
        counts for counts in PROBE_COUNTS if 2 * sum(counts) * weight.numel() <= PROBE_MULTIPLY_ADDS
    ]
    counts = fitting[0] if fitting else PROBE_COUNTS[-1]
    rows = _random_rows(max(counts) + SPARE_ROWS, weight.shape[1], weight.dtype)
    return differing_row_counts(linear, rows.to(weight.device), counts)


def choose_rows(
    operation: str,
    op: Callable[..., Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    samples: Callable[[], tuple[Tensor, ...]],
    *,
    exact: bool,
    store: ProbeStore,
) -> tuple[Callable[..., Tensor], Exactness]:
    """`op` if its rows are independent, else `op` row by row; and why.

    Args:
        shape: of one row, for the report.
        samples: makes the arguments of a trial, each [max(ROW_COUNTS) + SPARE_ROWS, ...], laid out
            in memory as the model will lay them out.
    """
    if not exact:
        return op, Exactness(operation, shape, _name(dtype), "together", "exact=False")

    def probe() -> tuple[str, str]:
        args = samples()

        def run(indices: Tensor) -> Tensor:
            start, stop = int(indices[0]), int(indices[-1]) + 1
            return op(*(arg[start:stop] for arg in args))

        differing = differing_row_counts(run, torch.arange(args[0].shape[0]))
        if not differing:
            return "together", "rows agree at every count tried"
        return "rowwise", f"together: rows differ at {', '.join(map(str, differing))} rows"

    verdict = store.verdict(operation, shape, dtype, probe, strategies=("together", "rowwise"))
    return (op if verdict.strategy == "together" else rowwise(op)), verdict


def sample_rows(*shape: int, dtype: torch.dtype) -> Tensor:
    """[max(ROW_COUNTS) + SPARE_ROWS, *shape] random values for a trial of `choose_rows`."""
    num_rows = max(ROW_COUNTS) + SPARE_ROWS
    return _random_rows(num_rows, math.prod(shape), dtype).reshape(num_rows, *shape)


def _random_rows(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Seeded normal values, three wide, so that exponentials reach both tails."""
    generator = torch.Generator().manual_seed(num_rows * 1_000_003 + width)
    return (3 * torch.randn(num_rows, width, generator=generator)).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / RMS(x) * weight over the last dimension.

    The mean and the division are float32; the result is rounded to x's dtype before it meets the
    weight, as in the models' reference code.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


class RMSNorm:
    """RMS normalisation over the last dimension, with a learned weight [width]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all [rows, width].

    Not torch's silu: the scalar code for the last few elements of its float32 kernel rounds
    differently from the vector code, so that a row's bits depend on the rows beside it.
    """
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


class Rotary:
    """Rotary position embedding in the rotate-half convention of Hugging Face models."""

    def __init__(
        self, rope: RopeConfig, *, head_dim: int, max_len: int, dtype: torch.dtype
    ) -> None:
        """Tables for positions 0..max_len - 1, computed in float32 and rounded to `dtype`.

        They are [max_len, head_dim / 2].
        """
        positions = torch.arange(max_len, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(rope, head_dim)
        self._cos = (angles.cos() * rope.attention_factor).to(dtype)
        self._sin = (angles.sin() * rope.attention_factor).to(dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [rows, 1, head_dim] each, for positions [rows] int64.

        The sign that rotate-half gives the first half is in the sine: -(x * s) is x * (-s), bit
        for bit.
        """
        cos, sin = self._cos[positions], self._sin[positions]
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """x [rows, heads, head_dim] turned by the angles of `Rotary.at`; contiguous."""
    first, second = x.chunk(2, -1)
    return (x * cos).add_(torch.cat((second, first), -1).mul_(signed_sin))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position of each pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "yarn":
        return _yarn_frequencies(rope, frequencies, head_dim)
    if rope.scaling != "llama3":
        return frequencies
    # Llama 3: slow turns are stretched by `factor`, fast ones are kept, those between are mixed by
    # how many turns fit into the context of pre-training.
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_len / rope.low_freq_factor
    shortest = rope.original_max_len / rope.high_freq_factor
    turns = rope.original_max_len / wavelengths
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - share) * frequencies / rope.factor + share * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, mixed)
    return torch.where(wavelengths < shortest, frequencies, stretched)


def _yarn_frequencies(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023): fast turns are kept, slow ones stretched by `factor`.

    Between them is a ramp over the dimensions that make `beta_fast` to `beta_slow` turns within
    the context of pre-training.
    """

    def dimension(turns: float) -> float:
        wavelength = rope.original_max_len / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first = max(math.floor(dimension(rope.beta_fast)), 0)
    last = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    places = torch.arange(head_dim // 2, dtype=torch.float32)
    kept = 1 - ((places - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies / rope.factor * (1 - kept) + frequencies * kept
