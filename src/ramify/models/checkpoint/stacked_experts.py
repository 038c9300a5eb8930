"""Experts that a checkpoint stacks in a tensor per layer, read one by one; MXFP4 is widened then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ramify.models.checkpoint.tensors import CheckpointTensors
from ramify.models.configs.model_config import ModelConfig

# E2M1: sign, two bits of exponent, one of mantissa.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_BIAS = 127  # of the exponent that a block's scale byte is


class StackedExperts(Mapping[str, Tensor]):
    """A checkpoint with each expert's tensors by the names of `ModelConfig.tensor_shapes`.

    An expert is read, and widened, when it is asked for, so that loading takes little more memory
    than the weights it makes.

    Args:
        config: with experts that are stacked or in MXFP4.
    """

    def __init__(self, tensors: CheckpointTensors, config: ModelConfig) -> None:
        self._tensors, self._made = tensors, dict[str, Callable[[], Tensor]]()
        assert config.moe is not None
        moe, self._dtype = config.moe, tensors.dtype("model.embed_tokens.weight")
        stacked = set[str]()
        for layer in filter(config.has_experts, range(config.num_layers)):
            prefix = f"model.layers.{layer}.{moe.prefix}experts."
            sources = [name for name in tensors if name.startswith(prefix)]
            stacked.update(sources)
            for expert in range(moe.num_experts):
                for name in moe.expert_names:
                    source, made = f"{prefix}{name}", f"{prefix}{expert}.{name}"
                    self._made[f"{made}.weight"] = partial(self._weight, source, expert)
                    self._made[f"{made}.bias"] = partial(self._bias, source, expert)
        self._others = dict.fromkeys(name for name in tensors if name not in stacked)

    def __len__(self) -> int:
        return len(self._others) + len(self._made)

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from self._made

    def __contains__(self, name: object) -> bool:
        return name in self._made or name in self._others

    def __getitem__(self, name: str) -> Tensor:
        made = self._made.get(name)
        return self._tensors[name] if made is None else made()

    def _weight(self, source: str, expert: int) -> Tensor:
        """[out_width, in_width]."""
        if source in self._tensors:
            return _gate_above_up(self._tensors.part(source, expert).T, source).contiguous()
        blocks = self._tensors.part(f"{source}_blocks", expert)
        scales = self._tensors.part(f"{source}_scales", expert)
        return widen_mxfp4(
            _gate_above_up(blocks, source), _gate_above_up(scales, source), self._dtype
        )

    def _bias(self, source: str, expert: int) -> Tensor:
        return _gate_above_up(self._tensors.part(f"{source}_bias", expert), source)


def _gate_above_up(rows: Tensor, name: str) -> Tensor:
    """Rows of gate and up, interleaved in the checkpoint, one above the other; other rows unchanged."""
    return torch.cat((rows[0::2], rows[1::2])) if name.endswith("gate_up_proj") else rows


def widen_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of MXFP4 blocks: two FP4 values a byte, low nibble first, times 2 ** (scale - 127).

    Args:
        blocks: [rows, groups, 16] uint8.
        scales: [rows, groups] uint8.

    Returns:
        [rows, groups * 32] in `dtype`: exact, as its exponents go as far as the scales.
    """
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], dtype=dtype)
    byte = torch.arange(256)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), -1)
    powers = torch.ldexp(torch.ones(256), byte - MXFP4_BIAS).to(dtype)
    wide = pairs.index_select(0, blocks.flatten().int()).view(*scales.shape, -1)
    return wide.mul_(powers[scales.int()][..., None]).flatten(1)
