"""Causes that times and cache rules show: expiry, parallel requests, breakpoints, minimums."""

from __future__ import annotations

from ramify.analysis.causes.evidence import Evidence
from ramify.analysis.corpus import StoredRequest
from ramify.analysis.providers.breakpoints import HOUR_S
from ramify.analysis.providers.prompts import Timing
from ramify.analysis.tokens import ESTIMATE_ERROR
from ramify.analysis.verdicts import Cause, CauseName, Certainty

MIN_UNMARKED_SHARE = 0.2  # of the shared prefix; less is not worth a breakpoint


class ParallelCold:
    """The entry was still being written by a request in flight."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        prediction = evidence.prediction
        if prediction.in_flight is None or not evidence.is_lost(prediction.read_if_ready):
            return None
        return Cause(
            CauseName.PARALLEL_COLD,
            Certainty.LIKELY,
            "",
            had=f"in flight: {evidence.log.name(prediction.in_flight)}",
            got=f"{prediction.read_if_ready} tokens not yet readable",
        )


class TtlExpired:
    """The entry was not used within its lifetime."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        prediction, rule = evidence.prediction, evidence.rule
        if prediction.expired is None or evidence.request.info.start_s is None:
            return None
        if not evidence.is_lost(prediction.read_if_kept):
            return None
        # The best match is the newest request that shares as much: it used the entry last.
        last, lifetime_s = prediction.expired, rule.lifetime_s or 0.0
        pause_s = _pause(evidence, evidence.facts.match)
        if pause_s is not None and pause_s >= lifetime_s and evidence.facts.match is not None:
            last = evidence.facts.match.number
        else:
            pause_s = _pause(evidence, evidence.log.requests[last]) or 0.0
        is_sure = evidence.is_billed_miss or pause_s >= (rule.lifetime_high_s or 0.0)
        return Cause(
            CauseName.TTL_EXPIRED,
            Certainty.LIKELY if is_sure else Certainty.SUSPECTED,
            "",
            had=f"last used by {evidence.log.name(last)}, {pause_s:.0f} s before",
            got=f"lifetime {lifetime_s:.0f} s",
        )


def _pause(evidence: Evidence, earlier: StoredRequest | None) -> float | None:
    """Seconds since an earlier request ended."""
    return None if earlier is None else Timing.of(evidence.request.info).since(earlier.info)


class BilledAfterPause:
    """A log without breakpoints or with parts of the prompt: the bill shows a miss after a pause."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        info, match, rule = evidence.request.info, evidence.facts.match, evidence.rule
        if rule.lifetime_s is None or match is None or not evidence.hides_breakpoints:
            return None
        pause_s = Timing.of(info).since(match.info)
        before, read = match.info.usage.num_input, info.usage.num_read
        if pause_s is None or before is None or read is None or info.verdict is not None:
            return None
        is_hour = bool(match.info.usage.num_written_1h) and max(rule.lifetimes_s) == HOUR_S
        lifetime_s = HOUR_S if is_hour else rule.lifetime_s
        if pause_s <= lifetime_s or 2 * read > before or before < rule.min_tokens:
            return None
        return Cause(
            CauseName.TTL_EXPIRED,
            Certainty.LIKELY,
            "",
            had=f"{before} tokens in {evidence.log.name(match.number)}, {pause_s:.0f} s before",
            got=f"{read} tokens read, lifetime {lifetime_s:.0f} s",
        )


class BelowMinimum:
    """The shared prefix is shorter than what the provider caches."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        if evidence.facts.has_waste or evidence.rule.cache == "none":
            return None
        if not evidence.request.info.has_full_text:
            return None
        possible = evidence.prediction.read_if_long_enough
        if evidence.rule.cache != "breakpoints" or evidence.rule.implicit:
            possible = max(possible, evidence.facts.reusable)
        if possible >= evidence.rule.min_tokens or not evidence.is_lost(possible):
            return None
        is_clear = possible <= (1 - ESTIMATE_ERROR) * evidence.rule.min_tokens
        # A request that is cached up to a later breakpoint shares little for another reason.
        billed = evidence.prediction.billed
        was_asked = bool(evidence.request.breakpoints) and not billed.num_written + billed.num_read
        is_likely = is_clear and (was_asked or evidence.is_billed_miss)
        if not (evidence.request.breakpoints or evidence.is_billed_miss):
            # Nobody asked for a cache, and no bill shows that one was missed.
            return None
        return Cause(
            CauseName.BELOW_MINIMUM,
            Certainty.LIKELY if is_likely else Certainty.SUSPECTED,
            "",
            had=f"{possible} tokens shared",
            got=f"minimum {evidence.rule.min_tokens}",
        )


class BreakpointMissing:
    """No breakpoint of an earlier request ends within the shared prefix, or none of this one's does."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        prediction = evidence.prediction
        if evidence.facts.has_waste or evidence.rule.cache != "breakpoints":
            return None
        if not evidence.request.info.has_full_text:
            return None
        possible = prediction.read_if_marked
        reached = max(
            prediction.read_if_in_reach, prediction.read_if_kept, prediction.read_if_ready
        )
        if not evidence.is_lost(possible, reached):
            return None
        if possible - reached < MIN_UNMARKED_SHARE * possible:
            return None
        if evidence.is_in_messages(reached) and possible < 2 * reached:
            return None  # a part of one turn: an edited or repeated question
        # Logs of some gateways keep no breakpoints: a log without any shows nothing.
        is_shown = evidence.log.has_breakpoints or evidence.is_billed_miss
        return Cause(
            CauseName.BREAKPOINT_MISSING,
            Certainty.LIKELY if is_shown else Certainty.SUSPECTED,
            evidence.path(evidence.segment_at(possible)),
            had=f"{possible} tokens shared",
            got=f"{reached} up to a breakpoint",
        )


class LookbackExceeded:
    """The last entry is too many positions before the breakpoint."""

    def find(self, evidence: Evidence) -> Cause | None:
        """See `OutsideRule`."""
        prediction = evidence.prediction
        if evidence.facts.has_waste or evidence.rule.lookback is None:
            return None
        if not evidence.request.info.has_full_text:
            return None
        if not evidence.is_lost(prediction.read_if_in_reach):
            return None
        last = max((segment for segment, _ in evidence.request.breakpoints), default=-1)
        return Cause(
            CauseName.LOOKBACK_EXCEEDED,
            Certainty.LIKELY,
            evidence.path(last),
            had=f"{prediction.read_if_in_reach} tokens cached",
            got=f"more than {evidence.rule.lookback} positions before the breakpoint",
        )
