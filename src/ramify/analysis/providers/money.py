"""Money that a request's input costs."""

from __future__ import annotations

from dataclasses import replace

from ramify.analysis.providers.prompts import Billed
from ramify.analysis.providers.rules import ModelRule
from ramify.analysis.records import LoggedRequest, Usage


def price_of(counts: Billed, rule: ModelRule, info: LoggedRequest) -> Billed:
    """The same counts with their price.

    `price · (ordinary + write · 5-minute writes + write_1h · 1-hour writes + read · reads)`
    """
    if rule.input_price is None:
        return counts
    write_1h = rule.write_1h_multiplier or rule.write_multiplier
    weighted = (
        counts.num_ordinary
        + rule.write_multiplier * (counts.num_written - counts.num_written_1h)
        + write_1h * counts.num_written_1h
        + rule.read_multiplier * counts.num_read
    )
    batch = rule.batch_multiplier if info.is_batch else 1.0
    return replace(counts, money=rule.input_price * weighted * batch / 1e6)


def billed_usage(usage: Usage, rule: ModelRule, info: LoggedRequest) -> Billed | None:
    """What the server billed, priced; None if the input or the reads are not logged."""
    if usage.num_input is None or usage.num_read is None:
        return None
    written = usage.num_written or 0
    counts = Billed(usage.num_input, usage.num_read, written, usage.num_written_1h or 0)
    return price_of(counts, rule, info)
