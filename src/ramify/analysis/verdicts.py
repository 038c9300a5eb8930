"""What `ramify lint` reports: a verdict for each request, findings over all of them.

The fields are those of `--json`, schema 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SCHEMA = 1


class Certainty(StrEnum):
    """How sure a cause is."""

    PROVED = "proved"  # a diff between two requests shows it
    LIKELY = "likely"
    SUSPECTED = "suspected"


class CauseName(StrEnum):
    """Causes of lost hits; NEW_CONTENT, COMPACTION and OUTSIDE_PROMPT are not waste in the prompt."""

    CLOCK = "clock"
    RANDOM_ID = "random_id"
    PATH_OR_STATE = "path_or_state"
    BILLING_HEADER = "billing_header"
    TOOL_ORDER = "tool_order"
    TOOL_CHANGED = "tool_changed"
    KEY_ORDER = "key_order"
    WHITESPACE = "whitespace"
    SETTINGS_CHANGED = "settings_changed"
    MEDIA_CHANGED = "media_changed"
    HISTORY_EDITED = "history_edited"
    COMPACTION = "compaction"
    REASONING_DROPPED = "reasoning_dropped"
    CONTEXT_MOVED = "context_moved"
    CONTEXT_ORDER = "context_order"
    SYSTEM_HOISTED = "system_hoisted"
    BREAKPOINT_MISSING = "breakpoint_missing"
    LOOKBACK_EXCEEDED = "lookback_exceeded"
    BELOW_MINIMUM = "below_minimum"
    TTL_EXPIRED = "ttl_expired"
    PARALLEL_COLD = "parallel_cold"
    MODEL_CHANGED = "model_changed"
    ROUTING = "routing"
    CACHE_KEY_SCATTERED = "cache_key_scattered"
    EVICTED = "evicted"
    NAMESPACE_SPLIT = "namespace_split"
    UNREAD_WRITE = "unread_write"
    NEW_CONTENT = "new_content"
    OUTSIDE_PROMPT = "outside_prompt"


class ValueKind(StrEnum):
    """What a value is that changes inside a text."""

    CLOCK = "clock"
    ID = "id"
    STATE = "state"  # a path, a branch, a count, a list of tasks
    UNKNOWN = "unknown"  # another value in nearly every request

    @property
    def cause(self) -> CauseName:
        """The name that the cause has in reports."""
        return _CAUSES_OF_KINDS[self]


_CAUSES_OF_KINDS = {
    ValueKind.CLOCK: CauseName.CLOCK,
    ValueKind.ID: CauseName.RANDOM_ID,
    ValueKind.STATE: CauseName.PATH_OR_STATE,
    ValueKind.UNKNOWN: CauseName.CLOCK,  # what changes so often is a time in most logs
}
# The names of a value that changes, whatever its kind.
CHANGING_VALUES = frozenset(_CAUSES_OF_KINDS.values())
VALUES = CHANGING_VALUES | {CauseName.BILLING_HEADER}  # of which a part of a text consists
# No change of the prompt or the client mends these: a report lists them beside its findings.
OBSERVED = frozenset({CauseName.COMPACTION, CauseName.BELOW_MINIMUM, CauseName.OUTSIDE_PROMPT})
LEGITIMATE = frozenset({CauseName.NEW_CONTENT, CauseName.COMPACTION, CauseName.OUTSIDE_PROMPT})


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference from the best match."""

    segment: str  # path, as `messages[4].content[1]`
    char: int  # code points of the segment's text before it
    token: int  # tokens of the prompt before it
    had: str  # quoted from the match, secrets masked
    got: str


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a request could not read what it shares with its best match."""

    cause: CauseName
    certainty: Certainty
    segment: str
    had: str = ""
    got: str = ""
    kind: ValueKind | None = None  # of a value that changes
    rule: str = ""  # of `ramify serve --prompt-rules` that takes the value out of the prompt


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of a request's prompt."""

    total: int
    reusable: int  # shared with the best match: same model, settings and key, infinite cache
    lost: int  # reusable with all causes mended, less `reusable`


@dataclass(frozen=True, slots=True)
class Verdict:
    """One request, compared with the earlier request that it could share most with."""

    file: str
    line: int
    index: int | None
    best_match_file: str | None
    best_match_line: int | None
    best_match_index: int | None
    divergence: Divergence | None
    causes: tuple[Cause, ...]
    tokens: TokenCounts


@dataclass(frozen=True, slots=True)
class Example:
    """A request in which a finding shows."""

    line: int
    had: str
    got: str
    file: str = ""


@dataclass(frozen=True, slots=True)
class Saving:
    """Tokens not computed in a replay of the mended log, with a range; money in US dollars."""

    tokens: int
    low: int
    high: int
    money: float | None


@dataclass(frozen=True, slots=True)
class Partner:
    """Another finding, without which the first saves nothing, and what both save together."""

    cause: CauseName
    segment: str
    saving: Saving


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause at a place, over all requests."""

    cause: CauseName
    certainty: Certainty
    segment: str
    num_requests: int
    tokens_lost: int
    example: Example
    change: str  # what to do, as an imperative sentence
    saving: Saving
    partner: Partner | None = None
    kind: ValueKind | None = None  # of a value that changes
    rule: str = ""  # of `ramify serve --prompt-rules` that takes the value out of the prompt

    @property
    def note(self) -> str:
        """Why the saving is what it is, where the tokens lost do not say it; else empty."""
        if self.partner is not None:
            place = f" in {self.partner.segment}" if self.partner.segment else ""
            together = f"{self.partner.saving.tokens:,} tokens"
            return f"Saves nothing alone; mended together with {self.partner.cause}{place} it saves {together}."
        if self.saving.tokens > self.tokens_lost:
            return (
                "Saves more than is lost: lost tokens count once, as billed, for the first cause of a "
                "request; the replay counts all that later requests read once this is mended."
            )
        return ""


@dataclass(frozen=True, slots=True)
class LintReport:
    """Everything that `ramify lint` finds."""

    num_requests: int
    verdicts: tuple[Verdict, ...]
    findings: tuple[Finding, ...]  # with a change that mends them; by saving, greatest first
    saving_all: Saving  # all findings mended together
    quality: dict[str, Any]
    provider: str
    tables: dict[str, Any] = field(default_factory=dict)  # see `report_tables`
    capacity_tokens: int | None = None  # of the replays; None: nothing is evicted
    observations: tuple[Finding, ...] = ()  # of causes that no change mends
    interrupted: str = ""  # what is missing since Ctrl-C
