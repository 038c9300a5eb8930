"""The peers that hash every block: vLLM (two hash functions) and ATOM."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from core.contract import AbsentError, Loaded, Tokens
from core.standins import bare_package, stand_in
from core.trees import version_of, wheel

# What the modules around vLLM's block pool import for serving, grammars, media and kernels.
VLLM_UNUSED = tuple(
    """
    PIL aiohttp anthropic blake3 compressed_tensors cpuinfo cv2 depyf diskcache fastapi gguf
    huggingface_hub ijson lark llguidance lmformatenforcer mcp mistral_common
    model_hosting_container_standards msgpack ninja openai openai_harmony outlines_core
    partial_json_parser prometheus_client prometheus_fastapi_instrumentator python_json_logger ray
    requests safetensors setproctitle six tiktoken tokenizers torchvision tqdm transformers urllib3 uvloop
    watchfiles xgrammar vllm.v1.structured_output vllm.v1.engine
    """.split()
)


@dataclass(slots=True)
class BlockRequest:
    """A request in the peer's own type, its output, and the hit and blocks the peer returned."""

    native: Any
    output: list[int]
    num_prompt: int
    name: str = ""
    hit_pages: Any = field(init=False)
    hit: int = field(init=False)
    block_ids: list[int] = field(init=False)


# -- vLLM ----------------------------------------------------------------------------------------


class VLLMCore:
    """KVCacheManager and BlockPool; hashing the prompt, in the request's constructor, is timed."""

    def __init__(self, num_pages: int, page_size: int, *, algorithm: str) -> None:
        torch = importlib.import_module("torch")
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        caching = importlib.import_module("vllm.v1.core.kv_cache_utils")
        hash_block = importlib.import_module("vllm.utils.hashing").get_hash_fn_by_name(algorithm)
        caching.init_none_hash(hash_block)
        self._hasher = caching.get_request_block_hasher(page_size, hash_block)
        self._request = importlib.import_module("vllm.v1.request").Request
        self._params = importlib.import_module("vllm.pooling_params").PoolingParams()
        spec = interface.FullAttentionSpec(
            block_size=page_size, num_kv_heads=1, head_size=64, dtype=torch.float16
        )
        config = interface.KVCacheConfig(
            num_blocks=num_pages + 1,  # one of them is the null block
            kv_cache_tensors=[],
            kv_cache_groups=[interface.KVCacheGroupSpec(["layer"], spec)],
        )
        self._cache = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=page_size,
            hash_block_size=page_size,
            enable_caching=True,
        )
        self._num_pages, self._page_size = num_pages, page_size
        self._names = count()

    def prepare(self, prompt: Tokens, output: Tokens) -> BlockRequest:
        return BlockRequest(prompt.tolist(), output.tolist(), len(prompt), str(next(self._names)))

    def match(self, request: BlockRequest) -> int:
        request.native = self._request(
            request.name, request.native, None, self._params, block_hasher=self._hasher
        )
        request.hit_pages, request.hit, _ = self._cache.get_computed_blocks(request.native)
        return request.hit

    def alloc(self, request: BlockRequest) -> None:
        cache, native = self._cache, request.native
        new = cache.allocate_slots(
            native, request.num_prompt - request.hit, request.hit, request.hit_pages
        )
        assert new is not None, "out of blocks"
        native.num_computed_tokens = request.num_prompt
        request.block_ids = cache.get_block_ids(native.request_id)[0]

    def insert(self, request: BlockRequest) -> None:
        cache, native = self._cache, request.native
        native.append_output_token_ids(request.output)
        new = cache.allocate_slots(native, len(request.output))
        assert new is not None, "out of blocks"
        request.block_ids += new.get_block_ids()[0]
        cache.free(native)

    def read_pages(self, request: BlockRequest) -> list[int]:
        return [block - 1 for block in request.hit_pages.get_block_ids()[0]]  # 0 is the null block

    def path_pages(self, request: BlockRequest) -> list[int]:
        whole = (request.num_prompt + len(request.output)) // self._page_size
        return [block - 1 for block in request.block_ids[:whole]]

    def evict(self, num_pages: int) -> None:
        pool = self._cache.block_pool
        pool.free_blocks(pool.get_new_blocks(num_pages))

    def check(self) -> None:
        assert self._cache.block_pool.get_num_free_blocks() == self._num_pages, "blocks leaked"


