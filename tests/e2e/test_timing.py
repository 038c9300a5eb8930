"""A timing attack: can the time to the first token reveal another tenant's prompt?

Before each probe the victim sends a long prompt. The attacker then sends, in random order, that
prompt or a new one, and guesses from the time alone which of the two it was.
"""

import http.client
import json
import logging
import os
import random
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import Running, Start

PROBES = int(os.environ.get("RAMIFY_TIMING_PROBES", "0"))  # 2,000 before a release; 120 take 2 min
pytestmark = pytest.mark.skipif(not PROBES, reason="RAMIFY_TIMING_PROBES is not set")
PROMPT_TOKENS = 1900
VOCAB = 1300
KEYS = ("--api-key", "key-ann", "--api-key", "key-bob")


class Tenant:
    """A client that keeps one connection, so that connecting is not measured."""

    def __init__(self, server: Running, key: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def ask(self, prompt: list[int]) -> float:
        """Request one token; returns seconds until the whole response has come."""
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
        start_s = time.perf_counter()
        self.connection.request("POST", "/v1/completions", body, self.headers)
        response = self.connection.getresponse()
        response_body = response.read()
        took_s = time.perf_counter() - start_s
        assert response.status == 200, response_body
        return took_s


def auc(hits: list[float], misses: list[float]) -> float:
    """The area under the ROC curve: the probability that a hit is faster than a miss."""
    ranked = sorted([(took_s, 0) for took_s in hits] + [(took_s, 1) for took_s in misses])
    num_faster = total = 0
    for _, is_miss in ranked:
        if is_miss:
            total += num_faster
        else:
            num_faster += 1
    return total / (len(hits) * len(misses))


def attack(victim: Tenant, attacker: Tenant, seed: int) -> float:
    rng = random.Random(seed)
    hits: list[float] = []
    misses: list[float] = []
    order = [True, False] * (PROBES // 2)
    rng.shuffle(order)
    for is_hit in order:
        secret = rng.choices(range(10, VOCAB), k=PROMPT_TOKENS)
        victim.ask(secret)
        probe = secret if is_hit else rng.choices(range(10, VOCAB), k=PROMPT_TOKENS)
        (hits if is_hit else misses).append(attacker.ask(probe))
    victim.connection.close()
    attacker.connection.close()
    return auc(hits, misses)


def test_time_tells_nothing_across_tenants_and_everything_within_one(
    start: Start, record_property: Callable[[str, object], None]
) -> None:
    """AUC 0.5 ± 0.05 between tenants; above 0.9 within a tenant, so that the attack itself works.

    With fewer than 2,000 probes the tolerance is four standard deviations of a random guess.
    """
    server = start(*KEYS, "--kv-cache-tokens", "65536")
    num_each = PROBES // 2
    deviation = ((2 * num_each + 1) / (12 * num_each * num_each)) ** 0.5
    tolerance = max(0.05, 4 * deviation)

    within = attack(Tenant(server, "key-ann"), Tenant(server, "key-ann"), seed=1)
    across = attack(Tenant(server, "key-ann"), Tenant(server, "key-bob"), seed=2)

    summary = f"AUC of {PROBES} probes: same tenant {within:.3f}, other tenant {across:.3f}"
    record_property("auc", summary)
    logging.getLogger(__name__).info(summary)
    assert within > 0.9, summary
    assert abs(across - 0.5) <= tolerance, summary
