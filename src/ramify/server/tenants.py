"""Who calls: keys, tenants, and what each of them may take."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ramify.errors import ConfigError
from ramify.server.errors import ApiError

HASH_PREFIX = "sha256:"
MAX_KEY_CHARS = 512


def hash_key(key: str) -> str:
    """What a key file holds in place of a key. Keys are random, so that no salt is needed."""
    return HASH_PREFIX + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True, slots=True)
class Quota:
    """What one tenant may use at once and per minute; None is without limit."""

    max_requests: int | None = None  # live at once
    max_waiting_tokens: int | None = None  # of prompts that live requests have
    tokens_per_minute: int | None = None  # prompt and output, uncached
    max_cached_share: float | None = 0.5  # of the pages: beyond it, its own are evicted first


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    tenant: str
    is_admin: bool = False
    quota: Quota = field(default_factory=Quota)


class ApiKeys:
    """The keys of a server.

    The file is JSON: `{"keys": [{"hash": "sha256:…", "tenant": "ann", "admin": false, "quota":
    {…}}]}`. Without `tenant` each key is a tenant of its own. `ramify keys` makes entries.

    Raises:
        ConfigError: the file cannot be read, or an entry is wrong.
    """

    def __init__(self, entries: Mapping[str, Caller]) -> None:
        self._callers = {
            bytes.fromhex(name.removeprefix(HASH_PREFIX)): who for name, who in entries.items()
        }

    @classmethod
    def load(cls, path: Path) -> ApiKeys:
        """The keys of a file."""
        try:
            found = json.loads(path.read_text("utf-8"))
            entries = [_entry(one, f"{path}: keys[{at}]") for at, one in enumerate(found["keys"])]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the key file {path} cannot be read: {error!r}") from error
        if not entries:
            raise ConfigError(f"the key file {path} has no keys; nobody could call")
        return cls(dict(entries))

    @classmethod
    def of(cls, *keys: str, admin: str | None = None) -> ApiKeys:
        """Keys as they are: each a tenant of its own."""
        entries = {hash_key(key): Caller(_tenant_of(hash_key(key))) for key in keys}
        if admin is not None:
            entries[hash_key(admin)] = Caller("admin", is_admin=True)
        return cls(entries)

    def caller(self, key: str | None) -> Caller:
        """Whose key this is; all keys are compared, each in constant time.

        Raises:
            ApiError: 401, no key or an unknown one.
        """
        if not key or len(key) > MAX_KEY_CHARS:
            raise ApiError(
                401, "an API key is needed: send Authorization: Bearer KEY", code="invalid_api_key"
            )
        digest = bytes.fromhex(hash_key(key).removeprefix(HASH_PREFIX))
        found = None
        for known, who in self._callers.items():
            if hmac.compare_digest(known, digest):
                found = who
        if found is None:
            raise ApiError(401, "this API key is not known", code="invalid_api_key")
        return found


def _entry(one: Mapping[str, Any], where: str) -> tuple[str, Caller]:
    unknown = one.keys() - {"hash", "tenant", "admin", "quota"}
    name = one.get("hash")
    if unknown or not isinstance(name, str) or not name.startswith(HASH_PREFIX):
        wrong = f"unknown fields {sorted(unknown)}" if unknown else f"hash={name!r}"
        raise ConfigError(f"{where} has {wrong}; it needs a hash that begins with {HASH_PREFIX}")
    try:
        if len(bytes.fromhex(name.removeprefix(HASH_PREFIX))) != hashlib.sha256().digest_size:
            raise ValueError("too short or too long")
        quota = Quota(**one.get("quota", {}))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{where} is wrong: {error}") from error
    tenant = str(one.get("tenant") or _tenant_of(name))
    return name, Caller(tenant, is_admin=one.get("admin") is True, quota=quota)


def _tenant_of(name: str) -> str:
    """A tenant's name that says nothing of its key."""
    return "key-" + hashlib.sha256(name.encode()).hexdigest()[:12]


@dataclass(slots=True)
class _TenantUsage:
    live: int = 0
    waiting_tokens: int = 0
    allowance: float = 0.0  # tokens left of this minute's
    since_s: float = 0.0


class QuotaMeter:
    """Counts what tenants use, and refuses what is beyond their quotas.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[str, _TenantUsage] = {}

    def acquire(self, caller: Caller, num_tokens: int) -> None:
        """A request with a prompt of so many tokens begins; `release` must follow.

        Raises:
            ApiError: 429, the quota is used up; nothing was counted.
        """
        quota, use = caller.quota, self._usage_of(caller)
        if quota.max_requests is not None and use.live >= quota.max_requests:
            raise ApiError(
                429,
                f"{use.live} of your requests are live, the limit is {quota.max_requests}; "
                "wait for one to end",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        most = quota.max_waiting_tokens
        if most is not None and use.live and use.waiting_tokens + num_tokens > most:
            raise ApiError(
                429,
                f"your live requests have {use.waiting_tokens} prompt tokens, with this one "
                f"{use.waiting_tokens + num_tokens}; the limit is {most}",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        rate = quota.tokens_per_minute
        if rate is not None and use.allowance <= 0:
            wait = max(1, round(-use.allowance / rate * 60) + 1)
            raise ApiError(
                429,
                f"your {rate} tokens per minute are used up; try again in {wait} s",
                code="rate_limit_exceeded",
                retry_after_s=wait,
            )
        use.live += 1
        use.waiting_tokens += num_tokens

    def release(self, caller: Caller, num_tokens: int, num_computed: int) -> None:
        """It has ended and took so many computed tokens."""
        use = self._usage_of(caller)
        use.live -= 1
        use.waiting_tokens -= num_tokens
        use.allowance -= num_computed
        if not use.live and caller.quota.tokens_per_minute is None:
            del self._usage[caller.tenant]

    def _usage_of(self, caller: Caller) -> _TenantUsage:
        rate = caller.quota.tokens_per_minute
        now = self._clock()
        use = self._usage.get(caller.tenant)
        if use is None:
            use = self._usage[caller.tenant] = _TenantUsage(allowance=float(rate or 0), since_s=now)
        if rate is not None:
            use.allowance = min(float(rate), use.allowance + (now - use.since_s) / 60 * rate)
            use.since_s = now
        return use
