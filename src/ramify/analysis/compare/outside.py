"""All rules about what text cannot prove, and writes that nobody reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from ramify.analysis.compare import timing, vendor
from ramify.analysis.compare.evidence import Evidence, LogFacts, MatchFacts, OutsideRule
from ramify.analysis.corpus import StoredRequest
from ramify.analysis.verdicts import Cause, CauseName, Certainty

# Each names what one restriction of the rule, or one split of the cache, takes away.
RULES: tuple[OutsideRule, ...] = (
    vendor.other_model_answered,
    vendor.routing,
    timing.parallel_cold,
    timing.ttl_expired,
    timing.billed_after_pause,
    timing.lookback_exceeded,
    timing.breakpoint_missing,
    timing.below_minimum,
    vendor.vendor_says_otherwise,
)
# These name what is left: they are asked if no other rule has a likely cause.
LAST_RULES: tuple[OutsideRule, ...] = (
    vendor.key_too_busy,
    vendor.unexplained_miss,
    vendor.unexplained_miss_in_part,
)


def outside_causes(log: LogFacts, request: StoredRequest, facts: MatchFacts) -> tuple[Cause, ...]:
    """Causes from times, usage, verdicts and the cache rule; none is proved.

    With waste already found in the text, no cause comes from breakpoints, look-back or minimums.
    """
    evidence = log.evidence(request, facts)
    if evidence.has_own_reason:
        return _ask((vendor.own_server_says,), evidence)
    causes = _ask(RULES, evidence)
    if facts.has_waste or any(cause.certainty is Certainty.LIKELY for cause in causes):
        return causes
    last = _ask(LAST_RULES, evidence)
    return (*causes, *last[:1])


def _ask(rules: tuple[OutsideRule, ...], evidence: Evidence) -> tuple[Cause, ...]:
    causes = (rule(evidence) for rule in rules)
    return tuple(cause for cause in causes if cause is not None)


def unread_writes(log: LogFacts, excused: Collection[int] = ()) -> dict[int, Cause]:
    """Writes that were paid and never read, by request; only conversations of one request.

    A single one at the end of the log is only suspected: a read may have come after the log. So is one
    under a rule that is assumed for want of the model's own, unless the bill shows the write.

    Args:
        log: the log.
        excused: requests whose entry a later request would have read but for another cause.
    """
    unread = {}
    late = {prediction.expired for prediction in log.predictions.values()}
    early = {prediction.in_flight for prediction in log.predictions.values()}
    for number in sorted(log.single - late - early):
        prediction, request = log.predictions[number], log.requests[number]
        usage = request.info.usage
        if not prediction.num_unread or number in excused or usage.num_written == 0:
            continue
        last = max((segment for segment, _ in request.breakpoints), default=-1)
        unread[number] = Cause(
            CauseName.UNREAD_WRITE,
            Certainty.LIKELY,
            request.paths[last] if last >= 0 else "",
            had=f"{prediction.num_unread} tokens written",
            got="never read",
        )
    num_by_segment = Counter(cause.segment for cause in unread.values())
    return {
        number: replace(cause, certainty=Certainty.SUSPECTED)
        if (num_by_segment[cause.segment] == 1 and log.ends_within_lifetime(number))
        or (log.is_rule_assumed(number) and not log.requests[number].info.usage.num_written)
        else cause
        for number, cause in unread.items()
    }
