"""Weight reload: swap a core's weights under live requests; K/V of the old ones is never read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ramify.cache.key import namespace_of, namespace_parts
from ramify.engine.core import EngineCore
from ramify.engine.identity import EngineIdentity
from ramify.errors import ConfigError, PinError


class LoadedWeights(Protocol):
    """Weights in memory, ready to replace those of an engine."""

    def identity(self) -> EngineIdentity:
        """That of the engine with these weights; may read files."""
        ...

    def __call__(self) -> bytes:
        """Install the weights; returns the cache namespace of their K/V."""
        ...


def swap_weights(core: EngineCore, swap: Callable[[], bytes]) -> int:
    """Swap weights between two steps; returns the number of live requests, children included.

    Live requests keep their output and recompute its K/V with the new weights. Pages of the old
    weights stay in a namespace that no request has any more; they are unpinned.

    Args:
        swap: installs the weights and returns the namespace of their K/V. If it raises, nothing
            changes.
    """
    core.drop_step()  # it computes with the old weights
    core.namespaces.base, old = swap(), core.namespaces.base
    verifier, scheduler = core.hit_verifier, core.scheduler
    verifier.pending.clear()  # the old weights' logprobs
    for request_id in list(verifier.running):
        del verifier.running[request_id]
        core.abort(request_id)
    for pin in core.cache.pins():
        with suppress(PinError):  # it has expired
            core.cache.unpin(pin)
    if core.tiering is not None:
        core.tiering.weights_replaced()
    live = [request for request in core.live if not request.is_finished]
    waiting, running = list(scheduler.waiting), list(scheduler.running)
    core.planner.release([request.sequence for request in running])
    for request in waiting:
        scheduler.waiting.remove(request)
    for request in live:  # includes children in no queue, whose parent computes the prompt
        request.verify_cold = False
        request.namespace = _with_base(request.namespace, old, core.namespaces.base)
        if core.tiering is not None and "apart" in namespace_parts(request.namespace):
            core.tiering.refuse_namespace(request.namespace)
        request.reset_for_recompute()
    scheduler.requeue([*running, *waiting])
    return len(live)


def validate_running_mode(running: str) -> None:
    """Raise ConfigError unless it is "finish" or "restart"."""
    if running not in ("finish", "restart"):
        raise ConfigError(f'running={running!r} but it must be "finish" or "restart"')


def _with_base(namespace: bytes, old: bytes, new: bytes) -> bytes:
    """The namespace of the same tenant and salt under another base."""
    if namespace == old:
        return new
    parts = namespace_parts(namespace)
    return namespace_of(**{**parts, "base": new})
