"""API keys, the tenants that they belong to, and their quotas."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ramify.counts import counted
from ramify.engine.cache_admin.warmup import PUBLIC
from ramify.errors import ConfigError
from ramify.reasons import reason_of
from ramify.server.errors import ApiError

HASH_PREFIX = "sha256:"
HASH = re.compile(HASH_PREFIX + "[0-9a-fA-F]{64}")
MAX_KEY_CHARS = 512
BACKGROUND_PRIORITY = -1_000_000  # below what any request may ask for
TENANT_PIN_SHARE = 0.25  # of the pool; `max_pinned_share` of tenants beside others


def hash_key(key: str) -> str:
    """`sha256:…` of a key, as key files hold it. Unsalted: keys are random."""
    return HASH_PREFIX + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one tenant; None is no limit."""

    max_requests: int | None = None  # live at once; each answer of `n` counts
    max_waiting_tokens: int | None = None  # prompt tokens of all live requests
    tokens_per_minute: int | None = None  # computed tokens: prompt without cache hits, and output
    # Share of the pool's pages; above it, the tenant's own pages are evicted first.
    max_cached_share: float | None = 0.5
    # Share of the pool's pages that the tenant's requests may pin; None: TENANT_PIN_SHARE beside other
    # tenants, else no limit but that of all pins.
    max_pinned_share: float | None = None

    def __post_init__(self) -> None:
        """Check the values, which come from a key file.

        Raises:
            ValueError: a limit of the wrong type or outside its range.
        """
        for name, count, least in (
            ("max_requests", self.max_requests, 0),
            ("max_waiting_tokens", self.max_waiting_tokens, 0),
            ("tokens_per_minute", self.tokens_per_minute, 1),
        ):
            if count is not None and not (type(count) is int and count >= least):
                raise ValueError(f"{name}={count!r} but it must be an integer >= {least}")
        for name, share in (
            ("max_cached_share", self.max_cached_share),
            ("max_pinned_share", self.max_pinned_share),
        ):
            if share is not None and not (type(share) in (int, float) and 0 <= share <= 1):
                raise ValueError(f"{name}={share!r} but it must be a share from 0 to 1")

    def strictest(self, other: Quota) -> Quota:
        """The smaller of the two quotas in each limit."""
        pairs = {
            limit.name: (getattr(self, limit.name), getattr(other, limit.name))
            for limit in fields(Quota)
        }
        return Quota(
            **{
                name: min((value for value in values if value is not None), default=None)
                for name, values in pairs.items()
            }
        )


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant that sent a request, and its rights.

    `is_background`: its requests are lines of a batch, for which nobody waits. They run after all other
    requests of the tenant, and the quota counts them by themselves.
    """

    tenant: str
    is_admin: bool = False
    quota: Quota = field(default_factory=Quota)
    is_background: bool = False

    @property
    def priority(self) -> int:
        """Added to the priorities of its requests."""
        return BACKGROUND_PRIORITY if self.is_background else 0


class ApiKeys:
    """The API keys of a server, by hash.

    A key file is JSON: `{"keys": [{"hash": "sha256:…", "tenant": "ann", "admin": false, "quota":
    {…}}]}`. A key without `tenant` is a tenant of its own. `ramify keys` adds entries.

    A quota is the tenant's: if several of its keys have one, each limit is the smallest of them, for
    all of its keys.
    """

    def __init__(self, entries: Mapping[str, Caller]) -> None:
        quotas: dict[str, Quota] = {}
        for caller in entries.values():
            quotas[caller.tenant] = caller.quota.strictest(quotas.get(caller.tenant, caller.quota))
        self._callers = {
            _digest(key_hash): replace(caller, quota=quotas[caller.tenant])
            for key_hash, caller in entries.items()
        }

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """Read a key file.

        Raises:
            ConfigError: the file cannot be read, has no keys, or an entry is wrong.
        """
        try:
            document = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"the key file {path} cannot be read: {reason_of(error, path)}"
            ) from error
        keys = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(keys, list):
            raise ConfigError(
                f'the key file {path} is no object with a list "keys"; `ramify keys FILE` writes one'
            )
        entries = [
            _parse_entry(entry, f"{path}: keys[{index}]") for index, entry in enumerate(keys)
        ]
        if not entries:
            raise ConfigError(f"the key file {path} has no keys; nobody could call")
        return cls(dict(entries))

    @property
    def num_tenants(self) -> int:
        """Tenants that have a key."""
        return len({caller.tenant for caller in self._callers.values()})

    @classmethod
    def of(cls, *keys: str, admin: str | None = None) -> ApiKeys:
        """Plain keys, each a tenant of its own; `admin` is the operator's."""
        entries = {hash_key(key): Caller(_tenant_of(hash_key(key))) for key in keys}
        if admin is not None:
            entries[hash_key(admin)] = Caller("admin", is_admin=True)
        return cls(entries)

    def caller_of(self, tenant: str) -> Caller | None:
        """A caller of a tenant, with the fewest rights that a key of it has; None: it has no key."""
        callers = [caller for caller in self._callers.values() if caller.tenant == tenant]
        return min(callers, key=lambda caller: caller.is_admin, default=None)

    def caller(self, key: str | None) -> Caller:
        """The caller that a key belongs to; compares with every key in constant time.

        Raises:
            ApiError: 401, no key or an unknown key.
        """
        if not key or len(key) > MAX_KEY_CHARS:
            raise ApiError(
                401, "an API key is needed: send Authorization: Bearer KEY", code="invalid_api_key"
            )
        digest = _digest(hash_key(key))
        match = None
        for known_digest, caller in self._callers.items():
            if hmac.compare_digest(known_digest, digest):
                match = caller
        if match is None:
            raise ApiError(401, "this API key is not known", code="invalid_api_key")
        return match


