"""The implementations of `Ops`, and the choice of one with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ramify.attention.exactness import ProbeStore, dtype_name
from ramify.errors import ConfigError
from ramify.models.ops.cpu.cpu_ops import CpuOps
from ramify.models.ops.protocol import Ops
from ramify.models.ops.quantized import Weight
from ramify.models.ops.torch_ops import CPU, TorchOps
from ramify.models.ops.triton_ops import TritonOps

# In the order of "auto". Triton's kernels have not run on a GPU yet: torch is before them.
OPS: Mapping[str, type[TorchOps]] = {"cpu": CpuOps, "torch": TorchOps, "triton": TritonOps}


class OpsFactory(Protocol):
    """Makes the operations of a decoder; see `TorchOps` for the arguments."""

    def __call__(
        self,
        weights: Mapping[str, Weight],
        *,
        dtype: torch.dtype,
        max_len: int,
        exact: bool = True,
        store: ProbeStore | None = None,
        device: torch.device = CPU,
    ) -> Ops:
        """Bind to these weights."""
        ...


@dataclass(frozen=True, slots=True)
class OpsChoice:
    """The selected implementation, the reason, and why each other was not selected."""

    name: str
    factory: OpsFactory
    reason: str
    rejected: dict[str, str]


def select_ops(name: str, dtype: torch.dtype, device: torch.device) -> OpsChoice:
    """The implementation of that name, or for "auto" the first that computes `dtype` on `device`.

    Raises:
        ConfigError: there is none of that name, or it cannot compute here.
    """
    if name != "auto" and name not in OPS:
        raise ConfigError(f"ops={name!r} does not exist; choose auto, {', '.join(OPS)}")
    reasons = {other: ops.supports(dtype, device) for other, ops in OPS.items()}
    usable = [other for other in OPS if reasons[other] is None]
    chosen = name if name != "auto" else usable[0]
    if reasons[chosen] is not None:
        raise ConfigError(f"ops={name!r} cannot be used here: {reasons[chosen]}; use ops='auto'")
    reason = "asked for"
    if name == "auto":
        reason = f"the first of {', '.join(OPS)} that computes {dtype_name(dtype)} on {device.type}"
    rejected = {other: reasons[other] or "would do" for other in OPS if other != chosen}
    return OpsChoice(chosen, OPS[chosen], reason, rejected)
