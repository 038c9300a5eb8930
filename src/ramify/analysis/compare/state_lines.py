"""Lines of a state block by their shape: changed files of Git, check boxes, a listing of files."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CHECK_BOX = re.compile(r"(?:[-*+]|\d+[.)])?\s*(?:\[[ xX~/-]?\]|[☐☑☒✅⬜✓✔✗✘])(?:\s|$)")
# A file behind the letters of its state. Behind a single letter a word could be prose: `A plum`.
_CHANGED_FILE = re.compile(
    r"(?:\?\?|!!|[MTADRCU]{1,2}) (?=\S*[./])\S+(?: -> \S+)?(?:<|$)|(?:\?\?|!!) \S"
)
_CHANGED = re.compile(r"(?:\?\?|!!|[MTADRCU]{1,2}) \S")
_GIT_STATUS = re.compile(r"(?i)\bgit[ _]?status\b|^status:", re.MULTILINE)
_LISTED_FILE = re.compile(r"[-*+•│├└─\s]*+[\w@.+-]*(?:/[\w@.+/-]*|[a-zA-Z_]\.[a-zA-Z]\w{0,5})$")
_STATUS_HEADER = re.compile(
    r"(?i)(?:^|[<\s#*_-])(?:status|state|todos?|todo[ _]list|task[ _]list|recent[ _]commits|"
    r"open[ _](?:files|tabs)|(?:modified|changed|staged|untracked)[ _]files)\b[^\n:>]{0,24}[:>]\W*$"
)
_ENVIRONMENT = re.compile(r"<env(?:ironment)?(?:[ _]\w+)*>")


def are_state_lines(lines: Sequence[str], before: str) -> bool:
    """Whether all lines are items with check boxes or changed files of Git.

    Args:
        lines: whole lines that a value is in or holds.
        before: the text before the value.
    """
    changed = _CHANGED if _GIT_STATUS.search(before) else _CHANGED_FILE
    return bool(lines) and all(
        _CHECK_BOX.match(line.strip()) or changed.match(line.strip()) for line in lines
    )


def are_listed_files(lines: Sequence[str], before: str, after: str) -> bool:
    """Whether all lines are file names, as is a line beside them."""
    beside = [*before.split("\n")[-2:-1], *after.split("\n")[1:2]]
    return (
        bool(lines)
        and all(_LISTED_FILE.match(line.strip()) for line in lines)
        and any(_LISTED_FILE.match(line.strip()) for line in beside)
    )


def is_sentence_added(line_before: str, values: Sequence[str]) -> bool:
    """Whether the values are the end of a sentence, and the same with more sentences behind it.

    Behind a colon a text may be a state, however long.
    """
    end = min(values, key=len, default="").rstrip()
    if not end.endswith((".", "!", "?")) or line_before.rstrip().endswith((":", "=")):
        return False
    return all(value.rstrip() == end or value.startswith(f"{end} ") for value in values)


def is_in_environment(before: str) -> bool:
    """Whether a tag that holds the environment is open before a value."""
    tag = list(_ENVIRONMENT.finditer(before))
    return bool(tag) and "</" not in before[tag[-1].end() :]


def is_in_status_block(before: str) -> bool:
    """Whether the lines up to the value, without a blank line, begin with a status block's header."""
    for line in reversed(before.split("\n")[:-1]):
        if not line.strip() or "</" in line:
            return False
        if _STATUS_HEADER.search(line):
            return True
        if line.rstrip().endswith((":", ">")):
            return False
    return False
