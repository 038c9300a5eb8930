"""Multi-head latent attention (MLA; DeepSeek-V2, 2024) over cached latents, absorbed or expanded.

- Absorbed: `kv_b` is multiplied into the query (W_UK) and the output (W_UV), and all heads attend
  to one latent per token: `2 * latent + rope` multiply-adds per head, query and key. Any backend
  can compute it.
- Expanded: keys and values of every head are computed from the latents, chunk by chunk, and the
  chunks' results merged by their log-sum-exp: `nope + rope + value` multiply-adds per head, query
  and key, after the up projection of every key. Faster for long prefills. On a device, a few heads
  of all keys at a time (`ramify.attention.expanded_heads`).

The bits differ, so `exact=True` is always absorbed. Otherwise each request takes the path that
needs less time by its multiply-adds; the speed of each path is measured once per model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.exactness import Exactness
from ramify.attention.expanded_heads import ExpandedHeads, HeadsPlan
from ramify.attention.gather import MASKED_MAX, RequestSlice, request_slices
from ramify.attention.sparse_index import IndexQuery, KeyIndex
from ramify.attention.spec import AttentionSpec
from ramify.attention.staging_buffers import upload_together
from ramify.errors import ConfigError
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.layout import read_plane

CPU = torch.device("cpu")
CHUNK_KEYS = 512  # 67 MB of float32 K and V at 128 heads of 128 + 128
MAX_SCORES = 1 << 22  # float32 scores in flight, 16 MB
COST_ROWS, COST_KEYS, COST_TRIALS = 64, 256, 5
# Less would measure the launches of kernels.
DEVICE_COST_ROWS, DEVICE_COST_KEYS = 1024, 4096

MlaPath = Literal["auto", "absorbed", "expanded"]


@dataclass(frozen=True, slots=True)
class UpProjection:
    """`kv_b` of a layer, split by head, and its application to queries and outputs."""

    w_uk: Tensor  # [num_heads, nope_dim, latent_dim]
    w_uv: Tensor  # [num_heads, latent_dim, value_dim]
    absorb: Callable[[Tensor], Tensor]  # [T, num_heads, nope_dim] -> [T, num_heads, latent_dim]
    project_v: Callable[[Tensor], Tensor]  # [T, num_heads, latent_dim] -> [T, num_heads, value_dim]

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """[n, latent_dim] -> float32 K [num_heads, n, nope_dim], V [num_heads, n, value_dim]."""
        latents = latents.to(self.w_uk.dtype)
        keys = torch.matmul(latents, self.w_uk.transpose(1, 2))
        return keys.float(), torch.matmul(latents, self.w_uv).float()


@dataclass(frozen=True, slots=True)
class MlaQuery:
    """Queries of a layer; rows beyond the batch are padding."""

    q_nope: Tensor  # [rows, num_heads, nope_dim]
    q_rope: Tensor  # [rows, num_heads, rope_dim]
    up: UpProjection
    index: IndexQuery | None = None


@dataclass(frozen=True, slots=True)
class MlaCostModel:
    """Seconds of each path per query row, per key, and per (query row, key) pair."""

    absorbed_row: float
    absorbed_pair: float
    expanded_key: float
    expanded_pair: float

    def expanded_is_cheaper(self, q_len: int, kv_len: int) -> bool:
        """Compare both paths for a request, per layer."""
        absorbed = q_len * (self.absorbed_row + kv_len * self.absorbed_pair)
        return kv_len * (self.expanded_key + q_len * self.expanded_pair) < absorbed


@dataclass(frozen=True, slots=True)
class ExpandedStep:
    """The requests that are expanded by heads, and their query rows."""

    plan: HeadsPlan
    rows: Tensor  # [n] int64


@dataclass(frozen=True, slots=True)
class MlaPlan:
    """A step: the backend's plan for absorbed requests, and the requests to expand."""

    absorbed: Any  # the backend's own plan
    absorbed_rows: Tensor | None  # query rows of `absorbed`; None: all
    expanded: list[RequestSlice]  # in chunks of keys
    index: Any  # the plan of the index; None without
    by_heads: ExpandedStep | None = None

    @property
    def signature(self) -> Hashable:
        """What a CUDA graph of an absorbed step depends on: see `TritonPlan`."""
        assert self.absorbed_rows is None, "a graph is of decodes, which are absorbed"
        index = None if self.index is None else self.index.signature
        return self.absorbed.signature, index


