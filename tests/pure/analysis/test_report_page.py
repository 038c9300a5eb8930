"""The HTML report: one file, safe against its log, without texts where asked."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from shutil import which

import pytest
from typer.testing import CliRunner

from ramify.analysis.findings import CHANGES
from ramify.analysis.report.document import Analysis, finding_anchor
from ramify.analysis.report.page.html import analysis_as_html
from ramify.analysis.report.privacy import hide_texts
from ramify.analysis.report.wording.causes import CAUSES, absent_causes
from ramify.analysis.report.wording.quotes import mark_changes
from ramify.analysis.verdicts import CauseName
from ramify.cli import app
from tests.pure.analysis.sample_analysis import sample_analysis

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'`{{7*7}}<!--<![CDATA["
    "\u2028\u2029\udfff\ud800\x00\u202e&lt;]]>--></pre><style>*{display:none}</style>"
)
ALLOWED_TAGS = frozenset(
    "html head meta title style body a header div p nav button h1 h2 h3 main section ul li article "
    "span code svg rect line polyline polygon circle text details summary b em table thead tbody tr "
    "th td figure figcaption label select option input fieldset legend noscript ol pre mark footer "
    "script".split()
)
PARTS = (
    "summary", "opportunities", "tree", "prefixes", "sessions", "curves", "waterfall",
    "agreement", "provenance",
)  # fmt: skip


class Page(HTMLParser):
    """Tags, attributes and texts of a page, as a parser sees them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: list[str] = []
        self.blocks: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._in_script = tag == "script"
        if self._in_script:
            self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.blocks[-1] += data
        else:
            self.texts.append(data)

    def ids(self) -> list[str]:
        """Every id of the page."""
        return [value for _, name, value in self.attributes if name == "id"]


def with_many(analysis: Analysis, number: int) -> Analysis:
    """The analysis with this many findings."""
    findings = analysis.lint.findings * (number // 4)
    return replace(analysis, lint=replace(analysis.lint, findings=findings))


def test_every_part_is_on_the_page() -> None:
    """Each section, each finding under its own address, and each link leads somewhere."""
    analysis = sample_analysis()

    page = Page(analysis_as_html(analysis))

    anchors = [finding_anchor(finding, at) for at, finding in enumerate(analysis.lint.findings)]
    links = {value[1:] for _, name, value in page.attributes if name == "href"}
    assert {*PARTS, *anchors} <= set(page.ids())
    assert links <= set(page.ids())
    assert len(page.ids()) == len(set(page.ids()))


def test_the_page_loads_nothing() -> None:
    """No address, no source and no style attribute; the policy allows only its own two blocks."""
    text = analysis_as_html(sample_analysis())

    page = Page(text)

    assert not {name for _, name, _ in page.attributes} & {"src", "srcset", "style", "action"}
    assert all(value.startswith("#") for _, name, value in page.attributes if name == "href")
    assert "@import" not in text
    assert "url(" not in text.replace('"url(#hatching)"', "")
    assert "default-src 'none'" in text
    assert "unsafe" not in text


def test_hostile_texts_stay_texts() -> None:
    """Texts of a log that look like markup add no tag, no handler and no script."""
    clean = Page(analysis_as_html(sample_analysis()))
    dirty = replace(sample_analysis(HOSTILE, HOSTILE + "!"), title=HOSTILE, warnings=(HOSTILE,))

    text = analysis_as_html(dirty)

    page = Page(text)
    assert set(page.tags) <= ALLOWED_TAGS
    assert page.tags.count("script") == clean.tags.count("script") == 2
    assert page.tags.count("style") == 1
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.blocks[1] == clean.blocks[1]
    assert "49<!--" not in text
    text.encode("utf-8")  # no lone surrogate is left
    assert not re.search("[\u2028\u2029\x00\u202e]", text)


def test_a_hostile_log_is_reported_from_end_to_end(tmp_path: Path) -> None:
    """Sessions, models, tools and messages that look like markup reach page and JSON as texts."""
    log = tmp_path / "<b>log.jsonl"
    log.write_text(
        "".join(json.dumps(hostile_row(at)) + "\n" for at in range(12)), encoding="utf-8"
    )
    page_file, json_file = tmp_path / "page.html", tmp_path / "page.json"

    result = CliRunner().invoke(
        app, ["analyze", str(log), "--html", str(page_file), "--json", str(json_file)]
    )

    assert result.exit_code == 0, result.output
    page = Page(page_file.read_text(encoding="utf-8"))
    assert "clock" in {
        finding["cause"] for finding in json.loads(json_file.read_text("utf-8"))["findings"]
    }
    assert set(page.tags) <= ALLOWED_TAGS
    assert page.tags.count("script") == 2
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def hostile_row(number: int) -> dict[str, object]:
    """A request whose every text is hostile."""
    clock = f"2026-11-02 09:0{number % 10}:11"
    system = f"{HOSTILE} {clock} {HOSTILE * 60}"
    return {
        "timestamp": f"2026-11-02T09:{number:02}:05Z",
        "session_id": f"{HOSTILE}{number % 2}",
        "request": {
            "model": f"gpt-4o{HOSTILE}",
            "tools": [
                {"type": "function", "function": {"name": HOSTILE, "description": HOSTILE * 9}}
            ],
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": f"{HOSTILE}{number}"},
            ],
        },
    }


