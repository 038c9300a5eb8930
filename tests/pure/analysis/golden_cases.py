"""Golden cases: logs with the figures that the commands on logs gave when they were recorded.

A case is one file, JSON compressed by xz: the log itself, so that no generator has to make it again, and
what `lint`, `analyze`, `explain` and `simulate` say about it, as their `--json` does.
"""

from __future__ import annotations

import base64
import json
import lzma
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FunctionType
from typing import Any

from ramify.analysis import lint, read_log, simulate
from ramify.analysis.explaining import explain, explanation_as_json
from ramify.analysis.lint_json import report_as_json
from ramify.analysis.reader import ReadQuality
from ramify.analysis.records import LoggedRequest
from ramify.analysis.report.analyze import analyze, read_corpus
from ramify.analysis.report.writers.as_json import analysis_as_json
from ramify.errors import RamifyError
from ramify.step_cost import CostModel

Json = dict[str, Any]
Place = list[Any]  # file, line, index of a request

SUFFIX = ".json.xz"
MAX_PAIRS = 6  # of requests that `explain` compares
MANY_REQUESTS = 20  # from which on `lint` is not run beside `analyze`, which has its report
FEW_REQUESTS = 30  # up to which every option of `simulate` is tried
SIMULATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "warmed up": {"warm_up": 0.1, "insert_outputs": True},
    "large pages": {"page_size": 32, "policy": "lru,fifo,lfu"},
    "lru": {"policy": "lru"},
    "engine": {"cost": CostModel(0.02, 1e-4, 1e-8), "policy": "lru", "max_num_seqs": 8},
}
# Recorded runs under another name, without the parts that only the options of that name had.
RECORDED_AS = {
    "warmed up": ("two servers", "replicas"),
    "large pages": ("reordered", "reordered"),
    "lru": ("sampled", "sampled_lru"),
}
# Keys of `analyze` that hold the time and the version of the run.
UNSTABLE = frozenset({"created", "version"})


@dataclass(frozen=True, slots=True)
class GoldenCase:
    """A log, what it is analysed with, and the figures as recorded."""

    name: str
    files: Mapping[str, bytes]  # content by name
    providers: tuple[str, ...]  # whose cache rules are tried beside that of the log
    figures: Json  # {}: not recorded yet

    @property
    def is_well_formed(self) -> bool:
        """Whether the log is what its writer meant: not torn, no broken values."""
        return not self.name.startswith("damaged")

    def save(self, folder: Path) -> Path:
        """Write the file of the case; equal cases make equal files."""
        document = asdict(self) | {
            "files": {name: _as_text(data) for name, data in self.files.items()}
        }
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        path = folder / f"{self.name}{SUFFIX}"
        path.write_bytes(lzma.compress(text.encode(), preset=6))
        return path

    @classmethod
    def load(cls, path: Path) -> GoldenCase:
        """Read the file of a case."""
        document = json.loads(lzma.decompress(path.read_bytes()))
        files = {name: _as_bytes(data) for name, data in document["files"].items()}
        return cls(
            document["name"],
            files,
            tuple(document["providers"]),
            _with_known_names(document["figures"]),
        )


def _with_known_names(figures: Json) -> Json:
    """Figures whose simulations have the names of `SIMULATIONS`."""
    runs = dict(figures.get("simulate", ()))
    for name, (recorded, part) in RECORDED_AS.items():
        if recorded in runs:
            run = runs.pop(recorded)
            runs[name] = {key: value for key, value in run.items() if key != part}
    return figures | {"simulate": runs} if runs else figures


def record(name: str, files: Mapping[str, bytes], providers: Sequence[str] = ()) -> GoldenCase:
    """A case of a log with the figures of the code as it is."""
    case = GoldenCase(name, files, tuple(providers), {})
    return replace(case, figures=measure(case))


