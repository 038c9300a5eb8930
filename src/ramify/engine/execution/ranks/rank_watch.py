"""`RankWatch`: reads what ranks report, notices that one has ended, and says why."""

from __future__ import annotations

import pickle
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from ramify.errors import RankLostError

OTHERS_S = 0.5  # after a rank has failed, for others to say that it was not its fault
END_S = 5.0  # for a process that was killed to be gone
# Parts of what torch says when a sum over ranks fails.
COLLECTIVES = ("gloo", "nccl")


class RankState:
    """What is known of ranks 1 and up: futures of what they report, and of the first that ends.

    Args:
        num_processes: ranks without rank 0.
    """

    def __init__(self, num_processes: int) -> None:
        self.lost: Future[RankLostError] = Future()
        self._reports: dict[str, Future[list[Any]]] = {"started": Future(), "ready": Future()}
        self._values: dict[str, dict[int, Any]] = {"started": {}, "ready": {}}
        self._num_processes = num_processes

    def reports(self, kind: str) -> Future[list[Any]]:
        """What each process has reported, once all have: "started", or "ready" with bytes of weights."""
        return self._reports[kind]

    def add(self, kind: str, number: int, value: Any) -> None:
        """Count a report."""
        values = self._values[kind]
        values[number] = value
        if len(values) == self._num_processes:
            self._reports[kind].set_result([values[number] for number in sorted(values)])

    def lose(self, reason: str) -> None:
        """Set the reason why the engine ends, unless there is another."""
        with suppress(InvalidStateError):
            self.lost.set_result(RankLostError(reason))


class RankWatch:
    """Reads reports in a thread of its own until a rank has ended; then ends the others.

    Args:
        processes, connections: of ranks 1 and up.
        timeout_s: of a sum over ranks.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        connections: Sequence[Connection],
        state: RankState,
        timeout_s: float,
    ) -> None:
        self._processes, self._connections = processes, connections
        self._state, self._timeout_s = state, timeout_s
        self._reasons: dict[int, str] = {}  # that ranks have reported, by number of the process
        self._ended: set[int] = set()

    def run(self) -> None:
        """Watch until a rank has ended."""
        while not self._ended:
            self._read(None)
        self._state.lose(self._reason())
        kill(self._processes)
        for connection in self._connections:
            connection.close()

    def _read(self, limit_s: float | None) -> None:
        """Read the reports that are there, or come within that time."""
        numbers = range(len(self._connections))
        live = {self._connections[n]: n for n in numbers if n not in self._ended}
        for ready in wait([*live], limit_s):
            assert isinstance(ready, Connection)
            number = live[ready]
            try:
                kind, value = pickle.loads(ready.recv_bytes())  # noqa: S301 - our own child's
            except (EOFError, OSError):
                self._ended.add(number)
                continue
            if kind == "failed":
                self._reasons[number] = value
            else:
                self._state.add(kind, number, value)

    def _reason(self) -> str:
        """Why the first rank has ended. Those that wait for it in a sum fail as well, some of them sooner."""
        until_s = time.monotonic() + OTHERS_S
        while True:
            for number in sorted(self._ended - self._reasons.keys()):
                return f"{self._name(number)} {_end_of(self._processes[number])}"
            for number, reason in self._reasons.items():
                if not is_of_a_collective(reason):
                    return f"{self._name(number)} has failed: {reason}"
            rest_s = until_s - time.monotonic()
            if rest_s < 0 or len(self._ended) == len(self._processes):
                break
            self._read(rest_s)
        return self.no_answer(self._ended)

    def no_answer(self, answered: set[int]) -> str:
        """The reason when a sum has failed and no rank has an own one: that of the ranks that hang."""
        hanging = [n for n in range(len(self._processes)) if n not in answered]
        names = ", ".join(map(self._name, hanging)) or f"rank 0 of {len(self._processes) + 1}"
        return f"{names} did not answer within rank_timeout_s={self._timeout_s:g}"

    def _name(self, number: int) -> str:
        process = self._processes[number].pid
        return f"rank {number + 1} of {len(self._processes) + 1} (process {process})"


def is_of_a_collective(reason: str) -> bool:
    """Whether an error is of a sum over ranks, whose cause may be another rank."""
    return any(name in reason.lower() for name in COLLECTIVES)


def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes, and wait until they are gone."""
    for process in processes:
        process.kill()
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)


def _end_of(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(END_S)
    except subprocess.TimeoutExpired:
        return "has closed its connection"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"has ended with exit code {code}"
