"""The text by which what the weights of an engine cost is measured. Loads no torch."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from ramify.errors import ConfigError
from ramify.reasons import reason_of

# Darwin, On the Origin of Species, first edition, 1859, chapter III: in the public domain.
DEFAULT_TEXT = "origin_of_species_chapter_3.txt"


def read_source(path: Path | None) -> str:
    """The text of a file, or of `DEFAULT_TEXT`.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    source = files("ramify") / "data" / DEFAULT_TEXT if path is None else path
    try:
        return source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the text {source} cannot be read: {reason_of(error, path)}; name a file in UTF-8"
        ) from None
