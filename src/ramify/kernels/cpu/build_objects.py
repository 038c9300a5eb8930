"""Build object code of all entry points for all targets: `python -m ramify.kernels.cpu.build_objects FOLDER`.

The build hook runs it for wheels. A process for each target compiles for it whatever this machine is,
and runs nothing of what it compiles.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from numba.core import ir, types
from numba.core.dispatcher import Dispatcher
from numba.parfors.parfor import Parfor

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
    _forget_this_build()
    for entry, _, signature in signatures():
        entry.compile(signature)
        write_object(folder, entry.py_func.__qualname__, signature, entry.overloads[signature])


def _forget_this_build() -> None:
    """Keep paths and addresses of this process out of the code.

    The code has the paths of its `raise`s: they are those below `sys.path`. Numba names a parallel loop
    by its hash, and a function that is an argument by its `repr`, so both by an address: here a loop by
    its number, a function by its module and name.
    """
    roots = sorted((f"{Path(root).resolve()}{os.sep}" for root in sys.path if root), key=len)

    class Location(ir.Loc):
        def __init__(self, filename: str, *args: Any, **options: Any) -> None:
            for root in reversed(roots):
                filename = filename.removeprefix(root)
            super().__init__(filename, *args, **options)

    ir.Loc = Location
    Parfor.__hash__ = lambda loop: loop.id
    Dispatcher.__repr__ = _place_of  # type: ignore[method-assign]
    for kind in gc.get_objects():
        if isinstance(kind, types.Dispatcher):
            kind.name = _place_of(kind.dispatcher)


def _place_of(dispatcher: Any) -> str:
    return f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__qualname__}"


if __name__ == "__main__":
    (build_all if compiled_target() is None else build_target)(Path(sys.argv[1]))
