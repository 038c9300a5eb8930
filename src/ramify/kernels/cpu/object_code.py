"""Object code of entry points: shipped with the wheel, else kept by Numba on disk, else compiled, and said.

Shipped code is used if all that it depends on is equal: sources, versions of Numba, llvmlite and LLVM,
Python, operating system; and if the machine has the instructions of its target. It holds no address:
Numba links it as it links what it has cached.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import pickle
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba
from filelock import FileLock, Timeout
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ramify.kernels.cpu.targets import shipped_target

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "objects"  # only in wheels
# For another process that compiles. Then it hangs, or the lock cannot be made where the cache is.
MAX_WAIT_S = 600.0
MANIFEST = "manifest.json"


def build_facts() -> dict[str, str]:
    """What object code depends on beside sources and instruction set."""
    return {
        "numba": numba.__version__,
        "llvmlite": llvmlite.__version__,
        "llvm": ".".join(map(str, llvmlite.binding.llvm_version_info)),
        "python": str(sys.implementation.cache_tag),
        "platform": sysconfig.get_platform(),
    }


def object_name(entry_name: str, signature: Any) -> str:
    """File name of the code of an entry point, whose name holds the digest of its sources."""
    types = hashlib.blake2b(str(tuple(signature)).encode(), digest_size=8).hexdigest()
    return f"{entry_name}-{types}.bin"


def reduce_to_object(compiled: Any) -> tuple[Any, ...]:
    """What Numba keeps of a compiled entry point, without its LLVM IR.

    Numba keeps the IR to link it into other functions, and would parse it again in every process: 30 MB
    resident for three kernels. All that loading needs of it is the name of the function that Python calls.
    """
    (library_name, kind, (code, _)), description, *rest = compiled._reduce()  # noqa: SLF001
    stub = f'define void @"{description.llvm_cpython_wrapper_name}"() {{\n  ret void\n}}'
    names = llvmlite.binding.parse_assembly(stub).as_bitcode()
    return (library_name, kind, (code, names)), description, *rest


def write_object(folder: Path, entry_name: str, signature: Any, compiled: Any) -> None:
    """Write the code of a compiled entry point for `load_object`."""
    data = zlib.compress(dumps(reduce_to_object(compiled)), 9)
    (folder / object_name(entry_name, signature)).write_bytes(data)


def load_object(folder: Path, entry_name: str, signature: Any, target_context: Any) -> Any:
    """Load the code of an entry point; None if the folder has none, or a damaged one, for this signature."""
    path = folder / object_name(entry_name, signature)
    if not path.exists():
        return None
    try:
        # As trusted as the modules beside it.
        reduced = pickle.loads(zlib.decompress(path.read_bytes()))  # noqa: S301
    except (OSError, EOFError, zlib.error, pickle.UnpicklingError) as error:
        logger.warning("a CPU kernel of this wheel cannot be read: %s: %s", path, error)
        return None
    return CompileResult._rebuild(target_context, *reduced)  # noqa: SLF001


@functools.cache
def shipped_folder() -> Path | None:
    """The folder of shipped object code that this process can use; logs why not, if there is any."""
    manifest = SHIPPED / MANIFEST
    if not manifest.exists():
        return None
    target, facts = shipped_target(), build_facts()
    if target is None:
        reason = "none of it is for this instruction set"
    else:
        built = _read_facts(manifest)
        different = [name for name, value in facts.items() if built.get(name) != value]
        if not different:
            return SHIPPED / target.name
        name = different[0]
        reason = f"it was built with {name} {built.get(name)}, this is {facts[name]}"
    logger.warning("the CPU kernels of this wheel cannot be used: %s", reason)
    return None


def _read_facts(manifest: Path) -> dict[str, str]:
    """The facts that were written; none where the file is damaged."""
    try:
        facts = json.loads(manifest.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


class Progress:
    """Says on stderr, through logging, which kernel of how many is being compiled.

    The lines are warnings: those show without any handler, in a script that configures nothing.
    """

    def __init__(self) -> None:
        self._started, self._total, self._begin_s = 0, 0, 0.0

    def start(self, num_missing: int, where: str) -> None:
        """Say that a kernel is being compiled; of `num_missing`, this included, known at the first."""
        if self._started >= self._total:
            self._started, self._total, self._begin_s = 0, num_missing, time.monotonic()
        self._started += 1
        logger.warning(
            "compiling CPU kernels, once for %s: %d of %d", where, self._started, self._total
        )

    def end(self) -> None:
        """Say how long all took, after the last."""
        if self._started == self._total:
            logger.warning("compiled in %.0f s", time.monotonic() - self._begin_s)


progress = Progress()


class _ObjectForm(CompileResultCacheImpl):
    """How Numba's cache on disk keeps an entry point: as wheels do."""

    def reduce(self, cres: Any) -> tuple[Any, ...]:
        return reduce_to_object(cres)


