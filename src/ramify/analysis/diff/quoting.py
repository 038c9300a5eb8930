"""Short quotes of texts, with secrets masked."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_QUOTE = 120

_SECRETS = (
    re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL
    ),
    re.compile(r"\b(?:sk|pk|rk|xai|gsk|hf|pplx|r8|ghp|gho|ghu|ghs|glpat|xox[abprs])[-_][\w-]{8,}"),
    re.compile(r"\bgithub_pat_\w{8,}|\bAKIA[0-9A-Z]{12,}|\bAIza[\w-]{20,}|\bya29\.[\w.-]{10,}"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),
)
# A name with a word for secrets in it, then the secret; the name stays.
_NAMED = re.compile(
    r"(?i)((?:(?:\b|_|-)(?:(?:access|auth|refresh|client|private|signing|encryption|account|master)"
    r"[ _-]?(?:token|key)|api[ _-]keys?|pwd|authorization|(?:set-)?cookie|credentials?)"
    r"|\b[A-Z0-9]+(?:_[A-Z0-9]+){0,8}_token\b(?=[\"']?=)|apikeys?|secret(?:[_-]?(?:access[_-]?)?key)?"
    r"|password|passwd|passphrase)(?:[_-][\w-]{1,40})?"
    r"[\"']?\s*(?:[:=]|\bis\b)\s*[\"']?(?:bearer |basic )?)([^\s\"',;}]{3,})"
)
_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)([\w+/.~=-]{8,})")
_URL_PASSWORD = re.compile(r"(://[^/\s:@]+:)[^/\s@]+(@)")


def mask_secrets(text: str) -> str:
    """The text with keys, tokens, passwords and cookies as `***`."""
    text = _URL_PASSWORD.sub(r"\1***\2", _BEARER.sub(r"\1***", _NAMED.sub(r"\1***", text)))
    for pattern in _SECRETS:
        text = pattern.sub("***", text)
    return text


def quote(text: str, start: int, end: int, *, limit: int = MAX_QUOTE) -> str:
    """`text[start:end]` without secrets, cut to `limit` characters.

    A secret is recognised by what stands before it, so the text around the quote is read too.
    """
    end = max(start, min(end, start + 4 * limit))
    left, right = max(0, start - 100), min(len(text), end + 200)
    window = text[left:right]
    if mask_secrets(window) == window:
        return shorten(text[start:end], limit=limit)
    # The parts before and within the quote are masked together, and the part before is taken away.
    before = mask_secrets(window[: start - left])
    whole = mask_secrets(window[: end - left] + _rest_of_word(text, end))
    if whole.startswith(before):
        return shorten(whole[len(before) :], limit=limit)
    return "***"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A part of a text, quoted when it is needed."""

    text: str = ""
    start: int = 0
    end: int | None = None

    @property
    def num_chars(self) -> int:
        """Code points of the part."""
        return (len(self.text) if self.end is None else self.end) - self.start

    def __str__(self) -> str:
        end = len(self.text) if self.end is None else self.end
        return quote(self.text, self.start, end)


NOTHING = Excerpt()


def shorten(text: str, *, limit: int = MAX_QUOTE) -> str:
    """The text with its middle left out if it is longer than `limit`."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    return f"{text[:head]} … {text[len(text) - (limit - head - 3) :]}"


def _rest_of_word(text: str, at: int) -> str:
    match = re.match(r"[\w-]{0,80}", text[at : at + 80])
    return match.group() if match else ""
