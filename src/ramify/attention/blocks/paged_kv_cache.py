"""A paged K/V cache without sharing: a pool, a page ledger, and a page list per request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.cache.pages import PageLedger
from ramify.errors import CacheError, ConfigError, UnknownRequestError
from ramify.kv.pool import KVLayout, KVPool


@dataclass(slots=True)
class _RequestPages:
    """The pages of a request, and the tokens written in each layer."""

    blocks: array[int]
    lengths: list[int]


class RadixAttentionWithPagedKVCache:
    """Appends a request's keys and values, reads them back in order, frees them with the request.

    A block is a page of the pool: block i of a request has the same index in every layer. No block
    is shared among requests; `RadixAttentionPlanner` over a `PrefixCache` does that.

    Args:
        num_layers, num_heads, head_dim: `num_heads` of keys and values; all at least 1.
        block_size: tokens per block.
        max_blocks_per_request: most blocks that a request may hold.
        num_blocks: blocks of the pool, allocated at once.
        dtype, device: of keys and values.

    Raises:
        ConfigError: a size is less than 1.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        block_size: int = 16,
        max_blocks_per_request: int = 128,
        *,
        num_blocks: int = 1024,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(num_layers, num_heads, head_dim, max_blocks_per_request) < 1:
            raise ConfigError(
                f"num_layers={num_layers}, num_heads={num_heads}, head_dim={head_dim} and "
                f"max_blocks_per_request={max_blocks_per_request} must be at least 1"
            )
        layout = KVLayout.mha(num_layers, num_heads, head_dim)
        self.pool = KVPool(layout, num_blocks, block_size, dtype=dtype, device=device)
        self.ledger = PageLedger(num_blocks)
        self.num_layers, self.block_size = num_layers, block_size
        self.max_blocks_per_request = max_blocks_per_request
        self._shape = (num_heads, head_dim)
        self._requests: dict[object, _RequestPages] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self.ledger.num_free

    def blocks(self, request_id: object) -> list[int]:
        """The blocks of a request, in order.

        Raises:
            UnknownRequestError: a KeyError.
        """
        return self._of(request_id).blocks.tolist()

    def length(self, request_id: object, *, layer: int = 0) -> int:
        """Tokens of a request written in a layer.

        Raises:
            UnknownRequestError: a KeyError.
            ConfigError: there is no such layer.
        """
        self._require_layer(layer)
        return self._of(request_id).lengths[layer]

    def allocate_blocks(self, request_id: object, num_blocks: int) -> list[int]:
        """Append `num_blocks` blocks to a request, which may be new; returns their ids.

        Raises:
            ConfigError: `num_blocks` is negative.
            CacheError: it would hold more than `max_blocks_per_request`; nothing changed.
            OutOfPagesError: too few blocks are free; nothing changed.
        """
        if num_blocks < 0:
            raise ConfigError(f"num_blocks={num_blocks} but it must be 0 or more")
        request = self._requests.get(request_id)
        total = num_blocks + (len(request.blocks) if request else 0)
        if total > self.max_blocks_per_request:
            raise CacheError(
                f"request {request_id!r} would hold {total} blocks of {self.block_size} tokens but "
                f"max_blocks_per_request is {self.max_blocks_per_request}; append less, or make a "
                "cache with a larger maximum"
            )
        blocks = array("i", self.ledger.take(num_blocks))
        if request is None:
            request = _RequestPages(array("i"), [0] * self.num_layers)
            self._requests[request_id] = request
        request.blocks.extend(blocks)
        return blocks.tolist()

    def append_slot(
        self, key: Tensor, value: Tensor, request_id: object, *, layer: int = 0
    ) -> Tensor:
        """Write the next tokens of a request in a layer, allocating blocks as needed.

        Args:
            key, value: [tokens, num_heads, head_dim] or [1, tokens, num_heads, head_dim], in the
                cache's dtype.
            request_id: an unknown id starts a request.

        Returns:
            the written slots, [tokens] int64; slot = block * block_size + offset.

        Raises:
            ConfigError: a shape or dtype is wrong, or there is no such layer.
            CacheError, OutOfPagesError: as `allocate_blocks`; nothing changed.
        """
        self._require_layer(layer)
        key, value = self._rows("key", key), self._rows("value", value)
        if len(key) != len(value):
            raise ConfigError(f"{len(key)} keys but {len(value)} values")
        request = self._requests.get(request_id)
        start, num_blocks = (request.lengths[layer], len(request.blocks)) if request else (0, 0)
        end = start + len(key)
        self.allocate_blocks(request_id, max(0, -(-end // self.block_size) - num_blocks))
        request = self._requests[request_id]
        slots = self._slots(request, start, end)
        self.pool.write_kv(layer, slots, k=key, v=value)
        request.lengths[layer] = end
        return slots

    def get_kv_cache(
        self,
        request_ids: Sequence[object],
        lengths: Sequence[int] | None = None,
        *,
        layer: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Concatenated keys and values of requests: [1, sum of lengths, heads, head_dim] each.

        Args:
            lengths: how many first tokens to read of each request; None: all.

        Raises:
            UnknownRequestError: a KeyError.
            CacheError: a length exceeds the tokens of the layer.
            ConfigError: not a length per request, or there is no such layer.
        """
        self._require_layer(layer)
        requests = [self._of(request_id) for request_id in request_ids]
        if lengths is None:
            lengths = [request.lengths[layer] for request in requests]
        if len(lengths) != len(requests):
            raise ConfigError(f"{len(requests)} requests but {len(lengths)} lengths")
        for request_id, request, length in zip(request_ids, requests, lengths, strict=True):
            if not 0 <= length <= request.lengths[layer]:
                raise CacheError(
                    f"{length} tokens of request {request_id!r} asked for, but layer {layer} has "
                    f"{request.lengths[layer]}"
                )
        slots = [torch.empty(0, dtype=torch.int64, device=self.pool.device)]
        slots += map(self._slots, requests, [0] * len(requests), lengths)
        dense = self.pool.gather_kv(layer, torch.cat(slots))
        return dense["k"][None], dense["v"][None]

    def free_request(self, request_id: object) -> None:
        """End a request and free its blocks; the last written is reused first.

        Raises:
            UnknownRequestError: a KeyError.
        """
        self.ledger.give_back(self._of(request_id).blocks.tobytes())
        del self._requests[request_id]

    def _of(self, request_id: object) -> _RequestPages:
        request = self._requests.get(request_id)
        if request is None:
            raise UnknownRequestError(request_id)
        return request

    def _require_layer(self, layer: int) -> None:
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer={layer} but layers are 0..{self.num_layers - 1}")

    def _rows(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` as [tokens, num_heads, head_dim]; raises ConfigError if it does not fit."""
        rows = tensor[0] if tensor.dim() == 4 and tensor.shape[0] == 1 else tensor
        fits = rows.dtype == self.pool.dtype and rows.device.type == self.pool.device.type
        if rows.dim() != 3 or rows.shape[1:] != self._shape or not fits:
            heads, width = self._shape
            raise ConfigError(
                f"{name} {list(tensor.shape)} {tensor.dtype} on {tensor.device} must be [tokens, "
                f"{heads}, {width}] or [1, tokens, {heads}, {width}] {self.pool.dtype} on "
                f"{self.pool.device}"
            )
        return rows

    def _slots(self, request: _RequestPages, start: int, end: int) -> Tensor:
        """Slots of tokens [start, end)."""
        tokens = torch.arange(start, end)
        blocks = torch.tensor(request.blocks.tolist(), dtype=torch.int64)
        slots = blocks[tokens // self.block_size] * self.block_size + tokens % self.block_size
        return slots.to(self.pool.device)