def load_vllm(folder: Path, algorithm: str) -> Loaded:
    """vLLM from its unpacked wheel, only Python files needed; "sha256" or "xxhash"."""
    package = wheel(folder / "vllm", "vllm")
    if "vllm" not in sys.modules:
        stand_in(*VLLM_UNUSED)
        sys.path.insert(0, str(package.parent))
        logging.disable(logging.WARNING)
    importlib.import_module("torch").set_num_threads(1)
    VLLMCore(16, 16, algorithm=algorithm)  # imports the rest
    return Loaded(
        lambda pages, size: VLLMCore(pages, size, algorithm=algorithm),
        version_of(package.parent, "vllm"),
    )


# -- ATOM ----------------------------------------------------------------------------------------


class AtomCore:
    """BlockManager, driven as its scheduler does: admit, allocate, hash, append, hash, free."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        module = importlib.import_module("atom.model_engine.block_manager")
        self._cache = module.BlockManager(
            types.SimpleNamespace(
                kv_cache_block_size=page_size,
                num_kvcache_blocks=num_pages,
                decode_context_parallel_size=1,
                enable_prefix_caching=True,
            )
        )
        self._sequence = importlib.import_module("atom.model_engine.sequence").Sequence
        self._num_pages, self._page_size = num_pages, page_size

    def prepare(self, prompt: Tokens, output: Tokens) -> BlockRequest:
        sequence = self._sequence(prompt.tolist(), self._page_size)
        return BlockRequest(sequence, output.tolist(), len(prompt))

    def match(self, request: BlockRequest) -> int:
        request.hit = self._cache.can_allocate(request.native)
        assert request.hit >= 0, "out of blocks"
        return request.hit * self._page_size

    def alloc(self, request: BlockRequest) -> None:
        self._cache.allocate(request.native, request.hit)
        request.hit_pages = request.native.block_table

    def insert(self, request: BlockRequest) -> None:
        cache, sequence, size = self._cache, request.native, self._page_size
        cache.hash_blocks(sequence, sequence.num_prompt_tokens - sequence.num_cached_tokens)
        sequence.token_ids += request.output
        total = len(sequence.token_ids)
        # Made for steps of one token, `may_append` does nothing at the exact end of a block; one
        # call just before it has the blocks of the whole output.
        sequence.num_tokens = total - (total % size == 0)
        cache.may_append(sequence, size)
        sequence.num_tokens = total
        cache.hash_decode_blocks(sequence, sequence.num_tokens)
        request.block_ids = list(sequence.block_table)
        cache.deallocate(sequence)

    def read_pages(self, request: BlockRequest) -> list[int]:
        sequence, size = request.native, self._page_size
        pages, hashed = [], -1
        for at in range(request.hit):  # `allocate` has not run yet: look up what it will claim
            hashed = self._cache.compute_hash(sequence[at * size : (at + 1) * size], hashed)
            pages.append(self._cache.kv.lookup(hashed))
        return pages

    def path_pages(self, request: BlockRequest) -> list[int]:
        return request.block_ids[: (request.num_prompt + len(request.output)) // self._page_size]

    def evict(self, num_pages: int) -> None:
        pool = self._cache.kv
        taken = [pool.pop() for _ in range(num_pages)]
        for block in taken:
            pool.allocate(block)
        for block in taken:
            pool.free(block)

    def check(self) -> None:
        assert self._cache.kv.num_free == self._num_pages, "blocks leaked"


def load_atom(folder: Path) -> Loaded:
    """ATOM from its source tree."""
    package = folder / "ATOM" / "atom"
    if not package.is_dir():
        raise AbsentError(f"not on the package index; unpack its source into {folder.name}/ATOM")
    if "atom" not in sys.modules:
        stand_in("atom.config")
        for name in ("", ".model_engine", ".distributed"):
            bare_package(f"atom{name}", package.joinpath(*name.split(".")))
        importlib.import_module("atom.model_engine.block_manager")
    return Loaded(AtomCore, "source tree")
