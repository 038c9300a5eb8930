"""What changes at a place of a text: a clock, an id, a state, or a value of no known kind.

A `Slot` holds the values of a place over the log with the text around it. `judge_slot` asks `KINDS` in order:
how the values look (`value_shapes`), which words stand beside them, how they behave from request to request.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ramify.analysis.compare.value_shapes import (
    are_listed_files,
    are_random,
    are_state_lines,
    has_digits,
    is_in_status_block,
    is_number,
    is_path,
    is_random,
    looks_like_clock,
    names_date,
    numbers_in,
)
from ramify.analysis.records import SegmentKind
from ramify.analysis.verdicts import CauseName, ValueKind

MAX_CONTEXT = 320  # code points around a value
MAX_LENGTH = 600  # code points of a value; a longer text is content
MIN_CHANGES = 5  # different values that show how a slot behaves
MAX_CLOCK_WORDS = 12  # of a date or a time; more are prose
MAX_NUMBER = 24  # code points of a number with the words around it
MAX_UNKNOWN = 60  # code points of a value of no known kind
MAX_ID_WORDS = 3  # of an id that is no random text

_UNITS = re.compile(r"(?i) ?(?:hours?|minutes?|seconds?|o'clock)\b")
# What happened on a date: the date belongs to the content.
_EVENT = re.compile(
    r"(?i)\b(?:born|birth(?:day|date)?|placed|ordered|bought|purchased|signed|hired|joined|married|founded)\b"
    r"[^.\n]{0,16}$"
)
_VERSION = re.compile(r"(?i)\b(?:version|release|revision)\W{0,3}$")
_AGO = re.compile(
    r"(?i) (?:second|minute|hour|day|week|month|year|min|sec)s? (?:ago|old|earlier)\b"
)
_CALENDAR = re.compile(
    r"(?i)\b(?:date|time|calendar|weekday|today|now|clock|week|shift)\b|年|月|時|現在"
)
_CLOCK_WORDS = re.compile(
    r"(?i)\b(?:now|time|date|clock|today|timestamp|as of|datetime)\b[^.\n]{0,30}$"
)
_STATE_WORDS = re.compile(
    r"(?i)(?:\b|_)(?:cwd|working dir\w*|work ?dir\w*|directory|folder|branch|git|commit|head|status|todos?|"
    r"tasks?|tokens?(?: used| left| remaining)?|budget|remaining|used|usage|context left|uptime|load|"
    r"battery|cursor|open files?|open tabs?|modified|staged|untracked|memory|disk|cpu|queue|workspace|"
    r"path|file|pwd|home|progress|step|turn|unread|state)(?:\b|_)(?:(?![.!?]\s)[^\n]){0,40}$"
)
_STATE_AFTER = re.compile(r"(?i) ?%? (?:used|left|remaining|free|full|unread)\b")
_ID_WORDS = re.compile(
    r"(?i)(?:\b|_|-)(?:id|ids|uuid|guid|session|request|trace|span|nonce|ref|reference|correlation|run|salt|"
    r"seed|token|key|hash|build|ticket|conversation|thread|instance|pod|host|worker|job|fingerprint|etag|"
    r"tag|serial|no|nr|number|code|handle|sid|rid|cid)(?:\b|_)(?:(?![.!?]\s)[^\n]){0,24}$|#$"
)
_ID_NAME = re.compile(
    r"(?i)(?:\b|_|-)(?:id|uuid|guid|session|request|trace|span|nonce|correlation|conversation|thread|"
    r"token|handle)[^\w\n]{0,4}$"
)
_CONTENT_WORDS = re.compile(
    r"(?i)\b(?:user|users|name|customer|client|account|order|orders|invoice|product|sku|city|country|"
    r"question|query|input|document|doc|title|subject|email|mail|phone|address|text|answer|example|"
    r"page|article|price|amount|total|age|employee|patient|company|member|contract|case|version|edition)\b[^.\n]{0,24}$"
)
# Fields of a document or record that a user asks about.
_FIELD = re.compile(
    r"(?i)\b(?:invoice|order|purchase|customer|account|product|article|contract|policy|patient|employee|"
    r"shipment|delivery|due|birth|issue|ticket|case)[ _-](?:date|number|no|nr|id|code|ref|reference)\b"
    r"[^\w\n]{0,4}$"
)
# A name with a colon or a measure before a number, and things that it counts behind it.
_NAMED = re.compile(
    r"(?i)[^\W\d_]{3,}\s?[:=]\s?$|\b(?:rate|ratio|rating|score|factor|level)\W{0,2}$"
)
_COUNTED = re.compile(r" (?:(?:out )?of \d|[^\W\d_]{3,})|/\d")
_CALL_ID = re.compile(r'"(?:(?:tool_)?(?:call|use)_)?id":"\w{0,8}$')
_RANDOM_PART = re.compile(r"(?<![0-9a-f])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,}")
# Words behind which a value in a user's message is waste too.
_MESSAGE_WORDS: dict[ValueKind, re.Pattern[str]] = {
    ValueKind.CLOCK: _CLOCK_WORDS,
    ValueKind.ID: re.compile(
        r"(?i)(?:session|request|trace|span|nonce|correlation|run|conversation|thread)[ _-]?(?:id|no|number)?"
        r"[^\w\n]{0,6}$"
    ),
    ValueKind.STATE: _STATE_WORDS,
}


@dataclass(frozen=True)
class Slot:
    """The values at a place of a text that is else equal, and what stands around them."""

    kind: SegmentKind
    label: str
    values: tuple[str, ...]  # a sample of different members, in order of first use
    before: str  # text before the place, `MAX_CONTEXT` code points at most
    after: str
    num_uses: int = 0  # requests that have a text of the sample; 0: not known

    @cached_property
    def line_before(self) -> str:
        """The part of the line before the value."""
        return self.before.rpartition("\n")[2]

    @cached_property
    def line(self) -> str:
        """The line around the value."""
        return f"{self.line_before[-60:]} {self.after.partition(chr(10))[0][:40]}"

    @property
    def is_instruction(self) -> bool:
        """Whether the text is no user's, model's or tool's message."""
        is_message = self.kind is SegmentKind.MESSAGE
        return not is_message or self.label.startswith(("system", "developer"))

    @property
    def lines(self) -> list[str]:
        """The lines that the values are in or hold, whole; without those of blanks."""
        rest, rows = self.after.partition("\n")[0], []
        for value in filter(None, self.values):
            head = "" if value.startswith("\n") else self.line_before
            tail = "" if value.endswith("\n") else rest
            rows += [line for line in (head + value + tail).split("\n") if line.strip()]
        return rows

    @cached_property
    def filled(self) -> tuple[str, ...]:
        """The values that are not empty."""
        return tuple(value for value in self.values if value.strip())

    @cached_property
    def all_have_digits(self) -> bool:
        """Whether each value that is not empty has a digit."""
        return all(map(has_digits, self.filled))

    @property
    def names_other(self) -> bool:
        """Whether the words before the value say that it is a state, an id or content."""
        line = self.line_before[-60:]
        return any(words.search(line) for words in (_STATE_WORDS, _ID_WORDS, _CONTENT_WORDS))

    @property
    def never_falls(self) -> bool:
        """Whether the numbers in the values grow or stay in the order of the requests."""
        return all(a <= b for a, b in pairwise(map(numbers_in, self.values)))

    @property
    def grows_unevenly(self) -> bool:
        """Whether values grow with the times of the requests, by different steps, as parts of a time do."""
        rows = list(map(numbers_in, self.values))
        if len(set(rows)) < MIN_CHANGES or not all(rows) or len(set(map(len, rows))) > 1:
            return False
        steps = [(b > a) - (b < a) for a, b in pairwise(rows)]
        sizes = {b[-1] - a[-1] for a, b in pairwise(rows)}
        return steps.count(1) >= 0.8 * (len(steps) - steps.count(0)) and len(sizes) > 2

    @property
    def changes_often(self) -> bool:
        """Whether more than half of the values differ from all others, or from the one before."""
        repeats = sum(a == b for a, b in pairwise(self.values))
        num_changes = max(len(set(self.values)), len(self.values) - repeats)
        return num_changes * 2 > len(self.values)

    @property
    def changes_always(self) -> bool:
        """Whether nearly every request has a value of its own."""
        num_different = len(set(self.values))
        return num_different >= max(MIN_CHANGES, 0.9 * self.num_uses)


