"""Run random operations on the cache core and check all invariants after each operation.

    make soak-core                                      1,000,000 operations, about 20 minutes
    make soak-core ARGS="--operations 50000"            a first look
    make soak-core ARGS="--cells hash/lru --seed 7"     one index and policy; other random numbers

Every pair of an index and an eviction policy is a cell with a state machine of its own
(`tests/pure/cache_life.py`): requests with forks, chunks, drafts, preemption and failed steps; pins
that expire; eviction by number and by predicate; page sizes 1 to 64. After each operation the cache
checks itself and is compared with a model made of dicts. A cell that fails prints the shortest
failing program and the seed that reproduces it.
"""

from __future__ import annotations

import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from soak_cells import end, parse_arguments

from ramify.cache import INDICES, POLICIES
from tests.pure.cache_life import machine

EXAMPLES = 200  # lives of a cache in one go
STEPS = 60  # operations in such a life, at most


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one cell."""

    cell: str
    operations: int
    seconds: float
    failure: str  # empty if there was none


def soak(cell: str, operations: int, first_seed: int) -> Outcome:
    """Run one cell until the given number of operations is done or an operation fails."""
    begin = time.monotonic()
    tested, failure, number = machine(*cell.split("/")), "", first_seed
    profile = settings(
        max_examples=EXAMPLES,
        stateful_step_count=STEPS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    while tested.num_operations < operations and not failure:
        try:
            run_state_machine_as_test(seed(number)(tested), settings=profile)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the finding
            program = "\n".join(getattr(error, "__notes__", []))
            failure = f"seed {number}\n{program}\n{traceback.format_exc(limit=-4)}"
        number += 1
    return Outcome(cell, tested.num_operations, time.monotonic() - begin, failure)


def main() -> None:
    cells = [f"{index}/{policy}" for index in INDICES for policy in POLICIES]
    args = parse_arguments(str(__doc__), cells, "operations", 1_000_000)
    outcomes = []
    with ProcessPoolExecutor(args.jobs) as pool:
        running = [pool.submit(soak, cell, args.per_cell, args.seed) for cell in args.cells]
        for done in as_completed(running):
            outcome = done.result()
            outcomes.append(outcome)
            verdict = f"FAILED\n{outcome.failure}" if outcome.failure else "ok"
            print(
                f"{outcome.cell:14} {outcome.operations:9,} operations {outcome.seconds:6.0f} s  {verdict}",
                flush=True,
            )
    total = sum(outcome.operations for outcome in outcomes)
    failed = [outcome.cell for outcome in outcomes if outcome.failure]
    end(total, "operations", failed, len(args.cells))


if __name__ == "__main__":
    main()
