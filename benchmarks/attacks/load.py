"""Attacks that take time or room, each a function that an attacker calls again and again."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Event
from typing import Any

from attacks.server import OPERATOR, TIMEOUT_S, AttackedServer, Target, chat
from ramify.server.http.connection_limit import raise_descriptor_limit
from ramify.server.http.json_limits import MAX_CONTAINERS

CHAT, COMPLETIONS, EXPLAIN = "/v1/chat/completions", "/v1/completions", "/v1/cache/explain"
CONVERSATIONS, RESPONSES = "/v1/conversations", "/v1/responses"
MIB = 1 << 20
PROBE_S, LIVEZ_S = 0.05, 0.02  # between two requests of the other tenant, and two of /livez
LEAVE_S = 0.08  # between two disconnects of an attacker
# Connections of an attacker that holds them, the time between two of them, and how long all are held.
NUM_IDLE, OPEN_S, IDLE_S = 325, 0.01, 2.0
WORDS = "lamp violin attic Rome Paris river stone bread Mara Otto green seven".split()
Statuses = Counter[str]


def text_of(seed: object, num_words: int) -> str:
    """Words that no other seed has in this order."""
    rng = random.Random(str(seed))
    return " ".join(rng.choices(WORDS, k=num_words))


# -- the attacks: each sends one request, and returns its status or "-" ---------------------------


def hang_up_large_bodies(target: Target, number: int) -> object:
    """16 MiB that take long to decode, to check or to tokenise; the answer is not read."""
    kind = number % 4
    if kind == 0:
        target.hang_up(COMPLETIONS, b'{"prompt":[' + b"1," * (8 * MIB) + b"1]}")
    elif kind == 1:
        target.hang_up(EXPLAIN, b'{"messages":[' + b"[]," * (5 * MIB) + b"[]]}")
    elif kind == 2:
        target.hang_up(CHAT, chat("<|end|>a" * (2 * MIB)))
    else:
        texts = [text_of((number, at), 4000)[:26_000] for at in range(100)]
        target.hang_up(COMPLETIONS, {"prompt": texts})
    return "-"


def many_values(target: Target, number: int) -> object:
    """28 MiB of empty lists, in a field that is not served."""
    values = b"[]," * (28 * MIB // 3)
    body = b'{"messages":[{"role":"user","content":"x"}],"functions":[' + values + b"[]]}"
    return target.post(CHAT, body)


def wrong_values(target: Target, number: int) -> object:
    """1 MiB in a field of two values, so that the error quotes it; it looks like an error's path."""
    return target.post(CHAT, chat("x", prompt_cache_retention=" - at `" + "[" * MIB))


def many_stored_values(target: Target, number: int) -> object:
    """A response that goes on from a conversation of many requests' lists, which no prompt has."""
    _, _, body = target.call("POST", CONVERSATIONS, {})
    name = json.loads(body)["id"]
    item = {"type": "web_search_call", "action": [[]] * (MAX_CONTAINERS - 5_000)}
    for _ in range(10):
        target.post(f"{CONVERSATIONS}/{name}/items", {"items": [item]})
    return target.post(RESPONSES, {"input": "x", "conversation": name, "max_output_tokens": 1})


def slow_tokenisation(target: Target, number: int) -> object:
    """Prompts as long as may be, of the characters that take longest."""
    kind = number % 4
    if kind == 0:
        return target.post("/tokenize", {"prompt": "é" * 13_000, "return_token_strs": True})
    if kind == 1:
        return target.post("/tokenize", chat("<|end|>" * 3000))
    if kind == 2:
        texts = [text_of((number, at), 400) for at in range(100)]
        return target.post(COMPLETIONS, {"prompt": texts, "max_tokens": 1})
    messages = [{"role": "user", "content": f"{number % 10}"}] * 4000
    return target.post("/tokenize", {"messages": messages})


def schema_descriptions(target: Target, number: int) -> object:
    """12 MiB in a schema's description, different each time."""
    schema = {"type": "object", "description": f"{number}" + "x" * (12 * MIB)}
    form = {"type": "text", "json_schema": {"name": "n", "schema": schema}}
    return target.post(CHAT, chat("x", response_format=form))


def hold_rows(target: Target, number: int) -> object:
    """A long answer; there are as many attackers as rows, and more."""
    return target.post(CHAT, chat(text_of(number, 4), max_tokens=1900, ignore_eos=True))


def many_answers(target: Target, number: int) -> object:
    """128 answers to one prompt."""
    return target.post(CHAT, chat(text_of(number, 4), n=128, max_tokens=100, ignore_eos=True))


def pin_the_pool(target: Target, number: int) -> object:
    """A prompt nearly as long as the context, pinned for a day."""
    options = {"ttl": "24h", "mode": "implicit"}
    return target.post(CHAT, chat(text_of(("pin", number), 800), prompt_cache_options=options))


def leave_streams(target: Target, number: int) -> object:
    """A stream that is left after its first bytes, or a body that is not sent to its end.

    At most 100 in a second: floods of connections are for a proxy to stop.
    """
    time.sleep(LEAVE_S)
    body = chat(text_of(number, 50), max_tokens=500, stream=True, ignore_eos=True)
    if number % 2:
        target.hang_up(CHAT, body, read_bytes=300)
    else:
        target.hang_up(CHAT, body, drop=10)
    return "-"


def hold_connections(target: Target, number: int) -> object:
    """More idle connections than the server has descriptors; they take a few seconds to open."""
    with ExitStack() as connections:
        for _ in range(NUM_IDLE):
            connections.enter_context(
                socket.create_connection(("127.0.0.1", target.port), timeout=TIMEOUT_S)
            )
            time.sleep(OPEN_S)
        time.sleep(IDLE_S)
    return "-"


