"""Malformed bodies: 4xx, nothing is left behind, and the server goes on."""

import os
import time
from collections import Counter

from ramify.server.history.expiring_store import MAX_ENTRIES
from tests.pure.server_bench import ServerBench, chat, run
from tests.pure.server_mutator import VALID, mutant

COUNT = int(os.environ.get("RAMIFY_FUZZ_BODIES", "600"))  # 20,000 before a release
SLOW_S = 30.0  # no request may take longer, also on a busy machine


def test_the_bodies_that_are_mutated_are_served() -> None:
    """Otherwise all mutants would be rejected for the same reason."""
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            for path, body in VALID:
                answer = await bench.post(path, body)
                expected = 409 if path.endswith("/pins") else 200  # the prefix is not cached
                assert answer.status == expected, (path, answer.body)

    run(main())


def test_malformed_bodies_are_refused_and_leave_nothing() -> None:
    """4xx in the form of the API, or 200 for a mutant that is still valid; no page or task is left."""
    bench = ServerBench()
    statuses: Counter[int] = Counter()

    async def main() -> None:
        async with bench.running():
            for seed in range(COUNT):
                path, body, headers = mutant(seed)
                start_s = time.perf_counter()
                answer = await bench.call("POST", path, body, headers=headers)
                took_s = time.perf_counter() - start_s
                context = (seed, path, body[:300], answer.status, answer.body[:300])
                assert took_s < SLOW_S, (took_s, *context)
                assert answer.status == 200 or 400 <= answer.status < 500, context
                statuses[answer.status] += 1
                if answer.status != 200:
                    assert answer.headers["content-type"] == "application/json", context
                    error = answer.json["error"]
                    assert error["message"], context
                    assert (answer.json.get("type") == "error") == path.startswith("/v1/messages")
                    assert b"Traceback" not in answer.body, context
                    assert b"/ramify/" not in answer.body, context
                    assert len(answer.body) < 4096, context
                elif answer.headers["content-type"].startswith("text/event-stream"):
                    errors = [event["error"] for event in answer.events if "error" in event]
                    assert not [error for error in errors if error["type"] == "server_error"], (
                        context
                    )
            assert (await bench.post("/v1/chat/completions", chat("still there?"))).status == 200

    run(main(), limit_s=120 + COUNT / 10)

    assert statuses[200] > COUNT // 100, statuses
    assert statuses[400] > COUNT // 4, statuses
    assert len(bench.service.history) <= MAX_ENTRIES
