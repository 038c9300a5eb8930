"""Gather a request's K/V from pages: slots, dense float32 keys and values, causal and window masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.kv.layout import read_slots
from ramify.kv.quantize import dequantize


@dataclass(frozen=True, slots=True)
class RequestSlice:
    """One request: its query rows, the slots of its keys, and the positions of both."""

    start: int
    stop: int
    slots: Tensor  # [kv_len] int64
    query_positions: Tensor  # [q_len] int64
    key_positions: Tensor  # [kv_len] int64


def request_slices(batch: AttentionBatch, device: torch.device) -> list[RequestSlice]:
    """The requests of a batch, each with its own slots and positions."""
    positions = torch.as_tensor(batch.positions.astype("int64"), device=device)
    found = []
    for seq in range(batch.num_seqs):
        start, stop = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
        slots = torch.from_numpy(batch.kv_slots(seq)).to(device)
        keys = torch.arange(len(slots), device=device)
        found.append(RequestSlice(start, stop, slots, positions[start:stop], keys))
    return found


def attention_mask(
    request: RequestSlice, window: int | None, selected: Tensor | None = None
) -> Tensor:
    """Which keys each query sees: [q_len, kv_len] bool, causal, at most `window` tokens back.

    `selected` [tokens of the batch, n]: and only those of its row.
    """
    behind = request.query_positions[:, None] - request.key_positions[None, :]
    seen = behind >= 0
    if window is not None:
        seen &= behind < window
    if selected is not None:
        mine = selected[request.start : request.stop].long()
        num_keys = len(request.key_positions)
        chosen = seen.new_zeros(len(mine), num_keys + 1)
        chosen.scatter_(1, mine.masked_fill((mine < 0) | (mine >= num_keys), num_keys), True)
        seen &= chosen[:, :num_keys]
    return seen


def gather_kv_f32(planes: Mapping[str, Tensor], slots: Tensor) -> tuple[Tensor, Tensor]:
    """K/V of `slots` [n] int64 in float32: keys [n, heads, key_dim], values [n, heads, value_dim].

    Planes may be in either layout of `KVLayout` and in any dtype of a `KVPool`. With `latent` and
    `rope` planes there is one head: its key is both, its value the latent.
    """
    if "latent" in planes:
        latent = gather_plane_f32(planes, "latent", slots)
        return torch.cat((latent, gather_plane_f32(planes, "rope", slots)), -1)[:, None], latent[
            :, None
        ]
    return gather_plane_f32(planes, "k", slots), gather_plane_f32(planes, "v", slots)


def gather_plane_f32(planes: Mapping[str, Tensor], name: str, slots: Tensor) -> Tensor:
    """[n, *shape] float32, times its scale where the plane has one."""
    found = read_slots(name, planes[name], slots)
    scale = planes.get(f"{name}_scale")
    if scale is None:
        return found.float()
    return dequantize(found, read_slots(f"{name}_scale", scale, slots))
