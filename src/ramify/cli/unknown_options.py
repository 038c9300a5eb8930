"""Options of other engines on the command line: the error says what is used here in their place."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
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


class Command(typer.core.TyperCommand):
    """A command whose error for an unknown option of another engine names ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click's `Command.parse_args`; `ctx` is a context of click or of typer's copy."""
        given = tuple(args)
        try:
            return super().parse_args(ctx, args)
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
