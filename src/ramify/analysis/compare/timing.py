"""Causes that times and cache rules show: expiry, parallel requests, breakpoints, minimums."""

from __future__ import annotations

from ramify.analysis.compare.evidence import Evidence, outside_cause
from ramify.analysis.providers.rules import HOUR_S
from ramify.analysis.tokens import ESTIMATE_ERROR
from ramify.analysis.verdicts import Cause, CauseName

MIN_UNMARKED_SHARE = 0.2  # of the shared prefix; less is not worth a breakpoint


def parallel_cold(evidence: Evidence) -> Cause | None:
    """The entry was still being written by a request in flight."""
    prediction = evidence.prediction
    if prediction.in_flight is None or not evidence.is_lost(prediction.read_if_ready):
        return None
    return outside_cause(
        CauseName.PARALLEL_COLD,
        had=f"in flight: {evidence.log.name(prediction.in_flight)}",
        got=f"{prediction.read_if_ready} tokens not yet readable",
    )


def ttl_expired(evidence: Evidence) -> Cause | None:
    """The entry was not used within its lifetime."""
    prediction, rule = evidence.prediction, evidence.rule
    if prediction.expired is None or evidence.request.info.start_s is None:
        return None
    if not evidence.is_lost(prediction.read_if_kept):
        return None
    # The best match is the newest request that shares as much: it used the entry last.
    last, lifetime_s = evidence.facts.match, rule.lifetime_s or 0.0
    pause_s = None if last is None else evidence.pause_since(last)
    if last is None or pause_s is None or pause_s < lifetime_s:
        last = evidence.log.requests[prediction.expired]
        pause_s = evidence.pause_since(last) or 0.0
    return outside_cause(
        CauseName.TTL_EXPIRED,
        had=f"last used by {evidence.log.name(last.number)}, {pause_s:.0f} s before",
        got=f"lifetime {lifetime_s:.0f} s",
        is_likely=evidence.is_billed_miss or pause_s >= (rule.lifetime_high_s or 0.0),
    )


def billed_after_pause(evidence: Evidence) -> Cause | None:
    """A log without breakpoints or with parts of the prompt: the bill shows a miss after a pause."""
    match, rule, bills = evidence.facts.match, evidence.rule, evidence.miss_by_bills
    if rule.lifetime_s is None or match is None or not evidence.hides_breakpoints:
        return None
    pause_s = evidence.pause_since(match)
    if pause_s is None or bills is None or evidence.request.info.verdict is not None:
        return None
    is_hour = bool(match.info.usage.num_written_1h) and max(rule.lifetimes_s) == HOUR_S
    lifetime_s = HOUR_S if is_hour else rule.lifetime_s
    if pause_s <= lifetime_s:
        return None
    before, num_read = bills
    return outside_cause(
        CauseName.TTL_EXPIRED,
        had=f"{before} tokens in {evidence.log.name(match.number)}, {pause_s:.0f} s before",
        got=f"{num_read} tokens read, lifetime {lifetime_s:.0f} s",
    )


def below_minimum(evidence: Evidence) -> Cause | None:
    """The shared prefix is shorter than what the provider caches."""
    rule, prediction = evidence.rule, evidence.prediction
    if not evidence.has_clean_text or rule.cache == "none":
        return None
    possible = prediction.read_if_long_enough
    if rule.cache != "breakpoints" or rule.implicit:
        possible = max(possible, evidence.facts.reusable)
    if possible >= rule.min_tokens or not evidence.is_lost(possible):
        return None
    has_breakpoints = bool(evidence.request.breakpoints)
    if not (has_breakpoints or evidence.is_billed_miss):
        # Nobody asked for a cache, and no bill shows that one was missed.
        return None
    # A request that is cached up to a later breakpoint shares little for another reason.
    billed = prediction.billed
    was_asked = has_breakpoints and not billed.num_written + billed.num_read
    return outside_cause(
        CauseName.BELOW_MINIMUM,
        had=f"{possible} tokens shared",
        got=f"minimum {rule.min_tokens}",
        is_likely=possible <= (1 - ESTIMATE_ERROR) * rule.min_tokens
        and (was_asked or evidence.is_billed_miss),
    )


def breakpoint_missing(evidence: Evidence) -> Cause | None:
    """No breakpoint of an earlier request ends within the shared prefix, or none of this one's does."""
    prediction = evidence.prediction
    if not evidence.has_clean_text or evidence.rule.cache != "breakpoints":
        return None
    possible = prediction.read_if_marked
    reached = max(prediction.read_if_in_reach, prediction.read_if_kept, prediction.read_if_ready)
    if not evidence.is_lost(possible, reached):
        return None
    if possible - reached < MIN_UNMARKED_SHARE * possible:
        return None
    if evidence.is_in_messages(reached) and possible < 2 * reached:
        return None  # a part of one turn: an edited or repeated question
    return outside_cause(
        CauseName.BREAKPOINT_MISSING,
        segment=evidence.path(evidence.segment_at(possible)),
        had=f"{possible} tokens shared",
        got=f"{reached} up to a breakpoint",
        # Logs of some gateways keep no breakpoints: a log without any shows nothing.
        is_likely=evidence.log.has_breakpoints or evidence.is_billed_miss,
    )


def lookback_exceeded(evidence: Evidence) -> Cause | None:
    """The last entry is too many positions before the breakpoint."""
    in_reach, lookback = evidence.prediction.read_if_in_reach, evidence.rule.lookback
    if not evidence.has_clean_text or lookback is None or not evidence.is_lost(in_reach):
        return None
    last = max((segment for segment, _ in evidence.request.breakpoints), default=-1)
    return outside_cause(
        CauseName.LOOKBACK_EXCEEDED,
        segment=evidence.path(last),
        had=f"{in_reach} tokens cached",
        got=f"more than {lookback} positions before the breakpoint",
    )
