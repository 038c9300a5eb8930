"""The two matmuls of the `blocked` backend: batch-invariant as probed on this machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ramify.attention.exactness import BATCHED, FP32_ROW_MULTIPLE, Exactness, ProbeStore

# [..., rows, n] x [..., n, m] -> [..., rows, m], float32, rows a multiple of FP32_ROW_MULTIPLE
MatMul = Callable[[Tensor, Tensor], Tensor]

TILED = "tiled"
_PROBE_ROW_COUNTS = (8, 16, 24, 32, 64, 96, 128, 256, 504)
_CHUNK_ROWS = 4096  # a prefill chunk of 512 tokens, 8 query heads per K/V head
_BATCHES = ((1, 1), (1, 3), (5, 1), (4, 2))  # requests, blocks


def choose_matmul(
    num_kv_heads: int, head_dim: int, block_keys: int, store: ProbeStore
) -> tuple[MatMul, Exactness]:
    """`torch.matmul` if the probe finds its rows independent of each other; else `tiled_matmul`."""

    def probe() -> tuple[str, str]:
        cases = _batch_variant_cases(num_kv_heads, head_dim, block_keys)
        if not cases:
            return BATCHED, "rows agree at every count and batch tried"
        return TILED, f"batched: rows differ for {', '.join(cases)}"

    verdict = store.verdict(
        "attention matmul",
        (num_kv_heads, head_dim, block_keys),
        torch.float32,
        probe,
        strategies=(BATCHED, TILED),
    )
    return (torch.matmul if verdict.strategy == BATCHED else tiled_matmul), verdict


def tiled_matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """Matmul by calls of one shape: `FP32_ROW_MULTIPLE` rows times one matrix."""
    out = rows.new_empty(*rows.shape[:-1], matrix.shape[-1])
    batch = (tensor.flatten(0, -3) for tensor in (out, rows, matrix))
    for out_2d, rows_2d, matrix_2d in zip(*batch, strict=True):
        for begin in range(0, rows_2d.shape[0], FP32_ROW_MULTIPLE):
            tile = slice(begin, begin + FP32_ROW_MULTIPLE)
            torch.mm(rows_2d[tile], matrix_2d, out=out_2d[tile])
    return out


def _batch_variant_cases(heads: int, dim: int, block_keys: int) -> list[str]:
    """Descriptions of the cases where rows differ, among the shapes and layouts of attention."""
    draw = torch.Generator().manual_seed(0)
    requests, blocks = (max(sizes) for sizes in zip(*_BATCHES, strict=True))
    num_rows = max(_PROBE_ROW_COUNTS) + FP32_ROW_MULTIPLE

    def random(*shape: int) -> Tensor:
        return torch.randn(requests, heads, blocks, *shape, generator=draw)

    queries, keys, values = random(num_rows, dim), random(block_keys, dim), random(block_keys, dim)
    weights = random(num_rows, block_keys).exp_()
    cases = ["a whole chunk"] if _chunk_differs(heads, dim, block_keys, draw) else []
    for name, rows, matrix in (
        ("scores", queries, keys.transpose(-1, -2)),
        ("values", weights, values),
    ):
        whole = torch.matmul(rows, matrix)
        for num_requests, num_blocks in _BATCHES:
            for count in _PROBE_ROW_COUNTS:
                start = (count // FP32_ROW_MULTIPLE) % 2 * FP32_ROW_MULTIPLE
                part = (slice(num_requests), slice(None), slice(num_blocks))
                part_rows = (*part, slice(start, start + count))
                # contiguous and transposed as in a step, since the layout selects the kernel
                other = matrix.transpose(-1, -2)[part].contiguous().transpose(-1, -2)
                other = other if name == "scores" else matrix[part].contiguous()
                product = torch.matmul(rows[part_rows].contiguous(), other)
                if not torch.equal(product, whole[part_rows]):
                    cases.append(f"{name} at {count} rows of {num_requests}x{num_blocks}")
    return cases


def _chunk_differs(heads: int, dim: int, block_keys: int, draw: torch.Generator) -> bool:
    """Whether the first or last rows of a large chunk differ from the same rows alone."""
    queries = torch.randn(1, heads, 1, _CHUNK_ROWS, dim, generator=draw)
    keys = torch.randn(1, heads, 1, block_keys, dim, generator=draw)
    values = torch.randn(1, heads, 1, block_keys, dim, generator=draw)
    scores = torch.matmul(queries, keys.transpose(-1, -2))
    weights = scores.softmax(-1)
    out = torch.matmul(weights, values)
    for rows in (slice(0, FP32_ROW_MULTIPLE), slice(_CHUNK_ROWS - FP32_ROW_MULTIPLE, _CHUNK_ROWS)):
        index = (..., rows, slice(None))
        scores_alone = torch.matmul(queries[index].contiguous(), keys.transpose(-1, -2))
        out_alone = torch.matmul(weights[index].contiguous(), values)
        if not (torch.equal(scores_alone, scores[index]) and torch.equal(out_alone, out[index])):
            return True
    return False
