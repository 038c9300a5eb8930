"""Summaries that clients put in place of the head of a conversation."""

from __future__ import annotations

import re

HEAD = 400  # code points in which a summary says what it is

_SUMMARY = re.compile(
    r"(?i)(summar|continued from a previous|previous conversation|compact|condensed|zusammenfassung|"
    r"résumé|resumen|recap|context so far|conversation so far|earlier conversation|<analysis>|handoff)"
)
_WHAT = r"(?:summar(?:y|ies|i[sz]ed)|recap|compacted|condensed|zusammen\w+|résumé\w*|resumen)"
_OF_WHAT = (
    r"(?:conversation|session|discussion|chat|dialog\w*|messages|history|context|turns|so far|earlier|"
    r"previous\w*|above|gespräch\w*|bisher\w*|verlauf\w*|unterhaltung|échange\w*|conversación)"
)
_BETWEEN = r"\W+(?:\w+\W+){0,6}?"
_OF_CONVERSATION = re.compile(
    rf"(?i)continued from a previous|<(?:conversation[_ -]?)?summary>|(?:context|conversation) so far|"
    rf"\b{_WHAT}{_BETWEEN}{_OF_WHAT}\b|\b{_OF_WHAT}{_BETWEEN}{_WHAT}\b|handoff summary"
)
_GOES_ON = re.compile(
    r"(?i)continued from an? (?:previous|earlier)|(?:ran|running) out of context|handoff summary|"
    r"(?:pick up|continue|resume)\b[^.]{0,40}\bleft off"
)
# What clients and vendors put there whatever the summary says: Codex, Aider, Gemini CLI, items of APIs.
_OF_CLIENT = re.compile(
    r"(?i)\s*(?:another language model started to solve this problem and produced a summary|"
    r"i spoke to you previously about a number of things|<state_snapshot>)"
)
_ITEM = re.compile(r'"type":"compaction(?:_summary)?"')
_REMINDER = re.compile(r"(?i)\s*<system[-_]?reminder\b")
_ASKS = re.compile(
    r"(?i)\W*(?:you (?:are an?|can|must|should|will|write|summari[sz]e) |(?:please|can|could|would|will|write|"
    r"summari[sz]e|give|create|provide|make|draft|what|how|bitte)\b)"
)


def is_summary(text: str, *, is_certain: bool) -> bool:
    """Whether a message is a summary of the messages before it.

    Args:
        text: of the message.
        is_certain: nothing else indicates a summary, so the text must name what it summarises.

    A message that asks for a summary is none.
    """
    head = text[:HEAD]
    if _OF_CLIENT.match(head) or is_compaction_item(text):
        return True
    pattern = _OF_CONVERSATION if is_certain else _SUMMARY
    return bool(pattern.search(head)) and not _ASKS.match(head)


def is_compaction_item(text: str) -> bool:
    """Whether a segment's JSON is what an API has put in place of older messages."""
    ends = text[:HEAD], text[-HEAD:]
    return text.startswith("{") and any(map(_ITEM.search, ends))


def says_it_continues(text: str) -> bool:
    """Whether a summary says that its own conversation goes on, as one that a task is about does not."""
    return bool(_GOES_ON.search(text[:HEAD]))


def is_reminder(text: str) -> bool:
    """Whether a text is a block of a program's reminders to the model, as coding agents send."""
    return bool(_REMINDER.match(text))
