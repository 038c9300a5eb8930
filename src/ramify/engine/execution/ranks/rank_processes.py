"""`RankProcesses`: the processes of ranks 1 and up, and calls that all ranks make."""

from __future__ import annotations

import os
import pickle
import queue
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from ramify.engine.execution.ranks.rank_watch import (
    RankState,
    RankWatch,
    is_of_a_collective,
    kill,
)
from ramify.errors import RankLostError
from ramify.module_command import module_command

T = TypeVar("T")
MODULE = "ramify.engine.execution.ranks.rank_process"
REASON_S = 3.0  # after a sum has failed here, for the rank that made it fail to be noticed


class RankProcesses:
    """Starts ranks 1 and up, and makes calls with them.

    Calls are made in a thread of their own: an interrupt of the caller's thread comes when the call has
    ended on all ranks, and a call that hangs does not keep the caller once a rank has gone. The processes
    end with `close`, with this object, and with this process.

    Args:
        size: ranks, rank 0 included.
        timeout_s: of a sum over ranks.
        call_limit_s: of a whole call, for a device whose sums have no limit of their own; None: no limit.
    """

    def __init__(self, size: int, *, timeout_s: float, call_limit_s: float | None = None) -> None:
        self.size, self._call_limit_s = size, call_limit_s
        self.folder = Path(tempfile.mkdtemp(prefix="ramify-ranks-"))
        self._state = RankState(size - 1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._watch = RankWatch(self._processes, self._connections, self._state, timeout_s)
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(
            target=_run_calls, args=(self._calls,), name="ramify rank 0", daemon=True
        ).start()
        self._end = weakref.finalize(self, _end, self._processes, self._calls, self.folder)

    def start(self, specs: Sequence[object]) -> None:
        """Start a process for each spec; returns when they can connect.

        Raises:
            RankLostError: a process has ended before.
        """
        # In a thread that lives as long as they do: the system ends a process with the thread that has
        # started it.
        self.run(partial(self._start, specs))
        threading.Thread(target=self._watch.run, name="ramify ranks", daemon=True).start()
        self._wait(self._state.reports("started"))

    def _start(self, specs: Sequence[object]) -> None:
        for spec in specs:
            ours, theirs = Pipe()
            command = [*module_command(MODULE), str(theirs.fileno())]
            process = subprocess.Popen(  # noqa: S603 - our own module
                command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
            )
            self._processes.append(process)
            theirs.close()
            self._connections.append(ours)
            ours.send_bytes(pickle.dumps((os.getpid(), spec)))

    @property
    def process_ids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def wait_until_loaded(self) -> list[int]:
        """Bytes of the weights of ranks 1 and up, once they have loaded them.

        Raises:
            RankLostError: a rank has ended before.
        """
        self._wait(self._state.reports("ready"))
        return self._state.reports("ready").result()

    def call(self, order: str, arguments: tuple[Any, ...], own: Callable[[], T]) -> T:
        """See `Followers.call`."""
        return self.run(partial(self._order, (order, *arguments), own))

    def _order(self, order: tuple[Any, ...], own: Callable[[], T]) -> T:
        message = pickle.dumps(order, protocol=pickle.HIGHEST_PROTOCOL)
        for connection in self._connections:
            connection.send_bytes(message)
        return own()

    def run(self, own: Callable[[], T]) -> T:
        """Do what other ranks take part in without an order.

        Raises:
            RankLostError: a rank has gone, or `own` has raised; the ranks have ended.
        """
        if self._state.lost.done():
            raise self._state.lost.result()
        result: Future[T] = Future()
        self._calls.put(partial(_fulfil, result, own))
        self._wait(result, self._call_limit_s)
        error = result.exception()
        if error is not None:
            self._lose(error)
            raise self._state.lost.result() from error
        return result.result()

    def _wait(self, result: Future[Any], limit_s: float | None = None) -> None:
        """Wait for a result, or for the loss of a rank; an interrupt comes afterwards."""
        lost, interrupt = self._state.lost, None
        while not (result.done() or lost.done()):
            try:
                done, _ = wait([result, lost], limit_s, FIRST_COMPLETED)
                if not done:
                    self._state.lose(self._watch.no_answer(set()))
            except BaseException as error:  # noqa: BLE001 - raised below
                interrupt = error
        if interrupt is not None:
            raise interrupt
        if lost.done():  # also if there is a result: a sum that was given up may have any value
            self._end()
            raise lost.result()

    def _lose(self, error: BaseException) -> None:
        """End all ranks, since a call has failed here."""
        reason = f"rank 0 of {self.size} has failed: {type(error).__name__}: {error}"
        if isinstance(error, OSError) or is_of_a_collective(
            reason
        ):  # maybe for another rank's fault
            wait([self._state.lost], timeout=REASON_S)
        if is_of_a_collective(reason):
            reason = self._watch.no_answer(set())
        self._state.lose(reason)
        self._end()

    def on_loss(self, call: weakref.WeakMethod[Callable[[RankLostError], None]]) -> None:
        """See `Ranks.on_loss`."""

        def report(lost: Future[RankLostError]) -> None:
            method = call()
            if method is not None:
                method(lost.result())

        self._state.lost.add_done_callback(report)

    def close(self) -> None:
        """End the processes. May be called twice; every later call raises RankLostError."""
        self._state.lose("the engine was closed")
        self._end()


def _fulfil(result: Future[T], own: Callable[[], T]) -> None:
    try:
        value = own()
    except BaseException as error:  # noqa: BLE001 - goes to the caller through the future
        result.set_exception(error)
    else:
        result.set_result(value)


def _run_calls(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        call = None  # it holds what it was given until the next comes


def _end(
    processes: Sequence[subprocess.Popen[bytes]],
    calls: queue.SimpleQueue[Callable[[], None] | None],
    folder: Path,
) -> None:
    kill(processes)
    calls.put(None)
    shutil.rmtree(folder, ignore_errors=True)