def _digest(key_hash: str) -> bytes:
    return bytes.fromhex(key_hash.removeprefix(HASH_PREFIX))


def _object(value: object, where: str, known: Sequence[str]) -> dict[str, Any]:
    """An object of a key file, if it has no other fields than the known ones."""
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r} but it must be an object with {', '.join(known)}")
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ConfigError(
            f"{where} has the unknown {', '.join(unknown)}; its fields are {', '.join(known)}"
        )
    return value


def _parse_entry(entry: object, where: str) -> tuple[str, Caller]:
    """The hash and the caller of a key file's entry; `where` begins error messages."""
    entry = _object(entry, where, ("hash", "tenant", "admin", "quota"))
    key_hash = entry.get("hash")
    if not isinstance(key_hash, str) or not HASH.fullmatch(key_hash):
        raise ConfigError(
            f"{where} has hash={key_hash!r} but it must be {HASH_PREFIX} and 64 hexadecimal digits; "
            "`ramify keys FILE` makes a key and its hash"
        )
    limits = _object(
        entry.get("quota", {}), f"{where}.quota", [limit.name for limit in fields(Quota)]
    )
    try:
        quota = Quota(**limits)
    except ValueError as error:
        raise ConfigError(f"{where}.quota has {error}") from error
    tenant = str(entry.get("tenant") or _tenant_of(key_hash))
    if tenant == PUBLIC:
        raise ConfigError(
            f"{where} has the tenant {PUBLIC!r}, which owns the public prefixes; choose another name"
        )
    return key_hash, Caller(tenant, is_admin=entry.get("admin") is True, quota=quota)


def _tenant_of(key_hash: str) -> str:
    """A tenant name for a key without one; a hash of the hash, so that it can be logged."""
    return "key-" + hashlib.sha256(key_hash.encode()).hexdigest()[:12]


def _over_quota(message: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=retry_after_s)


@dataclass(slots=True)
class _TenantUsage:
    live: int = 0
    waiting_tokens: int = 0
    used: float = 0.0  # computed tokens, less those that time has refilled
    refilled_s: float = 0.0


class QuotaMeter:
    """Counts the use of each tenant and rejects requests above its quota.

    `tokens_per_minute` is a token bucket: it refills with time up to one minute's tokens, and a
    request is admitted while it is not empty, whatever the request then takes. Use is counted for
    the tenant, whichever key and quota its requests came with; that of its batches by itself.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[tuple[str, bool], _TenantUsage] = {}

    def check_batch(
        self, caller: Caller, num_prompts: int, num_tokens: int, num_answers: int
    ) -> None:
        """Check that requests which come together could ever be live together.

        Raises:
            ApiError: 400, the quota is too small for them.
        """
        quota = caller.quota
        if quota.max_requests is not None and num_answers > quota.max_requests:
            raise ApiError(
                400,
                f"{num_answers} answers in one request, but at most {quota.max_requests} of "
                "yours may be live at once",
                param="n" if num_prompts == 1 else "prompt",
            )
        limit = quota.max_waiting_tokens
        if limit is not None and num_prompts > 1 and num_tokens > limit:
            raise ApiError(
                400,
                f"{num_prompts} prompts with {num_tokens} tokens in one request, but your live "
                f"requests may have {limit}. Send several requests",
                param="prompt",
            )

    def acquire(self, caller: Caller, num_tokens: int, num_answers: int = 1) -> None:
        """Count a request whose prompt has `num_tokens`; `release` must follow.

        Raises:
            ApiError: 429, the quota is used up, or 400, it is too small for this request; the request
                is not counted.
        """
        quota, usage = caller.quota, self._usage_of(caller)
        self.check_batch(caller, 1, num_tokens, num_answers)
        if quota.max_requests is not None and usage.live + num_answers > quota.max_requests:
            raise _over_quota(
                f"{usage.live} of your answers are live, with this request "
                f"{usage.live + num_answers}; the limit is {quota.max_requests}; wait for one to end"
            )
        limit = quota.max_waiting_tokens
        if limit is not None and usage.live and usage.waiting_tokens + num_tokens > limit:
            raise _over_quota(
                f"your live requests have {counted(usage.waiting_tokens, 'prompt token')}, with this one "
                f"{usage.waiting_tokens + num_tokens}; the limit is {limit}"
            )
        rate = quota.tokens_per_minute
        if rate is not None and usage.used >= rate:
            wait_s = max(1, round((usage.used - rate) / rate * 60) + 1)
            raise _over_quota(
                f"your {rate} tokens per minute are used up; try again in {wait_s} s", wait_s
            )
        usage.live += num_answers
        usage.waiting_tokens += num_tokens

    def release(
        self, caller: Caller, num_tokens: int, num_computed: int, num_answers: int = 1
    ) -> None:
        """Count the end of a request, with the arguments of `acquire` and the tokens it computed."""
        usage = self._usage_of(caller)
        usage.live -= num_answers
        usage.waiting_tokens -= num_tokens
        usage.used += num_computed

    @property
    def num_live(self) -> int:
        """Answers of all tenants that were acquired and not released."""
        return sum(usage.live for usage in self._usage.values())

    def _usage_of(self, caller: Caller) -> _TenantUsage:
        """The usage of the caller's tenant, with its token bucket refilled up to now."""
        rate = caller.quota.tokens_per_minute
        now_s = self._clock()
        key = caller.tenant, caller.is_background
        usage = self._usage.get(key)
        if usage is None:
            usage = self._usage[key] = _TenantUsage(refilled_s=now_s)
        if rate is not None:
            usage.used = max(0.0, usage.used - (now_s - usage.refilled_s) / 60 * rate)
            usage.refilled_s = now_s
        return usage
