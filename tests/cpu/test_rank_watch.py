"""What rank 0 learns of the others: who ended and why, and that interrupts wait for a call's end."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from ramify.engine.execution.ranks.rank_processes import RankProcesses
from ramify.engine.execution.ranks.rank_watch import RankState, RankWatch
from ramify.errors import RankLostError

LIMIT_S = 30.0
RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:537] Connection reset by peer"
LATE = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 4000ms"


class Process:
    """A process that has ended with this exit code, or lives."""

    def __init__(self, pid: int, code: int | None) -> None:
        self.pid, self.code = pid, code

    def wait(self, _limit_s: float) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -signal.SIGKILL if self.code is None else self.code


def reason_of(*ranks: Callable[[Connection], int | None]) -> str:
    """Why the engine ends: each rank writes its reports, and returns its exit code; None: it lives."""
    connections, processes = list[Connection](), list[Any]()
    ends = []
    for number, write in enumerate(ranks):
        ours, theirs = Pipe()
        connections.append(ours)
        code = write(theirs)
        processes.append(Process(101 + number, code))
        if code is None:
            ends.append(theirs)  # open
        else:
            theirs.close()
    state = RankState(len(ranks))
    RankWatch(processes, connections, state, 4.0).run()
    assert all(process.code is not None for process in processes), "a rank still runs"
    return state.lost.result(0).reason


def dies(code: int) -> Callable[[Connection], int | None]:
    return lambda connection: code


def fails(reason: str) -> Callable[[Connection], int | None]:
    def write(connection: Connection) -> int:
        connection.send_bytes(pickle.dumps(("failed", reason)))
        return 2

    return write


def lives(connection: Connection) -> None:
    connection.send_bytes(pickle.dumps(("started", None)))


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ([dies(-9)], "rank 1 of 2 (process 101) was ended by SIGKILL"),
        ([lives, dies(0)], "rank 2 of 3 (process 102) has ended with exit code 0"),
        # Others lose their connection to it before it is noticed.
        ([fails(RESET), dies(-11)], "rank 2 of 3 (process 102) was ended by SIGSEGV"),
        (
            [fails(RESET), fails("MemoryError: no"), lives],
            "rank 2 of 4 (process 102) has failed: MemoryError: no",
        ),
        (
            [fails(LATE), lives, fails(LATE)],
            "rank 2 of 4 (process 102) did not answer within rank_timeout_s=4",
        ),
        ([fails(LATE)], "rank 0 of 2 did not answer within rank_timeout_s=4"),
    ],
)
def test_the_reason_is_that_of_the_rank_at_fault(
    ranks: list[Callable[[Connection], int | None]], reason: str
) -> None:
    """A sum over ranks fails on all of them, whichever was the cause."""
    assert reason_of(*ranks) == reason


def test_an_interrupt_waits_for_the_call_to_end() -> None:
    """A call that ranks make together is made whole, or they would not agree about the next."""
    processes = RankProcesses(1, timeout_s=LIMIT_S)
    begun, calls = threading.Event(), list[str]()

    def call() -> None:
        begun.set()
        interrupted.wait(LIMIT_S)
        calls.append("ended")

    interrupted = threading.Event()

    def interrupt() -> None:
        begun.wait(LIMIT_S)
        signal.raise_signal(signal.SIGINT)
        interrupted.set()

    # A run in the background of a shell ignores it.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            processes.run(call)
    finally:
        signal.signal(signal.SIGINT, handler)

    assert calls == ["ended"]
    assert processes.run(lambda: 5) == 5
    processes.close()


def test_a_call_that_raises_ends_the_ranks() -> None:
    """They wait in a sum for this rank; the error is the cause, and every later call raises the same."""
    processes = RankProcesses(1, timeout_s=LIMIT_S)

    def call() -> None:
        raise MemoryError("no room")

    with pytest.raises(RankLostError, match="rank 0 of 1 has failed: MemoryError: no room") as info:
        processes.run(call)

    assert isinstance(info.value.__cause__, MemoryError)
    with pytest.raises(RankLostError, match="no room"):
        processes.run(lambda: None)
    assert not processes.folder.exists()


def test_a_call_that_hangs_ends_at_its_limit() -> None:
    """As one that waits for a device does, whose sums have no limit; the caller goes on."""
    processes = RankProcesses(1, timeout_s=0.05, call_limit_s=0.05)
    release = threading.Event()

    with pytest.raises(RankLostError, match=r"did not answer within rank_timeout_s=0\.05"):
        processes.run(lambda: release.wait(LIMIT_S))

    release.set()
