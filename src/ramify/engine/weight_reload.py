"""Other weights for a core: requests and cache go on, and nothing of the old ones is ever read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ramify.cache.key import namespace_of, namespace_parts
from ramify.engine.core import EngineCore
from ramify.errors import ConfigError, PinError


def swap_weights(core: EngineCore, swap: Callable[[], bytes]) -> int:
    """Put new weights in between two steps; live requests compute their K/V again.

    What they have produced so far stays: their next tokens are those that the new weights give
    after it. Pages of the old weights are in a namespace that no request asks for any more: they
    lose their pins and are evicted like anything that nobody uses.

    Args:
        swap: puts the weights in and returns the namespace of their K/V. If it raises, nothing has
            changed.

    Returns:
        how many requests were live; each of several answers counts.
    """
    core.namespaces.base, old = swap(), core.namespaces.base
    rechecks, scheduler = core.hit_verifier, core.scheduler
    rechecks.pending.clear()  # of answers that the old weights gave
    for request_id in list(rechecks.running):
        del rechecks.running[request_id]
        core.abort(request_id)
    for pin in core.cache.pins():  # they would keep what nobody can hit
        with suppress(PinError):  # its time was over
            core.cache.unpin(pin)
    live = [one for one in core.live if not one.is_finished]
    waiting, running = list(scheduler.waiting), list(scheduler.running)
    core.planner.release([one.sequence for one in running])
    for one in waiting:
        scheduler.waiting.remove(one)
    for one in live:
        one.verify_cold = False
        one.namespace = _with_base(one.namespace, old, core.namespaces.base)
        one.reset_for_recompute()  # branches too, which are in no queue before their prompt is computed
    scheduler.requeue([*running, *waiting])
    return len(live)


def validate_running_mode(running: str) -> None:
    """Raise ConfigError for a choice that there is not."""
    if running not in ("finish", "restart"):
        raise ConfigError(f'running={running!r} but it must be "finish" or "restart"')


def _with_base(namespace: bytes, old: bytes, new: bytes) -> bytes:
    """The same tenant and salt with other weights."""
    if namespace == old:
        return new
    parts = namespace_parts(namespace)
    return namespace_of(**{**parts, "base": new})
