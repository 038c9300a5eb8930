"""Work on blocks of rows by threads of our own: what packs and rounds weights as they load.

Torch's threads wait for each other after each operation, for milliseconds where a core is busy. Here a
thread goes on with the next block. The work must be numpy's, or torch's on so few elements that it takes
one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# Torch computes so many elements in one thread.
ONE_THREAD_ELEMENTS = 1 << 15


def for_blocks(function: Callable[[int, int], None], count: int, size: int) -> None:
    """Call `function(start, end)` for all blocks of `size` of `count` rows, by as many threads as torch has."""
    starts, num_threads = range(0, count, size), torch.get_num_threads()
    if num_threads == 1 or len(starts) < 2:
        for start in starts:
            function(start, min(count, start + size))
        return
    # A thread has an inference mode of its own; tensors made in that mode are written to in it only.
    in_mode = torch.inference_mode(torch.is_inference_mode_enabled())(function)
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in pool.map(lambda start: in_mode(start, min(count, start + size)), starts):
            pass
