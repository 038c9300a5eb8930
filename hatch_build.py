"""Hatch build hook: compiles the cache core with mypyc, and the CPU kernels to object code.

Without a C compiler, or if compiling fails, the wheel's core is plain Python, two times slower or
more. Without object code (another processor than x86-64, or no Numba) kernels are compiled where the
wheel is used, at the first call. An editable install gets neither: Python would import the compiled
modules in place of the sources. HATCH_BUILD_NO_HOOKS=1 turns the hook off, for example where mypy is
not available for a new Python.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The hot path of the cache. Not compiled, though it is hot: `prefix_cache`, because compiled functions
# refuse a wrong type with a bare TypeError; `types`, whose values must copy and pickle; `policies`,
# whose classes users inherit from.
MODULES = [
    "adaptive_policy",
    "child_index",
    "counters",
    "eviction",
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
# What object code is for, and Numba has wheels for. RAMIFY_WHEEL_KERNELS=0 builds without: it takes minutes.
SHIPS_KERNELS = (
    platform.machine() in ("x86_64", "AMD64")
    and platform.python_implementation() == "CPython"
    and not sysconfig.get_config_var("Py_GIL_DISABLED")
    and (platform.system() == "Windows" or platform.libc_ver()[0] == "glibc")
    and os.environ.get("RAMIFY_WHEEL_KERNELS") != "0"
)


# What compiles the kernels, in the versions of constraints.txt: object code is used with these only.
KERNEL_NEEDS = ("numba", "llvmlite", "numpy", "filelock")


class CompiledWheel(BuildHookInterface[Any]):
    """Compiles a copy of the sources, and adds extension modules and object code to the wheel."""

    def dependencies(self) -> list[str]:
        """Packages that the build needs; hatch calls this for editable builds too."""
        has_compiler = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
        # pip and build name what they ask for in their arguments.
        needs_kernels = SHIPS_KERNELS and "get_requires_for_build_editable" not in sys.argv
        return [
            *(NEEDS if has_compiler else ()),
            *(self._kernel_needs() if needs_kernels else ()),
        ]

    def _kernel_needs(self) -> list[str]:
        lines = (Path(self.root) / "constraints.txt").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.partition("==")[0] in KERNEL_NEEDS]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile; hatch calls this before it writes the wheel."""
        if version == "editable" or self.target_name != "wheel":
            return
        self._copy = TemporaryDirectory()
        folder = Path(self._copy.name)
        source = folder / "src"
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "objects")
        shutil.copytree(Path(self.root) / "src", source, ignore=ignored)
        # The kernels first: they import the sources.
        kernels = self._compile_kernels(source, folder / "objects") if SHIPS_KERNELS else {}
        files = kernels | self._compile_core(source)
        if files:
            build_data["force_include"].update(sorted(files.items(), key=lambda item: item[1]))
            build_data["infer_tag"] = True
            build_data["pure_python"] = False

    def _compile_core(self, source: Path) -> dict[str, str]:
        """Compile the modules of the cache core; returns extension modules and their places in the wheel."""
        files = [f"ramify/cache/{name}.py" for name in MODULES]
        # Two builds have the same bytes: no paths of this one (also of mypyc's own sources in C, which
        # name themselves in assertions), no order of sets.
        mypyc = importlib.util.find_spec("mypyc")
        folders = [source, *(Path(mypyc.origin).parents[1:2] if mypyc and mypyc.origin else ())]
        maps = " ".join(f"-ffile-prefix-map={folder}=." for folder in folders)
        flags = f"{os.environ.get('CFLAGS', '')} -g0 {maps}"
        settings = {"MYPYC_OPT_LEVEL": "3", "MYPYC_DEBUG_LEVEL": "0", "PYTHONHASHSEED": "0"}
        output = _run(["mypyc", *MYPY, *files], source, **settings, CFLAGS=flags)
        extensions = [path.relative_to(source) for path in source.glob("**/*.so")]
        extensions = [path for path in extensions if path.parts[0] != "build"]
        # One extension for each module, and one that they share.
        if output is not None or len(extensions) <= len(MODULES):
            self.app.display_warning(
                f"the cache core is not compiled, it stays plain Python:\n{output}"
            )
            return {}
        return {str(source / path): path.as_posix() for path in extensions}

    def _compile_kernels(self, source: Path, into: Path) -> dict[str, str]:
        """Compile the CPU kernels for all targets; returns their object code and its places in the wheel."""
        module = "ramify.kernels.cpu.build_objects"
        output = _run([module, str(into)], source)
        if output is not None:
            self.app.display_warning(
                f"no object code of the CPU kernels, they are compiled at their first call:\n{output}"
            )
            return {}
        objects = (path for path in into.rglob("*") if path.is_file())
        place = Path("ramify/kernels/cpu/objects")
        return {str(path): (place / path.relative_to(into)).as_posix() for path in objects}

    def finalize(self, *_: object) -> None:
        """Remove the copy; hatch calls this after it has written the wheel."""
        if hasattr(self, "_copy"):
            self._copy.cleanup()


def _run(module: list[str], folder: Path, **environment: str) -> str | None:
    """Run a Python module, from `folder` if it is there; returns None, or the end of its output if it failed.

    PYTHONPATH stays as it is: isolated builds find their packages by it.
    """
    done = subprocess.run(  # noqa: S603 - our own files
        [sys.executable, "-m", *module],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout[-2000:] if done.returncode else None
