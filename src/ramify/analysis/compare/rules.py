"""Name the differences between two prompts: the rules of a walk, tried from top to bottom.

A row of `RULES` has a name, a predicate over the places `a.rest[i]` and `b.rest[j]` of both prompts, and the
step that goes on as if the difference were mended. A difference that no row matches is content.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ramify.analysis.compare.context_blocks import MIN_BLOCK, mostly_in, split_block
from ramify.analysis.compare.hoisted_notes import HoistedNote
from ramify.analysis.compare.normal_forms import item_ids
from ramify.analysis.compare.pair_outcome import is_cut, is_reworded, judge_pair
from ramify.analysis.compare.prompt_sides import Difference, Side
from ramify.analysis.compare.text_diff import common_prefix_len
from ramify.analysis.compare.unit_pairs import PairDifferences, whitespace_of
from ramify.analysis.compare.walk import MessageWalk, Rule
from ramify.analysis.records import TextForm
from ramify.analysis.tokens import common_len
from ramify.analysis.verdicts import CauseName

MIN_REORDERED = 64  # tokens that another order of blocks shares more
_THINK = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>\s*", re.DOTALL)


# Ids of calls and items


def _ids_of_calls(walk: MessageWalk) -> tuple[str, str] | None:
    """The ids of a tool's call or result with the same text."""
    a, b, i, j = walk.a, walk.b, walk.i, walk.j
    left, right, role = a.unit(i).label, b.unit(j).label, a.role(i)
    is_call = " " in left and role not in {"user", "assistant", "system"}
    if left == right or not is_call or role != b.role(j) or a.text(i) != b.text(j):
        return None
    return left.split()[-1], right.split()[-1]


def _ids_of_items(walk: MessageWalk) -> tuple[str, str] | None:
    """The ids of an API's reasoning item with the same content."""
    a, b, i, j = walk.a, walk.b, walk.i, walk.j
    return item_ids(a.text(i), b.text(j)) if a.is_reasoning(i) and b.is_reasoning(j) else None


def _step_over_ids(walk: MessageWalk, ids: tuple[str, str]) -> None:
    walk.add(CauseName.RANDOM_ID, *ids)
    walk.share_and_advance()


# Parts that only one of the prompts has


def _empty_text(walk: MessageWalk) -> tuple[bool, bool] | None:
    """A text without a word beside what follows in its message, "" in place of null: in which prompt it is."""
    is_in = (
        _is_empty_before(walk.a, walk.i, walk.b.normals[walk.j]),
        _is_empty_before(walk.b, walk.j, walk.a.normals[walk.i]),
    )
    return is_in if any(is_in) else None


def _is_empty_before(side: Side, at: int, normal: int) -> bool:
    following = at + 1
    if following == len(side.rest) or side.message_of[following] != side.message_of[at]:
        return False
    return not side.normal_text(at) and side.normals[following] == normal


def _step_over_empty(walk: MessageWalk, is_in: tuple[bool, bool]) -> None:
    walk.add(CauseName.WHITESPACE, walk.a.text(walk.i), walk.b.text(walk.j))
    walk.i, walk.j = walk.i + is_in[0], walk.j + is_in[1]


def _changed_reasoning(walk: MessageWalk) -> tuple[bool, bool] | None:
    """Reasoning of an earlier answer that is gone, new or another: in which prompts it stands."""
    has = walk.a.is_reasoning(walk.i), walk.b.is_reasoning(walk.j)
    return has if any(has) and walk.history.is_reasoning_change(walk.i, walk.j) else None


def _step_over_reasoning(walk: MessageWalk, has: tuple[bool, bool]) -> None:
    had = walk.a.text(walk.i) if has[0] else ""
    got = walk.b.text(walk.j) if has[1] else ""
    walk.add(CauseName.REASONING_DROPPED, had, got)
    walk.i, walk.j = walk.i + has[0], walk.j + has[1]


