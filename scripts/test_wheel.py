"""Build a wheel, install it into an empty environment, and time first answers, which must compile nothing.

    python scripts/test_wheel.py [FOLDER]

A row for each instruction set that this processor has and each dtype. A process has no cache of kernels.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
DTYPES = ("float32", "bfloat16")
LIST_TARGETS = """
import json
from ramify.kernels.cpu import targets
print(json.dumps({t.name: t.environment for t in targets.TARGETS if targets._runs(t)}))
"""
# Counts what Numba compiles: functions inside kernels too.
ANSWER = """
import json, resource, sys
from numba.core import event
compiles = event.RecordingListener()
with event.install_listener("numba:compile", compiles):
    from ramify import LLM, SamplingParams
    llm = LLM("ramify-tiny", dtype=sys.argv[1])
    [output] = llm.generate(["The violin is in the attic. Where is it?"], SamplingParams(max_tokens=8))
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "compiles": len(compiles.buffer) // 2,
    "cpu_s": usage.ru_utime + usage.ru_stime,
    "resident_mib": usage.ru_maxrss // 1024,
    "text": output.text,
}))
"""


def run(*command: str | Path, **environment: str) -> str:
    """Run a command outside the checkout; returns its output."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(  # noqa: S603 - our own commands
            [str(part) for part in command],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return done.stdout


def timed(label: str, *command: str | Path) -> None:
    """Run a command and print how long it took."""
    start_s = time.monotonic()
    run(*command)
    print(f"{label}: {time.monotonic() - start_s:.0f} s", flush=True)


def main() -> int:
    """Build, install, answer; returns the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    pip = ("-m", "pip", "--disable-pip-version-check", "--no-input", "-q")
    timed(
        "wheel", sys.executable, *pip, "wheel", "--no-deps", "-w", folder, "-c", CONSTRAINTS, ROOT
    )
    [wheel] = folder.glob("*.whl")
    print(f"  {wheel.name}, {wheel.stat().st_size / 2**20:.1f} MiB")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    torch = next(line for line in lines if line.startswith("torch=="))
    timed("torch", python, *pip, "install", "-c", CONSTRAINTS, torch)
    timed("wheel and what it needs", python, *pip, "install", "-c", CONSTRAINTS, f"{wheel}[cpu]")

    targets = json.loads(run(python, "-c", LIST_TARGETS))
    print(
        "\n| code | dtype | compiled | wall s | CPU s | MiB | answer |\n|---|---|---|---|---|---|---|"
    )
    num_compiles = 0
    for target, environment in (("best", {}), *targets.items()):
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as cache:
                start_s = time.monotonic()
                out = run(python, "-c", ANSWER, dtype, **environment, NUMBA_CACHE_DIR=cache)
            row = json.loads(out)
            num_compiles += row["compiles"]
            print(
                f"| {target} | {dtype} | {row['compiles']} | {time.monotonic() - start_s:.1f} "
                f"| {row['cpu_s']:.1f} | {row['resident_mib']} | {row['text']!r} |",
                flush=True,
            )
    if num_compiles:
        print(f"\n{num_compiles} functions were compiled, though the wheel carries their code")
    return 1 if num_compiles or not targets else 0


if __name__ == "__main__":
    sys.exit(main())
