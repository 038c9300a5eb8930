"""Weights of a checkpoint on the device that computes with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ramify.errors import ConfigError
from ramify.models.ops.quantized import QuantizedWeight, Weight
from ramify.models.ops.weight_part import WeightPart, read_part


class WeightsOnDevice(Mapping[str, Weight]):
    """Weights that are copied to `device` as they are asked for, and not kept.

    Raises:
        ConfigError: a weight is quantised, and the device is no CPU.
    """

    def __init__(self, weights: Mapping[str, Weight], device: torch.device) -> None:
        self._weights, self._device = weights, device

    def __getitem__(self, name: str) -> Weight:
        return self._moved(name, self._weights[name])

    def read_part(self, name: str, part: WeightPart) -> Weight:
        """See `PartlyReadable`."""
        return self._moved(name, read_part(self._weights, name, part))

    def _moved(self, name: str, weight: Weight) -> Weight:
        if isinstance(weight, QuantizedWeight):
            raise ConfigError(
                f"{name} is quantised, and only the CPU multiplies by integers; use "
                f"quantize='widen' on {self._device}, or device='cpu'"
            )
        return weight.to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