def _differs_in_thoughts(walk: MessageWalk) -> bool:
    """An answer with other thoughts between tags, or without."""
    if walk.a.is_reasoning(walk.i) or walk.b.is_reasoning(walk.j):
        return False
    had, got = walk.a.text(walk.i), walk.b.text(walk.j)
    return "<think" in had + got and _without_thoughts(had) == _without_thoughts(got)


def _without_thoughts(text: str) -> str:
    return _THINK.sub("", text).strip()


def _step_over_thoughts(walk: MessageWalk, _: bool) -> None:
    walk.add(CauseName.REASONING_DROPPED, walk.a.text(walk.i), walk.b.text(walk.j))
    walk.share_and_advance()


# Notes of the history at the top


def _is_moved_note(walk: MessageWalk) -> bool:
    """Where a note stood that the later prompt has at the top."""
    return walk.notes.is_moved(walk.i)


def _step_over_moved_note(walk: MessageWalk, _: bool) -> None:
    walk.i += 1


def _known_note(walk: MessageWalk) -> tuple[HoistedNote, tuple[Difference, ...]] | None:
    """A note at the top of the earlier prompt, and the values in which the text before it differs."""
    note = walk.notes.find_known(walk.i, walk.j)
    if note is None or not note.head:
        return None if note is None else (note, ())
    head = walk.b.corpus.unit_like(walk.a.normals[walk.i], note.head)
    values = walk.values_between(head, walk.b.normals[walk.j])
    return None if values is None else (note, values)


def _step_over_known_note(
    walk: MessageWalk, match: tuple[HoistedNote, tuple[Difference, ...]]
) -> None:
    note, values = match
    walk.differences += values
    if note.head:
        walk.share()
    if not note.is_in_way:
        walk.is_done = True
        return
    walk.add(CauseName.SYSTEM_HOISTED, note.text, "")
    walk.i, walk.j = walk.i + 1, walk.j + bool(note.head)


def _new_note(walk: MessageWalk) -> HoistedNote | None:
    """Return the note that the client moved from the messages to the top of the later prompt, or None."""
    return walk.notes.find_moved(walk.i, walk.j)


def _step_over_new_note(walk: MessageWalk, note: HoistedNote) -> None:
    a, b, i, j = walk.a, walk.b, walk.i, walk.j
    if not note.head:
        walk.add(CauseName.SYSTEM_HOISTED, "", b.text(j))
        walk.j += 1
        return
    if note.head != a.normal_text(i):
        head = b.corpus.unit_like(b.normals[j], note.head)
        walk.differences += walk.values_between(a.normals[i], head) or ()
    elif not b.text(j).startswith(a.text(i)):
        walk.differences.append(whitespace_of(a.text(i), b.text(j), b.rest_path(j)))
    walk.add(CauseName.SYSTEM_HOISTED, "", note.text)
    walk.share_and_advance()


# Blocks of context that stand in the newest message


@dataclass(frozen=True, slots=True)
class _MovedBlock:
    text: str
    is_whole: bool  # all of a segment
    values: tuple[Difference, ...] = ()  # in which the rest of the segment differs


def _moved_block(walk: MessageWalk) -> _MovedBlock | None:
    """A block of an older message that stands in the newest one now."""
    a, b, i, j = walk.a, walk.b, walk.i, walk.j
    role = a.role(i)
    if role not in ("user", "system") or not walk.continues:
        return None
    newest = "\n".join(
        b.text(at)
        for at in range(j, len(b.rest))
        if b.role(at) == role and b.message_of[at] != b.message_of[j]
    )
    text = a.normal_text(i)
    if role == b.role(j) == "user" and b.normal_text(j):
        block, stripped = split_block(text, b.normal_text(j), newest)
        if len(block) >= MIN_BLOCK:
            rest = b.corpus.unit_like(b.normals[j], stripped)
            values = walk.values_between(rest, b.normals[j])
            if values is not None:
                return _MovedBlock(block, is_whole=False, values=values)
    is_moved = len(text) >= MIN_BLOCK and mostly_in(text, newest)
    if not is_moved or not walk.history.goes_on_without(i, j):
        return None
    return _MovedBlock(text, is_whole=True)


