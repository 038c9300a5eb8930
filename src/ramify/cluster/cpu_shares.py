"""How the cores of a machine are shared among its replicas; every replica computes with as many threads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class CpuShare:
    """The cores of one replica."""

    threads: int
    cpus: tuple[int, ...] = ()  # to be bound to; none: the system chooses


def cpu_shares(
    num_replicas: int, nodes: Sequence[Sequence[int]], threads: int | None = None
) -> list[CpuShare]:
    """The share of each replica.

    Replicas are bound to memory nodes in turn where each node gets one or more, so that they read
    weights and K/V from their own node's memory. The number of threads is the same for all: the bits
    of answers depend on it.

    Args:
        nodes: the cores of each memory node that this process may use.
        threads: of each replica; None: the cores divided by the replicas of a node, at least one.
    """
    if len(nodes) < 2 or num_replicas < len(nodes):
        num_cpus = sum(map(len, nodes))
        return [CpuShare(threads or max(1, num_cpus // num_replicas))] * num_replicas
    places = [number % len(nodes) for number in range(num_replicas)]
    if threads is None:
        threads = min(len(cpus) // places.count(node) for node, cpus in enumerate(nodes))
    return [CpuShare(max(1, threads), tuple(nodes[place])) for place in places]


def shares_of_this_machine(num_replicas: int, threads: int | None = None) -> list[CpuShare]:
    """The shares of replicas here.

    Args:
        threads: of each; None: `OMP_NUM_THREADS`, else the cores divided.
    """
    return cpu_shares(num_replicas, usable_nodes(), threads or threads_of_environment())


def usable_nodes(root: Path = NODES) -> list[list[int]]:
    """The cores that this process may use, by memory node; one node where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        usable = os.sched_getaffinity(0)
    else:
        usable = set(range(os.cpu_count() or 1))
    nodes = []
    for path in sorted(root.glob("node*/cpulist")):
        try:
            cpus = parse_cpu_list(path.read_text("ascii"))
        except (OSError, ValueError):
            return [sorted(usable)]
        if cpus & usable:
            nodes.append(sorted(cpus & usable))
    return nodes or [sorted(usable)]


def parse_cpu_list(text: str) -> set[int]:
    """The numbers of a list as the kernel writes it: `0-3,8`.

    Raises:
        ValueError: it has another form.
    """
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def threads_of_environment() -> int | None:
    """The threads that the user has set for torch; None if they are not set, or no number."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) else None
