"""The two products inside exact attention, and whether their rows are independent here."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ramify.attention.exactness import FP32_ROW_MULTIPLE, Exactness, ProbeStore

# [..., rows, n] x [..., n, m] -> [..., rows, m], float32, rows a multiple of FP32_ROW_MULTIPLE
MatMul = Callable[[Tensor, Tensor], Tensor]

BATCHED, TILED = "batched", "tiled"
_PROBE_ROW_COUNTS = (8, 16, 24, 32, 64, 96, 128, 256, 504)
_CHUNK_ROWS = 4096  # a chunk of 512 tokens for 8 query heads per K/V head
_BATCHES = ((1, 1), (1, 3), (5, 1), (4, 2))  # requests, blocks


def choose_matmul(
    num_kv_heads: int, head_dim: int, block_keys: int, store: ProbeStore
) -> tuple[MatMul, Exactness]:
    """One call for all, if there a row's bits do not depend on the others; else tile by tile."""

    def probe() -> tuple[str, str]:
        failed = _batch_variant_cases(num_kv_heads, head_dim, block_keys)
        if not failed:
            return BATCHED, "rows agree at every count and batch tried"
        return TILED, f"batched: rows differ for {', '.join(failed)}"

    verdict = store.verdict(
        "attention matmul",
        (num_kv_heads, head_dim, block_keys),
        torch.float32,
        probe,
        strategies=(BATCHED, TILED),
    )
    return (torch.matmul if verdict.strategy == BATCHED else tiled_matmul), verdict


def tiled_matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """The product by calls of one shape: `FP32_ROW_MULTIPLE` rows against one matrix."""
    out = rows.new_empty(*rows.shape[:-1], matrix.shape[-1])
    flat_rows, flat_matrix = rows.flatten(0, -3), matrix.flatten(0, -3)
    for into, some, one in zip(out.flatten(0, -3), flat_rows, flat_matrix, strict=True):
        for at in range(0, some.shape[0], FP32_ROW_MULTIPLE):
            torch.mm(some[at : at + FP32_ROW_MULTIPLE], one, out=into[at : at + FP32_ROW_MULTIPLE])
    return out


def _batch_variant_cases(heads: int, dim: int, block_keys: int) -> list[str]:
    """What fails, tried on the shapes and layouts that attention uses."""
    draw = torch.Generator().manual_seed(0)
    requests, blocks = (max(sizes) for sizes in zip(*_BATCHES, strict=True))
    num_rows = max(_PROBE_ROW_COUNTS) + FP32_ROW_MULTIPLE

    def random(*shape: int) -> Tensor:
        return torch.randn(requests, heads, blocks, *shape, generator=draw)

    queries, keys, values = random(num_rows, dim), random(block_keys, dim), random(block_keys, dim)
    weights = random(num_rows, block_keys).exp_()
    failed = ["a whole chunk"] if _chunk_differs(heads, dim, block_keys, draw) else []
    for name, rows, matrix in (
        ("scores", queries, keys.transpose(-1, -2)),
        ("values", weights, values),
    ):
        whole = torch.matmul(rows, matrix)
        for num_requests, num_blocks in _BATCHES:
            for count in _PROBE_ROW_COUNTS:
                start = (count // FP32_ROW_MULTIPLE) % 2 * FP32_ROW_MULTIPLE
                part = (slice(num_requests), slice(None), slice(num_blocks))
                at = (*part, slice(start, start + count))
                # contiguous and transposed as in a step: layout decides which kernel runs
                other = matrix.transpose(-1, -2)[part].contiguous().transpose(-1, -2)
                other = other if name == "scores" else matrix[part].contiguous()
                found = torch.matmul(rows[at].contiguous(), other)
                if not torch.equal(found, whole[at]):
                    failed.append(f"{name} at {count} rows of {num_requests}x{num_blocks}")
    return failed


def _chunk_differs(heads: int, dim: int, block_keys: int, draw: torch.Generator) -> bool:
    """Whether the first or last rows of a large chunk get other bits than by themselves."""
    queries = torch.randn(1, heads, 1, _CHUNK_ROWS, dim, generator=draw)
    keys = torch.randn(1, heads, 1, block_keys, dim, generator=draw)
    values = torch.randn(1, heads, 1, block_keys, dim, generator=draw)
    scores = torch.matmul(queries, keys.transpose(-1, -2))
    weights = scores.softmax(-1)
    mixed = torch.matmul(weights, values)
    for place in (slice(0, FP32_ROW_MULTIPLE), slice(_CHUNK_ROWS - FP32_ROW_MULTIPLE, _CHUNK_ROWS)):
        some = (..., place, slice(None))
        alone = torch.matmul(queries[some].contiguous(), keys.transpose(-1, -2))
        mixed_alone = torch.matmul(weights[some].contiguous(), values)
        if not (torch.equal(alone, scores[some]) and torch.equal(mixed_alone, mixed[some])):
            return True
    return False
