"""What one tenant of a server can do to the others: latency, memory, secrets, forged requests.

    python benchmarks/attack.py                      # all, in about three minutes
    python benchmarks/attack.py --only "many values" --json

Starts servers of its own on this machine: with keys for two tenants, and without keys. While one
tenant attacks, another sends small requests; `/livez` is asked all the time. Ends with exit code 1 if
a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from attacks.checks import forgeries_served, format_oracle, redirects
from attacks.load import LOAD_ATTACKS, MIB, LoadResult, end_pins, measure
from attacks.server import ATTACKER, OTHER, AttackedServer

MAX_P99_S, MAX_LIVEZ_S = 2.0, 0.1
MAX_KEPT = 256 * MIB  # of memory, after an attack
MAX_HISTORY = 64 * MIB  # request history of a tenant
AUC_RANGE = (0.45, 0.55)
ORACLE, FORGERY, REDIRECT, LOG = "format oracle", "host, origin", "redirects", "log"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report: what was measured, and which goals it missed."""

    name: str
    values: dict[str, object]
    missed: tuple[str, ...]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def load_row(result: LoadResult) -> Row:
    """The report of an attack under which another tenant was measured."""
    p99_s, livez_s = percentile(result.latencies_s, 0.99), percentile(result.livez_s, 0.99)
    goals = {
        f"p99 {p99_s:.1f} s": p99_s <= MAX_P99_S,
        f"/livez {livez_s:.2f} s": livez_s <= MAX_LIVEZ_S,
        f"kept {result.rss_growth / MIB:.0f} MiB": result.rss_growth <= MAX_KEPT,
        f"history {result.history_bytes / MIB:.0f} MiB": result.history_bytes <= MAX_HISTORY,
        f"other tenant: {dict(result.statuses)}": set(result.statuses) == {"200"},
        f"attacker: {dict(result.attacker_statuses)}": not any(
            status == "500" for status in result.attacker_statuses
        ),
    }
    values: dict[str, object] = {
        "median_ms": round(1000 * percentile(result.latencies_s, 0.5)),
        "p99_ms": round(1000 * p99_s),
        "max_ms": round(1000 * max(result.latencies_s)),
        "livez_p99_ms": round(1000 * livez_s),
        "livez_max_ms": round(1000 * max(result.livez_s)),
        "kept_mib": round(result.rss_growth / MIB),
        "history_mib": round(result.history_bytes / MIB, 1),
        "statuses": _joined(result.statuses),
        "attacker": _joined(result.attacker_statuses),
    }
    return Row(result.name, values, tuple(goal for goal, is_met in goals.items() if not is_met))


def _joined(statuses: dict[str, int]) -> str:
    return " ".join(f"{status}:{count}" for status, count in sorted(statuses.items())) or "-"


def run_attacks(only: str, seconds: float, num_pairs: int, folder: Path) -> list[Row]:
    """Run the attacks whose names contain `only`."""
    rows: list[Row] = []
    loads = [attack for attack in LOAD_ATTACKS if only in attack.name]
    server = AttackedServer(folder / "keys", with_keys=True)
    try:
        other, attacker = server.target(OTHER), server.target(ATTACKER)
        if only in ORACLE:
            value = format_oracle(other, attacker, num_pairs)
            is_met = AUC_RANGE[0] <= value <= AUC_RANGE[1]
            rows.append(Row(ORACLE, {"auc": round(value, 3)}, () if is_met else (f"{value:.3f}",)))
            _show(rows[-1])
        for attack in loads:
            rows.append(load_row(measure(server, attack, other, attacker, seconds)))
            _show(rows[-1])
            end_pins(server)
        if only in REDIRECT:
            followed = redirects(other)
            rows.append(Row(REDIRECT, {"found": len(followed)}, tuple(followed[:3])))
            _show(rows[-1])
        num_tracebacks = server.tracebacks()
        missed = (f"{num_tracebacks} tracebacks",) if num_tracebacks else ()
        rows.append(Row(LOG, {"tracebacks": num_tracebacks}, missed))
        _show(rows[-1])
    finally:
        server.stop()
    if only in FORGERY:
        keyless = AttackedServer(folder / "keyless", with_keys=False)
        try:
            served = forgeries_served(keyless.target())
            rows.append(Row(FORGERY, {"served": len(served)}, tuple(served[:3])))
            _show(rows[-1])
        finally:
            keyless.stop()
    return rows


def _show(row: Row) -> None:
    values = "  ".join(f"{name} {value}" for name, value in row.values.items())
    verdict = f"MISSED: {'; '.join(row.missed)}" if row.missed else "ok"
    sys.stderr.write(f"{row.name:<24} {values}  {verdict}\n")
    sys.stderr.flush()


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table: latencies of the other tenant in milliseconds."""
    columns = ("median_ms", "p99_ms", "livez_p99_ms", "kept_mib", "history_mib")
    lines = ["| attack | " + " | ".join(columns) + " | statuses | goals |"]
    lines.append("|---|" + "---:|" * len(columns) + "---|---|")
    for row in rows:
        cells = [str(row.values.get(column, "")) for column in columns]
        others = [f"{name} {row.values[name]}" for name in row.values if name not in columns]
        verdict = "; ".join(row.missed) or "met"
        lines.append(f"| {row.name} | {' | '.join(cells)} | {', '.join(others)} | {verdict} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="attacks whose names contain this")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--pairs", type=int, default=400, help="schemas of the format oracle")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = run_attacks(arguments.only, arguments.seconds, arguments.pairs, Path(folder))
    if arguments.json:
        print(json.dumps([{"name": row.name, **row.values, "missed": row.missed} for row in rows]))
    else:
        print(table(rows))
    return 1 if any(row.missed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