class _ObjectCache(FunctionCache):
    """Numba's cache on disk, of object code."""

    _impl_class = _ObjectForm


class KernelCache(NullCache):
    """Where Numba looks for the code of an entry point; compiles what is nowhere, and keeps it on disk.

    Args:
        dispatcher: of the entry point; Numba's `cache=True` would give it a cache of its own.
        num_missing: how many kernels a model with this signature must still compile.
    """

    def __init__(self, dispatcher: Any, num_missing: Callable[[Any], int]) -> None:
        self._dispatcher, self._num_missing = dispatcher, num_missing
        self._name = dispatcher.py_func.__qualname__
        self._disk: Any = NullCache()
        # Two processes that need a kernel at the same time compile it once.
        self._lock: FileLock | None = None
        try:
            self._disk = _ObjectCache(dispatcher.py_func)
        except RuntimeError as error:  # no writable cache directory
            logger.info("kernels are compiled anew in every process: %s", error)
        else:
            self._lock = FileLock(Path(self._disk.cache_path) / f"{self._name}.lock")

    @property
    def cache_path(self) -> Any:
        """The folder on disk, or None."""
        return self._disk.cache_path

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The code for a signature. Numba calls this before it would compile."""
        target_context.refresh()
        code = self._load(sig, target_context)
        if code is not None:
            return code
        with self._alone():
            return self._load(sig, target_context) or self._compile(sig)

    def has(self, sig: Any, target_context: Any) -> bool:
        """Whether there is code for a signature; loads none."""
        folder, disk = shipped_folder(), self._disk
        if folder is not None and (folder / object_name(self._name, sig)).exists():
            return True
        if not isinstance(disk, FunctionCache):
            return False
        key = disk._index_key(sig, target_context.codegen())  # noqa: SLF001
        return key in disk._cache_file._load_index()  # noqa: SLF001

    def _load(self, sig: Any, target_context: Any) -> Any:
        folder = shipped_folder()
        code = None if folder is None else load_object(folder, self._name, sig, target_context)
        return self._disk.load_overload(sig, target_context) if code is None else code

    def _compile(self, sig: Any) -> Any:
        where = "this process" if self._lock is None else "this machine"
        progress.start(self._num_missing(sig), where)
        details = {"dispatcher": self._dispatcher, "args": sig, "return_type": None}
        with event.trigger_event("numba:compile", data=details):
            code = self._dispatcher._compiler.compile(sig, None)  # noqa: SLF001
        try:
            self._disk.save_overload(sig, code)
        except OSError as error:
            logger.warning("the compiled CPU kernel is not kept for other processes: %s", error)
        progress.end()
        return code

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock, where there is one and it can be had: code that is compiled twice is right too."""
        lock = self._lock
        if lock is None or not _acquire(lock):
            yield
            return
        try:
            yield
        finally:
            lock.release()


def _acquire(lock: FileLock) -> bool:
    """Wait for a lock, and say so; returns whether it is held."""
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("waiting for CPU kernels that another process compiles")
    except OSError as error:  # of another user, or on a file system without locks
        logger.info("another process may compile the same CPU kernels: %s", error)
        return False
    else:
        return True
    try:
        lock.acquire(timeout=MAX_WAIT_S)
    except OSError:
        logger.warning("waited for %.0f s: %s is not released", MAX_WAIT_S, lock.lock_file)
        return False
    return True