@dataclass(frozen=True, slots=True)
class LoadAttack:
    """An attack, and how many do it at once.

    Args:
        send: sends one request; the number differs each time.
        is_large: the other tenant's requests are nearly as long as the context.
        max_rounds: requests of each attacker; None: until the measurement ends.
    """

    name: str
    send: Callable[[Target, int], object] | None
    num_attackers: int = 0
    is_large: bool = False
    max_rounds: int | None = None


LOAD_ATTACKS = (
    LoadAttack("none", None),
    LoadAttack("large bodies hung up", hang_up_large_bodies, 3),
    LoadAttack("body of many values", many_values, 3),
    LoadAttack("wrong values", wrong_values, 3),
    LoadAttack("many stored values", many_stored_values, 3),
    LoadAttack("slow tokenisation", slow_tokenisation, 8),
    LoadAttack("schema descriptions", schema_descriptions, 2, max_rounds=20),
    LoadAttack("all rows held", hold_rows, 100),
    LoadAttack("n=128 x 10", many_answers, 10),
    LoadAttack("disconnects in streams", leave_streams, 8),
    LoadAttack("idle connections", hold_connections, 4),
    LoadAttack("none, long prompts", None, is_large=True),
    LoadAttack("half of the pool pinned", pin_the_pool, 4, is_large=True, max_rounds=15),
)


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What was measured during an attack."""

    name: str
    latencies_s: tuple[float, ...]  # of the other tenant's requests, one after the other
    livez_s: tuple[float, ...]
    statuses: Statuses  # of the other tenant's requests
    attacker_statuses: Statuses
    rss_growth: int  # bytes, when all is over
    history_bytes: float


def measure(server: AttackedServer, attack: LoadAttack, other: Target, attacker: Target,
            seconds: float) -> LoadResult:  # fmt: skip
    """Measure the other tenant's requests and /livez for `seconds` while the attack goes on."""
    context = multiprocessing.get_context("spawn")
    stop, rss_before = context.Event(), server.rss_bytes()
    counts: Any = context.Queue()
    # A process of its own: the attacker's work must not delay what is measured here.
    process = context.Process(target=_attack, args=(attack.name, attacker, stop, counts))
    if attack.send is not None:
        process.start()
        time.sleep(2.0)
    statuses, livez_statuses = Statuses(), Statuses()
    deadline = time.monotonic() + seconds
    livez_s: list[float] = []
    livez = threading.Thread(
        target=_probe_livez, args=(server.target(), deadline, livez_s, livez_statuses)
    )
    livez.start()
    latencies_s = _probe(other, attack, deadline, statuses)
    livez.join()
    stop.set()
    attacker_statuses = Statuses()
    if attack.send is not None:
        attacker_statuses = counts.get(timeout=120)
        process.join()
    if not server.wait_until_idle():
        statuses["not idle"] += 1
    statuses.update(
        {f"livez {status}": n for status, n in livez_statuses.items() if status != "200"}
    )
    return LoadResult(
        attack.name,
        tuple(latencies_s),
        tuple(livez_s),
        statuses,
        attacker_statuses,
        server.rss_bytes() - rss_before,
        server.metrics().get("ramify_request_history_bytes", float("nan")),
    )


def _probe(target: Target, attack: LoadAttack, deadline: float, statuses: Statuses) -> list[float]:
    """Latencies of small requests, one after the other."""
    latencies_s: list[float] = []
    while time.monotonic() < deadline or not latencies_s:
        seed = (attack.name, len(latencies_s))
        body = chat(text_of(seed, 800 if attack.is_large else 8))
        latencies_s.append(_timed(partial(target.post, CHAT, body), statuses))
        time.sleep(PROBE_S)
    return latencies_s


def _probe_livez(
    target: Target, deadline: float, latencies_s: list[float], statuses: Statuses
) -> None:
    while time.monotonic() < deadline:
        latencies_s.append(_timed(lambda: target.call("GET", "/livez")[0], statuses))
        time.sleep(LIVEZ_S)


def _timed(send: Callable[[], object], statuses: Statuses) -> float:
    """Seconds that a request took; counts its status."""
    begin_s = time.perf_counter()
    try:
        statuses[str(send())] += 1
    except OSError as error:
        statuses[type(error).__name__] += 1
    return time.perf_counter() - begin_s


def _attack(name: str, target: Target, stop: Event, counts: Any) -> None:
    """The process of the attackers: threads that send until `stop`."""
    attack = next(attack for attack in LOAD_ATTACKS if attack.name == name)
    send, statuses, lock = attack.send, Statuses(), threading.Lock()
    raise_descriptor_limit()
    assert send is not None

    def work(place: int) -> None:
        for count in itertools.islice(itertools.count(), attack.max_rounds):
            if stop.is_set():
                return
            own = Statuses()
            _timed(partial(send, target, count * attack.num_attackers + place), own)
            with lock:
                statuses.update(own)
            if set(own) & {"429", "503"}:
                stop.wait(0.2)

    threads = [
        threading.Thread(target=work, args=(place,)) for place in range(attack.num_attackers)
    ]
    for thread in threads:
        thread.daemon = True  # a request of a minute must not hold up the end
        thread.start()
    for thread in threads:
        thread.join(90)
    with lock:
        counts.put(Statuses(statuses))


def end_pins(server: AttackedServer) -> None:
    """Remove all pins, as the operator."""
    _, _, body = server.target(OPERATOR).call("GET", "/v1/cache/pins")
    for pin in json.loads(body)["pins"]:
        server.target(OPERATOR).call("DELETE", f"/v1/cache/pins/{pin['id']}")
