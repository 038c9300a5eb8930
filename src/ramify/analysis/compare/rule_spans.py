"""Where a rule of `ramify serve --prompt-rules` would take text out of a system prompt."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.analysis.compare.normal_forms import normalise_spaces
from ramify.prompt_rules import MAX_TEXT_CHARS, RULES

RuleSpan = tuple[int, int, str]  # start, end, name of the rule


def find_rule_spans(text: str, normal: str) -> list[RuleSpan]:
    """Find what rules take out of a system prompt, as spans of its normal form.

    Args:
        text: as it was sent: some rules look at the blanks before a line.
    """
    spans: list[RuleSpan] = []
    if len(text) > MAX_TEXT_CHARS:
        return spans
    for rule in RULES.values():
        for start, end in rule.find(text):
            piece = normalise_spaces(text[start:end])
            at = normal.find(piece) if piece else -1
            if at >= 0:
                spans.append((at, at + len(piece), rule.name))
    return spans


def rule_at(spans: Sequence[RuleSpan], start: int, end: int) -> str:
    """The first rule whose text a value is part of; "" if there is none."""
    return next((name for first, stop, name in spans if first <= start and end <= stop), "")
