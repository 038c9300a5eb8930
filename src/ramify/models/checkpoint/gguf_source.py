"""The weights of a GGUF file by the names of the model, quantised as they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ramify.models.checkpoint.weight_source import WeightSource
from ramify.models.configs.model_config import ModelConfig
from ramify.models.gguf.blocks import decode_rows
from ramify.models.gguf.config import architecture_of
from ramify.models.gguf.container import Container, read_container
from ramify.models.gguf.names import TensorPlan, plan_tensors
from ramify.models.ops.quantized import (
    QuantizedWeight,
    Weight,
    as_tensor,
    concat_weights,
)


class GgufSource(WeightSource):
    """The weights of a GGUF file, read when they are asked for, and not kept.

    Matrices of quantised types are `QuantizedWeight`s with the bits of the type's formula; all other
    tensors have the dtype of the model.

    Args:
        plans: see `plan_tensors`; in the order of `ModelConfig.tensor_shapes`.
        config: of the model.
        dtype: that weights are computed in.
    """

    def __init__(
        self, plans: Mapping[str, TensorPlan], config: ModelConfig, dtype: torch.dtype
    ) -> None:
        self._plans, self._config, self._dtype = plans, config, dtype

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __contains__(self, name: object) -> bool:
        return name in self._plans

    def __getitem__(self, name: str) -> Weight:
        plan = self._plans[name]
        dtype = torch.float32 if self._config.is_float32(name) else self._dtype
        parts = [
            decode_rows(rows.info.kind, rows.info.read_rows(rows.first, rows.count), dtype)
            for rows in plan.parts
        ]
        if len(plan.shape) != 2 or not all(isinstance(part, QuantizedWeight) for part in parts):
            return self._tensor(plan, [as_tensor(part) for part in parts], dtype)
        weight = concat_weights(parts)
        if not plan.num_heads:
            return weight
        order = half_apart(len(weight), plan.num_heads)
        return weight.rows(order) if isinstance(weight, QuantizedWeight) else weight[order]

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self._plans[name].shape

    def num_bytes(self, name: str) -> int:
        """See `WeightSource`."""
        return self._plans[name].num_bytes

    def kind(self, name: str) -> str:
        """See `WeightSource`: the name of the type in ggml; of several, joined by +."""
        return self._plans[name].kind

    @property
    def widened(self) -> Mapping[str, str]:
        """See `WeightSource`: none, each type is a `QuantizedWeight`."""
        return {}

    def _tensor(self, plan: TensorPlan, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        """A float tensor of its parts, in `dtype`."""
        if len(plan.shape) == 1:
            parts = [part.flatten() for part in parts]
        whole = torch.cat([part.float() for part in parts]) if len(parts) > 1 else parts[0]
        if plan.offset:
            whole = whole.float() - plan.offset
        if plan.num_heads:
            whole = whole[half_apart(len(whole), plan.num_heads)]
        return whole.reshape(plan.shape).to(dtype)


def half_apart(num_rows: int, num_heads: int) -> Tensor:
    """Permutation [num_rows], for indexing, of heads whose rotary pairs are neighbours: to half a head apart."""
    rows = torch.arange(num_rows).view(num_heads, -1, 2)
    return rows.transpose(1, 2).flatten()


def open_gguf(path: Path, config: ModelConfig, *, dtype: torch.dtype) -> GgufSource:
    """Find and check the weights of a model in a file, or in the parts of which it is one; reads none.

    Args:
        config: see `config_fields`.
        dtype: that weights are computed in.

    Raises:
        CheckpointError: the file is damaged, or tensors are missing, unexpected or of another shape.
        UnsupportedModelError: a tensor has a type that is not read.
    """
    container: Container = read_container(path)
    plans = plan_tensors(container, architecture_of(container), config)
    return GgufSource(plans, config, dtype)