def measure(case: GoldenCase) -> Json:
    """What the commands say about the log of a case, in plain JSON values."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), _standing_clock():
        for name, data in case.files.items():
            Path(name).write_bytes(data)
        figures = _figures_of(list(case.files), case)
    plain: Json = json.loads(json.dumps(figures))
    return plain


def _figures_of(paths: list[str], case: GoldenCase) -> Json:
    requests: list[LoggedRequest] = _or_error(lambda: {"requests": list(read_log(paths))}).get(
        "requests", []
    )
    figures: Json = {}
    if len(requests) < MANY_REQUESTS:
        figures["lint"] = _or_error(lambda: report_as_json(lint(paths)))
    analysis = _or_error(lambda: _analysis_of(paths, case.name))
    figures.setdefault("lint", analysis.pop("lint", {}))
    report: Json = figures["lint"]
    # What `analyze` has as `lint` has it stands in the file once.
    figures["analyze"] = {
        name: value
        for name, value in analysis.items()
        if name not in UNSTABLE | {"lint"} and (name not in report or report[name] != value)
    }
    figures["providers"] = {
        provider: _or_error(lambda provider=provider: _by_rule_of(provider, paths))  # type: ignore[misc]
        for provider in case.providers
    }
    by_place = {(item.file, item.line, item.index): item for item in requests}
    recorded = [item["pair"] for item in case.figures.get("explain", ())]
    figures["explain"] = [
        {"pair": pair} | _explanation_of(by_place, *pair)
        for pair in (recorded if case.figures else _choose_pairs(report))
    ]
    names = list(case.figures.get("simulate") or _choose_simulations(requests))
    figures["simulate"] = {
        name: _or_error(lambda name=name: simulate(paths, **SIMULATIONS[name]).to_json())  # type: ignore[misc]
        for name in names
    }
    return figures


def _analysis_of(paths: list[str], title: str) -> Json:
    quality = ReadQuality()
    analysis = analyze(read_corpus(paths, quality), title=title, quality=quality)
    return analysis_as_json(analysis) | {"lint": report_as_json(analysis.lint)}


def _by_rule_of(provider: str, paths: list[str]) -> Json:
    report = report_as_json(lint(paths, provider=provider))
    findings = [
        {name: finding[name] for name in ("cause", "segment", "num_requests", "saving")}
        for finding in report["findings"]
    ]
    return {
        "predicted": report["tables"].get("predicted"),
        "saving_all": report["saving_all"],
        "findings": findings,
    }


def _explanation_of(
    requests: Mapping[tuple[Any, ...], LoggedRequest], first: Place, second: Place
) -> Json:
    pair = requests.get(tuple(first)), requests.get(tuple(second))
    if pair[0] is None or pair[1] is None:
        return {"error": f"no request at {first if pair[0] is None else second}"}
    return _or_error(lambda: explanation_as_json(explain(pair[0], pair[1])))  # type: ignore[arg-type]


def _or_error(call: Callable[[], Json]) -> Json:
    """The answer of a command, or the message with which it refuses."""
    try:
        return call()
    except RamifyError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _choose_pairs(report: Json) -> list[list[Place]]:
    """Requests with their best matches: the first of each set of causes."""
    pairs: dict[tuple[str, ...], list[Place]] = {}
    for verdict in report.get("verdicts", ()):
        if verdict["best_match_file"] is None or verdict["divergence"] is None:
            continue
        match = [verdict[f"best_match_{name}"] for name in ("file", "line")]
        first = [*match, verdict.get("best_match_index")]
        second = [verdict["file"], verdict["line"], verdict.get("index")]
        causes = tuple(sorted(cause["cause"] for cause in verdict["causes"]))
        pairs.setdefault(causes, [first, second])
    return list(pairs.values())[:MAX_PAIRS]


def _choose_simulations(requests: Sequence[LoggedRequest]) -> Iterator[str]:
    """The options of `simulate` that a log is tried with: of a long one the defaults."""
    for name in SIMULATIONS:
        if name == "default" or len(requests) <= FEW_REQUESTS:
            yield name


@contextmanager
def _standing_clock() -> Iterator[None]:
    """Give the parts that stop after some seconds a clock that stands still: a slow machine skips none."""
    functions = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith("ramify.analysis")
        for value in list(vars(module).values())
        if isinstance(value, FunctionType) and "clock" in (value.__kwdefaults__ or ())
    }
    defaults = [(function, dict(function.__kwdefaults__ or {})) for function in functions]
    for function, values in defaults:
        function.__kwdefaults__ = values | {"clock": float}
    try:
        yield
    finally:
        for function, values in defaults:
            function.__kwdefaults__ = values


def _as_text(data: bytes) -> Any:
    """Text as it is, other bytes in base64."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _as_bytes(data: Any) -> bytes:
    return data.encode() if isinstance(data, str) else base64.b64decode(data["base64"])
