"""docs/options.md is what the code says."""

import re
import runpy
from dataclasses import fields
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "options_table.py"
TABLE = runpy.run_path(str(SCRIPT))


def test_every_engine_option_has_help() -> None:
    """Each field of each section carries the text that the command line and the table show."""
    missing = [
        option.name
        for _, section in TABLE["engine_sections"]()
        for option in fields(section)
        if not option.metadata.get("help")
    ]

    assert not missing


def test_every_flag_of_serve_has_help() -> None:
    """Each flag says what it is for."""
    missing = [name for name, flag in TABLE["serve_parameters"]().items() if not flag.help]

    assert set(missing) <= {"help"}


def test_the_help_of_a_flag_names_flags() -> None:
    """No flag's help has a value, a call or the name of an option as Python writes it."""
    python = re.compile(r"`None`|llm\.|`[a-z]+_[a-z_]+`")

    wrong = [
        name for name, flag in TABLE["serve_parameters"]().items() if python.search(flag.help or "")
    ]

    assert not wrong


def test_the_table_is_up_to_date() -> None:
    """`make options` changes nothing."""
    assert TABLE["PAGE"].read_text(encoding="utf-8") == TABLE["page"](), "run `make options`"
