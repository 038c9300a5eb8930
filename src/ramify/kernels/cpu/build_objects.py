"""Build object code of all entry points for all targets: `python -m ramify.kernels.cpu.build_objects FOLDER`.

The build hook runs it for wheels. A process for each target compiles for it whatever this machine is,
and runs nothing of what it compiles.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numba.core import ir

from ramify.kernels.cpu.object_code import MANIFEST, build_facts, write_object
from ramify.kernels.cpu.targets import IS_X86, TARGETS, compiled_target


def build_all(folder: Path) -> None:
    """Compile for each target in a process of its own, all at once, and write the manifest.

    Raises:
        CalledProcessError: one of them failed.
    """
    with TemporaryDirectory() as cache:
        processes = []
        for target in TARGETS if IS_X86 else ():
            into = folder / target.name
            into.mkdir(parents=True)
            # The order of sets must not get into the code either: two builds have the same bytes.
            environment = {**os.environ, **target.environment, "NUMBA_CACHE_DIR": cache}
            environment["PYTHONHASHSEED"] = "0"
            command = [sys.executable, "-m", __spec__.name, str(into)]
            processes.append(subprocess.Popen(command, env=environment))  # noqa: S603 - ourselves
        for process in processes:
            if process.wait():
                raise subprocess.CalledProcessError(process.returncode, process.args)
    (folder / MANIFEST).write_text(json.dumps(build_facts(), indent=2), encoding="utf-8")


def build_target(folder: Path) -> None:
    """Compile all entry points for the target that Numba is configured for."""
    from ramify.kernels.cpu.entry_points import signatures

    logging.getLogger("ramify").setLevel(logging.ERROR)
    _shorten_locations()
    for entry, _, types in signatures():
        entry.compile(types)
        write_object(folder, entry.py_func.__qualname__, types, entry.overloads[types])


def _shorten_locations() -> None:
    """Let Numba know sources by their path below `sys.path`: object code has the paths of its `raise`s."""
    roots = sorted((f"{Path(root).resolve()}{os.sep}" for root in sys.path if root), key=len)

    class Location(ir.Loc):
        def __init__(self, filename: str, *args: Any, **options: Any) -> None:
            for root in reversed(roots):
                filename = filename.removeprefix(root)
            super().__init__(filename, *args, **options)

    ir.Loc = Location


if __name__ == "__main__":
    (build_all if compiled_target() is None else build_target)(Path(sys.argv[1]))
