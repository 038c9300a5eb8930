"""Rules that name what a changing value within a text is: a clock, an id, a path, a state.

`SlotEvidence` is a value with the text around it. `judge_slot` asks `VALUE_RULES` in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ramify.analysis.compare.clocks import (
    follows_times,
    grows_unevenly,
    is_count,
    is_duration,
    is_prose,
    is_spelt_out,
    is_version,
    looks_like_clock,
    names_date,
    numbers_in,
)
from ramify.analysis.compare.random_text import are_random, is_random
from ramify.analysis.compare.state_lines import (
    are_listed_files,
    are_state_lines,
    is_in_environment,
    is_in_status_block,
    is_sentence_added,
)
from ramify.analysis.records import SegmentKind
from ramify.analysis.verdicts import CauseName

MAX_CONTEXT = 320  # code points around a value
MIN_GROWING = 5  # values that make a count that only grows a clock
MAX_ID_WORDS = 3  # of an id that is no random text

_PATH = re.compile(r"(?:[A-Za-z]:)?[\\/][\w.@~+-]+[\\/]|~/|\w+://|^\.{0,2}/\w|\w/\w+/\w")
# A file in a folder.
_FILE = re.compile(r"[\w.@+-]*[a-zA-Z][\w.@+-]*/[\w.@+-]*[a-zA-Z_]\.[a-zA-Z]\w{0,5}$")
_DATE = re.compile(r"(?<![\w/])\d{1,4}/(?:\d{1,2}|[IVX]{1,4}|[A-Za-z]{3,9})/\d{1,4}(?![\w/])")
_UNITS = re.compile(
    r"(?i) ?(?:hours?|minutes?|seconds?|heures?|horas?|minutos?|stunden|minuten|uhr|o'clock)\b"
)
_SPOKEN_TIME = re.compile(
    r"(?i)\b(?:half|quarter|five|ten|twenty|twenty-five|\d{1,2}(?= past| minutes?))(?: minutes?)? (?:past|to) "
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|noon|midnight|\d{1,2})"
    r"(?=\W*$|[.,;!?]|\s(?:in|at|on|o'clock|this|today)\b)"
)
_BASIC_TIME = re.compile(r"T(?:[01]\d|2[0-3])[0-5]\d(?:[0-5]\d)?Z?")  # ISO 8601 without colons
_DATED_TIME = re.compile(r"\d{4}-(?:W\d\d|\d\d)-\d{1,2} ?T\d{4}(?:\d\d)?(?!\d)")
# What happened on a date: the date belongs to the content.
_EVENT = re.compile(
    r"(?i)\b(?:born|birth(?:day|date)?|placed|ordered|bought|purchased|signed|hired|joined|married|founded|"
    r"geboren|bestellt)\b[^.\n]{0,16}$"
)
_CALENDAR = re.compile(
    r"(?i)\b(?:date|time|calendar|weekday|today|now|clock|heute|hoy|aujourd'hui|oggi|hoje|fecha|datum|"
    r"fiscal week|week|shift)\b|年|月|時|現在"
)
_AGO = re.compile(
    r"(?i) (?:second|minute|hour|day|week|month|year|min|sec)s? (?:ago|old|earlier)\b"
)
_CLOCK_WORDS = re.compile(
    r"(?i)\b(?:now|time|date|clock|today|timestamp|as of|datetime|heute|jetzt|uhrzeit|datum|fecha|hora|heure)"
    r"\b[^.\n]{0,30}$"
)
_STATE_WORDS = re.compile(
    r"(?i)(?:\b|_)(?:cwd|working dir\w*|work ?dir\w*|directory|folder|branch|git|commit|head|status|todos?|"
    r"tasks?|tokens?(?: used| left| remaining)?|budget|remaining|used|usage|context left|uptime|load|"
    r"battery|cursor|open files?|open tabs?|modified|staged|untracked|memory|disk|cpu|queue|workspace|"
    r"path|file|pwd|home|progress|step|turn|unread|state)(?:\b|_)(?:(?![.!?]\s)[^\n]){0,40}$"
)
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
_CALL_ID = re.compile(r'"(?:(?:tool_)?(?:call|use)_)?id":"\w{0,8}$')
_STATE_AFTER = re.compile(r"(?i) ?%? (?:used|left|remaining|free|full|unread)\b")
_RANDOM_PART = re.compile(r"(?<![0-9a-f])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,}")
# Behind which a value in a user's message is waste too.
_MESSAGE_WORDS: dict[CauseName, re.Pattern[str]] = {
    CauseName.CLOCK: _CLOCK_WORDS,
    CauseName.RANDOM_ID: re.compile(
        r"(?i)(?:session|request|trace|span|nonce|correlation|run|conversation|thread)[ _-]?(?:id|no|number)?"
        r"[^\w\n]{0,6}$"
    ),
    CauseName.PATH_OR_STATE: _STATE_WORDS,
}


@dataclass(frozen=True, slots=True)
class SlotEvidence:
    """The values at a place of a text that is else equal, and what stands around them."""

    kind: SegmentKind
    label: str
    values: tuple[str, ...]  # a sample of different members, in order of first use
    times: tuple[float | None, ...]  # of the first use of each
    before: str  # text before the place, `MAX_CONTEXT` code points at most
    after: str

    @property
    def line_before(self) -> str:
        """The part of the line before the value."""
        return self.before.rpartition("\n")[2]

    @property
    def line(self) -> str:
        """The line around the value."""
        return f"{self.line_before[-60:]} {self.after.partition(chr(10))[0][:40]}"

    def around(self, value: str) -> str:
        """A value with the words before and after it in its line."""
        return f"{self.line_before[-24:]}{value}{self.after.partition(chr(10))[0][:24]}"

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

    @property
    def wide_before(self) -> str:
        """Characters without a blank right before the value."""
        return re.split(r"[\s\"'<>()\[\]{}=]", self.before)[-1]

    @property
    def filled(self) -> tuple[str, ...]:
        """The values that are not empty."""
        return tuple(value for value in self.values if value.strip())


@dataclass(frozen=True, slots=True)
class SlotVerdict:
    """What a slot holds; `cause` None is content."""

    cause: CauseName | None
    is_volatile: bool  # the values are waste wherever the text around them is equal


_CONTENT = SlotVerdict(None, is_volatile=False)


def _is_billing_header(slot: SlotEvidence) -> bool:
    """A coding agent's billing line, of which a part changes with every request."""
    return "x-anthropic-billing-header" in slot.line_before.lower() + slot.values[0].lower()


