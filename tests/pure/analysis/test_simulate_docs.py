"""docs/simulate.md is true: its keys and options exist, and its code runs."""

import json
import re
from pathlib import Path

from typer.main import get_command

from ramify.analysis import simulate
from ramify.cli import app
from ramify.step_cost import CostModel
from tests.pure.analysis.simulated_traces import hashed_request

PAGE = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text(encoding="utf-8")


def test_every_key_of_the_report_is_documented() -> None:
    """The table of the report has the keys of a report with all parts, and no others."""
    report = simulate(
        [hashed_request((0, 1), number) for number in range(4)],
        capacity=40,
        policy="lru",
        end_sessions=1,
        cost=CostModel(step_s=0.1, token_s=0.0, read_s=0.0),
        model="ramify-tiny",
    ).to_json()

    documented = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)

    assert sorted(documented) == sorted(json.loads(json.dumps(report)))


def test_every_option_on_the_page_exists() -> None:
    """Options that the page names are options of the two commands."""
    commands = get_command(app).commands  # type: ignore[attr-defined]  # it is a group
    known = {
        flag
        for name in ("simulate", "calibrate")
        for parameter in commands[name].params
        for flag in parameter.opts
    }

    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= known


def test_the_code_of_the_page_runs() -> None:
    """The Python on the page runs, and its assertions hold."""
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

    assert programs
    for program in programs:
        exec(compile(program, "docs/simulate.md", "exec"), {})
