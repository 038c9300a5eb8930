"""Import one part of a large engine: stand-ins for what that part names and never uses.

A cache core lies in a package that also wants GPU kernels, servers and model code at import time.
Those modules are replaced by inert ones; the code that is measured is the peer's own, untouched.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class _InertType(type):
    """Classes of which every attribute, union and subscript is inert again."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Inert(metaclass=_InertType):
    """Anything at all: a class, an instance, a decorator that changes nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return Inert()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert()

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _InertModule(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Inert


class _Finder:
    """Answers for the named modules and everything below them, installed or not."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._below = tuple(f"{name}." for name in names)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in self._names or name.startswith(self._below):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _InertModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def stand_in(*names: str) -> None:
    """From now on these modules are inert, with everything below them."""
    sys.meta_path.insert(0, _Finder(names))


def bare_package(name: str, folder: Path) -> types.ModuleType:
    """A package whose modules come from `folder` and whose `__init__` is not run."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module
