"""What a model's weights take as it holds them: of each, and in all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from ramify.models.checkpoint.tensor_names import LINEARS
from ramify.models.ops.quantized import Weight, fits_float16

FLOAT_KINDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class LoadedWeight:
    """A weight as it is stored, and as the model holds it.

    Args:
        kind: see `WeightSource.kind`.
        dtype: of a float tensor; None: it is quantised.
    """

    kind: str
    dtype: str | None
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_weights(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def form(self) -> str:
        """`kind`, and the dtype where that is another."""
        if self.dtype is None or FLOAT_KINDS.get(self.kind) == self.dtype:
            return self.kind
        return f"{self.kind} as {self.dtype}"

    @classmethod
    def of(cls, weight: Weight, kind: str) -> LoadedWeight:
        """Measure a weight. Scales count as kernels hold them: by factors, or float16 where that loses nothing."""
        if isinstance(weight, Tensor):
            dtype = str(weight.dtype).removeprefix("torch.")
            return cls(kind, dtype, tuple(weight.shape), weight.numel() * weight.element_size())
        num_bytes = -(-weight.numel() * weight.format.bits // 8)
        factors = weight.factors
        for values in (weight.scales, weight.mins):
            if values is not None and factors is not None:
                num_bytes += values.numel() + 2 * factors[:, 0].numel()
            elif values is not None:
                num_bytes += values.numel() * (2 if fits_float16(values) else 4)
        return cls(kind, None, tuple(weight.shape), num_bytes)


def weight_figures(loaded: Mapping[str, LoadedWeight]) -> dict[str, str]:
    """Number of weights, bits of each, and forms: of the whole model, then by part of it."""
    parts: dict[str, list[LoadedWeight]] = {}
    for name, weight in loaded.items():
        parts.setdefault(_part_of(name, weight.shape), []).append(weight)
    figures = {"in all": _count(list(loaded.values()))}
    for part, weights in parts.items():
        forms: dict[str, int] = {}
        for weight in weights:
            forms[weight.form] = forms.get(weight.form, 0) + weight.num_weights
        total = sum(forms.values())
        shares = [
            form if len(forms) == 1 else f"{form} ({count / total:.0%})"
            for form, count in sorted(forms.items(), key=lambda item: -item[1])
        ]
        figures[part] = f"{_count(weights)}: {', '.join(shares)}"
    return figures


def _count(weights: list[LoadedWeight]) -> str:
    num_weights = sum(weight.num_weights for weight in weights)
    num_bytes = sum(weight.num_bytes for weight in weights)
    bits = 8 * num_bytes / max(num_weights, 1)
    return f"{num_weights:,} weights, {bits:.2f} bits each, {num_bytes / 2**20:,.1f} MiB"


def _part_of(name: str, shape: tuple[int, ...]) -> str:
    """What `weight_figures` counts a weight with."""
    if name.startswith(("model.embed_tokens.", "lm_head.")):
        return "embedding, LM head"
    if len(shape) == 2 and ".self_attn." in name:
        return "attention"
    if len(shape) == 2 and "expert" in name:
        return "experts"
    if len(shape) == 2 and name.endswith(LINEARS):
        return "MLP"
    return "norms, biases, gates"
