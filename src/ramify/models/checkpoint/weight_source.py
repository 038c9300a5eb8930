"""`WeightSource`: the weights of a checkpoint by name, whatever files they are in."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from math import prod

import torch

from ramify.models.ops.quantized import Weight
from ramify.models.ops.weight_part import WeightPart, cut

logger = logging.getLogger(__name__)


class WeightSource(Mapping[str, Weight]):
    """The weights of a model by the names of `ModelConfig.tensor_shapes`, in the order of those.

    A weight is read when it is asked for, and not kept: loading takes little more memory than the
    weights that it makes. A quantised linear layer is one name, that of its matrix, whatever tensors
    its file has for it.
    """

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a weight once it is read; reads nothing."""

    @abstractmethod
    def num_bytes(self, name: str) -> int:
        """Bytes of a weight in its files."""

    @abstractmethod
    def kind(self, name: str) -> str:
        """Type of a weight as it is stored: "BF16", "Q4_K", "gptq, 4 bits, groups of 128"."""

    def read_part(self, name: str, part: WeightPart) -> Weight:
        """`cut(self[name], part)`; a source that can reads no more of its files."""
        return cut(self[name], part)

    @property
    @abstractmethod
    def widened(self) -> Mapping[str, str]:
        """Quantised weights that are read as float tensors: name -> the reason.

        Complete once every weight has been read.
        """


def log_widened(source: WeightSource, dtype: torch.dtype) -> None:
    """Log, once all weights are read, which quantised ones became float tensors, and what that costs."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in source.widened.items():
        groups.setdefault((source.kind(name), reason), []).append(name)
    for (kind, reason), names in groups.items():
        stored = sum(map(source.num_bytes, names))
        wide = sum(prod(source.shape(name)) for name in names) * dtype.itemsize
        logger.warning(
            "%d quantised matrices (%s) are widened to %s: %s bytes in memory, %s in the file; %s",
            len(names),
            kind,
            str(dtype).removeprefix("torch."),
            f"{wide:,}",
            f"{stored:,}",
            reason,
        )
