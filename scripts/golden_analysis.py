"""Golden figures of the analyser: record what it says about logs, and compare with it later.

    PYTHONPATH=src:. python scripts/golden_analysis.py record DIR --planted --data PATH
    PYTHONPATH=src:. python scripts/golden_analysis.py record DIR
    PYTHONPATH=src:. python scripts/golden_analysis.py compare DIR [--only PATTERN] [--exact]

DIR holds one file for each log, in the format of `tests/pure/analysis/golden_cases.py`. `record` adds the planted logs of the
tests and logs of your own; without either it records the logs of DIR once more. `compare` analyses them
again and judges by `tests/pure/analysis/golden_rules.py`; the exit code is 1 when a figure has fallen.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from tests.pure.analysis import planted_formats, planted_timing, timed_rows
from tests.pure.analysis.golden_cases import SUFFIX, GoldenCase, measure, record
from tests.pure.analysis.golden_rules import Comparison, differences
from tests.pure.analysis.planted_logs import KINDS, UNSEEN
from tests.pure.analysis.report_logs import write_clock_log

Log = tuple[str, dict[str, bytes]]  # name of the case, contents by name of the file

SEED = 21
MIXED_REQUESTS, ALONE_REQUESTS, TIMED_REQUESTS = 120, 40, 100
MAX_ROWS = 3000  # of a file of more than MAX_BYTES
MAX_BYTES = 1 << 20


def planted_logs(folder: Path) -> Iterator[Log]:
    """Logs with planted causes: all formats, each cause alone, causes that only time and usage show."""

    def case(name: str, path: Path) -> Log:
        return name, {path.name: path.read_bytes()}

    for name in planted_formats.FORMATS:
        log = planted_formats.planted_log(SEED, name, num_requests=MIXED_REQUESTS)
        path = folder / ("log.har" if name.startswith("har") else "log.jsonl")
        yield case(f"planted-{name}", planted_formats.write_log(log, name, path).path)
    for cause in KINDS:
        for name in ("openai_chat", "anthropic"):
            if cause in UNSEEN[planted_formats.FORMATS[name].api]:
                continue
            log = planted_formats.planted_log(SEED, name, num_requests=ALONE_REQUESTS, alone=cause)
            path = planted_formats.write_log(log, name, folder / "log.jsonl").path
            yield case(f"alone-{cause}-{name}", path)
    for name, (vendor, row) in timed_rows.ROWS.items():
        requests = planted_timing.timed_log(SEED, vendor, num_requests=TIMED_REQUESTS)
        path = folder / "log.jsonl"
        timed_rows.write_rows(requests, row, path)
        yield case(f"timed-{name}", path)
    yield case("report-clock", write_clock_log(folder / "log.jsonl", num_requests=40))


def logs_of(path: Path, *, together: bool) -> Iterator[Log]:
    """The files below a folder, each a log, or those of each folder as one; of long ones the first rows."""
    if path.is_file():
        yield path.stem, {path.name: _content(path)}
        return
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if not together:
        for file in files:
            name = "-".join(file.relative_to(path).with_suffix("").parts)
            yield name, {file.name: _content(file)}
        return
    for folder in sorted({file.parent for file in files}):
        name = "-".join(folder.relative_to(path).parts) or path.name
        yield name, {file.name: _content(file) for file in files if file.parent == folder}


def _content(path: Path) -> bytes:
    if path.stat().st_size <= MAX_BYTES:
        return path.read_bytes()
    with path.open("rb") as lines:
        return b"".join(islice(lines, MAX_ROWS))


def _record(options: argparse.Namespace) -> int:
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        logs: list[tuple[Log, tuple[str, ...]]] = []
        if options.planted:
            logs += [(log, ()) for log in planted_logs(Path(temporary))]
        for path in options.data:
            logs += [(log, ()) for log in logs_of(path, together=options.together)]
        if not logs:
            cases = map(GoldenCase.load, sorted(options.folder.glob(f"*{SUFFIX}")))
            logs = [((case.name, dict(case.files)), case.providers) for case in cases]
        for (name, files), providers in logs:
            if fnmatchcase(name, options.only):
                path = record(name, files, options.providers or providers).save(options.folder)
                print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
    return 0


def _compare(options: argparse.Namespace) -> int:
    paths = [
        path
        for path in sorted(options.folder.glob(f"*{SUFFIX}"))
        if fnmatchcase(path.name.removesuffix(SUFFIX), options.only)
    ]
    if not paths:
        print(f"{options.folder} has no case like {options.only}", file=sys.stderr)
        return 2
    comparison, num_different = Comparison(), 0
    for path in paths:
        case, start = GoldenCase.load(path), time.monotonic()
        current = measure(case)
        comparison.add(case, current)
        lines = list(differences(case.figures, current, case.name))
        num_different += bool(lines)
        print(
            f"{case.name}: {len(lines)} differences, {time.monotonic() - start:.1f} s", flush=True
        )
        for line in lines[: options.exact]:
            print(f"  {line}")
    print(f"\n{comparison.table()}\n")
    for note in comparison.notes[: options.notes]:
        print(note)
    fallen = comparison.fallen
    print(
        f"{len(paths)} logs, {num_different} with any difference, {len(fallen)} figures have fallen"
    )
    for line in fallen:
        print(f"FALLEN {line}")
    return int(bool(fallen) or (options.exact > 0 and num_different > 0))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    recorder = commands.add_parser("record", help="write the figures of logs")
    recorder.set_defaults(run=_record)
    recorder.add_argument("--planted", action="store_true", help="the planted logs of the tests")
    recorder.add_argument(
        "--data", type=Path, nargs="+", default=[], help="logs or folders of logs"
    )
    recorder.add_argument("--together", action="store_true", help="a folder's files are one log")
    recorder.add_argument("--providers", nargs="+", default=(), help="cache rules to try too")
    comparer = commands.add_parser("compare", help="analyse the logs again")
    comparer.set_defaults(run=_compare)
    comparer.add_argument(
        "--exact", type=int, nargs="?", const=sys.maxsize, default=0, metavar="N",
        help="list all differences, or N of each log; any is a failure",
    )  # fmt: skip
    comparer.add_argument("--notes", type=int, default=40, help="verdicts to list that differ")
    for command in (recorder, comparer):
        command.add_argument("folder", type=Path, metavar="DIR")
        command.add_argument(
            "--only", default="*", metavar="PATTERN", help="names of cases: 'timed-*'"
        )
    options = parser.parse_args()
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
