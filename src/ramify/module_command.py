"""The command that runs a module of ours in another process, with the modules that this one sees."""

from __future__ import annotations

import os
import sys


def module_command(module: str) -> tuple[str, ...]:
    """`python -m module`, which has the current directory on its path only if this process has.

    A file of the current directory that is named as a module of Python would else be run in its place.
    """
    is_seen = any(
        not path or os.path.realpath(path) == os.path.realpath(os.curdir) for path in sys.path
    )
    return (sys.executable, *(() if is_seen else ("-P",)), "-m", module)
