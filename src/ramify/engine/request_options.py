"""`RequestOptions`: what a caller chooses for a request beside its prompt and `SamplingParams`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from ramify.cache.pins import validate_ttl
from ramify.errors import ConfigError, InvalidParamsError

MAX_RETENTION = 64  # prefixes that one request may ask to pin


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of one request, as the caller gave them; `AsyncLLM.stream` describes them.

    Every entry of the engine passes this value on. `EngineCore.add_request` checks it, so that a
    wrong value refuses the request and not the call that made the value.
    """

    priority: int = 0
    tenant: str = ""
    salt: str = ""
    session: str = ""
    max_shared: int | None = None
    explain: bool = False
    retention: Sequence[tuple[int, float | None]] = ()  # (tokens of a prefix, seconds)
    cache_share: float | None = None
    pin_share: float | None = None
    generated: Sequence[Sequence[int]] = ()  # by answer: token ids that were delivered before

    @property
    def wants_report(self) -> bool:
        """Whether the first increment has `prefix`: the answer to these options."""
        return bool(self.explain or self.retention) or self.cache_share is not None

    def checked(self) -> RequestOptions:
        """These options with `retention` as a tuple of (int, float or None).

        Raises:
            InvalidParamsError: a value of the wrong type or outside its range.
        """
        self._check_types()
        for name in ("cache_share", "pin_share"):
            share = getattr(self, name)
            if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
                raise InvalidParamsError(name, share, "None or a share of the pages from 0 to 1")
        if not self.retention:
            return self
        if len(self.retention) > MAX_RETENTION:
            allowed = f"at most {MAX_RETENTION} prefixes"
            raise InvalidParamsError("retention", f"{len(self.retention)} prefixes", allowed)
        return replace(self, retention=tuple(map(_checked_prefix, self.retention)))

    def _check_types(self) -> None:
        priority: object = self.priority
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidParamsError("priority", priority, "an integer")
        limit: object = self.max_shared
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int) or limit < 0
        ):
            raise InvalidParamsError("max_shared", limit, "None or a number of tokens >= 0")
        for name in ("tenant", "salt", "session"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise InvalidParamsError(name, value, "a text")


def _checked_prefix(prefix: object) -> tuple[int, float | None]:
    match prefix:
        case (int() as num_tokens, ttl_s) if not isinstance(num_tokens, bool) and num_tokens >= 0:
            with suppress(ConfigError):
                return num_tokens, validate_ttl(ttl_s)
    allowed = "pairs of a number of tokens and of seconds > 0 or None"
    raise InvalidParamsError("retention", prefix, allowed)
