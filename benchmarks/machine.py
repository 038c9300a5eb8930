"""Commit and processor of a benchmark run, to publish with its figures."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path


def commit() -> str:
    """The commit of this checkout, with `-dirty` if tracked files were changed."""
    process = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return process.stdout.strip() or "no git"


def cpu_model() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or "unknown"
