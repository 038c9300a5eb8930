"""Every engine option is a flag of `serve`, `chat` and `generate`, and may stand in a config file."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from ramify.cli import app
from ramify.cli.options import PANELS, engine_options
from ramify.cli.usage_errors import Command
from ramify.config import SECTIONS, EngineConfig

DEFAULTS = {field.name: field.default for section in SECTIONS.values() for field in fields(section)}


def run_command(tmp_path: Path, text: str, *arguments: str) -> tuple[dict[str, Any], Any]:
    """What a command with all engine options receives, given a config file and flags."""
    received: dict[str, Any] = {}
    probe = typer.Typer()

    @probe.command(cls=Command)
    @engine_options(panels=PANELS, max_waiting=1024)
    def command(
        engine: dict[str, Any],
        model: Annotated[str, typer.Argument()] = "ramify-tiny",
        port: Annotated[int, typer.Option()] = 8000,
        api_key: Annotated[list[str] | None, typer.Option(envvar="PROBE_KEY")] = None,
    ) -> None:
        received.update(engine, model=model, port=port, api_key=api_key)

    file = tmp_path / "ramify.toml"
    file.write_text(text, "utf-8")
    call: Callable[..., Any] = CliRunner().invoke
    return received, call(probe, [*arguments, "--config", str(file)], env={"COLUMNS": "200"})


@pytest.mark.parametrize("name", ["serve", "chat", "generate"])
def test_every_engine_option_is_a_flag(name: str) -> None:
    """Of each of the three commands, with `--config`; `model` is the argument."""
    group: Any = typer.main.get_command(app)
    parameters = {parameter.name for parameter in group.commands[name].params}

    assert DEFAULTS.keys() | {"config"} <= parameters


def test_a_file_sets_every_option(tmp_path: Path) -> None:
    """Flat or below the name of its section, with `-` or `_`; what it leaves out keeps its default."""
    text = """
    max-waiting = 7
    port = 0
    model = "some/dir"
    api_key = ["a", "b"]
    [cache]
    page_size = 32
    prefix_cache = false
    kv-dtype = "int8"
    [self_check]
    step_timeout_s = 2
    """

    received, result = run_command(tmp_path, text)

    assert result.exit_code == 0, result.output
    changed = {name for name, value in received.items() if value != DEFAULTS.get(name)}
    assert changed == {"max_waiting", "port", "model", "api_key", "page_size", "prefix_cache"} | {
        "kv_dtype",
        "step_timeout_s",
    }
    assert (received["max_waiting"], received["page_size"], received["step_timeout_s"]) == (
        7,
        32,
        2,
    )
    assert (received["model"], received["port"], received["api_key"]) == ("some/dir", 0, ["a", "b"])
    assert received["prefix_cache"] is False
    assert received["kv_dtype"] == "int8"
    engine = {name: value for name, value in received.items() if name in DEFAULTS}
    assert EngineConfig.of(**engine).cache.page_size == 32


@pytest.mark.parametrize("size", ['"8GB"', "8000000000", '"8000000000"'])
def test_the_size_of_the_pool_is_a_size_like_others(tmp_path: Path, size: str) -> None:
    """In a file and on the command line: a number of bytes, or with a unit."""
    received, result = run_command(tmp_path, f"kv_cache_memory = {size}\ncache_disk = {size}")
    by_flag, _ = run_command(tmp_path, "", "--kv-cache-memory", size.strip('"'))

    assert result.exit_code == 0, result.output
    for values in (received, by_flag):
        cache = EngineConfig.of(kv_cache_memory=values["kv_cache_memory"]).cache
        assert cache.memory_bytes == 8_000_000_000


def test_a_flag_goes_before_the_file(tmp_path: Path) -> None:
    """Wherever `--config` stands; the command's own default goes last."""
    received, result = run_command(tmp_path, "page_size = 32\nexact = false", "--page-size", "8")

    assert result.exit_code == 0, result.output
    assert (received["page_size"], received["exact"], received["max_waiting"]) == (8, False, 1024)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("page_sise = 3", "unknown option 'page_sise'"),
        ("[cash]\npage_size = 3", "unknown option 'cash'"),
        ("config = 'other.toml'", "unknown option 'config'"),
        ("page_size = 3\n[cache]\npage-size = 4", "page_size twice"),
        ("page_size = ", "ramify.toml cannot be read: it is not TOML: Invalid value"),
        ("page_size = 'x'", "'--page-size': 'x' is no whole number"),
        ("exact = 'maybe'", "'--exact': 'maybe' is neither true nor false"),
        ("dtype = 'float8'", "'--dtype': 'float8' is not one of 'auto'"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_it(tmp_path: Path, text: str, problem: str) -> None:
    """Exit code 2, before anything is loaded."""
    received, result = run_command(tmp_path, text)

    assert result.exit_code == 2
    assert problem in result.output
    assert not received


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    """It names the path."""
    call: Callable[..., Any] = CliRunner().invoke
    result = call(app, ["generate", "--config", str(tmp_path / "none.toml")])

    assert result.exit_code == 2
    assert "none.toml" in result.output.replace("\n", "")
