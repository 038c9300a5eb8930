"""FlashInfer's wrapper over paged latents (MLA, absorbed), by the `plan` and `run` of 0.2.10 and of 0.7.4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ramify.attention.backends.flashinfer_buffers import GraphBuffers
from ramify.attention.spec import AttentionSpec

LATENT_DIM, ROPE_DIM = 512, 64  # that FlashInfer has kernels for
TILE_ROWS = 128  # of queries and heads in a tile; half of it for few rows
HOPPER = (9, 0)


class LatentWrapper:
    """A `BatchMLAPagedAttentionWrapper`, over the planes `latent` and `rope`.

    Args:
        library: the package `flashinfer`.
        workspace: [bytes] uint8 on the device.
        buffers: for steps that graphs capture.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        library: Any,
        workspace: Tensor,
        buffers: GraphBuffers | None = None,
    ) -> None:
        on_gpu = workspace.device.type == "cuda"
        is_hopper = on_gpu and torch.cuda.get_device_capability(workspace.device) == HOPPER
        # Of all kernels these alone read latents and ropes that do not lie side by side.
        self._wrapper = library.BatchMLAPagedAttentionWrapper(
            workspace,
            backend="fa3" if is_hopper else "fa2",
            **({} if buffers is None else buffers.of_latents()),
        )
        # Since 0.7 metadata are an object, and tensors by themselves are deprecated.
        self._metadata = getattr(getattr(library, "mla", None), "MLAPlanMetadata", None)
        self._spec = spec

    def plan(self, rows: Tensor, indptr: Tensor, pages: Tensor, kv_lens: Tensor) -> None:
        """Plan a step of B requests; all arrays are in host memory.

        Args:
            rows, indptr: [B + 1] int32, offsets of the query rows and of the pages of each request.
            pages: int32, of all requests; 0.7.4 takes their least and largest, and would wait for a device.
            kv_lens: [B] int32.
        """
        spec = self._spec
        options: dict[str, Any] = {
            "num_heads": spec.num_heads,
            "head_dim_ckv": spec.v_head_dim,
            "head_dim_kpe": spec.head_dim - spec.v_head_dim,
            "page_size": spec.page_size,
            "causal": True,
            "sm_scale": spec.scale,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.plane_dtype,
        }
        arrays = {
            "qo_indptr": rows,
            "kv_indptr": indptr,
            "kv_indices": pages,
            "kv_len_arr": kv_lens,
        }
        if self._metadata is None:
            self._wrapper.plan(**arrays, **options)
        else:
            layouts = {"query_layout": "split", "kv_cache_layout": "split"}
            self._wrapper.plan(metadata=self._metadata.csr(**arrays), **layouts, **options)

    def run(self, q: Tensor, planes: Mapping[str, Tensor], out: Tensor) -> None:
        """Attend with q [T, num_heads, latent + rope]; writes out [T, num_heads, latent]."""
        query, kv = q.split((out.shape[-1], q.shape[-1] - out.shape[-1]), -1), planes
        if self._metadata is None:
            self._wrapper.run(
                q_nope=query[0],
                q_pe=query[1],
                ckv_cache=kv["latent"],
                kpe_cache=kv["rope"],
                out=out,
            )
        else:
            self._wrapper.run(query=query, kv_cache=(kv["latent"], kv["rope"]), out=out)


def reason_not_latent(spec: AttentionSpec) -> str | None:
    """None, or why FlashInfer cannot attend to latents so on any device."""
    rope_dim = spec.head_dim - spec.v_head_dim
    if (spec.v_head_dim, rope_dim) != (LATENT_DIM, ROPE_DIM):
        return (
            f"kind=mla with latents of {spec.v_head_dim} and ropes of {rope_dim}: it has kernels for "
            f"{LATENT_DIM} and {ROPE_DIM}"
        )
    if TILE_ROWS % spec.num_heads:
        # 0.2.10 rounds the last key of such a tile down, and leaves it out; 0.7.4 refuses the step.
        return f"{spec.num_heads} heads: a tile of {TILE_ROWS} rows ends within a query's"
    if spec.plane_dtype != spec.dtype:
        return f"kv_dtype={spec.plane_dtype}: it reads latents in the half of the queries"
    if spec.soft_cap is not None or spec.sinks or any(spec.windows):
        return "latents with soft_cap, sinks or windows"
    return None
