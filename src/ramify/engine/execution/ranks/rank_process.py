"""The process of a rank other than 0: `python -m ramify.engine.execution.ranks.rank_process FD`.

FD is its end of a connection to the engine's process. It brings a `RankSpec`, then orders. Reports go
back: "started" before it meets the other ranks, "ready" with the bytes of its weights once they are
loaded, "failed" with the reason before it ends. When the connection ends, so does this process, at once,
whatever it waits for.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import queue
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from ramify.errors import RamifyError

PARENT_GONE = 3  # exit codes
FAILED = 2
PR_SET_PDEATHSIG = 1

logger = logging.getLogger(__name__)


def main(connection: Connection) -> int:
    """Be a rank; returns the exit code."""
    # Whoever ends the engine decides when; Ctrl-C in a terminal goes to all of its processes.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent, spec = pickle.loads(connection.recv_bytes())  # noqa: S301 - written by our own parent
    _end_with(parent)
    orders: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    threading.Thread(
        target=_read_orders, args=(connection, orders), name="orders", daemon=True
    ).start()
    try:
        _follow(spec, connection, orders)
    except RamifyError as error:  # says all itself
        _report(connection, "failed", f"{type(error).__name__}: {error}")
    except BaseException as error:
        logger.exception("rank %d of %d has failed", spec.rank, spec.size)
        _report(connection, "failed", f"{type(error).__name__}: {error}")
    return FAILED


def _follow(spec: Any, connection: Connection, orders: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Load, then do what rank 0 orders."""
    import torch

    from ramify.models.ops.sharded.rank_group import connect

    torch.set_num_threads(spec.threads)
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _report(connection, "started", None)
    exact = spec.config.requested.attention.exact
    group = connect(
        spec.folder, spec.rank, spec.size, device, exact=exact, timeout_s=spec.timeout_s
    )
    runner = spec.load(group)
    weights = sum(weight.num_bytes for weight in runner.model.loaded.values())
    _report(connection, "ready", weights)
    while True:
        runner.follow(*orders.get())


def _read_orders(connection: Connection, orders: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    """Read orders until the parent has gone, then end this process."""
    try:
        while True:
            orders.put(pickle.loads(connection.recv_bytes()))  # noqa: S301
    except (EOFError, OSError):
        os._exit(PARENT_GONE)


def _report(connection: Connection, kind: str, value: object) -> None:
    connection.send_bytes(pickle.dumps((kind, value)))


def _end_with(parent: int) -> None:
    """Let the system end this process when its parent dies, even while this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(PARENT_GONE)


if __name__ == "__main__":
    code = main(Connection(int(sys.argv[1])))
    sys.stderr.flush()
    # No thread of a collective that waits for another rank may keep it.
    os._exit(code)
