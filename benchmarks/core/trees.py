"""The peers that are radix trees over torch tensors: SGLang (three cores) and mini-sglang."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from core.contract import AbsentError, Loaded, Tokens, round_up
from core.standins import bare_package, stand_in

# What SGLang's cache modules import and never call in a run on one device without kernels.
SGLANG_UNUSED = (
    "triton", "torchvision", "IPython", "sgl_kernel", "flashinfer",
    "PIL", "fastapi", "huggingface_hub", "requests", "starlette", "transformers", "tqdm",
    "sglang.kernels", "sglang.jit_kernel", "sglang.srt.layers", "sglang.srt.configs",
    "sglang.srt.server_args", "sglang.srt.model_executor", "sglang.srt.hardware_backend",
    "sglang.srt.speculative", "sglang.srt.sampling", "sglang.srt.observability",
    "sglang.srt.utils.hf_transformers", "sglang.srt.utils.hf_transformers_utils",
    "sglang.srt.managers.cache_controller", "sglang.srt.managers.schedule_batch",
    "sglang.srt.mem_cache.memory_pool", "sglang.srt.mem_cache.memory_pool_host",
    "sglang.srt.mem_cache.swa_memory_pool", "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.hybrid_cache",
)  # fmt: skip


class PagePool:
    """Free pages as a numpy stack that hands out slots, one int per token, as these trees store.

    All trees share it, so that the benchmark compares trees and not free lists; the peers' own
    free lists (torch.cat of all free slots) cost more. Method names are SGLang's.
    """

    device = "cpu"

    def __init__(self, num_pages: int, page_size: int, dtype: type[np.signedinteger[Any]]) -> None:
        self._from_numpy = importlib.import_module("torch").from_numpy
        self._free = np.arange(num_pages - 1, -1, -1, dtype=dtype)
        self._num_free = num_pages
        self._page_size = page_size
        self._offsets = np.arange(page_size, dtype=dtype)

    def available_size(self) -> int:
        return self._num_free * self._page_size

    def alloc(self, need_size: int) -> Any:
        count = need_size // self._page_size
        assert count <= self._num_free, "the tree evicted too little"
        pages = self._free[self._num_free - count : self._num_free]
        self._num_free -= count
        return self._from_numpy((pages[:, None] * self._page_size + self._offsets).reshape(-1))

    def free(self, slots: Any) -> None:
        pages = slots.numpy()[:: self._page_size] // self._page_size
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def free_segment(self, slots: Any, *, start_pos: int = 0) -> None:
        self.free(slots)


@dataclass(slots=True)
class TreeRequest:
    """Token ids in the tree's container, and their slots."""

    ids: Any
    num_prompt: int
    pin: Any = field(init=False)
    hit: int = field(init=False)
    hit_slots: Any = field(init=False)
    slots: Any = field(init=False)  # allocated for the rest