@dataclass(frozen=True, slots=True)
class SlotVerdict:
    """What a slot holds; `cause` None is content."""

    cause: CauseName | None
    is_volatile: bool  # the values are waste wherever the text around them is equal
    kind: ValueKind | None = None  # of a value that changes
    rule: str = ""  # of `--prompt-rules` that takes the values out of the prompt


_CONTENT = SlotVerdict(None, is_volatile=False)


def _is_path(slot: Slot) -> bool:
    """A value within the path of a file or a URL."""
    word_before = re.split(r"[\s\"'<>()\[\]{}=]", slot.before)[-1]
    return all(is_path(word_before + value) for value in slot.filled)


def _is_clock(slot: Slot) -> bool:
    """A date, a time, a time span before now, or numbers that grow from request to request."""
    line, is_ago = slot.line_before, bool(_AGO.match(slot.after))
    if (_EVENT.search(line) and not is_ago) or _VERSION.search(line):
        return False
    if any(len(value.split()) > MAX_CLOCK_WORDS for value in slot.filled):
        return False
    if all(map(looks_like_clock, slot.filled)):
        return not _may_be_name(slot)
    if _ID_NAME.search(line):
        return False  # a serial id grows with time too
    if is_ago or (slot.grows_unevenly and not slot.names_other):
        return True
    speaks_of_time = bool(_CALENDAR.search(slot.line))
    if _UNITS.match(slot.after) and (slot.all_have_digits or speaks_of_time):
        return True
    if slot.all_have_digits:
        if all(map(_UNITS.search, slot.filled)):
            return True
        if speaks_of_time or names_date(slot.line):
            is_serial = is_random(slot.filled[0]) and not (
                len(slot.values) > 2 and slot.never_falls
            )
            return not is_serial and not _STATE_WORDS.search(line)
    has_word = bool(_CLOCK_WORDS.search(line[-60:]))
    return has_word and (slot.all_have_digits or len(slot.filled) > 2)


