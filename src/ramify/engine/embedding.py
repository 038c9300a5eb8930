"""Embeddings of prompts: pooling of hidden states, the options of a request, the vector of its output."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from ramify.outputs import RequestOutput
from ramify.params import PoolingMode, SamplingParams


def embedding_params(pooling: PoolingMode) -> SamplingParams:
    """The options of a request for a prompt's embedding and no output token."""
    return SamplingParams(max_tokens=0, prompt_embedding=True, pooling=pooling)


class PromptPooling:
    """Sum of a prompt's hidden states, as its steps compute them.

    Rows are added one by one in float64: the bits do not depend on how the prompt was chunked.
    """

    def __init__(self, mode: PoolingMode, num_tokens: int) -> None:
        stop = 1 if mode == "cls" else num_tokens
        self._positions = range(num_tokens - 1 if mode == "last" else 0, stop)
        self._num_added = 0
        self._sum: NDArray[np.float64] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every row is added."""
        return self._num_added == len(self._positions)

    def wanted(self, begin: int, end: int) -> range:
        """Positions, of a step's begin..end-1, whose rows come next."""
        missing = self._positions[self._num_added :]
        return range(max(begin, missing.start), min(end, missing.stop))

    def add(self, rows: NDArray[np.float32]) -> None:
        """Add the rows [R, hidden_size] of `wanted`."""
        total = np.zeros(rows.shape[1]) if self._sum is None else self._sum
        for row in rows:
            total = total + row
        self._sum, self._num_added = total, self._num_added + len(rows)

    def embedding(self) -> array[float] | None:
        """The mean of the rows [hidden_size] float32; None if one is missing."""
        if self._sum is None or not self.is_complete:
            return None
        mean = (self._sum / self._num_added).astype(np.float32)
        return array("f", mean.tobytes())


def embedding_of(
    output: RequestOutput, *, num_dims: int | None = None, is_normalised: bool = True
) -> NDArray[np.float32]:
    """The prompt's embedding.

    Args:
        num_dims: keep the first dimensions only, of a model that was trained for it (Matryoshka).
        is_normalised: scale what is kept to length 1.

    Raises:
        Exception: the request's own error, if it failed.
    """
    if output.error is not None:
        raise output.error
    assert output.prompt_embedding is not None
    vector = np.frombuffer(output.prompt_embedding, np.float32)[:num_dims]
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not is_normalised or length == 0:
        return vector
    return (vector / length).astype(np.float32)
