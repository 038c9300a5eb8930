"""Gather a request's K/V from pages: slots, dense float32 K and V, causal and window masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.staging_buffers import upload_together
from ramify.kv.layout import read_plane

MASKED_MAX = -1e30  # row max if all keys are masked; finite, so that differences stay finite


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """Query rows [start, stop) of a request, the slots of its keys, and both positions."""

    start: int
    stop: int
    slots: Tensor  # [kv_len] int64
    query_positions: Tensor  # [q_len] int64
    key_positions: Tensor  # [kv_len] int64


def request_slices(batch: AttentionBatch, device: torch.device) -> list[RequestSlice]:
    """Split a batch into requests, each with its slots and positions on `device`."""
    arrays = [batch.kv_slots(seq) for seq in range(batch.num_seqs)]
    positions, *uploaded = upload_together([batch.positions.astype(np.int64), *arrays], device)
    keys = torch.arange(batch.max_kv_len, device=device)
    slices = []
    for seq, slots in enumerate(uploaded):
        start, stop = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
        slices.append(RequestSlice(start, stop, slots, positions[start:stop], keys[: len(slots)]))
    return slices


def all_kv_slots(batch: AttentionBatch) -> NDArray[np.int64]:
    """Slots of the keys of all requests, concatenated: [total_kv]."""
    slots = [batch.kv_slots(seq) for seq in range(batch.num_seqs)]
    return np.concatenate(slots) if slots else np.zeros(0, np.int64)


def attention_mask(
    request: RequestSlice, window: int | None, selected: Tensor | None = None
) -> Tensor:
    """True where a query sees a key: [q_len, kv_len] bool, causal, of the last `window` tokens.

    `selected` [tokens of the batch, n] restricts each query to the positions in its row.
    """
    distance = request.query_positions[:, None] - request.key_positions[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if selected is not None:
        keys = selected[request.start : request.stop].long()
        num_keys = len(request.key_positions)
        # the extra column takes the padding (-1) and is cut off
        is_selected = visible.new_zeros(len(keys), num_keys + 1)
        is_selected.scatter_(1, keys.masked_fill((keys < 0) | (keys >= num_keys), num_keys), True)
        visible &= is_selected[:, :num_keys]
    return visible


def gather_kv_f32(planes: Mapping[str, Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
    """Gather K/V of `slots` [n] int64 as float32 [n, heads, key_dim] and [n, heads, value_dim].

    Planes may have either layout of `KVLayout` and any dtype of a `KVPool`. Planes `latent` and
    `rope` make one head with key `[latent, rope]` and value `latent`.
    """
    if "latent" in planes:
        latent = read_plane(planes, "latent", slots).float()[:, None]
        rope = read_plane(planes, "rope", slots).float()[:, None]
        return torch.cat((latent, rope), -1), latent
    return read_plane(planes, "k", slots).float(), read_plane(planes, "v", slots).float()


def gather_rows(scratch: dict[str, Tensor], name: str, plane: Tensor, slots: Tensor) -> Tensor:
    """Gather rows [n, *shape] of `plane` [num_slots, *shape] into the buffer `name` of `scratch`.

    The buffer is reused by the next call: an allocation costs several times the copy.
    """
    buffer = scratch.get(name)
    if buffer is None or len(buffer) < len(slots) or buffer.dtype != plane.dtype:
        buffer = scratch[name] = plane.new_empty(len(slots), *plane.shape[1:])
    return torch.index_select(plane, 0, slots, out=buffer[: len(slots)])
