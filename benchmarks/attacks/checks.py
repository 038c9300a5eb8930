"""Attacks that only look: the format oracle, forged Host and Origin headers, redirects."""

from __future__ import annotations

import random
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from attacks.load import CHAT
from attacks.server import Target, chat

HERE = {"Host": "127.0.0.1"}
FORGERIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("rebound host", {"Host": "evil.example"}),
    ("rebound host with its origin", {"Host": "evil.example", "Origin": "http://evil.example"}),
    ("host with a suffix", {"Host": "127.0.0.1.evil.example"}),
    ("foreign origin", HERE | {"Origin": "https://evil.example"}),
    ("opaque origin", HERE | {"Origin": "null"}),
    ("form of a page", HERE | {"Origin": "https://evil.example", "Content-Type": "text/plain"}),
    ("form without origin", HERE | {"Referer": "https://e.x/", "Content-Type": "text/plain"}),
    ("fetch across sites", HERE | {"Sec-Fetch-Site": "cross-site"}),
)
GUARDED = (
    ("POST", CHAT),
    ("POST", "/v1/messages"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/v1/cache/pins"),
    ("DELETE", "/v1/cache"),
)


def forgeries_served(target: Target) -> list[str]:
    """Requests as a page of another site could make them that a keyless server did not refuse.

    Also a program's request if that is refused: the server must answer somebody.
    """
    status, _, _ = target.call("POST", CHAT, chat("x"), HERE)
    served = [] if status == 200 else [f"no forgery: POST {CHAT} {status}"]
    for name, headers in FORGERIES:
        for method, path in GUARDED:
            status, _, _ = target.call(method, path, chat("x"), headers)
            if status not in (403, 415):
                served.append(f"{name}: {method} {path} {status}")
    return served


def redirects(target: Target) -> list[str]:
    """Paths at which the server redirects to another host."""
    paths = ["/v1/models/", "/v1/chat/completions/", "/v1//models", "//evil.example/v1", "/livez/"]
    paths += ["/v1/cache/", "/%2f%2fevil.example", "/v1/models/../models/"]
    followed = []
    for path in paths:
        for method in ("GET", "POST"):
            status, headers, _ = target.call(method, path, b"", {"Host": "evil.example"})
            location = headers.get("Location", "")
            if 300 <= status < 400 or location:
                followed.append(f"{method} {path} {status} {location}")
    return followed


def format_oracle(other: Target, attacker: Target, num_pairs: int) -> float:
    """AUC of the timing attack: is a schema, judged by its request time, one that another tenant used?

    0.5: not at all. The standard error is about `1 / sqrt(6 * num_pairs)`.
    """
    rng = random.Random(0)
    known_s: list[float] = []
    new_s: list[float] = []
    for number in range(num_pairs):
        known, new = _schema(rng, number), _schema(rng, -number - 1)
        statuses = {other.post(CHAT, known)}
        pair = [(known_s, known), (new_s, new)]
        rng.shuffle(pair)
        for times_s, body in pair:
            begin_s = time.perf_counter()
            statuses.add(attacker.post(CHAT, body))
            times_s.append(time.perf_counter() - begin_s)
        if statuses != {200}:
            raise RuntimeError(f"requests of the oracle ended with {statuses}; they tell nothing")
    return auc(known_s, new_s)


def _schema(rng: random.Random, number: int) -> dict[str, Any]:
    names = [f"field_{rng.randrange(10**6)}" for _ in range(8)]
    properties = {name: {"type": "string", "enum": [name, str(number)]} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    return chat("x", response_format=form, max_tokens=1)


def auc(positives: Sequence[float], negatives: Sequence[float]) -> float:
    """Probability that a positive is smaller than a negative; equal ones count half."""
    ordered = sorted(negatives)
    larger = sum(
        len(ordered) - (bisect_left(ordered, value) + bisect_right(ordered, value)) / 2
        for value in positives
    )
    return larger / (len(positives) * len(negatives))
