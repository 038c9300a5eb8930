"""The shared store against a real server: shared pages, and servers that are dead, slow, full or foreign."""

import contextlib
import math
import socket
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

from ramify.errors import ConfigError, StoreUnavailableError
from ramify.kv.stores.circuit_breaker import CircuitBreaker
from ramify.kv.stores.page_store import PageKey, ReadOutcome, WriteOutcome
from ramify.kv.stores.valkey import MAX_OWED, ValkeyStore
from ramify.kv.stores.valkey_link import ValkeyLink, shown_url
from tests.pure.store_cases import IDENTITY, get, hash_of, hits, key, page, put
from tests.pure.valkey_server import ValkeyServer

pytest.importorskip("valkey", reason="the shared store needs valkey: pip install 'ramify[remote]'")

PAGE_BYTES = 4096


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    server = ValkeyServer("--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.close()


class Clock:
    """Seconds that pass when a test says so, for pauses; deadlines are real."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def connected(server: ValkeyServer, **changes) -> ValkeyStore:
    values = {"identity": IDENTITY, "page_bytes": PAGE_BYTES, "clock": Clock(), **changes}
    return ValkeyStore(values.pop("url", server.url), **values)


def soon() -> float:
    return time.monotonic() + 0.05


def test_pages_are_shared_by_engines_of_one_identity(server: ValkeyServer) -> None:
    """What one store puts another of the same identity reads; a second put finds it present."""
    first, second = connected(server), connected(server)

    assert put(first, range(40)) == [WriteOutcome.WRITTEN] * 40
    assert put(second, range(40)) == [WriteOutcome.PRESENT] * 40
    assert hits(second, range(41)) == list(range(40))
    assert second.has_many([hash_of(1), hash_of(99)], deadline=math.inf) == [True, False]
    assert second.counts().hit_pages == 40 and second.counts().errors == ()
    assert "connected" in first.start_report and "not encrypted" in first.start_report


@pytest.mark.parametrize("name", [*IDENTITY, "page_bytes"])
def test_another_identity_gives_no_hit(server: ValkeyServer, name: str) -> None:
    """One field of the identity changed: no page is seen."""
    put(connected(server), range(3))
    other = (
        connected(server, page_bytes=PAGE_BYTES + 1)
        if name == "page_bytes"
        else connected(server, identity={**IDENTITY, name: "another"})
    )

    assert hits(other, range(3)) == []


def test_large_pages_go_in_batches(server: ValkeyServer) -> None:
    """A call of 14 MB is cut to batches of 8 MiB and 16 pages; every page is right."""
    store = connected(server, page_bytes=368_640)

    put(store, range(20))

    buffers = [memoryview(bytearray(368_640)) for _ in range(20)]
    outcomes = store.get_many([key(n) for n in range(20)], buffers, deadline=math.inf)
    assert outcomes == [ReadOutcome.HIT] * 20
    assert [bytes(buffer) for buffer in buffers] == [bytes(page(n, 368_640)) for n in range(20)]


def test_removed_and_cleared_pages_are_gone_for_everybody(server: ValkeyServer) -> None:
    """remove_many and clear delete on the server, clear only pages of its identity."""
    store, other = connected(server), connected(server, identity={"weights": "w2"})
    put(store, range(5))
    put(other, range(5))

    assert store.remove_many([hash_of(1), hash_of(9)], deadline=math.inf) == 1
    assert hits(connected(server), range(5)) == [0, 2, 3, 4]
    assert store.clear(deadline=math.inf) == 4
    assert hits(store, range(5)) == [] and hits(other, range(5)) == [0, 1, 2, 3, 4]


def test_encrypted_pages_need_their_key(server: ValkeyServer) -> None:
    """Another key sees no page; no page's bytes and no hash are on the server."""
    pytest.importorskip("cryptography")
    store = connected(server, cache_key=b"k" * 32)
    put(store, range(3))

    keys = server.call("KEYS", "*")
    values = [server.call("GET", name) for name in keys]
    assert len(keys) == 3 and not any(hash_of(n) in name for n in range(3) for name in keys)
    assert not any(bytes(page(n, PAGE_BYTES))[:16] in value for n in range(3) for value in values)
    assert hits(connected(server, cache_key=b"k" * 32), range(3)) == [0, 1, 2]
    assert hits(connected(server, cache_key=b"j" * 32), range(3)) == []
    assert "not encrypted" not in store.start_report


@pytest.mark.parametrize(
    "wrong", ["flipped bit", "another page", "short", "long", "list", "another parent"]
)
def test_a_wrong_value_under_a_key_is_a_miss_and_deleted(server: ValkeyServer, wrong: str) -> None:
    """Whatever lies under a page's key: never served, one attempt, then absent and writable."""
    store = connected(server)
    put(store, [1, 2])
    name = store._key(hash_of(1))
    value = server.call("GET", name)
    if wrong == "list":
        server.call("DEL", name)
        server.call("RPUSH", name, "x")
    elif wrong != "another parent":
        values = {
            "flipped bit": value[:500] + bytes([value[500] ^ 1]) + value[501:],
            "another page": server.call("GET", store._key(hash_of(2))),
            "short": value[:-1],
            "long": value + bytes(50 << 20),
        }
        server.call("SET", name, values[wrong])

    read = PageKey(hash_of(1), hash_of(77)) if wrong == "another parent" else key(1)
    outcome = store.get_many([read], [memoryview(bytearray(PAGE_BYTES))], deadline=math.inf)

    assert outcome == [ReadOutcome.CORRUPT]
    assert get(store, 1) is ReadOutcome.ABSENT and get(store, 2)
    assert put(store, [1]) == [WriteOutcome.WRITTEN] and get(store, 1)
    assert store.counts().errors == (("corrupt", 1),)


def test_a_killed_server_is_left_alone_and_comes_back(server: ValkeyServer) -> None:
    """Misses, then no call at all; once it runs again it is used again."""
    clock = Clock()
    store = connected(server, clock=clock)
    put(store, range(3))
    server.kill()

    for _ in range(3):
        assert get(store, 1) is ReadOutcome.IO_ERROR
    with pytest.raises(StoreUnavailableError, match="answers no call"):
        get(store, 1)
    assert store.counts().unavailable
    clock.now += 1
    store.maintain()
    assert store.counts().unavailable, "the server still runs not"
    server.restart()
    store.maintain()
    assert store.counts().unavailable, "the pause has doubled"
    clock.now += 2
    store.maintain()

    assert store.counts().unavailable == ""
    assert hits(store, range(3)) == [] and all(put(store, range(3))) and get(store, 1)


def test_a_stopped_server_costs_a_bounded_wait(server: ValkeyServer) -> None:
    """SIGSTOP: each call ends at its deadline, then none is made; after SIGCONT it is used again."""
    clock = Clock()
    store = connected(server, clock=clock)
    put(store, range(3))
    server.pause()
    start = time.monotonic()

    outcomes = [get(store, 1) for _ in range(3)]
    with pytest.raises(StoreUnavailableError):
        get(store, 1)

    assert outcomes == [ReadOutcome.LATE] * 3
    assert time.monotonic() - start < 3
    assert dict(store.counts().errors)["timeout"] == 3
    server.resume()
    clock.now += 1
    store.maintain()
    assert hits(store, range(3)) == [0, 1, 2]


@pytest.mark.parametrize(("num_others", "left"), [(0, [0, 1]), (MAX_OWED, [])])
def test_what_was_removed_while_the_server_was_stopped_does_not_come_back(
    server: ValkeyServer, num_others: int, left: list[int]
) -> None:
    """A removal that the server did not hear of is made before it is used again; too many are one of all."""
    clock = Clock()
    store = connected(server, clock=clock)
    put(store, range(4))
    server.pause()
    others = [b"%016d" % number for number in range(num_others)]

    with pytest.raises(StoreUnavailableError):
        store.remove_many([hash_of(2)], deadline=soon())
    with pytest.raises(StoreUnavailableError):
        store.remove_many([hash_of(3), *others], deadline=soon())
    assert len(store._owed) <= MAX_OWED
    server.resume()
    clock.now += 1
    store.maintain()

    assert hits(store, range(4)) == left
    assert hits(connected(server), range(4)) == left
    assert put(store, [3]) == [WriteOutcome.WRITTEN] and hits(store, [3]) == [3]


def test_a_call_in_flight_does_not_reopen_a_store_that_owes_a_clear(
    server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clear fails while another call is answered: no page is served until the clear was made."""
    clock = Clock()
    store = connected(server, clock=clock)
    put(store, range(4))
    exchange = store._link.exchange

    def cleared_meanwhile(commands, deadline):
        answers = exchange(commands, deadline)
        monkeypatch.setattr(store._link, "exchange", exchange)
        server.pause()
        with pytest.raises(StoreUnavailableError):
            store.clear(deadline=soon())
        server.resume()
        return answers

    monkeypatch.setattr(store._link, "exchange", cleared_meanwhile)
    assert get(store, 0) is ReadOutcome.ABSENT
    with pytest.raises(StoreUnavailableError):
        get(store, 1)
    clock.now += 1
    store.maintain()

    assert store.counts().unavailable == ""
    assert hits(store, range(4)) == [] and hits(connected(server), range(4)) == []


def test_a_full_server_refuses_pages_and_is_read() -> None:
    """noeviction is named at the start; once full, pages are refused for a minute, reads go on."""
    server = ValkeyServer("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    clock = Clock()
    try:
        store = connected(server, clock=clock)
        outcomes = put(store, range(2000))
        written = [n for n, outcome in enumerate(outcomes) if outcome is WriteOutcome.WRITTEN]

        assert "noeviction" in store.start_report and "allkeys-lru" in store.start_report
        assert 0 < len(written) < 2000 and outcomes[-1] is WriteOutcome.REFUSED
        assert "maxmemory" in store.counts().writing_off
        assert hits(store, written) == written
        server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        assert put(store, [5000]) == [WriteOutcome.REFUSED]
        clock.now += 61
        assert put(store, [5000]) == [WriteOutcome.WRITTEN]
        assert store.counts().writing_off == ""
    finally:
        server.close()


def test_a_server_with_too_small_values_is_found_at_the_start() -> None:
    """proto-max-bulk-len below a page: not used, with the setting and the command in the report."""
    server = ValkeyServer("--proto-max-bulk-len", str(1 << 20))
    clock = Clock()
    try:
        store = connected(server, page_bytes=2 << 20, clock=clock)

        assert "proto-max-bulk-len" in store.start_report
        assert "CONFIG SET proto-max-bulk-len" in store.start_report
        with pytest.raises(StoreUnavailableError, match="proto-max-bulk-len"):
            get(store, 1)
        server.call("CONFIG", "SET", "proto-max-bulk-len", 8 << 20)
        clock.now += 1
        store.maintain()
        assert all(put(store, [1])) and get(store, 1)
    finally:
        server.close()


@contextlib.contextmanager
def foreign_server(answer: bytes, *, byte_pause_s: float = 0.0) -> Iterator[str]:
    """A server that answers every connection with these bytes, one at a time where told; yields its URL."""
    stop = threading.Event()
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/s")
        listener.listen()

        def serve() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    threading.Thread(target=answer_one, args=(connection,), daemon=True).start()

        def answer_one(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.recv(1)
                step = 1 if byte_pause_s else max(len(answer), 1)
                for start in range(0, len(answer), step):
                    connection.sendall(answer[start : start + step])
                    if stop.wait(byte_pause_s):
                        return
                stop.wait(30)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"unix://{directory}/s"
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "byte_pause_s"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", 0.0),
        (b"", 0.0),
        (b"\xff\x00" * 100, 0.0),
        (b"+HELLO\r\n:1\r\n" * 50, 0.0),
        (b"-NOAUTH Authentication required.\r\n" * 4, 0.0),
        (b"$536870912\r\n" + b"x" * 5000, 0.0),
        (b"$100000\r\n" + b"x" * 100000, 0.01),
    ],
)
def test_a_foreign_server_is_a_bounded_wait_and_a_reason(
    answer: bytes, byte_pause_s: float
) -> None:
    """Another protocol, silence, or a byte now and then: told at the start within a second or two."""
    with foreign_server(answer, byte_pause_s=byte_pause_s) as url:
        start = time.monotonic()
        store = ValkeyStore(url, identity=IDENTITY, page_bytes=PAGE_BYTES)

        assert time.monotonic() - start < 3
        assert "out of reach" in store.start_report
        with pytest.raises(StoreUnavailableError):
            get(store, 1)
        store.close()


@pytest.mark.parametrize(
    "error",
    ["LOADING dataset in memory", "NOAUTH Authentication required.", "NOPERM no", "MASTERDOWN x"],
)
def test_an_error_of_the_server_itself_deletes_nothing(
    server: ValkeyServer, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers reads by an error: IO_ERROR, no UNLINK, and no further call."""
    healthy = connected(server)
    put(healthy, [1])
    commands: list[str] = []
    with foreign_server(b"-" + error.encode() + b"\r\n") as url:
        store = connected(server)
        own, foreign = store._link, ValkeyLink(url)
        exchange = foreign.exchange

        def noted(sent, deadline):
            commands.extend(str(command[0]) for command in sent)
            return exchange(sent, deadline)

        monkeypatch.setattr(foreign, "exchange", noted)
        store._link = foreign
        outcome = get(store, 1)
        with pytest.raises(StoreUnavailableError):
            get(store, 1)
        own.close()
        store.close()

    assert (outcome, commands) == (ReadOutcome.IO_ERROR, ["GETRANGE"])
    assert get(healthy, 1)


def test_connecting_ends_at_the_deadline() -> None:
    """A server that accepts no connection costs a call its deadline, not the time to connect."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        # Connections that nobody accepts fill the queue: a further one waits.
        waiting = [socket.socket() for _ in range(4)]
        for connection in waiting:
            connection.setblocking(False)
            connection.connect_ex(address)
        link = ValkeyLink(f"valkey://127.0.0.1:{address[1]}")
        start = time.monotonic()
        answers = link.exchange([("PING",)], start + 0.1)
        elapsed_s = time.monotonic() - start
        for connection in waiting:
            connection.close()

    assert answers.failure == "timeout" and elapsed_s < 0.5


def test_a_server_that_is_not_there_is_no_error() -> None:
    """Start goes on, the report says why; requests compute."""
    store = ValkeyStore("unix:///nowhere/at/all", identity=IDENTITY, page_bytes=PAGE_BYTES)

    assert "out of reach" in store.start_report
    with pytest.raises(StoreUnavailableError):
        put(store, [1])


def test_a_password_is_used_and_never_shown() -> None:
    """A server with a password is used through its URL, which no message shows."""
    server = ValkeyServer("--requirepass", "secret")
    try:
        store = connected(server, url=f"unix://:secret@{server.socket}")
        refused = connected(server)

        assert all(put(store, [1])) and get(store, 1)
        assert "secret" not in store.start_report and "***" in store.start_report
        assert "Authentication required" in refused.start_report
    finally:
        server.close()


def test_urls_that_are_none_are_refused() -> None:
    """An unknown scheme names those that there are; TLS and TCP URLs are taken."""
    with pytest.raises(ConfigError, match=r"valkeys://"):
        ValkeyLink("http://host")
    for url in ("valkey://h:1", "redis://h", "valkeys://h", "rediss://u:p@h:1/2"):
        ValkeyLink(url).close()
    assert shown_url("rediss://u:p@h:1/2") == "rediss://u:***@h:1/2"


def test_threads_share_a_store(server: ValkeyServer) -> None:
    """Four threads that read and write at the same time get their own pages."""
    store = connected(server)
    results: list[list[int]] = []

    def work(start: int) -> None:
        numbers = range(start, start + 50)
        put(store, numbers)
        results.append(hits(store, numbers))

    threads = [threading.Thread(target=work, args=(start,)) for start in range(0, 400, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(len(pages) for pages in results) == [50] * 4


def test_a_closed_store_answers_no_call(server: ValkeyServer) -> None:
    """After close every call raises and maintain does nothing."""
    store = connected(server)
    store.close()
    store.maintain()

    with pytest.raises(StoreUnavailableError, match="closed"):
        get(store, 1)


def test_the_pause_doubles_up_to_a_minute() -> None:
    """Three failures in a row open the breaker; pauses are 1, 2, 4 … 60 s; a probe starts over."""
    clock = Clock()
    breaker = CircuitBreaker(clock)

    breaker.note_failure("x")
    breaker.note_failure("x")
    breaker.note_success()
    breaker.note_failure("x")
    breaker.note_failure("x")
    assert breaker.reason == "" and not breaker.is_probe_due()
    breaker.note_failure("dead")
    assert breaker.reason == "dead"
    pauses = []
    for _ in range(8):
        pauses.append(breaker.retry_after_s)
        assert not breaker.is_probe_due()
        clock.now += pauses[-1]
        assert breaker.is_probe_due()
        breaker.open("dead")
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    breaker.note_success()
    assert breaker.reason == "dead", "only a probe lets calls pass"
    breaker.close()
    assert breaker.reason == ""
