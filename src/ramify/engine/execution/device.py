"""The device that an engine computes on: chosen once, from its option, and handed down from there."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ramify.engine.execution.host_memory import free_memory
from ramify.errors import ConfigError

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The device, and the reason why it is this one."""

    device: torch.device
    reason: str

    @property
    def name(self) -> str:
        """`cpu`, or the number of a CUDA device and what it calls itself."""
        if self.device.type == "cpu":
            return "cpu"
        return f"{self.device} ({torch.cuda.get_device_name(self.device)})"

    def free_memory(self) -> int:
        """Bytes of the device that could be allocated now; 0 if unknown."""
        if self.device.type == "cpu":
            return free_memory()
        return torch.cuda.mem_get_info(self.device)[0]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the thread's current one, to which events, graphs and Triton's launches go."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def choose_device(name: str) -> DeviceChoice:
    """The device of that name: `auto`, `cpu`, `cuda` or `cuda:N`.

    `auto` is the CPU, on which all that is here is tested.

    Raises:
        ConfigError: there is no such device here, or no such name.
    """
    if name == "cpu":
        return DeviceChoice(CPU, "asked for")
    if name == "auto":
        return DeviceChoice(CPU, f"auto: exact arithmetic is tested on CPUs; {_cuda_found()}")
    number = re.fullmatch(r"cuda(?::(\d{1,3}))?", name)
    if number is None:
        raise ConfigError(f"device={name!r} does not exist; use auto, cpu, cuda or cuda:N")
    index, count = int(number[1] or 0), torch.cuda.device_count()
    if index >= count:
        way_out = f"cuda:0 to cuda:{count - 1}, or cpu" if count else "device='cpu'"
        if torch.version.cuda is None:
            way_out = "a torch that is built with CUDA (pytorch.org/get-started), or device='cpu'"
        raise ConfigError(f"device={name!r} is not there: {_cuda_found()}; use {way_out}")
    return DeviceChoice(torch.device("cuda", index), "asked for")


def _cuda_found() -> str:
    """What this torch has of CUDA: its build, and the devices that it finds."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    count = torch.cuda.device_count()
    devices = f"{count} device{'s' * (count != 1)}" if count else "no device"
    return f"torch {torch.__version__} is built with CUDA {torch.version.cuda} and finds {devices}"


def check_exact(device: torch.device, *, ops: str, attention: str) -> None:
    """Refuse `exact=True` on a device where operations or attention are not batch-invariant.

    Args:
        ops, attention: names of the implementations.

    Raises:
        ConfigError: the device is no CPU, and one of them is not that of Triton's kernels.
    """
    if device.type != "cpu" and (ops, attention) != ("triton", "triton"):
        raise ConfigError(
            f"exact=True on {device} needs ops='triton' and attention_backend='triton', and this engine "
            f"has ops={ops!r} and attention_backend={attention!r}; name both, or use exact=False "
            "(--no-exact), with which a cache hit may change roundings, or device='cpu'"
        )


def check_graphs(device: torch.device, *, num_ranks: int, has_experts: bool, ops: str) -> None:
    """Refuse `decode_graphs` where a step cannot be captured.

    Args:
        ops: name of the model's operations.

    Raises:
        ConfigError: the device is no CUDA device, ranks share the model, or the host reads which experts
            are chosen.
    """
    if device.type != "cuda" or num_ranks > 1:
        raise ConfigError(
            f"decode_graphs=True captures the CUDA graphs of one device, and this engine computes on "
            f"{device} with tensor_parallel_size={num_ranks}; leave decode_graphs out"
        )
    if has_experts and ops != "triton":
        raise ConfigError(
            "decode_graphs=True captures steps that are the same whatever their tokens, and the experts of "
            f"this model are chosen by the router in each step, which the host reads with ops={ops!r}; use "
            "ops='triton', or leave decode_graphs out"
        )


def check_computable(device: torch.device, *, has_tiers: bool) -> None:
    """Refuse what needs a CPU.

    Raises:
        ConfigError: the device is another, and there are cache tiers.
    """
    if device.type != "cpu" and has_tiers:
        raise ConfigError(
            f"cache tiers copy pages of a pool in host memory, and this engine computes on {device}; "
            "leave the options of the tiers out, or use device='cpu'"
        )
