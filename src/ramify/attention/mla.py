"""Latent attention (DeepSeek-V2, 2024) over cached latents, by either of its two paths.

Absorbed: `kv_b` goes into the query and the output, and attention reads one latent per token for
all heads: any backend can do it. Expanded: the latents of a request are read chunk by chunk, keys
and values of every head computed from them, and the chunks' results merged by their log-sum-exp.
Per query and key absorbed costs `2 * latent + rope` multiply-adds a head and expanded
`nope + rope + value`, but expanded first pays for every key: long prefills gain. The bits differ,
so `exact` is absorbed throughout; otherwise a request takes what is cheaper by a count of the
multiply-adds of either path, at a speed of each that is measured once per model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.exactness import Exactness
from ramify.attention.gather import RequestSlice, gather_plane_f32, request_slices
from ramify.attention.sparse_index import IndexPlan, IndexQuery, SparseIndex
from ramify.attention.spec import AttentionSpec
from ramify.errors import ConfigError
from ramify.kv.block_table import PagedBlockTable

CHUNK_KEYS = 512  # at fixed positions; 128 heads of 128 + 128 are 67 MB of float32
MAX_SCORES = 1 << 22  # float32 scores in flight, 16 MB
COST_ROWS, COST_KEYS, COST_TRIALS = 64, 256, 5
MASKED_MAX = -1e30  # a maximum over nothing: finite, so that differences of maxima stay finite

MlaPath = Literal["auto", "absorbed", "expanded"]


@dataclass(frozen=True, slots=True)
class UpProjection:
    """`kv_b` of one layer by head, and how it is applied to queries and outputs."""

    w_uk: Tensor  # [num_heads, nope_dim, latent_dim]
    w_uv: Tensor  # [num_heads, latent_dim, value_dim]
    absorb: Callable[[Tensor], Tensor]  # [T, num_heads, nope_dim] -> [T, num_heads, latent_dim]
    project_v: Callable[[Tensor], Tensor]  # [T, num_heads, latent_dim] -> [T, num_heads, value_dim]

    def expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """[n, latent_dim] float32 -> keys and values [num_heads, n, nope_dim or value_dim]."""
        latents = latents.to(self.w_uk.dtype)
        keys = torch.matmul(latents, self.w_uk.transpose(1, 2))
        return keys.float(), torch.matmul(latents, self.w_uv).float()


@dataclass(frozen=True, slots=True)
class MlaQuery:
    """What a layer asks of latent attention; rows beyond the batch are padding."""

    q_nope: Tensor  # [rows, num_heads, nope_dim]
    q_rope: Tensor  # [rows, num_heads, rope_dim]
    up: UpProjection
    index: IndexQuery | None = None


@dataclass(frozen=True, slots=True)
class MlaCostModel:
    """Seconds of either path per unit of what it is proportional to."""

    absorbed_row: float
    absorbed_pair: float  # of a query row and a key
    expanded_key: float
    expanded_pair: float

    def expanded_is_cheaper(self, q_len: int, kv_len: int) -> bool:
        """For one request in one layer."""
        absorbed = q_len * (self.absorbed_row + kv_len * self.absorbed_pair)
        return kv_len * (self.expanded_key + q_len * self.expanded_pair) < absorbed


@dataclass(frozen=True, slots=True)
class MlaPlan:
    """One step: what the backend does, and the requests that are expanded."""

    absorbed: Any  # the backend's own plan
    absorbed_rows: Tensor | None  # rows of the queries that it is for, None: all
    expanded: list[RequestSlice]
    index: IndexPlan | None


class MlaAttention:
    """Attention over `latent` and `rope` planes, with the interface of a backend but `MlaQuery`.

    Args:
        backend: computes the absorbed path; made with the same `spec`.
        spec: `kind="mla"`.
        nope_dim, value_dim: of a head; they need not be equal.
        index: chooses the keys of each query, for `spec.sparse`.
        path: `absorbed` and `expanded` are for tests and benchmarks.
        chunk_keys: keys that are expanded at a time.
        costs: of either path; None measures them when they are first asked for.

    Raises:
        ConfigError: `path` cannot serve `spec`: expanded attention is not exact, reads every key
            and knows no window or soft cap; or `spec` is of another kind of model.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        *,
        nope_dim: int,
        value_dim: int,
        index: SparseIndex | None = None,
        path: MlaPath = "auto",
        chunk_keys: int = CHUNK_KEYS,
        costs: MlaCostModel | None = None,
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
        self.backend, self.spec, self.index = backend, spec, index
        self._nope_dim, self._value_dim = nope_dim, value_dim
        self._path: MlaPath = "absorbed" if reason is not None else path
        self._chunk_keys = chunk_keys
        self._costs = costs

    @property
    def costs(self) -> MlaCostModel:
        """Measured on first use: a few calls of either path on random values."""
        if self._costs is None:
            self._costs = self._measure()
        return self._costs

    def exactness(self) -> list[Exactness]:
        """How the backend's products and the index compute, and why."""
        index = self.index.exactness() if self.index is not None else []
        return [*self.backend.exactness(), *index]

    def plan(self, batch: AttentionBatch) -> MlaPlan:
        """Which request takes which path, and the backend's plan; once per step."""
        index = None if self.index is None else self.index.plan(batch)
        device = torch.device("cpu") if self.index is None else self.index.device
        chosen = [seq for seq in range(batch.num_seqs) if self._expands(batch, seq)]
        if not chosen:
            return MlaPlan(self.backend.plan(batch), None, [], index)
        spans = request_slices(batch, device)
        others = [seq for seq in range(batch.num_seqs) if seq not in set(chosen)]
        rows = [np.arange(spans[seq].start, spans[seq].stop) for seq in others]
        return MlaPlan(
            self.backend.plan(batch.select(others)),
            torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *rows])),
            [spans[seq] for seq in chosen],
            index,
        )

    def run(
        self, plan: MlaPlan, layer: int, query: MlaQuery, planes: Mapping[str, Tensor]
    ) -> Tensor:
        """Attention output of one layer, [rows, num_heads, value_dim]; zeros for padding rows."""
        selected = None
        if self.index is not None and plan.index is not None:
            assert query.index is not None
            selected = self.index.select(plan.index, query.index, planes)
        rows = plan.absorbed_rows
        if rows is None:
            return self._absorbed(plan, layer, query, planes, selected)
        out = query.q_nope.new_zeros(*query.q_nope.shape[:2], self._value_dim)
        if len(rows):
            part = replace(query, q_nope=query.q_nope[rows], q_rope=query.q_rope[rows])
            out[rows] = self._absorbed(plan, layer, part, planes, selected)
        for span in plan.expanded:
            out[span.start : span.stop] = self._expanded(span, query, planes).to(out.dtype)
        return out

    def _expands(self, batch: AttentionBatch, seq: int) -> bool:
        if self._path != "auto":
            return self._path == "expanded"
        q_len = int(batch.cu_seqlens_q[seq + 1] - batch.cu_seqlens_q[seq])
        # decoding is absorbed: expanding every key for one row is what the latent is there to avoid
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
        return query.up.project_v(
            self.backend.run(plan.absorbed, layer, q, planes, selected=selected)
        )

    def _expanded(
        self, request: RequestSlice, query: MlaQuery, planes: Mapping[str, Tensor]
    ) -> Tensor:
        """[q_len, num_heads, value_dim] float32, chunk by chunk from position 0."""
        q = torch.cat((query.q_nope, query.q_rope), -1)[request.start : request.stop].float()
        q = q.mul_(self.spec.scale).transpose(0, 1).contiguous()
        num_heads, q_len = q.shape[:2]
        first = len(request.slots) - q_len  # position of the first query
        out = q.new_zeros(num_heads, q_len, self._value_dim)
        lse = q.new_full((num_heads, q_len, 1), -torch.inf)
        for begin in range(0, len(request.slots), self._chunk_keys):
            slots = request.slots[begin : begin + self._chunk_keys]
            end = begin + len(slots)
            keys, values = query.up.expand(gather_plane_f32(planes, "latent", slots))
            shared = gather_plane_f32(planes, "rope", slots).expand(num_heads, -1, -1)
            keys = torch.cat((keys, shared), -1).transpose(1, 2)
            step = max(1, MAX_SCORES // (num_heads * len(slots)))
            for start in range(max(0, begin - first), q_len, step):  # earlier rows see nothing
                rows = slice(start, start + step)
                scores = q[:, rows] @ keys
                if end - 1 > first + start:
                    unseen = request.key_positions[begin:end] > request.query_positions[rows, None]
                    scores.masked_fill_(unseen, -torch.inf)
                found, its_lse = block_attention_lse(scores, values)
                out[:, rows], lse[:, rows] = merge_state(out[:, rows], lse[:, rows], found, its_lse)
        return out.transpose(0, 1)

    def _measure(self) -> MlaCostModel:
        spec, keys = self.spec, COST_KEYS
        latent = spec.v_head_dim
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw).to(spec.dtype)

        # wild scores would make weights denormal, and denormals are slow
        up_keys = random(spec.num_heads, self._nope_dim, latent) * latent**-0.5
        up_values = random(spec.num_heads, latent, self._value_dim) * latent**-0.5
        up = UpProjection(
            up_keys,
            up_values,
            lambda x: torch.matmul(x.transpose(0, 1), up_keys).transpose(0, 1),
            lambda x: torch.matmul(x.transpose(0, 1), up_values).transpose(0, 1),
        )
        num_pages = -(-keys // spec.page_size)
        planes = {
            "latent": random(num_pages, spec.page_size, latent),
            "rope": random(num_pages, spec.page_size, spec.head_dim - latent),
        }
        table = PagedBlockTable.of([list(range(num_pages))], spec.page_size)
        rows = COST_ROWS
        batch = AttentionBatch.build([Extend(0, 0, keys - rows, rows)], table)
        [span] = request_slices(batch, torch.device("cpu"))
        query = MlaQuery(
            random(rows, spec.num_heads, self._nope_dim),
            random(rows, spec.num_heads, spec.head_dim - latent),
            up,
        )
        plan = MlaPlan(self.backend.plan(batch), None, [], None)
        absorbed, expanded = _best_seconds(
            partial(self._absorbed, plan, 0, query, planes, None),
            partial(self._expanded, span, query, planes),
        )
        # multiply-adds: of one row or one key in the up projection, of one pair in attention
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


def reason_not_expanded(spec: AttentionSpec) -> str | None:
    """None, or why a model is served by the absorbed path alone."""
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
    """Softmax-weighted values over one block of keys and the log of its sum of exponentials.

    Args:
        scores: [heads, rows, keys] float32, -inf where a row does not look.
        values: [heads, keys, value_dim].

    Returns:
        [heads, rows, value_dim] and [heads, rows, 1]; zeros and -inf for a row that sees nothing.
    """
    peak = scores.amax(-1, keepdim=True).clamp_min(MASKED_MAX)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    return (weights @ values) / total.clamp_min(1e-30), peak + total.log()


def merge_state(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Two results over disjoint keys as one over all of them, with its log-sum-exp.

    Rows that saw nothing (-inf) count for nothing; at least one of the two must have seen a key.
    """
    joint = torch.logaddexp(lse, other_lse)
    return out * torch.exp(lse - joint) + other * torch.exp(other_lse - joint), joint


def _best_seconds(*calls: Callable[[], object]) -> list[float]:
    """The shortest of `COST_TRIALS` of each, in turns, after one that does not count."""
    best = [math.inf] * len(calls)
    for trial in range(COST_TRIALS + 1):
        for number, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if trial:
                best[number] = min(best[number], time.perf_counter() - start)
    return best