def _step_over_block(walk: MessageWalk, block: _MovedBlock) -> None:
    place = len(walk.differences)
    walk.differences += block.values
    walk.add(CauseName.CONTEXT_MOVED, block.text, "")
    if block.is_whole:
        walk.i += 1
        return
    if walk.a.normal_text(walk.i).startswith(block.text):  # what stands first is named first
        walk.differences.insert(place, walk.differences.pop())
    walk.share_and_advance()


# Values, white space and order of keys within a segment that both have


def _pair(walk: MessageWalk) -> PairDifferences | None:
    """Two segments with enough in common; not where the history goes on behind a dropped message."""
    pair = walk.compare_units(walk.a.rest[walk.i], walk.b.rest[walk.j])
    if pair is None or pair.stop_char is None:
        return pair
    return pair if walk.history.next_equal(walk.i, walk.j) is None else None


def _step_into_pair(walk: MessageWalk, pair: PairDifferences) -> None:
    a, b, i, j = walk.a, walk.b, walk.i, walk.j
    history = walk.history
    if is_reworded(pair) and (history.replaces_summary(i, j) or history.takes_in_summary(i, j)):
        walk.stop()
        walk.stop_at_summary()
        return
    is_other = pair.stop_char is not None or is_cut(pair)
    if is_other and "thinking" not in b.unit(j).label and history.is_edited_result(i, j):
        _step_over_edited(walk, True)
        return
    outcome = judge_pair(pair, a, i, b, j, continues=walk.continues)
    walk.differences += outcome.waste
    if outcome.stops and (order := _order_that_shares_more(walk, outcome.num_shared)):
        _step_over_order(walk, order)
        return
    walk.num_shared += outcome.num_shared
    walk.content = outcome.content
    if outcome.stops:
        walk.is_done = True
    else:
        walk.i, walk.j = i + 1, j + 1


# Images and files


def _changed_media(walk: MessageWalk) -> bool:
    """An image or a file that is gone, new, or in other bytes."""
    forms = walk.a.unit(walk.i).form, walk.b.unit(walk.j).form
    return TextForm.MEDIA in forms and walk.history.is_media_change(walk.i, walk.j)


def _step_over_media(walk: MessageWalk, _: bool) -> None:
    a, b, i, j = walk.a, walk.b, walk.i, walk.j
    if a.rest_path(i) == b.rest_path(j) or walk.history.is_other_medium(i, j):
        walk.add(CauseName.MEDIA_CHANGED, a.text(i), b.text(j))
        walk.share_and_advance()
        return
    is_gone = a.unit(i).form is TextForm.MEDIA
    walk.add(CauseName.MEDIA_CHANGED, *((a.text(i), "") if is_gone else ("", b.text(j))))
    walk.i, walk.j = i + is_gone, j + (not is_gone)


# Changes of the history


def _is_compaction(walk: MessageWalk) -> bool:
    """A summary in place of the head of the conversation."""
    return walk.history.is_compaction(walk.i, walk.j)


def _stop_at_summary(walk: MessageWalk, _: bool) -> None:
    walk.stop_at_summary()


def _next_equal(walk: MessageWalk) -> tuple[int, int] | None:
    """Where messages are equal again behind older ones that are dropped, cut or edited."""
    return walk.history.next_equal(walk.i, walk.j)


def _step_to_equal(walk: MessageWalk, equal_at: tuple[int, int]) -> None:
    had = "" if equal_at[0] == walk.i else walk.a.text(walk.i)
    got = "" if equal_at[1] == walk.j else walk.b.text(walk.j)
    walk.add(CauseName.HISTORY_EDITED, had, got)
    walk.i, walk.j = equal_at