def _is_path(slot: SlotEvidence) -> bool:
    """A value within a file path or a URL path."""
    around = [_DATE.sub("", slot.wide_before + value) for value in slot.filled]
    return all(_PATH.search(item) or _FILE.match(item) for item in around)


def _is_clock(slot: SlotEvidence) -> bool:
    """A date, a time, a time span before now, or numbers that follow the request times."""
    values = slot.filled
    is_past = _EVENT.search(slot.line_before) and not _AGO.match(slot.after)
    if is_past or is_version(slot.line_before) or any(map(is_prose, values)):
        # Else it is when something happened, or prose that speaks of a time.
        return follows_times(slot.values, slot.times)
    if all(map(looks_like_clock, values)):
        return not _may_be_other(slot)
    if _ID_NAME.search(slot.line_before):
        return False  # a serial id grows with time too
    if follows_times(slot.values, slot.times) or _AGO.match(slot.after):
        return True
    if all(is_spelt_out(value, slot.line) for value in values):
        return True
    written = map(slot.around, values)
    if all(_SPOKEN_TIME.search(time) or _DATED_TIME.search(time) for time in written):
        return True
    has_digits = all(any(map(str.isnumeric, value)) for value in values)
    if has_digits and all(map(_UNITS.search, values)):
        return True
    if _UNITS.match(slot.after) and (has_digits or _CALENDAR.search(slot.line)):
        return True
    if has_digits and (_CALENDAR.search(slot.line) or names_date(slot.line)):
        is_time = not is_random(values[0]) or _never_falls(values)
        is_time |= all(map(_BASIC_TIME.fullmatch, values))
        return is_time and not _STATE_WORDS.search(slot.line_before)
    if grows_unevenly(slot.values) and not _names_other(slot):
        return True
    has_word = bool(_CLOCK_WORDS.search(slot.line_before[-60:]))
    return has_word and (all(any(map(str.isdigit, value)) for value in values) or len(values) > 2)


def _may_be_other(slot: SlotEvidence) -> bool:
    """Whether dates may be names, as April, May and June are, or time spans a state."""
    line = slot.line_before
    if all(map(is_duration, slot.filled)):
        return bool(_STATE_WORDS.search(line))
    has_digits = any(any(map(str.isnumeric, value)) for value in slot.filled)
    return not has_digits and bool(_CONTENT_WORDS.search(line)) and not _CLOCK_WORDS.search(line)


def _names_other(slot: SlotEvidence) -> bool:
    """Whether the text before the value says that it is a state, an id or content."""
    line = slot.line_before[-60:]
    return any(words.search(line) for words in (_STATE_WORDS, _ID_WORDS, _CONTENT_WORDS))


