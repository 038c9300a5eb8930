"""docs/analysis.md names every key of the JSON and of a budget."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ramify.analysis.lint_json import report_as_json
from ramify.analysis.linting import lint
from ramify.analysis.reader import ReadQuality
from ramify.analysis.report.analyze import analyze, read_corpus
from ramify.analysis.report.budget import Budget, read_budget
from ramify.analysis.report.writers.as_json import analysis_as_json
from ramify.analysis.verdicts import CauseName
from tests.pure.analysis.report_logs import write_clock_log

PAGE = Path(__file__).parents[3] / "docs" / "analysis.md"
TEXT = PAGE.read_text("utf-8")


def test_the_budget_of_the_page_has_every_key(tmp_path: Path) -> None:
    """And can be read."""
    example = re.search(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert example is not None
    path = tmp_path / "budget.toml"
    path.write_text(example[1], encoding="utf-8")

    read_budget(path)

    assert set(tomllib.loads(example[1])) == set(Budget.__struct_fields__)


def test_the_page_names_the_keys_of_lint(tmp_path: Path) -> None:
    """Of the document, of a verdict, a divergence, a cause and a finding."""
    log = tmp_path / "log.jsonl"
    body = '{{"model": "m", "messages": [{{"role": "system", "content": "At 10:0{}:00. {}"}}]}}\n'
    log.write_text("".join(body.format(n, "Be kind. " * 60) for n in range(4)), encoding="utf-8")

    document = report_as_json(lint(log))

    verdict, finding = document["verdicts"][1], document["findings"][0]
    parts = document, verdict, verdict["divergence"], verdict["causes"][0], finding
    keys = {key for part in (*parts, verdict["tokens"], finding["saving"]) for key in part}
    assert not {key for key in keys if not re.search(rf"[`\"]{key}[`\"]", TEXT)}


def test_the_page_names_the_keys_of_analyze(tmp_path: Path) -> None:
    """Of the document and of all its parts, but for those that are named with `lint`."""
    log = write_clock_log(tmp_path / "log.jsonl")
    document = analysis_as_json(analyze(read_corpus([log], ReadQuality()), title="log"))
    for name in ("quality", "tables"):
        assert document.pop(name)

    keys = set(_keys(document)) - set(CauseName)

    assert len(keys) > 60
    assert not {key for key in keys if not re.search(rf"[`\"]{key}[`\"]", TEXT)}


def _keys(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _keys(item)
