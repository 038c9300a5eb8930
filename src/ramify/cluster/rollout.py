"""Rolling update: replace the weights of replicas one after the other, while the others serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from ramify.cluster.remote_replica import RemoteReplica
from ramify.errors import ConfigError, ReplicaLostError, RolloutError

logger = logging.getLogger(__name__)

REJOIN_S = 120.0  # for a replica to take requests with its weights
CHECK_S = 0.02


async def replace_weights_in_turn(
    replicas: Collection[RemoteReplica],
    model: str,
    replaced: Callable[[str, str], None],
    *,
    rejoin_s: float = REJOIN_S,
) -> None:
    """Replace the weights of every replica that is connected, one at a time.

    Each loads them while it serves, drains, installs them, and takes requests again before the next
    one begins. It takes as long as the longest live answers, once for each replica. Of two servers that
    replace weights at the same time one fails at least: a replica refuses to replace weights that are
    not those of the begin.

    Args:
        model: a checkpoint, as each replica's machine names it.
        replaced: gets the name of each replica that has them, or has to load them when it is started
            again, and the model.

    Raises:
        RolloutError: a replica failed after others had replaced theirs, or has other weights than they.
        ConfigError: another server replaces them.
        ModelError, ConfigError, ReplicaLostError: the first one failed; nothing has changed.
    """
    _refuse_if_updating(replicas, model)
    # By incarnation: a replica that starts meanwhile comes with the weights of its command.
    before = {_incarnation(replica): _digest(replica) for replica in replicas}
    done: dict[str, None] = {}
    weights: str | None = None  # digest of those that the first has got
    # One that starts meanwhile comes with the weights of before.
    while (replica := _next(replicas, done)) is not None:
        begin_s = time.monotonic()
        try:
            incarnation = _incarnation(replica)
            await replica.replace_weights(model, before.get(incarnation, ""))
            await _until_ready(replica, rejoin_s)
            if _incarnation(replica) != incarnation:
                raise ReplicaLostError(
                    f"replica {replica.name} ended before it took requests with the new weights, and was "
                    "started again with those of before; send the request again"
                )
            weights = weights or _weights(replica)
            _check_weights(replica, model, weights)
        except Exception as error:
            if not done:
                raise
            raise RolloutError(model, replica.name, [*done], str(error)) from error
        done[replica.name] = None
        replaced(replica.name, model)
        logger.info(
            "replica %s has the weights of %s after %.1f s",
            replica.name,
            model,
            time.monotonic() - begin_s,
        )
    for replica in replicas:
        if replica.name not in done:
            logger.warning("replica %s is away, and does not get the weights now", replica.name)
            replaced(replica.name, model)
    _check_all([replica for replica in replicas if replica.name in done], model, weights)


def _refuse_if_updating(replicas: Collection[RemoteReplica], model: str) -> None:
    """Raise ConfigError while a replica replaces its weights for somebody else."""
    for replica in replicas:
        if replica.is_updating:
            raise ConfigError(
                f"replica {replica.name} replaces its weights for another server; send {model!r} when "
                "that has ended"
            )


def _weights(replica: RemoteReplica) -> str | None:
    """The digest of a replica's weights; None: it is not connected."""
    return None if replica.welcome is None else replica.welcome.identity.weights


def _check_weights(replica: RemoteReplica, model: str, weights: str | None) -> None:
    """Raise ReplicaLostError if a replica has other weights than the first that has replaced its own."""
    if _weights(replica) not in (None, weights):
        raise ReplicaLostError(
            f"its weights have the digest {_weights(replica)}, and the first that were replaced "
            f"{weights}: {model!r} is not the same checkpoint on all machines, or another server "
            "replaces weights, too"
        )


def _check_all(replicas: Collection[RemoteReplica], model: str, weights: str | None) -> None:
    """Raise RolloutError if another server has replaced the weights of one of them again."""
    for replica in replicas:
        try:
            _check_weights(replica, model, weights)
        except ReplicaLostError as error:
            others = [other.name for other in replicas if _weights(other) == weights]
            raise RolloutError(model, replica.name, others, str(error)) from error


def _digest(replica: RemoteReplica) -> str:
    return "" if replica.welcome is None else replica.welcome.identity.digest


def _incarnation(replica: RemoteReplica) -> int | None:
    return None if replica.welcome is None else replica.welcome.incarnation


def _next(replicas: Collection[RemoteReplica], done: Collection[str]) -> RemoteReplica | None:
    left = (replica for replica in replicas if replica.is_ready and replica.name not in done)
    return next(left, None)


async def _until_ready(replica: RemoteReplica, limit_s: float) -> None:
    """Wait until a replica takes requests.

    Raises:
        ReplicaLostError: it does not within the limit.
    """
    deadline_s = time.monotonic() + limit_s
    while not replica.is_ready:
        if time.monotonic() > deadline_s:
            raise ReplicaLostError(
                f"replica {replica.name} has not come back within {limit_s:g} s: "
                f"{replica.last_error or 'it is not connected'}"
            )
        await asyncio.sleep(CHECK_S)
