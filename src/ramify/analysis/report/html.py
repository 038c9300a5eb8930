"""The HTML report: one file that opens without network.

Texts of the log reach the page in two ways only: through the template, which escapes them, and as
JSON in a data block, whose `<`, `>`, `&`, U+2028 and U+2029 are escaped. The page's own script is the
only one that the content security policy lets run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ramify.analysis.report import charts
from ramify.analysis.report.causes_text import CAUSES, passed_checks
from ramify.analysis.report.changes import mark_changes
from ramify.analysis.report.document import Analysis, PrefixNode, finding_anchor
from ramify.analysis.report.headline import headline
from ramify.analysis.report.markdown import analysis_as_markdown, finding_as_markdown
from ramify.analysis.report.wording import RATE_NAMES, count, duration, money, percent, plural

_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def analysis_as_html(analysis: Analysis) -> str:
    """A self-contained page."""
    page = resources.files("ramify.analysis.report.page")
    script = page.joinpath("report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    environment.filters |= {
        "count": count,
        "percent": percent,
        "money": money,
        "duration": duration,
    }
    template = environment.from_string(page.joinpath("report.html.j2").read_text("utf-8"))
    curves = analysis.curves
    findings = analysis.lint.findings
    return template.render(
        analysis=analysis,
        lint=analysis.lint,
        headline=headline(analysis),
        rate_names=RATE_NAMES,
        findings=[
            {
                "finding": finding,
                "anchor": finding_anchor(finding, number),
                "about": CAUSES[finding.cause],
                "marks": mark_changes(finding.example.had, finding.example.got),
            }
            for number, finding in enumerate(findings)
        ],
        passed=passed_checks(findings),
        causes=CAUSES,
        capacity_chart=charts.capacity_chart(curves) if curves else None,
        lifetime_chart=charts.lifetime_chart(curves) if curves else None,
        plural=plural,
        gap_position=_gap_position,
        style=Markup(page.joinpath("report.css").read_text("utf-8")),  # noqa: S704 - our own file
        script=Markup(script),  # noqa: S704 - our own file
        script_digest=digest,
        data=embed_json(_page_data(analysis)),
    )


def _gap_position(gap_s: float) -> float:
    """Pixels of 90 on a logarithmic axis with 5 minutes at 48 and an hour at 69."""
    scale = (69 - 48) / math.log(3600 / 300)
    return round(min(87.0, max(3.0, 48 + scale * math.log(max(gap_s, 0.01) / 300))), 1)


def embed_json(value: Any) -> Markup:
    """JSON for a data block of a page: no text in it can end the block."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, as `\udc80`
    return Markup(text.translate(_ESCAPES))  # noqa: S704 - escaped above


def _page_data(analysis: Analysis) -> dict[str, Any]:
    what_if = analysis.what_if
    return {
        "markdown": analysis_as_markdown(analysis),
        "findings": [
            finding_as_markdown(finding, number)
            for number, finding in enumerate(analysis.lint.findings)
        ],
        "input": analysis.num_input,
        "nodes": [_node_row(node) for node in analysis.tree],
        "whatIf": None
        if what_if is None
        else {
            "findings": what_if.findings,
            "savings": {
                str(mask): [saving.tokens, saving.low, saving.high, saving.money]
                for mask, saving in what_if.savings.items()
            },
        },
    }


def _node_row(node: PrefixNode) -> list[Any]:
    worst = max(node.lost, key=lambda cause: node.lost[cause], default=None)
    return [
        node.parent,
        node.label,
        node.text,
        node.first,
        node.num_requests,
        node.num_tokens,
        node.prefix_tokens,
        node.total,
        node.num_own,
        node.num_read,
        "" if worst is None else str(worst),
        sum(node.lost.values()),
        node.num_merged,
    ]