class MlaAttention:
    """MLA over `latent` and `rope` planes: the interface of a backend, with `MlaQuery` as query.

    Args:
        backend: computes the absorbed path; built with the same `spec`.
        spec: `kind="mla"`.
        nope_dim, value_dim: per head.
        index: selects the keys of each query; required if `spec.sparse`.
        path: `absorbed` and `expanded` are for tests and benchmarks.
        chunk_keys: keys expanded at a time.
        costs: None measures them on first use.
        heads: expands a few heads at a time, in place of chunks of keys.
        device: of the queries and planes.

    Raises:
        ConfigError: `path="expanded"` cannot serve `spec` (see `reason_not_expanded`), or `spec`
            and `index` do not fit MLA.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        *,
        nope_dim: int,
        value_dim: int,
        index: KeyIndex | None = None,
        path: MlaPath = "auto",
        chunk_keys: int = CHUNK_KEYS,
        costs: MlaCostModel | None = None,
        heads: ExpandedHeads | None = None,
        device: torch.device = CPU,
    ) -> None:
        if spec.kind != "mla":
            raise ConfigError(f"kind={spec.kind!r} but latent attention needs kind='mla'")
        if spec.sparse != (index is not None):
            raise ConfigError(f"sparse={spec.sparse} but index is {index}; give both or neither")
        if chunk_keys < 1:
            raise ConfigError(f"chunk_keys={chunk_keys} must be at least 1")
        reason = reason_not_expanded(spec)
        if path == "expanded" and reason is not None:
            raise ConfigError(f"path='expanded' cannot be used: {reason}; use path='auto'")
        if index is not None and index.device != device:
            raise ConfigError(f"device={device} but the index is on {index.device}; use one device")
        self.backend, self.spec, self.index = backend, spec, index
        self.device = device
        self._nope_dim, self._value_dim = nope_dim, value_dim
        self._path: MlaPath = "absorbed" if reason is not None else path
        self._chunk_keys = chunk_keys
        self._costs, self._heads = costs, heads

    def over(self, backend: AttentionBackend) -> MlaAttention:
        """The same over another backend, built with the same `spec`."""
        return MlaAttention(
            backend,
            self.spec,
            nope_dim=self._nope_dim,
            value_dim=self._value_dim,
            index=self.index,
            path=self._path,
            chunk_keys=self._chunk_keys,
            costs=self._costs,
            heads=self._heads,
            device=self.device,
        )

    @property
    def costs(self) -> MlaCostModel:
        """Seconds per unit of work of both paths, measured on first use with random values."""
        if self._costs is None:
            self._costs = self._measure()
        return self._costs

    def exactness(self) -> list[Exactness]:
        """The strategies of the backend and of the index, and why."""
        index = self.index.exactness() if self.index is not None else []
        return [*self.backend.exactness(), *index]

    def plan(self, batch: AttentionBatch) -> MlaPlan:
        """Choose the path of every request and plan the backend's part. Called once per step."""
        index = None if self.index is None else self.index.plan(batch)
        expanded = [seq for seq in range(batch.num_seqs) if self._expands(batch, seq)]
        if not expanded:
            return MlaPlan(self.backend.plan(batch), None, [], index)
        absorbed = [seq for seq in range(batch.num_seqs) if seq not in set(expanded)]
        rows, expanded_rows = upload_together(
            [_query_rows(batch, seqs) for seqs in (absorbed, expanded)], self.device
        )
        planned = self.backend.plan(batch.select(absorbed))
        if self._heads is not None:
            step = ExpandedStep(self._heads.plan(batch.select(expanded)), expanded_rows)
            return MlaPlan(planned, rows, [], index, step)
        requests = request_slices(batch, self.device)
        return MlaPlan(planned, rows, [requests[seq] for seq in expanded], index)

    def run(
        self, plan: MlaPlan, layer: int, query: MlaQuery, planes: Mapping[str, Tensor]
    ) -> Tensor:
        """Attention output of a layer, [rows, num_heads, value_dim]; zeros for padding rows."""
        selected = None
        if self.index is not None and plan.index is not None:
            assert query.index is not None
            selected = self.index.select(plan.index, query.index, planes)
        rows = plan.absorbed_rows
        if rows is None:
            return self._absorbed(plan, layer, query, planes, selected)
        out = query.q_nope.new_zeros(*query.q_nope.shape[:2], self._value_dim)
        if len(rows):
            absorbed = replace(query, q_nope=query.q_nope[rows], q_rope=query.q_rope[rows])
            out[rows] = self._absorbed(plan, layer, absorbed, planes, selected)
        if plan.by_heads is not None:
            out[plan.by_heads.rows] = self._by_heads(plan.by_heads, query, planes)
        for request in plan.expanded:
            expanded = self._expanded(request, query, planes)
            out[request.start : request.stop] = expanded.to(out.dtype)
        return out

    def _expands(self, batch: AttentionBatch, seq: int) -> bool:
        if self._path != "auto":
            return self._path == "expanded"
        q_len = int(batch.cu_seqlens_q[seq + 1] - batch.cu_seqlens_q[seq])
        # Decodes are absorbed: expanding every key for one query row is what MLA avoids.
        return q_len > 1 and self.costs.expanded_is_cheaper(q_len, int(batch.seq_lens_kv[seq]))

    def _absorbed(
        self,
        plan: MlaPlan,
        layer: int,
        query: MlaQuery,
        planes: Mapping[str, Tensor],
        selected: Tensor | None,
    ) -> Tensor:
        q = torch.cat((query.up.absorb(query.q_nope), query.q_rope), -1)
        latents = self.backend.run(plan.absorbed, layer, q, planes, selected=selected)
        return query.up.project_v(latents)

    def _by_heads(
        self, step: ExpandedStep, query: MlaQuery, planes: Mapping[str, Tensor]
    ) -> Tensor:
        """Attention of the expanded rows, heads by heads: [n, num_heads, value_dim]."""
        assert self._heads is not None
        q = torch.cat((query.q_nope[step.rows], query.q_rope[step.rows]), -1)
        return self._heads.run(step.plan, q, query.up.w_uk, query.up.w_uv, planes)

    def _expanded(
        self, request: RequestSlice, query: MlaQuery, planes: Mapping[str, Tensor]
    ) -> Tensor:
        """Attention of a request, chunk by chunk: [q_len, num_heads, value_dim] float32."""
        q = torch.cat((query.q_nope, query.q_rope), -1)[request.start : request.stop].float()
        q = q.mul_(self.spec.scale).transpose(0, 1).contiguous()
        num_heads, q_len = q.shape[:2]
        first = len(request.slots) - q_len  # position of the first query
        out = q.new_zeros(num_heads, q_len, self._value_dim)
        lse = q.new_full((num_heads, q_len, 1), -torch.inf)
        for begin in range(0, len(request.slots), self._chunk_keys):
            slots = request.slots[begin : begin + self._chunk_keys]
            end = begin + len(slots)
            keys, values = query.up.expand(read_plane(planes, "latent", slots).float())
            shared = read_plane(planes, "rope", slots).float().expand(num_heads, -1, -1)
            keys = torch.cat((keys, shared), -1).transpose(1, 2)
            step = max(1, MAX_SCORES // (num_heads * len(slots)))
            for start in range(max(0, begin - first), q_len, step):  # rows before see no key
                rows = slice(start, start + step)
                scores = q[:, rows] @ keys
                if end - 1 > first + start:
                    masked = request.key_positions[begin:end] > request.query_positions[rows, None]
                    scores.masked_fill_(masked, -torch.inf)
                chunk = block_attention_lse(scores, values)
                out[:, rows], lse[:, rows] = merge_state(out[:, rows], lse[:, rows], *chunk)
        return out.transpose(0, 1)

    def _measure(self) -> MlaCostModel:
        """Time both paths once and divide by their multiply-adds."""
        spec, on_cpu = self.spec, self.device.type == "cpu"
        rows, keys = (COST_ROWS, COST_KEYS) if on_cpu else (DEVICE_COST_ROWS, DEVICE_COST_KEYS)
        latent = spec.v_head_dim
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(self.device, spec.dtype)

        # scaled, since large scores would make softmax weights denormal, which are slow
        w_uk = random(spec.num_heads, self._nope_dim, latent) * latent**-0.5
        w_uv = random(spec.num_heads, latent, self._value_dim) * latent**-0.5
        up = UpProjection(
            w_uk,
            w_uv,
            lambda x: torch.matmul(x.transpose(0, 1), w_uk).transpose(0, 1),
            lambda x: torch.matmul(x.transpose(0, 1), w_uv).transpose(0, 1),
        )
        num_pages = -(-keys // spec.page_size)
        planes = {
            "latent": random(num_pages, spec.page_size, latent),
            "rope": random(num_pages, spec.page_size, spec.head_dim - latent),
        }
        table = PagedBlockTable.of([list(range(num_pages))], spec.page_size)
        batch = AttentionBatch.build([Extend(0, 0, keys - rows, rows)], table)
        query = MlaQuery(
            random(rows, spec.num_heads, self._nope_dim),
            random(rows, spec.num_heads, spec.head_dim - latent),
            up,
        )
        plan = MlaPlan(self.backend.plan(batch), None, [], None)
        expand: Callable[[], object]
        if self._heads is not None:
            [all_rows] = upload_together([_query_rows(batch, [0])], self.device)
            expanded_step = ExpandedStep(self._heads.plan(batch), all_rows)
            expand = partial(self._by_heads, expanded_step, query, planes)
        else:
            [request] = request_slices(batch, self.device)
            expand = partial(self._expanded, request, query, planes)
        absorbed, expanded = _best_seconds(
            partial(self._absorbed, plan, 0, query, planes, None),
            expand,
            wait=torch.cuda.synchronize if self.device.type == "cuda" else None,
        )
        # multiply-adds of a row or key in the up projection, and of a pair in attention
        up_count = spec.num_heads * latent * (self._nope_dim + self._value_dim)
        latent_pair = spec.num_heads * (spec.head_dim + latent)
        head_pair = spec.num_heads * (self._nope_dim + spec.head_dim - latent + self._value_dim)
        absorbed /= rows * up_count + rows * keys * latent_pair
        expanded /= keys * up_count + rows * keys * head_pair
        return MlaCostModel(
            absorbed_row=absorbed * up_count,
            absorbed_pair=absorbed * latent_pair,
            expanded_key=expanded * up_count,
            expanded_pair=expanded * head_pair,
        )


def _query_rows(batch: AttentionBatch, seqs: Sequence[int]) -> NDArray[np.int64]:
    """The query rows of some requests, in order: [n]."""
    begin, end = batch.cu_seqlens_q[:-1], batch.cu_seqlens_q[1:]
    rows = [np.arange(begin[seq], end[seq], dtype=np.int64) for seq in seqs]
    return np.concatenate([np.empty(0, np.int64), *rows])


def reason_not_expanded(spec: AttentionSpec) -> str | None:
    """None, or why a model can only use the absorbed path."""
    if spec.exact:
        return "exact=True: its bits differ from those of the absorbed path"
    if spec.sparse:
        return "sparse: it reads every key"
    if spec.soft_cap is not None:
        return f"soft_cap={spec.soft_cap}"
    if any(window is not None for window in spec.windows):
        return "it knows no window"
    return None


def block_attention_lse(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over a block of keys, with its log-sum-exp (LSE).

    Args:
        scores: [heads, rows, keys] float32, -inf where masked.
        values: [heads, keys, value_dim].

    Returns:
        output [heads, rows, value_dim] and LSE [heads, rows, 1]; 0 and -inf if all is masked.
    """
    row_max = scores.amax(-1, keepdim=True).clamp_min(MASKED_MAX)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    return (weights @ values) / row_sum.clamp_min(1e-30), row_max + row_sum.log()


def merge_state(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge the attention outputs and LSEs of two disjoint sets of keys.

    An LSE of -inf (no key) has weight 0; not both may be -inf.
    """
    merged = torch.logaddexp(lse, other_lse)
    return out * torch.exp(lse - merged) + other * torch.exp(other_lse - merged), merged


def _best_seconds(
    *calls: Callable[[], object], wait: Callable[[], object] | None = None
) -> list[float]:
    """The shortest time of each call in `COST_TRIALS` rounds, after a warm-up round.

    Args:
        wait: returns when a device that works by itself is done.
    """
    best = [math.inf] * len(calls)
    for trial in range(COST_TRIALS + 1):
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if wait is not None:
                wait()
            if trial:
                best[index] = min(best[index], time.perf_counter() - start)
    return best
