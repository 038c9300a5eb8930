"""Random requests and faults against engines around a tiny model; every answer is compared.

    make soak-engine                                    20,000 requests, about 20 minutes
    make soak-engine ARGS="--requests 600"              a first look
    make soak-engine ARGS="--cells chunks --seed 70 --requests 40"   one life again
    RAMIFY_TEST_RUNNER=device-ahead make soak-engine    through the executor of a device, see tests/device_runner.py

A life (`tests/cpu/engine_life.py`) is one engine that serves some dozens of requests: aborts,
preemptions, several answers by fork, stop texts, penalties, drafts, and steps, copies, decoders and
pages that fail. Each answer must be that of the same request alone on a fresh engine, bit for bit,
each request ends once, and no page is leaked. A cell that fails prints the seed of that life.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from soak_cells import end, parse_arguments

LIFE = 40  # requests of one engine
COLUMNS = ("requests", "tokens", "read", "aborts", "preemptions", "faults", "out of memory")
MORE = ("interrupts", "repairs", "condemned", "errors")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts, duration and failure of one cell."""

    cell: str
    counts: Counter[str]
    seconds: float
    failure: str  # empty if there was none


@cache
def model_of(folder: str, kv_dtype: str) -> Any:
    """The small model, built once per process so that cells share its reference answers."""
    from tests.cpu.engine_life import SmallModel

    return SmallModel(Path(folder), kv_dtype)


def soak(name: str, requests: int, first_seed: int, folder: str) -> Outcome:
    """Run lives of cell `name` until `requests` requests are served or a life fails."""
    import logging

    import torch

    from tests.cpu.engine_life import CELLS, Life
    from tests.device_runner import install

    install()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # faults are what this is about
    begin, cell, counts = time.monotonic(), CELLS[name], Counter[str]()
    model = model_of(folder, cell.kv_dtype)
    number, failure = first_seed, ""
    while counts["requests"] < requests and not failure:
        try:
            life = Life(model, cell, number)
            counts += life.run(min(LIFE, requests - counts["requests"]))
        except BaseException:  # noqa: BLE001  # whatever it is, it is the finding
            failure = f"seed {number}\n{traceback.format_exc(limit=-6)}"
        number += 1
    return Outcome(name, counts, time.monotonic() - begin, failure)


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from ramify.testing import write_tiny_checkpoint
    from tests.cpu.engine_life import CELLS, TINY

    args = parse_arguments(str(__doc__), CELLS, "requests", 20_000)
    heads = (*COLUMNS, *MORE)
    print(
        f"{'cell':13}" + "".join(f"{head:>{max(9, len(head) + 1)}}" for head in heads), flush=True
    )
    outcomes = []
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(args.jobs) as pool:
        write_tiny_checkpoint(folder, "llama", **TINY)
        running = [pool.submit(soak, cell, args.per_cell, args.seed, folder) for cell in args.cells]
        for done in as_completed(running):
            outcome = done.result()
            outcomes.append(outcome)
            row = "".join(f"{outcome.counts[head]:>{max(9, len(head) + 1)},}" for head in heads)
            print(f"{outcome.cell:13}{row} {outcome.seconds:6.0f} s", flush=True)
            if outcome.failure:
                print(f"{outcome.cell} FAILED: {outcome.failure}", flush=True)
    total = sum(outcome.counts["requests"] for outcome in outcomes)
    failed = [outcome.cell for outcome in outcomes if outcome.failure]
    end(total, "requests", failed, len(args.cells))


if __name__ == "__main__":
    main()