def _may_be_name(slot: Slot) -> bool:
    """Whether dates may be names, as April, May and June are."""
    line, is_name = slot.line_before, not any(map(has_digits, slot.filled))
    return is_name and bool(_CONTENT_WORDS.search(line)) and not _CLOCK_WORDS.search(line)


def _is_state(slot: Slot) -> bool:
    """A line of a status block: a branch, counters, a todo list."""
    line = slot.line_before
    if _CALL_ID.search(line):
        return False  # the arguments before it may name a path
    if _is_sentence_added(slot):
        return False  # the state word is in prose
    if _ID_NAME.search(line) and all(map(is_random, slot.filled)):
        return False  # the id of a state's thing: a task, a branch
    if _STATE_WORDS.search(line) or _STATE_AFTER.match(slot.after):
        return True
    above = slot.before.rstrip().rpartition("\n")[2]
    if _STATE_WORDS.search(above) and not line.strip(" -*[]"):
        return True
    if is_in_status_block(slot.before) or are_state_lines(slot.lines, slot.before):
        return True
    return slot.is_instruction and are_listed_files(slot.lines, slot.before, slot.after)


def _is_sentence_added(slot: Slot) -> bool:
    """Whether the values are the end of a sentence, and the same with more sentences behind it.

    Behind a colon a text may be a state, however long.
    """
    end = min(slot.filled, key=len).rstrip()
    if not end.endswith((".", "!", "?")) or slot.line_before.rstrip().endswith((":", "=")):
        return False
    return all(value.rstrip() == end or value.startswith(f"{end} ") for value in slot.filled)


def _is_id(slot: Slot) -> bool:
    """A value of high entropy, or a serial number, named as an id or not."""
    return are_random(slot.filled) or (
        bool(_ID_WORDS.search(slot.line_before))
        and all(len(value) <= 80 and len(value.split()) <= MAX_ID_WORDS for value in slot.filled)
    )


def _is_growing_number(slot: Slot) -> bool:
    """A number before the messages that grows with the requests, and no word says what it is."""
    if not slot.is_instruction or len(slot.values) < 2 or max(map(len, slot.values)) > MAX_NUMBER:
        return False
    if slot.names_other or _EVENT.search(slot.line_before):
        return False
    is_count = _NAMED.search(slot.line_before) or _COUNTED.match(slot.after)
    if len(slot.values) < MIN_CHANGES and is_count:
        return False
    return all(map(is_number, slot.values)) and slot.never_falls


def _always_changes(slot: Slot) -> bool:
    """Whether a short value before the messages changes in nearly every request."""
    if not slot.is_instruction or max(map(len, slot.values)) > MAX_UNKNOWN:
        return False
    return slot.changes_always and not slot.names_other


# Asked in order: the first that is met names the kind.
KINDS: tuple[tuple[ValueKind, Callable[[Slot], bool]], ...] = (
    (ValueKind.STATE, _is_path),
    (ValueKind.CLOCK, _is_clock),
    (ValueKind.STATE, _is_state),
    (ValueKind.ID, _is_id),
    (ValueKind.CLOCK, _is_growing_number),
    (ValueKind.UNKNOWN, _always_changes),
)


def judge_slot(slot: Slot) -> SlotVerdict:
    """What a slot holds, by the first kind that is met."""
    if not slot.filled or max(map(len, slot.values)) > MAX_LENGTH:
        return _CONTENT
    if "x-anthropic-billing-header" in f"{slot.line_before}{slot.values[0]}".lower():
        return SlotVerdict(CauseName.BILLING_HEADER, is_volatile=True)
    if slot.label.startswith("user") and _FIELD.search(slot.line_before):
        return _CONTENT
    kind = next((kind for kind, is_met in KINDS if is_met(slot)), None)
    if kind is None:
        return _CONTENT
    return SlotVerdict(kind.cause, _is_volatile(slot, kind), kind)


def _is_volatile(slot: Slot, kind: ValueKind) -> bool:
    """Whether the values are waste, and no content that a user asked about."""
    names_content = bool(_CONTENT_WORDS.search(slot.line_before))
    if not slot.is_instruction:
        if slot.label.startswith(("tool", "assistant")) or " " in slot.label:
            return False  # tool and model text is content, not waste
        words = _MESSAGE_WORDS.get(kind)
        return words is not None and bool(words.search(slot.line_before)) and not names_content
    if kind is ValueKind.CLOCK:
        return True
    if names_content:
        return False
    if kind is ValueKind.ID and min(map(len, slot.filled)) >= 12 and are_random(slot.filled):
        return True
    if kind is ValueKind.STATE and all(map(_RANDOM_PART.search, slot.filled)):
        return True  # a folder of a run or a job, however seldom another
    return slot.changes_often
