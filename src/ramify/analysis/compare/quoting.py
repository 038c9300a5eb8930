"""Short quotes of texts, with secrets masked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import repeat

MAX_QUOTE = 120

# Rows of literals and a pattern of secrets: every match contains at least one literal. Searching for literals
# costs a hundredth of the pattern, and most texts contain none.
_SECRETS = tuple(
    (literals.split(), re.compile(pattern))
    for literals, pattern in (
        ("KEY-----", r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"),
        ("- _", r"\b(?:sk|pk|rk|xai|gsk|hf|pplx|r8|ghp|gho|ghu|ghs|glpat|xox[abprs])[-_][\w-]{8,}"),
        # By issuer: npm, PyPI, SendGrid, Twilio, Mailgun, Mailchimp, Slack, Stripe, Docker, Shopify, Databricks,
        # DigitalOcean, Vault, Google, Grafana, Atlassian, age.
        (
            ("npm_ pypi- SG. SK AC key- -us xapp- xox whsec_ dckr_pat_ shp dapi _v1_ "
            "hvb. hvs. GOCSPX- glsa_ ATATT3 AGE-SECRET-KEY-1"),
            (r"\bnpm_[A-Za-z0-9]{30,}|\bpypi-[\w-]{40,}|\bSG\.[\w-]{16,}\.[\w-]{16,}"
            r"|\b(?:SK|AC|key-)[0-9a-f]{32}\b|\b[0-9a-f]{32}-us\d{1,2}\b"
            r"|\b(?:xapp-|xox[a-z]-|dckr_pat_)[\w-]{8,}|\bwhsec_\w{8,}"
            r"|\b(?:shp(?:at|ca|pa|ss)_[0-9a-f]{16,}|dapi[0-9a-f]{32}|do[opr]_v1_[0-9a-f]{32,})"
            r"|\b(?:hv[bs]\.|GOCSPX-)[\w-]{20,}|\bglsa_\w{20,}|\bATATT3[\w=-]{20,}|\bAGE-SECRET-KEY-1[0-9A-Z]{20,}"),
        ),
        # Telegram
        (":", r"(?<!\d)\d{8,10}:[\w-]{35}(?![\w-])"),
        # Webhooks: whoever knows the address may post.
        (
            "slack.com/ /api/webhooks/ webhook.office.com/",
            (r"\bhooks\.slack\.com/[\w/+-]{8,}|\bdiscord(?:app)?\.com/api/webhooks/[\w/-]{8,}"
            r"|\.webhook\.office\.com/[\w@/-]{8,}"),
        ),
        (
            "github_pat_ AKIA ASIA AIza ya29.",
            r"\bgithub_pat_\w{8,}|\bA[KS]IA[0-9A-Z]{12,}|\bAIza[\w-]{20,}|\bya29\.[\w.-]{10,}",
        ),
        ("eyJ", r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"),
    )
)  # fmt: skip
# A name with a word for secrets in it, then the secret; the name stays.
_NAMED = re.compile(
    r"(?i)((?:(?:\b|_|-)(?:(?:access|auth|refresh|client|private|signing|encryption|account|master)"
    r"[ _-]?(?:token|key)|api[ _-]keys?|pwd|authorization|(?:set-)?cookie|credentials?)"
    r"|\b[A-Z0-9]+(?:_[A-Z0-9]+){0,8}_token\b(?=[\"']?=)|apikeys?|secret(?:[_-]?(?:access[_-]?)?key)?"
    r"|password|passwd|passphrase)(?:[_-][\w-]{1,40})?"
    r"[\"']?\s*(?:[:=]|\bis\b)\s*[\"']?(?:bearer |basic )?)([^\s\"',;}]{3,})"
)
_NAME_WORDS = (
    "token key pwd authorization cookie credential secret password passwd passphrase".split()
)
_DIGITS = re.compile(r"(?<![\w.])\d(?:[ -]?\d){12,18}(?![\w-])")
# Visa, Mastercard (two ranges), American Express, Diners, Discover, JCB, UnionPay.
_CARD = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|3[068]\d{12}|6(?:011|5\d\d)\d{12}"
    r"|35\d{14}|62\d{14,17}"
)
_BEARER = re.compile(r"(?i)(\b(?:bearer|basic)\s+)([\w+/.~=-]{8,})")
_URL_PASSWORD = re.compile(r"(://[^/\s:@]+:)[^/\s@]+(@)")


def mask_secrets(text: str) -> str:
    """The text with keys, tokens, passwords and cookies as `***`."""
    folded = text.casefold()
    if any(word in folded for word in _NAME_WORDS):
        text = _NAMED.sub(r"\1***", text)
    text = _URL_PASSWORD.sub(r"\1***\2", _BEARER.sub(r"\1***", text))
    for marks, pattern in _SECRETS:
        if any(mark in text for mark in marks):
            text = pattern.sub("***", text)
    return _DIGITS.sub(lambda match: "***" if _is_card(match[0]) else match[0], text)


def _is_card(digits: str) -> bool:
    """Whether digits in groups are the number of a payment card: its issuer, length and check digit."""
    number = digits.replace(" ", "").replace("-", "")
    if _CARD.fullmatch(number) is None:
        return False
    doubled = (int(digit) * 2 for digit in number[-2::-2])
    return (sum(map(int, number[::-2])) + sum(map(sum, map(divmod, doubled, repeat(10))))) % 10 == 0


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
    match = re.match(r"(?:[\w.:/+=~-]|[ ](?=\d)){0,200}", text[at : at + 200])
    return match.group() if match else ""
