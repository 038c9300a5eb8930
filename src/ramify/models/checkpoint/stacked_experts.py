"""Experts that a checkpoint stacks in a tensor per layer, read one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

import torch
from torch import Tensor

from ramify.models.checkpoint.tensors import CheckpointTensors
from ramify.models.checkpoint.weight_source import WeightSource
from ramify.models.configs.model_config import ModelConfig
from ramify.models.ops.quantized import Weight
from ramify.models.ops.weight_part import WeightPart, cut
from ramify.models.packed_formats.fp4 import mxfp4

MXFP4 = "MXFP4"


class StackedExperts(WeightSource):
    """A checkpoint with each expert's tensors by the names of `ModelConfig.tensor_shapes`.

    An expert is read when it is asked for, so that loading takes little more memory than the weights it
    makes.

    Args:
        config: with experts that are stacked or in MXFP4.
    """

    def __init__(self, tensors: CheckpointTensors, config: ModelConfig) -> None:
        assert config.moe is not None
        moe, self._shapes = config.moe, config.tensor_shapes()
        self._tensors, self._dtype = tensors, tensors.dtype("model.embed_tokens.weight")
        self._num_experts = moe.num_experts
        # Of each expert's tensors: those that it is part of, and its number.
        self._stacks: dict[str, tuple[tuple[str, ...], int]] = {}
        for layer in filter(config.has_experts, range(config.num_layers)):
            prefix = f"model.layers.{layer}.{moe.prefix}experts."
            for expert, name in product(range(moe.num_experts), moe.expert_names):
                stack, made = f"{prefix}{name}", f"{prefix}{expert}.{name}"
                is_plain = stack in tensors
                stacks = (stack,) if is_plain else (f"{stack}_blocks", f"{stack}_scales")
                self._stacks[f"{made}.weight"] = stacks, expert
                self._stacks[f"{made}.bias"] = (f"{stack}_bias",), expert

    def __len__(self) -> int:
        return len(self._shapes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> Weight:
        if name not in self._stacks:
            return self._tensors[name]
        stacks, expert = self._stacks[name]
        parts = [self._tensors.part(stack, expert) for stack in stacks]
        if name.endswith(".bias"):
            return _gate_above_up(parts[0], name)
        if len(parts) == 1:
            return _gate_above_up(parts[0].T, name).contiguous()
        blocks, scales = (_gate_above_up(part, name) for part in parts)
        rows, width = self._shapes[name]
        return mxfp4(stacks[0].removesuffix("_blocks"), blocks, scales, (rows, width), self._dtype)

    def read_part(self, name: str, part: WeightPart) -> Weight:
        """See `WeightSource`; reads an expert whole."""
        return (
            cut(self[name], part) if name in self._stacks else self._tensors.read_part(name, part)
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self._shapes[name]

    def num_bytes(self, name: str) -> int:
        """See `WeightSource`."""
        if name not in self._stacks:
            return self._tensors.num_bytes(name)
        return sum(map(self._tensors.num_bytes, self._stacks[name][0])) // self._num_experts

    def kind(self, name: str) -> str:
        """See `WeightSource`."""
        if name not in self._stacks:
            return self._tensors.kind(name)
        stacks = self._stacks[name][0]
        return self._tensors.kind(stacks[0]) if len(stacks) == 1 else MXFP4

    @property
    def widened(self) -> Mapping[str, str]:
        """See `WeightSource`."""
        return {}


def _gate_above_up(rows: Tensor, name: str) -> Tensor:
    """Rows of gate and up, interleaved in the checkpoint, one above the other; other rows unchanged."""
    return torch.cat((rows[0::2], rows[1::2])) if ".gate_up_proj." in name else rows
