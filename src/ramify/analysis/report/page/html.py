"""The HTML report: one file that opens without network.

Texts of the log reach the page in two ways only: through the template, which escapes them, and as
JSON in a data block, whose `<`, `>`, `&` and hidden characters are escaped. The content security policy
lets the page's own script and style run, by their digests, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from ramify.analysis.report.document import Analysis, Curves, finding_anchor
from ramify.analysis.report.page import charts, rows
from ramify.analysis.report.wording.causes import CAUSES, absent_causes, missing_checks
from ramify.analysis.report.wording.headline import counted_words, headline
from ramify.analysis.report.wording.numbers import (
    RATE_NAMES,
    count,
    duration,
    money,
    observed_words,
    percent,
)
from ramify.analysis.report.wording.quotes import mark_changes, mark_quotes
from ramify.analysis.report.writers.markdown import analysis_as_markdown, finding_as_markdown
from ramify.counts import counted

# Characters that a browser hides, or that reorder what stands around them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)
_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}
_SURROGATE = re.compile("[\ud800-\udfff]")
_SHOWN_SPACES = str.maketrans({" ": "·", "\n": "↵\n", "\t": "→\t", "\u00a0": "⍽"})


def analysis_as_html(analysis: Analysis) -> str:
    """A self-contained page, whose size does not grow with the log (see `rows`)."""
    style, script = _page_file("report.css"), _page_file("report.js")
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_page_file),
    )
    filters = (count, percent, money, duration, rows.cut, rows.width, visible, shown)
    environment.filters |= {function.__name__: function for function in filters}
    calls = (counted, observed_words, mark_changes, mark_quotes, finding_anchor)
    environment.globals |= {function.__name__: function for function in calls}
    curves = analysis.curves
    findings = analysis.lint.findings
    page = environment.get_template("report.html.j2").render(
        analysis=analysis,
        lint=analysis.lint,
        headline=headline(analysis),
        counted_note=counted_words(analysis),
        rate_names=RATE_NAMES,
        findings=findings[: rows.MAX_FINDINGS],
        most_saved=max((max(finding.saving.high, 1) for finding in findings), default=1),
        absent=absent_causes((*findings, *analysis.lint.observations), analysis.lint.quality),
        unchecked=missing_checks(analysis.lint.quality),
        waterfall=rows.waterfall_bars(analysis.waterfall),
        provenance=rows.provenance_rows(analysis.lint),
        capacity_chart=charts.capacity_chart(curves) if curves else None,
        lifetime_chart=charts.lifetime_chart(curves) if curves else None,
        knee=knee_sentence(curves),
        causes=CAUSES,
        leaders=rows.leaders(analysis.tree),
        rows=rows,
        charts=charts,
        style=Markup(style),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        style_digest=_digest(style),
        script_digest=_digest(script),
        data=embed_json(_page_data(analysis)),
    )
    return _SURROGATE.sub("\ufffd", page)  # a surrogate has no UTF-8


def embed_json(value: Any) -> Markup:
    """JSON for a data block of a page: no text in it can end the block."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, as `\udc80`
    return Markup(visible(text.translate(_ESCAPES)))  # noqa: S704 - escaped above


def visible(text: object) -> str:
    """A text whose hidden characters are written as escapes of JSON."""
    return _HIDDEN.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))


def shown(text: str) -> str:
    """A changed text with white space drawn."""
    return visible(text.translate(_SHOWN_SPACES))


def knee_sentence(curves: Curves | None) -> str:
    """Where more capacity stops to pay."""
    if curves is None or not curves.knee_tokens:
        return ""
    return (
        f"Beyond {count(curves.knee_tokens)} tokens, doubling an LRU cache adds less than a point; "
        f"an infinite cache reaches {percent(curves.infinite)}."
    )


def _page_file(name: str) -> str:
    folder = resources.files("ramify.analysis.report.page")
    return folder.joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _page_data(analysis: Analysis) -> dict[str, Any]:
    return {
        "markdown": analysis_as_markdown(analysis),
        "findings": [
            finding_as_markdown(finding, number)
            for number, finding in enumerate(analysis.lint.findings[: rows.MAX_FINDINGS])
        ],
        "nodes": [rows.node_row(node) for node in analysis.tree],
    }