def _is_edited_result(walk: MessageWalk) -> bool:
    """An older result of a tool call that was cut or edited."""
    return walk.history.is_edited_result(walk.i, walk.j)


def _step_over_edited(walk: MessageWalk, _: bool) -> None:
    walk.add(CauseName.HISTORY_EDITED, walk.a.text(walk.i), walk.b.text(walk.j))
    walk.i, walk.j = walk.i + 1, walk.j + 1


# Blocks of a message behind others


@dataclass(frozen=True, slots=True)
class _Order:
    num_gained: int  # tokens shared from here on if the blocks stand in the order that shares most
    ends: tuple[int, int] | None  # where both messages end if they are equal in that order


def _order(walk: MessageWalk) -> _Order | None:
    """Another order of a message's blocks, by which the prompts share more."""
    return _order_that_shares_more(walk, walk.num_shared_here())


def _order_that_shares_more(walk: MessageWalk, num_shared: int) -> _Order | None:
    """The order, if it shares clearly more than the `num_shared` tokens of the segments as they stand."""
    b, units, j = walk.b, walk.b.corpus.units, walk.j
    had, had_end = _in_order(walk.a, walk.i)
    got, got_end = _in_order(b, j)
    num_equal = common_len(np.array(had), np.array(got))
    num_mended = b.num_tokens(got[:num_equal])
    if num_equal < min(len(had), len(got)):
        num_mended += b.corpus.shared_tokens(had[num_equal], got[num_equal])
    num_gained = num_mended - sum(units[unit].num_tokens for unit in b.rest[got_end - len(got) : j])
    if num_gained < num_shared + MIN_REORDERED:
        return None
    return _Order(num_gained, (had_end, got_end) if had == got else None)


def _in_order(side: Side, at: int) -> tuple[list[int], int]:
    """Units of a message with its blocks in the order that shares most, and where the message ends."""
    order, message = side.templates.order, side.message_of[at]
    begin = end = at
    while begin and side.message_of[begin - 1] == message:
        begin -= 1
    while end < len(side.rest) and side.message_of[end] == message:
        end += 1
    parts = [(order.mend(side.rest[place]), "") for place in range(begin, end)]
    return [unit for unit, _ in order.sorted_parts(parts)], end


def _step_over_order(walk: MessageWalk, order: _Order) -> None:
    had, got = walk.a.text(walk.i), walk.b.text(walk.j)
    start = max(0, common_prefix_len(had, got) - 16)
    path = walk.b.message_of[walk.j]
    walk.differences.append(
        Difference.proved(CauseName.CONTEXT_ORDER, path, had, got, start, start + 100)
    )
    walk.num_shared += order.num_gained
    if order.ends is None:
        walk.is_done = True
    else:
        walk.i, walk.j = order.ends


RULES: tuple[Rule, ...] = (
    Rule("random_id", _ids_of_calls, _step_over_ids),
    Rule("whitespace", _empty_text, _step_over_empty),
    Rule("random_id", _ids_of_items, _step_over_ids),
    Rule("reasoning_dropped", _changed_reasoning, _step_over_reasoning),
    Rule("reasoning_dropped", _differs_in_thoughts, _step_over_thoughts),
    Rule("system_hoisted", _is_moved_note, _step_over_moved_note),
    Rule("system_hoisted", _known_note, _step_over_known_note),
    Rule("system_hoisted", _new_note, _step_over_new_note),
    Rule("context_moved", _moved_block, _step_over_block),
    Rule("changing_value, whitespace, key_order", _pair, _step_into_pair),
    Rule("media_changed", _changed_media, _step_over_media),
    Rule("compaction", _is_compaction, _stop_at_summary),
    Rule("history_edited", _next_equal, _step_to_equal),
    Rule("history_edited", _is_edited_result, _step_over_edited),
    Rule("context_order", _order, _step_over_order),
)
