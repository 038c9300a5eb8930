"""Files of a log: those that are named, and those of directories with the suffix of a log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path

from ramify.errors import LogError

STDIN = "-"
_SUFFIXES = frozenset(".json .jsonl .ndjson .csv .tsv .har .log .txt .parquet".split())
_COMPRESSED = frozenset(".gz .zst .bz2 .xz".split())

Progress = Callable[[int, int | None], None]  # bytes read of all files, their sum if it is known


def find_files(paths: Iterable[str | PathLike[str]]) -> Iterator[Path | str]:
    """Each file, those of directories by name and only with a suffix of a log; "-" is stdin.

    Raises:
        LogError: there is no such file, or a directory holds none.
    """
    for path in paths:
        if str(path) == STDIN:
            yield STDIN
            continue
        entry = Path(path)
        if entry.is_dir():
            logs = sorted(file for file in entry.rglob("*") if _is_log(file))
            if not logs:
                known = " ".join(sorted(_SUFFIXES))
                raise LogError(
                    f"{entry} has no file with a suffix of a log ({known}); name the files"
                )
            yield from logs
        elif entry.exists():
            yield entry
        else:
            raise LogError(
                f"{entry} does not exist; give files, directories or - for standard input"
            )


def _is_log(file: Path) -> bool:
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return bool(suffixes) and suffixes[-1] in _SUFFIXES and file.is_file()


def total_bytes(files: Iterable[Path | str]) -> int | None:
    """Bytes of all files as stored; None with standard input."""
    total = 0
    for file in files:
        if isinstance(file, str):
            return None
        total += file.stat().st_size
    return total