def _is_state(slot: SlotEvidence) -> bool:
    """A line of a status block: a branch, counters, a todo list."""
    if _CALL_ID.search(slot.line_before):
        return False  # the arguments before it may name a path
    if is_sentence_added(slot.line_before, slot.filled):
        return False  # the state word is in prose
    if _ID_NAME.search(slot.line_before) and all(map(is_random, slot.filled)):
        return False  # the id of a state's thing: a task, a branch
    if _STATE_WORDS.search(slot.line_before) or _STATE_AFTER.match(slot.after):
        return True
    above = slot.before.rstrip().rpartition("\n")[2]
    if _STATE_WORDS.search(above) and not slot.line_before.strip(" -*[]"):
        return True
    if is_in_status_block(slot.before) or are_state_lines(slot.lines, slot.before):
        return True
    return slot.is_instruction and are_listed_files(slot.lines, slot.before, slot.after)


def _is_random_id(slot: SlotEvidence) -> bool:
    """A value of high entropy, or a serial number, named as an id or not."""
    return are_random(slot.filled) or (
        bool(_ID_WORDS.search(slot.line_before))
        and all(len(value) <= 80 and len(value.split()) <= MAX_ID_WORDS for value in slot.filled)
    )


def _never_falls(values: Sequence[str]) -> bool:
    """Whether the numbers in three or more values grow or stay in the order of requests."""
    rows = list(map(numbers_in, values))
    is_grid = len({len(row) for row in rows}) == 1
    return len(rows) > 2 and is_grid and all(a <= b for a, b in pairwise(rows))


def _is_environment(slot: SlotEvidence) -> bool:
    """Any other short value between the tags of an environment."""
    return "\n" not in "".join(slot.values) and is_in_environment(slot.before)


def _is_unnamed_number(slot: SlotEvidence) -> bool:
    """A number before the messages that grows with the requests, and no word says what it is."""
    if not slot.is_instruction:
        return False
    rows = list(map(numbers_in, slot.values))
    if not all(rows) or max(map(len, slot.values)) > 24 or _names_other(slot):
        return False
    if _EVENT.search(slot.line_before):
        return False
    if len(slot.values) < MIN_GROWING and is_count(slot.line_before, slot.after):
        return False
    if any(sum(map(str.isalpha, value)) > sum(map(str.isdigit, value)) for value in slot.values):
        return False  # digits of a word
    return len(rows) > 1 and all(a <= b for a, b in pairwise(rows))


# Asked in order: the first that is met names the cause.
VALUE_RULES: tuple[tuple[CauseName, Callable[[SlotEvidence], bool]], ...] = (
    (CauseName.BILLING_HEADER, _is_billing_header),
    (CauseName.PATH_OR_STATE, _is_path),
    (CauseName.CLOCK, _is_clock),
    (CauseName.PATH_OR_STATE, _is_state),
    (CauseName.RANDOM_ID, _is_random_id),
    (CauseName.PATH_OR_STATE, _is_environment),
    (CauseName.CLOCK, _is_unnamed_number),
)


def judge_slot(slot: SlotEvidence) -> SlotVerdict:
    """What a slot holds, by the first rule that is met."""
    if not slot.filled or max(map(len, slot.values)) > 600:
        return _CONTENT
    if slot.label.startswith("user") and _FIELD.search(slot.line_before):
        return _CONTENT
    for cause, is_met in VALUE_RULES:
        if is_met(slot):
            return SlotVerdict(cause, _is_volatile(slot, cause))
    return _CONTENT


def _is_volatile(slot: SlotEvidence, cause: CauseName) -> bool:
    """Whether the values are waste, and no content that a user asked about."""
    if cause is CauseName.BILLING_HEADER:
        return True
    named_content = bool(_CONTENT_WORDS.search(slot.line_before))
    role = slot.label.partition(" ")[0]
    if slot.kind is SegmentKind.MESSAGE and role not in ("system", "developer"):
        if role in ("tool", "assistant") or " " in slot.label:
            return False  # tool and model text is content, not waste
        rule = _MESSAGE_WORDS.get(cause)
        return rule is not None and bool(rule.search(slot.line_before)) and not named_content
    if cause is CauseName.CLOCK:
        return True
    if named_content:
        return False
    if (
        cause is CauseName.RANDOM_ID
        and min(map(len, slot.filled)) >= 12
        and are_random(slot.filled)
    ):
        return True
    if cause is CauseName.PATH_OR_STATE and all(map(_RANDOM_PART.search, slot.filled)):
        return True  # a folder of a run or a job, however seldom another
    repeats = sum(a == b for a, b in pairwise(slot.values))
    return max(len(set(slot.values)), len(slot.values) - repeats) * 2 > len(slot.values)
