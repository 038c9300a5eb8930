"""Embeddings of prompts: the options of such a request, and the vector of its output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ramify.outputs import RequestOutput
from ramify.params import SamplingParams

# The token after the prompt costs a row of the LM head, and nothing else.
EMBEDDING_PARAMS = SamplingParams(max_tokens=1, ignore_eos=True, prompt_embedding=True)


def unit_embedding(output: RequestOutput, num_dims: int | None = None) -> NDArray[np.float32]:
    """The prompt's embedding, scaled to length 1.

    Args:
        num_dims: keep the first dimensions only, of a model that was trained for it (Matryoshka).

    Raises:
        Exception: the request's own error, if it failed.
    """
    if output.error is not None:
        raise output.error
    assert output.prompt_embedding is not None
    vector = np.frombuffer(output.prompt_embedding, np.float32)[:num_dims]
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector if length == 0 else (vector / length).astype(np.float32)
