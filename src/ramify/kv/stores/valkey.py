"""`ValkeyStore`: pages in a Valkey or Redis server that several engines share."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ramify.errors import ConfigError, StoreUnavailableError
from ramify.kv.stores import valkey_settings
from ramify.kv.stores.circuit_breaker import CircuitBreaker
from ramify.kv.stores.page_names import KEY_BYTES, PageNames
from ramify.kv.stores.page_store import (
    PageKey,
    ReadOutcome,
    StoreCounts,
    WriteOutcome,
    check_call,
)
from ramify.kv.stores.payload_codec import (
    EncryptedPayload,
    PayloadCodec,
    PlainPayload,
    cache_key_tag,
    decode_record,
    derived_name_key,
    encode_record,
    record_payload_bytes,
)
from ramify.kv.stores.segment_format import CHECKSUM_BYTES, FORMAT_VERSION, HEADER_BYTES
from ramify.kv.stores.store_identity import StoreIdentity, Value
from ramify.kv.stores.valkey_link import Command, Exchange, ReplyError, ValkeyLink

logger = logging.getLogger(__name__)

MAX_BATCH_PAGES, MAX_BATCH_BYTES = 16, 8 << 20
# A call may take this long, and twice as long as its bytes take at the measured bandwidth.
CALL_S = 0.1
FIRST_BYTES_PER_S = 50e6
# After the server has refused a page for lack of memory.
REFUSED_S = 60.0
# No answer at all after this long is a failure of the server, whatever the caller's deadline.
SILENT_S = 0.05
_SCAN_COUNT = 1000
SCRATCH_NAME = b"scratch"  # no page has it: names are 16 bytes
SCRATCH_S = 60
# Names of removed pages that wait for a server that is out of reach: beyond, all pages of the identity go.
MAX_OWED = 1 << 18


class ValkeyStore:
    """Pages on a server, under the same identity and in the same records as on disk.

    A value is verified on arrival. A server that fails is left alone for 1 to 60 seconds; `maintain`
    tries it again.

    Args:
        identity: see SegmentOptions.
        cache_key: encrypts pages and keys their names; None: whoever can read the server and has the
            weights can read the prompts back.

    Raises:
        ConfigError: the URL is none.
        MissingPackageError: `valkey` is not installed.

    A server that cannot be reached is no error: `start_report` says so.
    """

    tier = "remote"

    def __init__(
        self,
        url: str,
        *,
        identity: Mapping[str, Value],
        page_bytes: int,
        cache_key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if page_bytes < 1:
            raise ConfigError(f"page_bytes={page_bytes} must be at least 1")
        self.page_bytes = page_bytes
        self._link = ValkeyLink(url)
        self._codec: PayloadCodec = (
            PlainPayload() if cache_key is None else EncryptedPayload(cache_key)
        )
        encryption = "none" if cache_key is None else cache_key_tag(cache_key)
        self._digest = StoreIdentity(
            {
                **identity,
                "page_bytes": page_bytes,
                "file_format": FORMAT_VERSION,
                "encryption": encryption,
            }
        ).digest
        self._names = PageNames(
            hashlib.blake2b(self._digest, digest_size=KEY_BYTES).digest()
            if cache_key is None
            else derived_name_key(cache_key)
        )
        self._prefix = b"ramify:" + self._digest.hex().encode() + b":"
        self._record_bytes = HEADER_BYTES + record_payload_bytes(self._codec, page_bytes)
        self._clock = clock
        self._breaker = CircuitBreaker(clock)
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._bytes_per_s = FIRST_BYTES_PER_S
        self._refused_until, self._refused_reason = 0.0, ""
        # Removed while the server was out of reach: removed before it is used again.
        self._owed: set[bytes] = set()
        self._owes_clear, self._num_overflows = False, 0
        self._is_closed = False
        self._warning = ""
        if not self._probe():
            self._breaker.open(self._breaker.reason or self._warning)
        self.start_report = self._describe_start(encrypted=cache_key is not None)

    def _describe_start(self, *, encrypted: bool) -> str:
        where = f"shared store {self._link.shown_url}"
        if self._breaker.reason:
            return f"{where}: out of reach ({self._breaker.reason}); it is tried again"
        notes = [self._warning] if self._warning else []
        if not encrypted:
            notes.append(
                "names and pages are not encrypted: whoever reads the server and has the weights "
                "can read prompts back; use --cache-key and TLS"
            )
        return f"{where}: connected" + "".join(f"; {note}" for note in notes)

    def has_many(self, hashes: Sequence[bytes], *, deadline: float) -> list[bool]:
        """See PageStore."""
        self._check_available()
        names = [self._key(page_hash) for page_hash in hashes]
        exchange = self._answered([("EXISTS", name) for name in names], deadline, 0)
        if exchange.failure:
            raise self._unavailable(exchange.reason)
        return [
            reply == 1 and not self._is_owed(name)
            for name, reply in zip(names, exchange.replies, strict=True)
        ]

    def were_evicted(self, hashes: Sequence[bytes]) -> list[bool]:
        """See PageStore; what the server evicts it does not say."""
        return [False] * len(hashes)

    def get_many(
        self, keys: Sequence[PageKey], into: Sequence[memoryview], *, deadline: float
    ) -> list[ReadOutcome]:
        """See PageStore."""
        check_call(keys, into, self.page_bytes)
        self._check_available()
        outcomes: list[ReadOutcome] = []
        for start, end in self._batches(len(keys)):
            outcomes += self._get_batch(keys[start:end], into[start:end], deadline)
        with self._lock:
            self._totals.update(outcome.value for outcome in outcomes)
        return outcomes

    def _batches(self, count: int) -> list[tuple[int, int]]:
        size = max(min(MAX_BATCH_PAGES, MAX_BATCH_BYTES // self._record_bytes), 1)
        return [(start, min(start + size, count)) for start in range(0, count, size)]

    def _get_batch(
        self, keys: Sequence[PageKey], into: Sequence[memoryview], deadline: float
    ) -> list[ReadOutcome]:
        if self._clock() > deadline or self._breaker.reason:
            return [ReadOutcome.LATE] * len(keys)
        # GETRANGE bounds what a wrong value can make this process read; one byte more tells it apart.
        commands: list[Command] = [
            ("GETRANGE", self._key(key.hash), 0, self._record_bytes) for key in keys
        ]
        exchange = self._answered(commands, deadline, len(keys) * self._record_bytes)
        outcomes = [
            self._decode(key, page, reply)
            for key, page, reply in zip(keys, into, exchange.replies, strict=False)
        ]
        missing = ReadOutcome.LATE if exchange.failure == "timeout" else ReadOutcome.IO_ERROR
        outcomes += [missing] * (len(keys) - len(outcomes))
        wrong = [
            self._key(key.hash)
            for key, outcome in zip(keys, outcomes, strict=True)
            if outcome is ReadOutcome.CORRUPT
        ]
        if wrong:
            logger.warning(
                "%s: deleted values that are no pages, or damaged: %d",
                self._link.shown_url,
                len(wrong),
            )
            self._exchange([("UNLINK", name) for name in wrong], deadline, 0)
        return outcomes

    def _decode(self, key: PageKey, page: memoryview, reply: object) -> ReadOutcome:
        if isinstance(reply, ReplyError) and not reply.is_wrong_type:
            return ReadOutcome.IO_ERROR
        if not isinstance(reply, bytes):
            return ReadOutcome.CORRUPT
        if not reply or self._is_owed(self._key(key.hash)):
            return ReadOutcome.ABSENT
        if len(reply) != self._record_bytes:
            return ReadOutcome.CORRUPT
        if self._codec.in_place:
            stored = memoryview(reply)[HEADER_BYTES:]
        else:
            stored = memoryview(bytearray(reply[HEADER_BYTES:]) + bytes(CHECKSUM_BYTES))
        name, parent_tag = self._names.name(key.hash), self._names.parent_tag(key.parent)
        intact = decode_record(self._codec, reply, stored, page, name, parent_tag, self._digest)
        return ReadOutcome.HIT if intact else ReadOutcome.CORRUPT

    def read_any(self, into: Sequence[memoryview], *, deadline: float) -> int:
        """See PageStore. Reads a scratch value, which expires: whose pages the server has is not known."""
        self._check_available()
        name, value = self._prefix + SCRATCH_NAME, bytes(self._record_bytes)
        num_bytes = (len(into) + 1) * self._record_bytes
        commands: list[Command] = [("SET", name, value, "NX", "EX", SCRATCH_S)]
        commands += [("GETRANGE", name, 0, self._record_bytes)] * len(into)
        exchange = self._exchange(commands, deadline, num_bytes)
        return sum(
            isinstance(reply, bytes) and len(reply) == self._record_bytes
            for reply in exchange.replies[1:]
        )

    def put_many(
        self, keys: Sequence[PageKey], pages: Sequence[memoryview], *, deadline: float
    ) -> list[WriteOutcome]:
        """See PageStore. WRITTEN: in the server's memory; what it keeps is up to its settings."""
        check_call(keys, pages, self.page_bytes)
        self._check_available()
        outcomes: list[WriteOutcome] = []
        for start, end in self._batches(len(keys)):
            outcomes += self._put_batch(keys[start:end], pages[start:end], deadline)
        with self._lock:
            self._totals["written"] += outcomes.count(WriteOutcome.WRITTEN)
            self._totals["refused"] += outcomes.count(WriteOutcome.REFUSED)
            self._totals["late"] += outcomes.count(WriteOutcome.LATE)
        return outcomes

    def _put_batch(
        self, keys: Sequence[PageKey], pages: Sequence[memoryview], deadline: float
    ) -> list[WriteOutcome]:
        if self._clock() > deadline or self._breaker.reason:
            return [WriteOutcome.LATE] * len(keys)
        if self._clock() < self._refused_until:
            return [WriteOutcome.REFUSED] * len(keys)
        # Pages that another engine wrote are not sent again; TOUCH also keeps them from eviction.
        touched = self._answered([("TOUCH", self._key(key.hash)) for key in keys], deadline, 0)
        if touched.failure:
            return [self._not_written(touched)] * len(keys)
        lacking = [index for index, reply in enumerate(touched.replies) if reply != 1]
        commands: list[Command] = [
            ("SET", self._key(keys[index].hash), self._record(keys[index], pages[index]), "NX")
            for index in lacking
        ]
        exchange = self._exchange(commands, deadline, len(lacking) * self._record_bytes)
        outcomes = [WriteOutcome.PRESENT] * len(keys)
        for position, index in enumerate(lacking):
            has_answer = position < len(exchange.replies)
            outcomes[index] = (
                self._written(exchange.replies[position])
                if has_answer
                else self._not_written(exchange)
            )
        return outcomes

    def _not_written(self, exchange: Exchange) -> WriteOutcome:
        return WriteOutcome.LATE if exchange.failure == "timeout" else WriteOutcome.REFUSED

    def _record(self, key: PageKey, page: memoryview) -> bytes:
        _, pieces = encode_record(
            self._codec,
            self._names.name(key.hash),
            self._names.parent_tag(key.parent),
            self._names.tenant_tag(key.tenant),
            page,
            self._digest,
        )
        return b"".join(pieces)

    def _written(self, reply: object) -> WriteOutcome:
        if isinstance(reply, ReplyError):
            with self._lock:
                if self._clock() >= self._refused_until:
                    logger.warning(
                        "%s takes no pages (tried again every %.0f s): %s",
                        self._link.shown_url,
                        REFUSED_S,
                        reply.message,
                    )
                self._refused_until = self._clock() + REFUSED_S
                self._refused_reason = reply.message
            return WriteOutcome.REFUSED
        return WriteOutcome.PRESENT if reply is None else WriteOutcome.WRITTEN

    def remove_many(self, hashes: Sequence[bytes], *, deadline: float) -> int:
        """See PageStore. What cannot be removed now is, before this process reads the server again."""
        names = [self._key(page_hash) for page_hash in hashes]
        with self._lock:
            self._owed.update(names)
            if self._breaker.reason and len(self._owed) > MAX_OWED:
                self._owed.clear()
                self._owes_clear, self._num_overflows = True, self._num_overflows + 1
        self._check_available()
        exchange = self._answered([("UNLINK", name) for name in names], deadline, 0)
        if exchange.failure:
            self._stop(exchange.reason)
            raise self._unavailable(exchange.reason)
        count = sum(reply for reply in exchange.replies if isinstance(reply, int))
        with self._lock:
            self._owed.difference_update(names)
            self._totals["removed"] += count
        return count

    def clear(self, *, deadline: float) -> int:
        """See PageStore. Removes the pages that other engines of this identity wrote, too."""
        with self._lock:
            self._owes_clear = True
        self._check_available()
        try:
            return self._clear(deadline)
        except StoreUnavailableError as error:
            self._stop(error.reason)
            raise

    def _clear(self, deadline: float) -> int:
        with self._lock:
            owed, num_overflows = set(self._owed), self._num_overflows
        try:
            count = self._unlink_all(deadline)
        except StoreUnavailableError:
            with self._lock:
                # Another call may have cleared meanwhile, and unset it.
                self._owes_clear = True
            raise
        with self._lock:
            # Names that overflowed meanwhile may be of keys that the scan had passed.
            self._owes_clear = self._num_overflows != num_overflows
            self._owed -= owed
            self._totals["removed"] += count
        return count

    def _unlink_all(self, deadline: float) -> int:
        """Delete every key of this identity; returns how many."""
        count, cursor = 0, b"0"
        while True:
            scan = self._answered(
                [("SCAN", cursor, "MATCH", self._prefix + b"*", "COUNT", _SCAN_COUNT)], deadline, 0
            )
            reply = scan.replies[0] if scan.replies else None
            if scan.failure or not isinstance(reply, list):
                raise self._unavailable(scan.reason or "it cannot list its keys")
            cursor, names = reply
            if names:
                removal = self._answered([("UNLINK", *names)], deadline, 0)
                if removal.failure:
                    raise self._unavailable(removal.reason)
                count += sum(reply for reply in removal.replies if isinstance(reply, int))
            if cursor == b"0":
                return count

    def _is_owed(self, name: bytes) -> bool:
        """Whether a page was removed or cleared, and the server may not know it yet."""
        return self._owes_clear or name in self._owed

    def _stop(self, reason: str) -> None:
        """Stop calls until a probe has paid what is owed."""
        if not self._breaker.reason:
            self._breaker.open(reason)

    def maintain(self) -> None:
        """See PageStore. Tries a server again that failed, and pays what removals are owed."""
        if self._is_closed or not self._breaker.is_probe_due():
            return
        self._link.close_idle()
        if self._probe():
            logger.warning("%s answers again", self._link.shown_url)
        else:
            self._breaker.open(self._warning)

    def _probe(self) -> bool:
        """Connect, check the server's settings and remove what is owed; whether it can be used."""
        deadline = time.monotonic() + 2 * CALL_S
        answers = self._link.exchange(valkey_settings.QUESTIONS, deadline)
        self._warning = valkey_settings.refusal(answers, self._record_bytes)
        if self._warning:
            return False
        self._warning = valkey_settings.warning(answers)
        while not self._close_if_nothing_is_owed():
            try:
                self._pay(deadline)
            except StoreUnavailableError as error:
                self._warning = error.reason
                return False
        return True

    def _close_if_nothing_is_owed(self) -> bool:
        # Under the lock: a removal that comes later finds that it can be made at once.
        with self._lock:
            if self._owes_clear or self._owed:
                return False
            self._breaker.close()
            return True

    def _pay(self, deadline: float) -> None:
        """Remove what is owed.

        Raises:
            StoreUnavailableError: the server failed again.
        """
        if self._owes_clear:
            self._clear(deadline)
            return
        with self._lock:
            names = list(self._owed)
        removal = self._answered([("UNLINK", name) for name in names], deadline, 0)
        if removal.failure:
            raise self._unavailable(removal.reason)
        with self._lock:
            self._owed.difference_update(names)

    def counts(self) -> StoreCounts:
        """See PageStore. How many pages the server has is not known."""
        with self._lock:
            totals = Counter(self._totals)
            refused = self._refused_reason if self._clock() < self._refused_until else ""
        kinds = ("corrupt", "io_error", "timeout", "connection", "protocol", "refused_calls")
        return StoreCounts(
            num_pages=0,
            used_bytes=0,
            budget_bytes=0,
            writing_off=refused,
            unavailable="closed" if self._is_closed else self._breaker.reason,
            written_pages=totals["written"],
            hit_pages=totals["hit"],
            absent_pages=totals["absent"],
            late_pages=totals["late"],
            refused_pages=totals["refused"],
            removed_pages=totals["removed"],
            errors=tuple((kind, totals[kind]) for kind in kinds if totals[kind]),
        )

    def close(self) -> None:
        """See PageStore."""
        self._is_closed = True
        self._link.close()

    def _key(self, page_hash: bytes) -> bytes:
        return self._prefix + self._names.name(page_hash)

    def _answered(self, commands: Sequence[Command], deadline: float, num_bytes: int) -> Exchange:
        """`_exchange` in which an error of the server itself is a failure, and stops calls."""
        exchange = self._exchange(commands, deadline, num_bytes)
        for reply in exchange.replies:
            if isinstance(reply, ReplyError) and not reply.is_wrong_type and not exchange.failure:
                exchange.failure, exchange.reason = "refused", reply.message
                with self._lock:
                    self._totals["refused_calls"] += 1
                self._stop(reply.message)
        return exchange

    def _exchange(self, commands: Sequence[Command], deadline: float, num_bytes: int) -> Exchange:
        if not commands:
            return Exchange()
        now = time.monotonic()
        limit = now + CALL_S + 2 * num_bytes / self._bytes_per_s
        exchange = self._link.exchange(commands, min(deadline, limit))
        if not exchange.failure:
            self._breaker.note_success()
            if num_bytes >= MAX_BATCH_BYTES // 8 and exchange.elapsed_s > 0:
                with self._lock:
                    self._bytes_per_s += 0.2 * (num_bytes / exchange.elapsed_s - self._bytes_per_s)
            return exchange
        kind = "refused_calls" if exchange.failure == "refused" else exchange.failure
        with self._lock:
            self._totals[kind] += 1
        if exchange.failure == "refused":
            self._stop(exchange.reason)
            return exchange
        # A caller's short deadline alone says nothing about the server.
        silent = not exchange.replies and exchange.elapsed_s >= SILENT_S
        if exchange.failure != "timeout" or silent or limit <= deadline:
            self._breaker.note_failure(exchange.reason)
        return exchange

    def _check_available(self) -> None:
        if self._is_closed:
            raise StoreUnavailableError(f"the shared store {self._link.shown_url}", "closed")
        if self._breaker.reason:
            raise self._unavailable(self._breaker.reason)

    def _unavailable(self, reason: str) -> StoreUnavailableError:
        after_s = self._breaker.retry_after_s if self._breaker.reason else None
        return StoreUnavailableError(f"the shared store {self._link.shown_url}", reason, after_s)
