"""Wheels come with the cache core compiled by mypyc: the same sources, half the time and less.

Without a C compiler, or where compiling fails, the wheel is plain Python instead. An editable install
is never compiled: the modules would be imported in place of the sources. HATCH_BUILD_NO_HOOKS=1 turns
it off, also where the build needs what cannot be had (mypy, for a very new Python).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# What every request goes through, but for what callers see: `prefix_cache`, since a compiled function
# would refuse a wrong type with words of its own, `values`, which could not be copied or pickled, and
# `policies`, which could not be inherited from.
MODULES = (
    "adaptive_policy",
    "counters",
    "eviction_queue",
    "ghosts",
    "hash_index",
    "lease_ops",
    "leases",
)
MODULES += ("node_store", "packed", "pages", "tree")
# No configuration of the user's; and what is not compiled is not read, since it needs what is not there.
MYPY = ("--config-file=", "--python-version=3.11", "--follow-imports=skip")
NEEDS = ["mypy>=1.15", "setuptools"]


class CompiledCore(BuildHookInterface[Any]):
    """Compiles in a copy, and puts what comes out into the wheel."""

    def dependencies(self) -> list[str]:
        """What the build needs; asked for before it is known whether it is an editable one."""
        return NEEDS if any(shutil.which(name) for name in ("cc", "gcc", "clang")) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is written."""
        if version == "editable" or self.target_name != "wheel":
            return
        self._copy = TemporaryDirectory()
        source = Path(self._copy.name) / "src"
        left = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(Path(self.root) / "src", source, ignore=left)
        files = [f"ramify/cache/{name}.py" for name in MODULES]
        done = subprocess.run(  # noqa: S603 - our own files
            [sys.executable, "-m", "mypyc", *MYPY, *files],
            cwd=source,
            env={**os.environ, "MYPYC_OPT_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        found = [path.relative_to(source) for path in source.glob("**/*.so")]
        found = [path for path in found if path.parts[0] != "build"]
        if done.returncode or len(found) <= len(MODULES):  # one for each, and what they share
            self.app.display_warning(
                f"the cache core is not compiled, it stays plain Python:\n{done.stdout[-2000:]}"
            )
            return
        for path in found:
            build_data["force_include"][str(source / path)] = path.as_posix()
        build_data["infer_tag"] = True
        build_data["pure_python"] = False

    def finalize(self, *_: object) -> None:
        """Called when it is written."""
        if hasattr(self, "_copy"):
            self._copy.cleanup()
