"""Graphs of decode steps: each bucket of sizes is captured once and replayed with new inputs.

What a graph has captured it repeats: operations, addresses, shapes and Python values. So all that
differs between two steps of a bucket is in tensors of fixed addresses, which one upload fills.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.engine.execution.decode_sources import DecodeSource
from ramify.engine.execution.host_copies import to_device
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.execution.staged_upload import CopyStream, StagedUpload
from ramify.engine.step import StepPlan
from ramify.models.ops.protocol import ForwardStep

MAX_GRAPHS = 48  # the bucket that was not used for longest is captured again when it comes back
NUM_INPUTS = 3  # token ids, positions, slots
ROW_STEP = 8  # buckets are 1, 2, 4 and the multiples of it

Outputs = tuple[Tensor, ...]


class CapturedStep(Protocol):
    """A captured function; its inputs are in the tensors that it read when it was captured."""

    def replay(self) -> Outputs:
        """Run it again; returns the outputs of `capture`, with new values."""


class GraphDevice(Protocol):
    """Captures functions of a device."""

    def capture(self, run: Callable[[], Outputs]) -> CapturedStep:
        """Capture a function that neither waits for the device nor depends on Python values that change."""

    def drop(self) -> None:
        """Called before a captured function is dropped: wait until none is running."""


class CudaGraphs:
    """`torch.cuda.CUDAGraph`s that share one memory pool: outputs hold until the next replay of any."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        # One for all, or memory is not shared; torch's own is on the device of the process's first capture.
        self._stream = torch.cuda.Stream(device)

    def capture(self, run: Callable[[], Outputs]) -> CapturedStep:
        """See `GraphDevice.capture`; runs the function first, which loads its kernels."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Not "global": another engine of this process may allocate meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            outputs = run()
        return _CudaStep(graph, outputs)

    def drop(self) -> None:
        """See `GraphDevice.drop`."""
        torch.cuda.synchronize(self._device)


class _CudaStep:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Outputs) -> None:
        self._graph, self._outputs = graph, outputs

    def replay(self) -> Outputs:
        """See `CapturedStep.replay`."""
        self._graph.replay()
        return self._outputs


class DecodeGraphs:
    """Runs decode steps of a runner's model by graphs, captured when a bucket first comes.

    Args:
        source: of the attention.
        graphs: captures them.
        num_rows: most requests of a step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        source: DecodeSource,
        graphs: GraphDevice,
        stream: CopyStream,
        *,
        num_rows: int,
        max_graphs: int = MAX_GRAPHS,
    ) -> None:
        self._runner, self._source, self._graphs = runner, source, graphs
        self._num_rows, self._max_graphs, self._model = num_rows, max_graphs, runner.model
        self._size = row_bucket(num_rows, runner.row_multiple)
        num_words = NUM_INPUTS * self._size + source.max_words
        self._upload = StagedUpload(num_words, runner.pool.device, stream)
        self._inputs = self._upload.on_device[: NUM_INPUTS * self._size].view(NUM_INPUTS, -1)
        self._captured = OrderedDict[Hashable, CapturedStep]()  # the one not used for longest first
        self.num_captured = self.num_replayed = 0

    def can_run(self, plan: StepPlan) -> bool:
        """Whether a step is a row of each request, each sampled from, and no more than that."""
        num_rows = plan.batch.num_tokens
        return (
            0 < num_rows == plan.batch.num_seqs == len(plan.samples) <= self._num_rows
            and not (plan.prompt_logprobs or plan.embeddings)
            and plan.request_ids == tuple([spec.request_id for spec in plan.samples])
        )

    def run(self, plan: StepPlan, late_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden rows [B, hidden_size], logits [B, vocab_size], and whether hidden rows are finite [B].

        They hold until the next step.

        Args:
            late_ids: see `ModelRunner.forward`.
        """
        if self._runner.model is not self._model:  # new weights
            self._forget_graphs(0)
            self._model = self._runner.model
        num_rows = plan.batch.num_tokens
        bucket = row_bucket(num_rows, self._runner.row_multiple)
        try:
            key, words = self._source.update(plan, bucket)
            self._send_inputs(plan, bucket, words, late_ids)
        except BaseException:
            self._source.forget()
            raise
        step = self._captured.pop((bucket, key), None)
        if step is None:
            self._forget_graphs(self._max_graphs - 1)
            step = self._graphs.capture(lambda: self._forward(bucket, key))
            self.num_captured += 1
        self._captured[bucket, key] = step
        hidden, logits, are_finite = step.replay()
        self.num_replayed += 1
        return hidden[:num_rows], logits[:num_rows], are_finite[:num_rows]

    def _forward(self, bucket: int, key: Hashable) -> Outputs:
        ids, positions, slots = (words[:bucket] for words in self._inputs)
        attention = self._source.attention(key, positions, slots)
        hidden = self._model.forward(ids, ForwardStep(positions, attention))
        return hidden, self._model.logits(hidden), finite_rows(hidden)

    def _send_inputs(
        self, plan: StepPlan, bucket: int, extra: NDArray[np.int64], late_ids: Tensor | None
    ) -> None:
        """Upload token ids, positions and slots, and the words of the source, in one copy."""
        begin, num_rows, pool = NUM_INPUTS * self._size, plan.batch.num_tokens, self._runner.pool
        words = self._upload.fill()
        inputs = words[:begin].reshape(NUM_INPUTS, -1)
        inputs[0, :num_rows], inputs[1, :num_rows] = plan.token_ids, plan.batch.positions
        inputs[2, :num_rows] = plan.batch.slot_mapping
        inputs[:2, num_rows:bucket] = 0
        inputs[2, num_rows:bucket] = pool.padding_page * pool.page_size
        words[begin : begin + len(extra)] = extra
        self._upload.send(begin + len(extra))
        self._source.receive(self._upload.on_device[begin : begin + len(extra)])
        if late_ids is not None:
            rows = [late.row for late in plan.late_tokens]
            if rows == [*range(len(rows))]:
                self._inputs[0, : len(rows)].copy_(late_ids)
            else:
                at = to_device(np.array(rows, np.int64), pool.device)
                self._inputs[0].index_copy_(0, at, late_ids)

    def _forget_graphs(self, num_kept: int) -> None:
        if len(self._captured) > num_kept:
            self._graphs.drop()
        while len(self._captured) > num_kept:
            self._captured.popitem(last=False)


def finite_rows(hidden: Tensor) -> Tensor:
    """Whether all of each row [T, hidden_size] is finite: [T] bool."""
    return hidden.isfinite().all(-1)


def row_bucket(num_rows: int, multiple: int = 1) -> int:
    """Rows of the graph for a step: 1, 2, 4 or a multiple of 8, and of `multiple`."""
    bucket = 1 << max(0, num_rows - 1).bit_length()
    if num_rows > ROW_STEP:
        bucket = -(-num_rows // ROW_STEP) * ROW_STEP
    return -(-bucket // multiple) * multiple
