"""Malformed bodies: only the client's fault is told, nothing is left, the server goes on."""

import os
import time
from collections import Counter

from tests.pure.server_bench import ServerBench, chat, run
from tests.pure.server_mutator import VALID, mutant

COUNT = int(os.environ.get("RAMIFY_FUZZ_BODIES", "600"))  # 20,000 before a release
SLOW_S = 30.0  # of a machine that does other things too; nothing may take long


def test_the_bodies_that_are_mutated_are_served() -> None:
    """Otherwise mutants would all be refused for the same reason."""
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            for path, body in VALID:
                answer = await bench.post(path, body)
                expected = 409 if path.endswith("/pins") else 200  # nothing is cached to be pinned
                assert answer.status == expected, (path, answer.body)

    run(main())


def test_malformed_bodies_are_refused_and_leave_nothing() -> None:
    """4xx in the envelope of the API, or 200 where a mutant is still valid; no page, record or task stays."""
    bench = ServerBench()
    told: Counter[int] = Counter()

    async def main() -> None:
        async with bench.running():
            for seed in range(COUNT):
                path, body, headers = mutant(seed)
                begun = time.perf_counter()
                answer = await bench.call("POST", path, body, headers=headers)
                took_s = time.perf_counter() - begun
                where = (seed, path, body[:300], answer.status, answer.body[:300])
                assert took_s < SLOW_S, (took_s, *where)
                assert answer.status == 200 or 400 <= answer.status < 500, where
                told[answer.status] += 1
                if answer.status != 200:
                    assert answer.headers["content-type"] == "application/json", where
                    error = answer.json["error"]
                    assert error["message"], where
                    assert (answer.json.get("type") == "error") == path.startswith("/v1/messages")
                    assert b"Traceback" not in answer.body, where
                    assert b"/ramify/" not in answer.body, where
                    assert len(answer.body) < 4096, where
                elif answer.headers["content-type"].startswith("text/event-stream"):
                    codes = [one["error"] for one in answer.events if "error" in one]
                    assert not [one for one in codes if one["type"] == "server_error"], where
            assert (await bench.post("/v1/chat/completions", chat("still there?"))).status == 200

    run(main(), limit_s=120 + COUNT / 10)

    assert told[200] > COUNT // 100, told
    assert told[400] > COUNT // 4, told
    assert len(bench.service.history) <= bench.service.history.max_entries
