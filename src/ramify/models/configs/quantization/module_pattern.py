r"""Regular expressions of module names from a downloaded file, matched within a time limit. No torch.

`re` backtracks without one: `(a+)+$` would stop the program. The package `regex` has one for matching;
compiling copies what is repeated, so counts are limited.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from ramify.errors import CheckpointError
from ramify.models.configs.fields import shown

if TYPE_CHECKING:
    import regex

MAX_PATTERN_CHARS = 512
MAX_COPIES = 1000  # product of what every count copies
COUNT = re.compile(r"\{\s*(\d+)")
# A repeat of what may be a group, so may hold others: `(...)+` is compiled as `(...)(...)*`, {n,} and {n,m}
# as n copies and one more.
GROUP_REPEAT = re.compile(r"(?<![\w.\]])(?:\+|\{\s*\d+\s*,)")
LIMIT_S = 0.1  # of a match; those of real files take microseconds


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """A compiled pattern.

    Args:
        source: the file and the field that hold it, for messages.
    """

    pattern: regex.Pattern[str]
    source: str

    def matches_start(self, name: str) -> bool:
        """Whether the pattern matches from the start of a name, as with `re.match`.

        Raises:
            CheckpointError: that takes longer than LIMIT_S.
        """
        try:
            return self.pattern.match(name, timeout=LIMIT_S) is not None
        except TimeoutError:
            raise CheckpointError(
                f"{self.source} holds {shown(self.pattern.pattern)}, which takes more than {LIMIT_S} s to "
                f"compare with {name}; name the modules instead"
            ) from None


def compile_pattern(text: str, source: str) -> ModulePattern:
    """Compile a pattern of a file.

    Raises:
        CheckpointError: it is no regular expression, or is above a limit.
    """
    import regex  # the analyser reads configurations without the packages of the engine

    try:
        return ModulePattern(_limited(text), source)
    except (ValueError, regex.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{source} holds {shown(text)}, which is no regular expression that is read: {error}; name the "
            "modules instead"
        ) from error


def _limited(text: str) -> regex.Pattern[str]:
    import regex

    if len(text) > MAX_PATTERN_CHARS:
        raise ValueError(f"it has {len(text)} characters, above {MAX_PATTERN_CHARS}")
    copies = prod(max(1, int(count)) for count in COUNT.findall(text))
    copies *= 2 ** len(GROUP_REPEAT.findall(text))
    if copies > MAX_COPIES:
        raise ValueError(f"its counts and + make {copies} copies, above {MAX_COPIES}")
    return regex.compile(text, flags=regex.V0)