def test_quotes_are_whole_whatever_is_marked() -> None:
    """The runs of a marked quote join to the quote; equal texts have no mark."""
    pairs = [
        ("", "abc"),
        ("abc", "abc"),
        ("read_file", "approve"),
        ("x" * 700 + "a", "x" * 700 + "b"),
    ]

    for had, got in pairs:
        before, after = mark_changes(had, got)
        assert "".join(piece.text for piece in before) == had
        assert "".join(piece.text for piece in after) == got
        assert any(piece.is_changed for piece in (*before, *after)) == (had != got)


def test_embedded_data_come_back_as_they_were() -> None:
    """The data block is JSON, and hostile texts in it survive unchanged."""
    page = Page(analysis_as_html(sample_analysis(HOSTILE)))

    data = json.loads(page.blocks[0])

    assert data["nodes"][1][2] == HOSTILE[:200]
    assert len(data["nodes"]) == len(sample_analysis().tree)


def test_warnings_come_first() -> None:
    """What makes figures unsure stands before the figures."""
    analysis = replace(sample_analysis(), warnings=("12 lines of 4,812 are no requests.",))

    text = analysis_as_html(analysis)

    assert text.index("12 lines of 4,812") < text.index('id="summary"')


def test_changed_characters_are_marked() -> None:
    """A quote marks what differs and nothing else."""
    text = analysis_as_html(sample_analysis("at 09:14 now", "at 09:15 now"))

    assert "at 09:1<mark>4</mark> now" in text
    assert "at 09:1<mark>5</mark> now" in text


def test_a_private_page_holds_no_text_of_the_log() -> None:
    """Neither quotes nor names of files and conversations reach the page or its data."""
    analysis = sample_analysis("the secret quokka", "the secret wombat")

    text = analysis_as_html(hide_texts(analysis))

    for word in (
        "secret",
        "quokka",
        "wombat",
        "gateway",
        "conversation-7f",
        "open_file",
        "search&#34;",
    ):
        assert word not in text
    assert "17 characters" in text


def test_an_unexplained_rest_is_named() -> None:
    """The waterfall has a row for what no step accounts for."""
    text = analysis_as_html(sample_analysis())

    assert "<em>unexplained</em>" in text


def test_an_empty_analysis_is_a_page() -> None:
    """Without findings, tree, sessions and curves the page still says what it has."""
    full = sample_analysis()
    bare = replace(
        full,
        lint=replace(full.lint, findings=(), tables={}, quality={}),
        rates=(), tree=(), sessions=(), curves=None,
        waterfall=(), duration_s=None, num_input=0,
    )  # fmt: skip

    page = Page(analysis_as_html(bare))

    assert "No cause of lost hits in this log." in " ".join(page.texts)
    links = {value[1:] for _, name, value in page.attributes if name == "href"}
    assert links <= set(page.ids())


def test_the_page_is_bounded() -> None:
    """However many findings an analysis holds, the page stays small."""
    once, twice = (analysis_as_html(with_many(sample_analysis(), size)) for size in (6000, 12_000))

    assert len(once.encode()) < 1_000_000
    assert abs(len(twice) - len(once)) < 10_000


def test_each_cause_has_words() -> None:
    """Each cause has a title and an explanation, and each waste a change."""
    assert set(CAUSES) == set(CauseName)
    assert all(text.title and text.what for text in CAUSES.values())
    assert set(CHANGES) == set(CauseName) - {CauseName.NEW_CONTENT}


def test_absent_causes_are_those_that_the_log_could_show() -> None:
    """A cause is a finding, absent, or one for which the log lacks the evidence; the page says which."""
    full = sample_analysis()
    lacks = {"num_with_text": 0, "num_with_times": 0, "num_with_reads": 4}
    findings = {finding.cause for finding in full.lint.findings}

    absent = set(absent_causes(full.lint.findings, {}))
    few = set(absent_causes((), lacks))
    page = Page(analysis_as_html(replace(full, lint=replace(full.lint, quality=lacks))))

    assert absent == set(CauseName) - findings - {CauseName.NEW_CONTENT}
    assert not few & {CauseName.CLOCK, CauseName.TOOL_ORDER, CauseName.TTL_EXPIRED}
    assert {CauseName.ROUTING, CauseName.BELOW_MINIMUM} <= few
    words = " ".join("".join(page.texts).split())
    assert "since the log has no texts; 2 causes, since the log has no times." in words


@pytest.mark.skipif(which("chromium") is None, reason="needs chromium")
def test_a_browser_runs_the_page(tmp_path: Path) -> None:
    """The page's script runs under its policy: the tree is drawn, and hostile texts do nothing."""
    path = tmp_path / "report.html"
    path.write_text(analysis_as_html(sample_analysis(HOSTILE)), encoding="utf-8")
    command = [
        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--dump-dom", f"--user-data-dir={tmp_path / 'profile'}", path.as_uri(),
    ]  # fmt: skip

    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    if "<body" not in done.stdout:
        pytest.skip("chromium does not start here")
    assert 'class="node' in done.stdout
    assert "CONSOLE" not in done.stderr
