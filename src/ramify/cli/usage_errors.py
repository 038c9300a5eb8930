"""Errors in what was typed: an unknown command or option, a value that an option does not take."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import typer
import typer.core

from ramify.foreign_names import (
    ENGINE_NAMES,
    PARAM_NAMES,
    SHORT_FLAGS,
    flag_advice,
    python_advice,
)
from ramify.params import SAMPLING_FIELDS

# Of click, which typer carries under a private name.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


# What typer's validator reports of a value, by its kind of error.
VALUE_ERRORS = {
    "bool_parsing": "is neither true nor false",
    "int_from_float": "is no whole number",
    "int_parsing": "is no whole number",
    "int_type": "is no whole number",
    "float_parsing": "is no number",
    "float_type": "is no number",
    "greater_than_equal": "is too small; at least {ge} is possible",
    "less_than_equal": "is too large; at most {le} is possible",
}


class Group(typer.core.TyperGroup):
    """Commands; the error for an unknown command names the most similar one, or lists all."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """See click's `Group.resolve_command`; `ctx` is a context of click or of typer's copy."""
        try:
            return super().resolve_command(ctx, args)
        except USAGE_ERROR as error:
            if not args[0].startswith("-"):
                vars(error).update(message=_unknown_command(args[0], list(self.commands)))
            raise


class Command(typer.core.TyperCommand):
    """A command whose errors name our option for one of another engine, and the value that is wrong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click's `Command.parse_args`; `ctx` is a context of click or of typer's copy."""
        given = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            report = getattr(error.__cause__, "errors", None)
            if report is not None:
                error.message = _wrong_value(report()[0])
            raise
        except USAGE_ERROR as error:
            option = getattr(error, "option_name", None)
            params = {str(parameter.name) for parameter in self.params}
            # Commands without an engine have options of their own kind.
            if option is not None and "config" in params:
                flag = _whole_flag(option, given)
                advice = advice_for(flag, params)
                if advice:
                    vars(error).update(
                        message=f"No such option: {flag}: {advice}", possibilities=None
                    )
            raise


def _unknown_command(name: str, commands: list[str]) -> str:
    """The error for a command that does not exist."""
    similar = difflib.get_close_matches(name, commands, n=1)
    way_out = f"Did you mean {similar[0]!r}?" if similar else f"The commands: {', '.join(commands)}"
    return f"No such command {name!r}. {way_out}"


def _wrong_value(error: Mapping[str, Any]) -> str:
    """The error for a value, from the report of typer's validator, which is pydantic's."""
    words = VALUE_ERRORS.get(error["type"])
    if words is None:
        return str(error["msg"]).removeprefix("Value error, ")
    return f"{error['input']!r} {words.format(**error.get('ctx', {}))}"


def advice_for(flag: str, params: Collection[str]) -> str:
    """What to use in place of a flag; "" if that is not known.

    Args:
        params: names of the command's options.
    """
    name = flag.lstrip("-").replace("-", "_")
    if not flag.startswith("--"):
        return _in_command(SHORT_FLAGS.get(name, ""), params)
    name = name.removeprefix("no_") if name not in ENGINE_NAMES else name
    if name == "model" and name in params:  # the argument of that name
        return "the model is the first argument"
    if name in SAMPLING_FIELDS:
        return f"a parameter of each request: {name}"
    return flag_advice(ENGINE_NAMES.get(name, "")) or _in_command(PARAM_NAMES.get(name, ""), params)


def _in_command(text: str, params: Collection[str]) -> str:
    """Advice on a sampling parameter: a flag where the command has it, else a field of requests."""
    names = re.findall(r"`(\w+)", text)
    if all(name in params for name in names):
        return flag_advice(text)
    return f"a parameter of each request; {python_advice(text)}"


def _whole_flag(option: str, args: Sequence[str]) -> str:
    """The flag as it was given: of `-ngl`, click reports `-n`."""
    flags = (arg.partition("=")[0] for arg in args if arg.startswith(option))
    if option.startswith("--"):
        return option
    return next((flag for flag in flags if flag.lstrip("-") in SHORT_FLAGS), option)