def pages_of(slots: Any, page_size: int) -> list[int]:
    """The page ids of whole runs of slots."""
    return [int(slot) // page_size for slot in slots[::page_size]]


def path_pages_of(request: TreeRequest, page_size: int) -> list[int]:
    """The whole pages of a request's tokens: its hit, then what was allocated."""
    pages = pages_of(request.hit_slots, page_size) + pages_of(request.slots, page_size)
    return pages[: len(request.ids) // page_size]


# -- SGLang --------------------------------------------------------------------------------------


class SGLangCore:
    """RadixCache, or UnifiedRadixCache over a core in Python or in Rust."""

    def __init__(self, num_pages: int, page_size: int, *, kind: str) -> None:
        self._torch = importlib.import_module("torch")
        self._base = importlib.import_module("sglang.srt.mem_cache.base_prefix_cache")
        radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
        self._key = radix.RadixKey
        params = importlib.import_module("sglang.srt.mem_cache.cache_init_params").CacheInitParams
        self._pool = PagePool(num_pages, page_size, np.int64)
        self._page_size, self._num_pages = page_size, num_pages
        shared = {
            "disable": False,
            "req_to_token_pool": None,
            "token_to_kv_pool_allocator": self._pool,
            "page_size": page_size,
        }
        self._unified = kind != "radix"
        if self._unified:
            name = "sglang.srt.mem_cache.unified_cache.component_type"
            full = importlib.import_module(name).ComponentType.FULL
            unified = importlib.import_module("sglang.srt.mem_cache.unified_radix_cache")
            self._cache = unified.UnifiedRadixCache(
                params(**shared, tree_components=(full,), tree_core_backend=kind)
            )
            chosen = type(self._cache.tree_core).__name__
            if ("Rust" in chosen) != (kind == "rust"):
                raise AbsentError(f"asked for the {kind} core, SGLang chose {chosen}")
        else:
            self._cache = radix.RadixCache(params(**shared))

    def prepare(self, prompt: Tokens, output: Tokens) -> TreeRequest:
        ids = array("q")
        ids.frombytes(np.concatenate([prompt, output]).astype(np.int64).tobytes())
        return TreeRequest(ids, len(prompt))

    def match(self, request: TreeRequest) -> int:
        cache = self._cache
        key = self._key(request.ids, limit=request.num_prompt - 1)
        match = cache.match_prefix(self._base.MatchPrefixParams(key=key))
        node = match.last_device_node
        request.hit = int(match.device_prefix_len)
        if self._unified:
            request.pin = cache.lock(node)
        else:
            request.pin = node
            cache.inc_lock_ref(node)
        request.hit_slots = cache.path_device_indices(node)
        return request.hit

    def alloc(self, request: TreeRequest) -> None:
        size = self._page_size
        need = round_up(len(request.ids), size) * size - request.hit
        short = need - self._pool.available_size()
        if short > 0:
            self._cache.evict(self._base.EvictParams(num_tokens=short))
        request.slots = self._pool.alloc(need)

    def insert(self, request: TreeRequest) -> None:
        torch, cache, hit = self._torch, self._cache, request.hit
        slots = torch.cat((request.hit_slots, request.slots))
        whole = len(request.ids) // self._page_size * self._page_size
        key = self._key(request.ids)
        if whole != len(request.ids):
            key = key.page_aligned(self._page_size)
        value = slots[:whole].to(dtype=torch.int64, copy=True)
        if self._unified:  # frees what the tree has already by itself
            cache.insert(self._base.InsertParams(key=key, value=value, prev_prefix_len=hit))
        else:
            known = cache.insert(self._base.InsertParams(key=key, value=value)).prefix_len
            if known > hit:
                self._pool.free(slots[hit:known])
        if whole != len(request.ids):
            self._pool.free(slots[whole:])
        if self._unified:
            cache.unlock(request.pin)
        else:
            cache.dec_lock_ref(request.pin)

    def read_pages(self, request: TreeRequest) -> list[int]:
        return pages_of(request.hit_slots, self._page_size)

    def path_pages(self, request: TreeRequest) -> list[int]:
        return path_pages_of(request, self._page_size)

    def evict(self, num_pages: int) -> None:
        self._cache.evict(self._base.EvictParams(num_tokens=num_pages * self._page_size))

    def check(self) -> None:
        held = self._cache.evictable_size() + self._pool.available_size()
        assert self._cache.protected_size() == 0, "pins were left behind"
        assert held == self._num_pages * self._page_size, "pages leaked"


def load_sglang(folder: Path, kind: str) -> Loaded:
    """SGLang from its unpacked wheel; kind is "radix", "rust" or "python"."""
    package = wheel(folder / "sglang", "sglang")
    if "sglang" not in sys.modules:
        stand_in(*SGLANG_UNUSED)
        sys.path.insert(0, str(package.parent))
        bare_package("sglang", package)
        logging.disable(logging.INFO)
    importlib.import_module("torch").set_num_threads(1)
    SGLangCore(16, 16, kind=kind)  # imports the rest
    return Loaded(
        lambda pages, size: SGLangCore(pages, size, kind=kind), version_of(package.parent, "sglang")
    )


def wheel(folder: Path, package: str) -> Path:
    """The package in an unpacked wheel.

    Raises:
        AbsentError: it is not there; says why, if the installer left a note.
    """
    if not (folder / package).is_dir():
        note = folder.with_suffix(".absent")
        reason = note.read_text(encoding="utf-8").strip() if note.is_file() else "not installed"
        raise AbsentError(f"{reason}; `make bench-core` unpacks the wheel into {folder.name}/")
    return folder / package


def version_of(folder: Path, name: str) -> str:
    """Return the version in the name of an unpacked wheel's metadata folder."""
    folders = sorted(folder.glob(f"{name}-*.dist-info"))
    return folders[-1].name.removesuffix(".dist-info").partition("-")[2] if folders else "unknown"


# -- mini-sglang ---------------------------------------------------------------------------------


class MiniSGLangCore:
    """RadixPrefixCache; the calls of its CacheManager, without the copy into a page table."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._torch = torch = importlib.import_module("torch")
        radix = importlib.import_module("minisgl.kvcache.radix_cache")
        radix.get_global_ctx = lambda: types.SimpleNamespace(page_size=page_size)  # type: ignore[attr-defined]
        self._cache = radix.RadixPrefixCache(torch.device("cpu"))
        self._pool = PagePool(num_pages, page_size, np.int32)
        self._page_size, self._num_pages = page_size, num_pages
        self._nothing = torch.empty(0, dtype=torch.int32)

    def prepare(self, prompt: Tokens, output: Tokens) -> TreeRequest:
        return TreeRequest(self._torch.from_numpy(np.concatenate([prompt, output])), len(prompt))

    def match(self, request: TreeRequest) -> int:
        handle = self._cache.match_prefix(request.ids[: request.num_prompt - 1]).cuda_handle
        self._cache.lock_handle(handle)
        request.pin, request.hit = handle, int(handle.cached_len)
        request.hit_slots = handle.get_matched_indices() if request.hit else self._nothing
        return request.hit

    def alloc(self, request: TreeRequest) -> None:
        size = self._page_size
        need = round_up(len(request.ids), size) * size - request.hit
        short = need - self._pool.available_size()
        if short > 0:
            self._pool.free(self._cache.evict(short))
        request.slots = self._pool.alloc(need)

    def insert(self, request: TreeRequest) -> None:
        slots = self._torch.cat((request.hit_slots, request.slots))
        known = self._cache.insert_prefix(request.ids, slots[: len(request.ids)]).cached_len
        self._cache.lock_handle(request.pin, unlock=True)
        whole = len(request.ids) // self._page_size * self._page_size
        if known > request.hit:
            self._pool.free(slots[request.hit : known])
        if whole != len(request.ids):
            self._pool.free(slots[whole:])

    def read_pages(self, request: TreeRequest) -> list[int]:
        return pages_of(request.hit_slots, self._page_size)

    def path_pages(self, request: TreeRequest) -> list[int]:
        return path_pages_of(request, self._page_size)

    def evict(self, num_pages: int) -> None:
        self._pool.free(self._cache.evict(num_pages * self._page_size))

    def check(self) -> None:
        sizes = self._cache.size_info
        held = sizes.evictable_size + self._pool.available_size()
        assert sizes.protected_size == 0, "pins were left behind"
        assert held == self._num_pages * self._page_size, "pages leaked"


def load_mini_sglang(folder: Path) -> Loaded:
    """mini-sglang from its source tree; its own comparison routine needs a C++ compiler."""
    package = folder / "mini-sglang" / "python" / "minisgl"
    if not package.is_dir():
        raise AbsentError(
            f"not on the package index; unpack its source into {folder.name}/mini-sglang"
        )
    if "minisgl" not in sys.modules:
        for name in ("", ".utils", ".kernel"):
            bare_package(f"minisgl{name}", package.joinpath(*name.split(".")))
        _lift("minisgl.utils", "minisgl.utils.misc", "align_down", "align_ceil", "div_ceil")
        _lift("minisgl.utils", "minisgl.utils.registry", "Registry")
        _lift("minisgl.kernel", "minisgl.kernel.radix", "fast_compare_key")
    importlib.import_module("torch").set_num_threads(1)
    return Loaded(MiniSGLangCore, "source tree")


def _lift(package: str, module: str, *names: str) -> None:
    """Set the names in the package that its `__init__`, which is not run, imports from `module`."""
    source = importlib.import_module(module)
    for name in names:
        setattr(sys.modules[package], name, getattr(source, name))
