"""Rules of prompt hygiene: text that clients put into the system prompt and that changes, by name.

A rule takes text out of the system prompt that stands at the beginning, and says where it goes: into the
first message of the user if it stays the same within a conversation, to the end of the last message if it
does not, nowhere if it is not for the model. What follows it in the system prompt, and the tools, is then
the same in other conversations, and found in the cache.

A rule sees the text and nothing else, so that it does the same in each turn of a conversation. Its
patterns are linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ramify.errors import ConfigError

Span = tuple[int, int]
MAX_VALUE_CHARS = 80  # of a date, a time or an id
# Of a text that rules are applied to: a search holds up all other requests, 0.2 s for this much of the
# worst text.
MAX_TEXT_CHARS = 1 << 18


class Target(Enum):
    """Where text goes that a rule takes out."""

    NOWHERE = "nowhere"
    FIRST_MESSAGE = "the beginning of the first message of the user"
    LAST_MESSAGE = "the end of the last message"


@dataclass(frozen=True, slots=True)
class PromptRule:
    """A rule.

    Args:
        what: what it takes out, for people.
        find: spans of a text, ascending and apart, of whole lines without their last line feed.
    """

    name: str
    what: str
    target: Target
    find: Callable[[str], Iterable[Span]]


@dataclass(frozen=True, slots=True)
class AppliedRule:
    """A text that a rule has taken out of a prompt.

    Args:
        path: the request field that it came from.
        target: the message that it went to; None: it was left out.
    """

    name: str
    path: str
    target: str | None
    num_chars: int

    def as_json(self) -> dict[str, Any]:
        """For a client."""
        return {
            "rule": self.name,
            "from": self.path,
            "to": self.target,
            "characters": self.num_chars,
        }


def _matches(*patterns: str) -> Callable[[str], Iterator[Span]]:
    """A search for patterns, in order of their places; `^` and `$` are the ends of lines."""
    compiled = [re.compile(pattern, re.MULTILINE) for pattern in patterns]

    def find(text: str) -> Iterator[Span]:
        spans = sorted(match.span() for pattern in compiled for match in pattern.finditer(text))
        end = 0
        for span in spans:
            if span[0] >= end:
                end = span[1]
                yield span

    return find


# Spaces are bounded: two runs of them side by side would take quadratic time.
_DATE_LINE = re.compile(
    r"^[ \t]{0,16}(?:[-*][ \t]{1,4})?\*{0,2}(?:the[ \t]{1,4})?"
    r"(?:today['\u2019]s[ ]date|today|current[ ](?:date(?:[ ]?(?:and|/|&)[ ]?time)?|time|datetime))"
    r"(?:[ ]is)?(?:[ ]now)?[ \t]{0,2}[:=]?\*{0,2}[:=]?[ \t]{1,8}"
    rf"(?P<value>[^\s][^\n]{{2,{MAX_VALUE_CHARS}}})$",
    re.MULTILINE | re.IGNORECASE,
)
_TIME_OF_DAY = re.compile(r"\d{1,2}:\d{2}|\d[ \t]?[ap]\.?m\b", re.IGNORECASE)
# The words of a date or a time, beside names of time zones; a line with any other is a sentence.
_DATE_WORDS = frozenset(
    "january february march april may june july august september october november december "
    "jan feb mar apr jun jul aug sep sept oct nov dec "
    "monday tuesday wednesday thursday friday saturday sunday mon tue tues wed thu thur thurs fri sat sun "
    "st nd rd th of at am pm a p m t z utc gmt local time \u5e74 \u6708 \u65e5".split()
)
_ZONE = re.compile(r"[A-Z]{1,4}T|[A-Z]{3}Z|[A-Z][A-Za-z]+/[A-Z][A-Za-z_]+")
_WORD = re.compile(r"[^\W\d_]+(?:/[^\W\d]+)?")


def _is_date(value: str) -> bool:
    has_digit = any(char.isdigit() for char in value)
    return has_digit and all(
        word.lower() in _DATE_WORDS or _ZONE.fullmatch(word) for word in _WORD.findall(value)
    )


def _dates(*, with_time: bool) -> Callable[[str], Iterator[Span]]:
    def find(text: str) -> Iterator[Span]:
        for match in _DATE_LINE.finditer(text):
            value = match["value"]
            if _is_date(value) and (_TIME_OF_DAY.search(value) is not None) == with_time:
                yield match.span()

    return find


def _ids(*kinds: str) -> Callable[[str], Iterator[Span]]:
    return _matches(
        rf"(?i:^[ \t]{{0,16}}(?:[-*][ \t]{{1,4}})?(?:x-)?(?:{'|'.join(kinds)})[ _-]?id[ ]?[:=][ \t]{{0,8}})"
        rf"(?=[\w.:-]{{0,{MAX_VALUE_CHARS}}}\d)[\w.:-]{{6,{MAX_VALUE_CHARS}}}$"
    )


# In the order in which they are applied: a block before the lines that may stand in it.
RULES = {
    rule.name: rule
    for rule in (
        PromptRule(
            "billing-header",
            "the line `x-anthropic-billing-header: …` of Claude Code, which Anthropic's servers take out, too",
            Target.NOWHERE,
            _matches(r"^x-anthropic-billing-header:[^\n]*$"),
        ),
        PromptRule(
            "env-block",
            "`<env> … </env>` of opencode and Claude Code with the sentence before it, and the list below "
            "`# Environment` of Claude Code: working directory, platform, date",
            Target.FIRST_MESSAGE,
            _matches(
                r"^(?:[ \t]*Here is (?:some )?useful information about the environment you are running in:[ \t]*\n)?"
                r"[ \t]*<env>[ \t]*\n(?:(?![ \t]*</env>)[^\n]{0,1000}\n){0,60}[ \t]*</env>[ \t]*$",
                r"^# Environment[ \t]*\nYou have been invoked in the following environment:[ \t]*"
                r"(?:\n[ \t]+- [^\n]*){1,40}$",
            ),
        ),
        PromptRule(
            "git-status",
            "from `gitStatus: This is the git status at the start of the conversation` of Claude Code to the "
            "end of that text",
            Target.FIRST_MESSAGE,
            _matches(
                r"^gitStatus: This is the git status at the start of the conversation[\s\S]*\Z"
            ),
        ),
        PromptRule(
            "date-line",
            "a line that says the date and nothing else: `Today's date: …`, `Today's date is …`, `Current date: …`",
            Target.FIRST_MESSAGE,
            _dates(with_time=False),
        ),
        PromptRule(
            "clock-line",
            "the same with a time of day, as Open WebUI writes for `{{CURRENT_DATETIME}}`",
            Target.LAST_MESSAGE,
            _dates(with_time=True),
        ),
        PromptRule(
            "session-id",
            "a line `Session ID: …`; also of a conversation, thread or chat",
            Target.FIRST_MESSAGE,
            _ids("session", "conversation", "thread", "chat"),
        ),
        PromptRule(
            "request-id",
            "a line `Request ID: …`; also of a trace, correlation, run or invocation",
            Target.LAST_MESSAGE,
            _ids("request", "trace", "correlation", "run", "invocation"),
        ),
    )
}
BILLING = RULES["billing-header"]


def rules_named(names: Iterable[str], option: str = "--prompt-rules") -> tuple[PromptRule, ...]:
    """The rules of these names, in the order in which they are applied.

    Args:
        option: that names them, for the error.

    Raises:
        ConfigError: there is no such rule.
    """
    wanted = {name.strip() for name in names} - {""}
    if unknown := sorted(wanted - RULES.keys()):
        raise ConfigError(
            f"{option}: there is no rule {unknown[0]!r}; the rules are {', '.join(RULES)}"
        )
    return tuple(rule for name, rule in RULES.items() if name in wanted)


def take_out(text: str, rules: Sequence[PromptRule]) -> tuple[str, list[tuple[PromptRule, str]]]:
    """A text without what rules take out, and the pieces with their rules.

    A piece goes with the line feed behind it, at the end of the text with that before it. Of a text longer
    than `MAX_TEXT_CHARS`, only what is not for the model is taken out.
    """
    if len(text) > MAX_TEXT_CHARS:
        rules = [rule for rule in rules if rule.target is Target.NOWHERE]
    pieces: list[tuple[PromptRule, str]] = []
    for rule in rules:
        left: list[str] = []
        begin = 0
        for start, end in rule.find(text):
            pieces.append((rule, text[start:end]))
            at_end = end == len(text)
            left.append(text[begin : start - 1 if at_end and start > begin else start])
            begin = end if at_end else end + 1
        if left:
            text = "".join([*left, text[begin:]])
    return text, pieces
