"""The three hit rates of a log, and the steps from the ideal down to what was reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.providers.prompts import Prediction
from ramify.analysis.report.document import HitRate, WaterfallStep
from ramify.analysis.report.figures.reads import Counts, RequestReads
from ramify.analysis.report.wording.headline import rule_words
from ramify.analysis.verdicts import CauseName, LintReport, Verdict

# Restrictions of a rule, in the order in which lost tokens are counted for them.
RESTRICTIONS = (
    ("read_if_marked", "no breakpoint", "a breakpoint after every segment would read it"),
    ("read_if_long_enough", "below the minimum", "the prefix is shorter than the rule caches"),
    ("read_if_in_reach", "out of the look-back", "more positions than a breakpoint looks back"),
    ("read_if_resident", "capacity", "evicted from a cache of the stated capacity"),
    ("read_if_kept", "expired", "the entry's lifetime had ended"),
    ("read_if_ready", "in flight", "the request that writes it had not begun to answer"),
)
_OUTSIDE = (
    (CauseName.ROUTING, "routing", "answered by another replica"),
    (CauseName.EVICTED, "evicted", "the server's cache was too small"),
    (CauseName.MODEL_CHANGED, "other model", "answered by another model"),
    (CauseName.CACHE_KEY_SCATTERED, "cache keys", "requests with one prefix under several keys"),
)
UNEXPLAINED = ("unexplained", "no evidence in the log says why")
Loss = tuple[str, int, str]  # name, tokens, how it is measured


def possible_reads(lint: LintReport, reads: RequestReads) -> int:
    """Tokens that `counted_requests` could read if all causes were mended.

    What each shares with its best match or has read, and not less than what any fixes read in their
    replay.
    """
    chosen = counted_requests(reads)
    savings = [lint.saving_all, *(finding.saving for finding in lint.findings)]
    savings += [finding.partner.saving for finding in lint.findings if finding.partner]
    num_input = int(reads.num_tokens[chosen].sum())
    rate: float = num_input / max(1, lint.tables["predicted"]["num_input"])
    replayed = int(reads.by_rule[chosen].sum()) + ceil(
        rate * max(0, *(item.tokens for item in savings))
    )
    shared = np.maximum(reads.reusable + reads.lost, reads.reported)
    num_shared = int(shared[chosen].sum())
    return max(num_shared, min(num_input, replayed))


def hit_rates(lint: LintReport, reads: RequestReads, num_possible: int) -> tuple[HitRate, ...]:
    """Reported (where usage is logged), by rule, and possible: over the same requests and tokens.

    They are over the requests with whole prompts whose usage has cached tokens; without usage, over
    those with whole prompts. A log without whole prompts has the reported rate only.
    """
    chosen = counted_requests(reads)
    num_input, num_requests = int(reads.num_tokens[chosen].sum()), int(chosen.sum())
    unit = "input tokens"
    if reads.has_usage.any():
        unit = "input tokens as billed, of the requests whose cached tokens are logged"

    def rate(name: str, num_read: int, formula: str) -> HitRate:
        return HitRate(name, num_read, num_input, num_requests, formula)

    rates = []
    if reads.has_usage[chosen].any():
        num_reported = int(reads.reported[chosen].sum())
        rates.append(rate("reported", num_reported, f"cached tokens of usage / {unit}"))
    if reads.is_whole[chosen].any():
        words = f"reads by {rule_words(lint)}, from a cold cache / {unit}"
        rates.append(rate("by_rule", int(reads.by_rule[chosen].sum()), words))
        words = (
            "tokens shared with an earlier request if all causes were mended, infinite cache, or reported "
            "as read, or read in the best replay of the mended log"
        )
        rates.append(rate("possible", num_possible, f"{words} / {unit}"))
    return tuple(rates)


def counted_requests(reads: RequestReads) -> NDArray[np.bool_]:
    """[requests]: those that all rates and the waterfall are over."""
    choices = (reads.has_usage & reads.is_whole, reads.has_usage, reads.is_whole)
    return next((chosen for chosen in choices if chosen.any()), np.zeros_like(reads.is_whole))


def waterfall(
    reads: RequestReads,
    verdicts: Sequence[Verdict],
    predictions: Mapping[int, Prediction],
    unsplit: Mapping[int, Prediction],
    num_possible: int,
) -> tuple[WaterfallStep, ...]:
    """Levels and the steps between them, as shares of the input tokens of the same requests.

    They are the requests of `hit_rates`, so that all levels compare. Each lost token counts for one
    step. Without whole prompts nothing can be compared.

    Args:
        reads: of each request.
        verdicts: of each request.
        predictions: by the request's number.
        unsplit: the same if all replicas, keys and answering models shared a cache.
        num_possible: see `possible_reads`.
    """
    chosen = counted_requests(reads)
    total = int(reads.num_tokens[chosen].sum())
    if not total or not reads.is_whole[chosen].any():
        return ()
    as_sent, by_rule, reported = (
        int(tokens[chosen].sum()) for tokens in (reads.reusable, reads.by_rule, reads.reported)
    )
    other = ("other requests", "read from others than the best match, once mended")
    rest = ("rest of the rule", "steps of the grid, whole units, scope of settings")
    # Each level, with the losses above it and the name of what they leave over.
    levels: list[tuple[Loss, Iterable[Loss], tuple[str, str]]] = [
        (("possible, mended", num_possible, "all causes mended, infinite cache"), (), ("", "")),
        (
            ("as sent", as_sent, "infinite cache, no rule"),
            _prompt_causes(reads, verdicts, chosen),
            other,
        ),
        (
            ("by rule", by_rule, "predicted reads"),
            _restrictions(reads, predictions, unsplit, chosen),
            rest,
        ),
    ]
    if reads.has_usage[chosen].any():
        level = ("reported", reported, "cached tokens of usage")
        levels.append((level, _outside(reads, verdicts, chosen), UNEXPLAINED))
    steps: list[WaterfallStep] = []
    now = num_possible
    for (name, tokens, detail), losses, (left, why) in levels:
        for loss, lost, how in losses:
            if lost:
                now -= lost
                steps.append(WaterfallStep(loss, now / total, -lost / total, how))
        if now != tokens or (left, why) == UNEXPLAINED:
            # A negative loss is a gain that nothing explains.
            steps.append(WaterfallStep(left, tokens / total, (tokens - now) / total, why))
        now = tokens
        steps.append(WaterfallStep(name, tokens / total, 0.0, detail, is_level=True))
    return tuple(steps)


def _prompt_causes(
    reads: RequestReads, verdicts: Sequence[Verdict], chosen: NDArray[np.bool_]
) -> Iterator[Loss]:
    """Lost tokens by the first cause of each request, most first."""
    lost: Counter[str] = Counter()
    for number in np.flatnonzero(chosen & (reads.lost > 0)).tolist():
        causes = verdicts[number].causes
        lost[str(causes[0].cause) if causes else "other"] += int(reads.lost[number])
    for name, num_tokens in lost.most_common():
        yield name, num_tokens, "changes of the prompt"


def _restrictions(
    reads: RequestReads,
    predictions: Mapping[int, Prediction],
    unsplit: Mapping[int, Prediction],
    chosen: NDArray[np.bool_],
) -> Iterator[Loss]:
    """Tokens that each restriction of the rule takes; a token counts for the first that frees it."""
    numbers = np.flatnonzero(chosen)
    of_rule = [predictions[number] for number in numbers.tolist()]
    num_read = np.array([item.billed.num_read for item in of_rule])
    rate = reads.num_tokens[numbers] / [max(1, item.billed.num_input) for item in of_rule]
    left: Counts = (reads.reusable - reads.by_rule)[numbers].clip(min=0)

    def take(possible: NDArray[np.int64]) -> int:
        freed = np.rint((possible - num_read).clip(min=0) * rate).astype(np.int64)
        taken = np.minimum(freed, left)
        np.subtract(left, taken, out=left)
        return int(taken.sum())

    lifted = {
        field: np.array([getattr(item, field) for item in of_rule]) for field, _, _ in RESTRICTIONS
    }
    for field, name, detail in RESTRICTIONS:
        yield name, take(lifted[field]), detail
    # Beyond what the restrictions free: each of them is lifted alone, over the replicas as they are.
    joined = np.array([unsplit[number].billed.num_read for number in numbers.tolist()])
    apart = num_read + joined - np.max(list(lifted.values()), axis=0)
    yield "split", take(apart), "another replica, cache key or model has the entry"


def _outside(
    reads: RequestReads, verdicts: Sequence[Verdict], chosen: NDArray[np.bool_]
) -> Iterator[Loss]:
    """Tokens predicted but not reported, by causes outside the prompt."""
    missing = (reads.by_rule - reads.reported).clip(min=0)
    for cause, name, detail in _OUTSIDE:
        named = np.array(
            [any(item.cause is cause for item in verdict.causes) for verdict in verdicts], np.bool_
        )
        here = chosen & named
        yield name, int(missing[here].sum()), detail
        missing[here] = 0
