"""Rotary position embedding: inverse frequencies (plain, linear, llama3, yarn, longrope) and cos/sin tables."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.models.configs.rope import RopeConfig, yarn_ramp

# Positions computed at once: about 3 ms for heads of 128.
BLOCK_POSITIONS = 4096


class RotaryTable:
    """cos and sin of every position, for rope in the rotate-half convention of Hugging Face models.

    On CPU the rows exist from the start, at fixed addresses, and are computed when positions reach them:
    memory of rows that were never computed is not touched. The bits of a row depend on its position only.
    """

    def __init__(
        self,
        rope: RopeConfig,
        *,
        head_dim: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """Reserve `cos` and `sin` [max_len, head_dim / 2] of `dtype`; elsewhere than on CPU, compute them."""
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._num_pairs, self._factor = (rope.rotary_dim or head_dim) // 2, rope.attention_factor
        shape = max_len, head_dim // 2
        self.cos, self.sin = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.num_computed = 0
        self.extend(1 if self.cos.device.type == "cpu" else max_len)

    def extend(self, num_positions: int) -> None:
        """Compute the rows of the first positions, in float32 on CPU; those beyond the table do not count."""
        while self.num_computed < min(num_positions, len(self.cos)):
            end = min(self.num_computed + BLOCK_POSITIONS, len(self.cos))
            rows = slice(self.num_computed, end)
            # From 0 in int64: floats hold positions up to 2**24.
            positions = torch.arange(rows.start, rows.stop).to(torch.float32)
            angles = positions[:, None] * self._frequencies
            for table, values in ((self.cos, angles.cos()), (self.sin, angles.sin())):
                values[:, : self._num_pairs] *= self._factor
                table[rows] = values
            self.num_computed = end

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Gather cos and signed sin [rows, 1, head_dim] for positions [rows] int64.

        The sine carries the sign of rotate-half's first half: -(x * s) equals x * (-s), bit for bit.
        """
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions: [head_dim / 2] float32, scaled as `rope` says.

    Pairs beyond `rope.rotary_dim` have frequency 0, which leaves them as they are: the weights are
    reordered so that those pairs come last (`models.checkpoint.weight_layout`).
    """
    if rope.scaling == "none":
        return torch.zeros(head_dim // 2)
    dim = rope.rotary_dim or head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    frequencies = _scaled_frequencies(rope, 1.0 / (rope.theta**exponents), dim)
    return F.pad(frequencies, (0, (head_dim - dim) // 2))


def _scaled_frequencies(rope: RopeConfig, frequencies: Tensor, dim: int) -> Tensor:
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "yarn":
        return _yarn_frequencies(rope, frequencies, dim)
    if rope.scaling == "longrope":
        return frequencies / torch.tensor(rope.pair_factors, dtype=torch.float32)
    if rope.scaling == "llama3":
        return _llama3_frequencies(rope, frequencies)
    return frequencies


def _llama3_frequencies(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Llama 3: divide low frequencies by `factor`, keep high ones, interpolate between.

    Low and high by the number of turns within the context of pre-training.
    """
    wavelengths = 2 * math.pi / frequencies
    longest = rope.original_max_len / rope.low_freq_factor
    shortest = rope.original_max_len / rope.high_freq_factor
    turns = rope.original_max_len / wavelengths
    weight = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    interpolated = (1 - weight) * frequencies / rope.factor + weight * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, interpolated)
    return torch.where(wavelengths < shortest, frequencies, scaled)


def _yarn_frequencies(rope: RopeConfig, frequencies: Tensor, head_dim: int) -> Tensor:
    """YaRN (Peng et al., 2023): keep high frequencies, divide low ones by `factor`.

    Between them a linear ramp over the dimensions that make `beta_fast` to `beta_slow` turns
    within the context of pre-training.
    """
    first, last = yarn_ramp(rope, head_dim)
    dims = torch.arange(head_dim // 2, dtype=torch.float32)
    weight = 1 - ((dims - first) / max(last - first, 0.001)).clamp(0, 1)
    return frequencies / rope.factor * (1 - weight) + frequencies * weight
