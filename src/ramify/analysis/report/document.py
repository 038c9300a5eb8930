"""The analysis of a log as values: what `ramify analyze` prints, draws and writes as JSON.

Everything here is aggregated: its size does not grow with the number of requests, except for
`lint.verdicts`, which no report embeds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ramify.analysis.verdicts import CauseName, Finding, LintReport

SCHEMA = 1
KIND = "ramify-analysis"  # of the JSON


@dataclass(frozen=True, slots=True)
class HitRate:
    """Input tokens read from a cache, of all input tokens, by one way of counting."""

    name: str  # reported, by_rule, possible
    num_read: int
    num_input: int
    num_requests: int  # over which both are counted
    formula: str

    @property
    def share(self) -> float:
        """Part of the input tokens that is read, 0 without input."""
        return self.num_read / self.num_input if self.num_input else 0.0


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A part of prompts that the same requests share, below the part before it.

    `total` counts the tokens of the node's requests from its start to their end, so that children
    never exceed their parent; `num_tokens` is the part itself, once.
    """

    parent: int  # -1 for the root
    label: str
    text: str  # how it begins; empty where texts are private or unknown
    depth: int
    first: int  # number of the first request, for the order of time
    num_requests: int
    num_tokens: int
    prefix_tokens: int  # before it and its own
    total: int
    num_read: int  # of `num_own`
    lost: dict[CauseName, int] = field(default_factory=dict)
    num_merged: int = 0  # small siblings drawn as this node

    @property
    def num_own(self) -> int:
        """Tokens of the part in all of its requests, which `num_read` is a share of."""
        return self.total if self.num_merged else self.num_tokens * self.num_requests

    @property
    def tokens_saved(self) -> int:
        """Tokens that all requests but the first can read."""
        return self.num_tokens * max(0, self.num_requests - 1)


@dataclass(frozen=True, slots=True)
class TimelineRequest:
    """A request in a session's timeline."""

    file: str
    line: int
    start_s: float | None
    gap_s: float | None  # since the request before it
    num_input: int
    num_read: int
    num_written: int | None  # None: the log has no such count
    source: str  # of the counts: usage or rule
    tokens_lost: int
    causes: tuple[str, ...]
    segment: str
    had: str
    got: str


@dataclass(frozen=True, slots=True)
class Session:
    """Requests of a conversation, in order."""

    name: str
    is_inferred: bool  # not by logged id: same first user message, or all requests
    num_requests: int  # of which `requests` are the first
    tokens_lost: int
    requests: tuple[TimelineRequest, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Hit rate at a capacity in tokens, or at a lifetime in seconds."""

    at: float
    share: float


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of the chart of capacities or lifetimes."""

    name: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """Hit rates by capacity and by lifetime; shares of all input tokens."""

    by_capacity: tuple[Curve, ...]
    by_lifetime: Curve | None
    infinite: float
    page_size: int
    here_share: float | None  # of the log's own cache
    here_tokens: float | None  # capacity of an LRU cache with that hit rate
    here_lifetime_s: float | None
    knee_tokens: float | None  # after which capacity buys little
    stated_tokens: int | None = None  # capacity that the user gave
    stated_share: float | None = None  # of LRU at that capacity


@dataclass(frozen=True, slots=True)
class WaterfallStep:
    """A step from the ideal to the reported hit rate; `change` is 0 for levels."""

    name: str
    level: float  # share after this step
    change: float
    detail: str
    is_level: bool = False


@dataclass(frozen=True, slots=True)
class Analysis:
    """All parts of a report."""

    title: str
    created: str  # ISO 8601, UTC
    version: str  # of Ramify
    lint: LintReport
    num_input: int  # tokens as billed where usage is logged, else as counted
    num_counted: int  # input tokens as the replays count them, which savings are a share of
    rates: tuple[HitRate, ...]
    duration_s: float | None  # from the first to the last request
    tree: tuple[PrefixNode, ...] = ()
    sessions: tuple[Session, ...] = ()
    curves: Curves | None = None
    waterfall: tuple[WaterfallStep, ...] = ()
    warnings: tuple[str, ...] = ()  # what makes the figures unsure; shown first
    is_private: bool = False
    is_partial: bool = False  # interrupted: requests or parts are missing

    def rate(self, name: str) -> HitRate | None:
        """The hit rate of this name, where the log allows one."""
        return next((rate for rate in self.rates if rate.name == name), None)

    @property
    def tokens_lost(self) -> int:
        """Tokens that mending all causes would make reusable, over all requests."""
        return sum(verdict.tokens.lost for verdict in self.lint.verdicts)


def finding_anchor(finding: Finding, number: int) -> str:
    """Name of a finding in links to the report."""
    place = "".join(letter if letter.isalnum() else "-" for letter in finding.segment).strip("-")
    return f"{finding.cause}-{place or 'log'}-{number + 1}"
