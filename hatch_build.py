"""Hatch build hook: compiles the cache core with mypyc when a wheel is built; twice as fast or more.

Without a C compiler, or if compiling fails, the wheel is plain Python. An editable install is never
compiled: Python would import the compiled modules in place of the sources. HATCH_BUILD_NO_HOOKS=1
turns the hook off, for example where mypy is not available for a new Python.
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

# The hot path of the cache. Not compiled, though it is hot: `prefix_cache`, because compiled functions
# refuse a wrong type with a bare TypeError; `types`, whose values must copy and pickle; `policies`,
# whose classes users inherit from.
MODULES = [
    "adaptive_policy",
    "counters",
    "eviction_queue",
    "ghosts",
    "hash_index",
    "lease_ops",
    "leases",
    "node_store",
    "packed",
    "pages",
    "tree",
]
# No configuration of the user's. Skip imports: mypy needs stubs of packages that the build has not.
MYPY = ("--config-file=", "--python-version=3.11", "--follow-imports=skip")
NEEDS = ["mypy>=1.15", "setuptools"]


class CompiledCore(BuildHookInterface[Any]):
    """Compiles a copy of the sources, and adds the extension modules to the wheel."""

    def dependencies(self) -> list[str]:
        """Packages that the build needs; hatch calls this for editable builds too."""
        return NEEDS if any(shutil.which(name) for name in ("cc", "gcc", "clang")) else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules; hatch calls this before it writes the wheel."""
        if version == "editable" or self.target_name != "wheel":
            return
        self._copy = TemporaryDirectory()
        source = Path(self._copy.name) / "src"
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(Path(self.root) / "src", source, ignore=ignored)
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
        extensions = [path.relative_to(source) for path in source.glob("**/*.so")]
        extensions = [path for path in extensions if path.parts[0] != "build"]
        # One extension for each module, and one that they share.
        if done.returncode or len(extensions) <= len(MODULES):
            self.app.display_warning(
                f"the cache core is not compiled, it stays plain Python:\n{done.stdout[-2000:]}"
            )
            return
        for path in extensions:
            build_data["force_include"][str(source / path)] = path.as_posix()
        build_data["infer_tag"] = True
        build_data["pure_python"] = False

    def finalize(self, *_: object) -> None:
        """Remove the copy; hatch calls this after it has written the wheel."""
        if hasattr(self, "_copy"):
            self._copy.cleanup()
