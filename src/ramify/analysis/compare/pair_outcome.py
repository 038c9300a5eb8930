"""What the walk does at two segments with different values: step over them, or stop within the text."""

from __future__ import annotations

from dataclasses import dataclass

from ramify.analysis.compare.prompt_sides import Difference, Side
from ramify.analysis.compare.text_diff import common_prefix_len
from ramify.analysis.compare.unit_pairs import PairDifferences
from ramify.analysis.corpus import Unit
from ramify.analysis.records import TextForm
from ramify.analysis.verdicts import VALUES, CauseName

MIN_TAIL = 60  # code points behind a value in a summary, so that the summary is the same
MIN_CUT = 4  # words at the end of a text that are more than a value
MIN_RECOVERED = 16  # tokens behind a value in a user's message, so that the value is waste
# The same if nothing says that it is a time, an id or a state: users ask for orders and dates.
MIN_UNNAMED = 48


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """Waste that is stepped over, and the tokens shared with it mended."""

    waste: tuple[Difference, ...]
    num_shared: int
    stops: bool = False  # the walk ends within the segment
    content: tuple[int, int] | None = None  # where content begins, in both normal forms


def judge_pair(
    pair: PairDifferences, a: Side, i: int, b: Side, j: int, *, continues: bool
) -> PairOutcome:
    """The outcome at segment `i` of the earlier prompt and segment `j` of the later prompt.

    Args:
        pair: how the two segments differ.
        a: the earlier prompt.
        i: place in `a.rest`.
        b: the later prompt.
        j: place in `b.rest`.
        continues: `b` continues the conversation of `a`.
    """
    num_tokens, num_chars = b.unit(j).num_tokens, len(b.normal_text(j))
    rate = num_tokens / max(1, num_chars)
    waste = tuple(item for item in pair.differences if item.is_waste)
    if waste and not continues:
        if b.role(j) != "system":
            # A date or a number in a user's message may be the question itself.
            return _judge_question(pair, waste, a, i, b, j, rate)
        stable = next((at for at, item in enumerate(waste) if not item.is_volatile), None)
        if stable is not None:
            num_shared = 0 if b.is_newest(j) else int(rate * num_chars / 2)
            return PairOutcome(waste[:stable], num_shared, stops=True)
    return _outcome(pair, waste, num_tokens, rate)


def _outcome(
    pair: PairDifferences, waste: tuple[Difference, ...], num_tokens: int, rate: float
) -> PairOutcome:
    """Step over all waste, to the end of the segment or to its content."""
    if pair.stop_char is None:
        return PairOutcome(waste, num_tokens)
    content = pair.had_stop_char, pair.stop_char
    return PairOutcome(waste, int(rate * pair.stop_char), stops=True, content=content)


def _judge_question(
    pair: PairDifferences,
    waste: tuple[Difference, ...],
    a: Side,
    i: int,
    b: Side,
    j: int,
    rate: float,
) -> PairOutcome:
    """Values in a message of another conversation are waste if enough equal text follows."""
    outcome = _outcome(pair, waste, b.unit(j).num_tokens, rate)
    start = common_prefix_len(a.text(i), b.text(j))
    value = int(rate * (start + max(item.got.num_chars for item in waste)))
    is_asked = b.role(j) == "user" and all(
        item.cause in VALUES and not item.is_volatile for item in waste
    )
    least = MIN_UNNAMED if is_asked else MIN_RECOVERED
    follows = outcome.num_shared - value >= least
    if pair.stop_char is None and not follows:
        # Equal tokens in later messages count too.
        follows = _equal_after(a, i, b, j, least) >= least
    if _is_said(b.unit(j)):
        # In another conversation, tool and model text is content, not waste.
        follows &= all(item.cause not in VALUES for item in waste)
    return outcome if follows else PairOutcome((), int(rate * start), stops=True)


def _equal_after(a: Side, i: int, b: Side, j: int, limit: int) -> int:
    """Tokens of the equal segments behind two places; stops counting at `limit`."""
    total = 0
    for at in range(1, min(len(a.rest) - i, len(b.rest) - j)):
        if a.normals[i + at] != b.normals[j + at] or total >= limit:
            break
        total += b.unit(j + at).num_tokens
    return total


def is_reworded(pair: PairDifferences) -> bool:
    """Whether a text has other content, or values with little equal text behind them."""
    has_values = any(item.cause in VALUES for item in pair.differences)
    return pair.stop_char is not None or (has_values and pair.tail_chars < MIN_TAIL)


def is_cut(pair: PairDifferences) -> bool:
    """Whether the end of a text is shorter: words that look like a state, and nothing behind them."""
    if not pair.differences or pair.tail_chars:
        return False
    last = pair.differences[-1]
    had, got = (len(part.text[part.start : part.end].split()) for part in (last.had, last.got))
    return last.cause is CauseName.PATH_OR_STATE and had >= max(MIN_CUT, 2 * got)


def _is_said(unit: Unit) -> bool:
    """Whether a segment is text of an answer or a tool result, not a tool call."""
    is_answer = unit.label.startswith(("tool", "assistant")) or " " in unit.label
    return is_answer and unit.form is TextForm.TEXT
