"""The executor of an engine's steps: `build_executor` by its options, `step_executor` by its device."""

from __future__ import annotations

from ramify.attention.backend import BackendChoice
from ramify.attention.backends.flashinfer import FlashInferBackend, reason_not_captured
from ramify.attention.mla import MlaAttention
from ramify.attention.paged import PagedBackend
from ramify.attention.spec import AttentionSpec
from ramify.config import ResolvedConfig
from ramify.engine.execution.decode_sources import BackendSource, DecodeSource, TorchSource
from ramify.engine.execution.device_executor import DeviceExecutor
from ramify.engine.execution.local_executor import LocalExecutor
from ramify.engine.execution.ranks.rank_runner import LeadRunner
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.execution.sampler import rejection_sample, sample_from_cdf
from ramify.engine.execution.staged_upload import CudaStream
from ramify.engine.execution.step_graphs import CudaGraphs, DecodeGraphs
from ramify.engine.step import Executor
from ramify.engine.threaded_executor import ThreadedExecutor
from ramify.errors import ConfigError


def step_executor(
    runner: ModelRunner, *, by_rejection: bool = False, decode: DecodeGraphs | None = None
) -> Executor:
    """The executor of a runner's steps: NumPy samples on a CPU, torch or Triton on a device.

    Args:
        by_rejection: draft tokens are accepted by rejection sampling.
        decode: runs decode steps, on a device only.
    """
    if runner.pool.device.type == "cpu":
        return LocalExecutor(runner, rejection_sample if by_rejection else sample_from_cdf)
    return DeviceExecutor(runner, by_rejection=by_rejection, decode=decode)


def build_executor(
    runner: ModelRunner, config: ResolvedConfig, spec: AttentionSpec, attention: BackendChoice
) -> Executor:
    """The executor that runs the steps of an engine as its options say.

    Raises:
        ConfigError: `decode_graphs` with a model or attention that cannot be captured.
    """
    requested = config.requested
    by_rejection = requested.speculative.speculative_sampling == "rejection"
    executor: Executor
    if isinstance(runner, LeadRunner):  # rank 0 samples on the host
        executor = LocalExecutor(runner, rejection_sample if by_rejection else sample_from_cdf)
    else:
        decode = None
        if requested.model.decode_graphs:
            decode = _decode_graphs(runner, config, spec, attention)
        executor = step_executor(runner, by_rejection=by_rejection, decode=decode)
    is_on_cpu = runner.pool.device.type == "cpu"
    return (
        ThreadedExecutor(executor)
        if is_on_cpu and requested.scheduler.overlap == "on"
        else executor
    )


def _decode_graphs(
    runner: ModelRunner, config: ResolvedConfig, spec: AttentionSpec, attention: BackendChoice
) -> DecodeGraphs:
    """Graphs over the plans of Triton's kernels or FlashInfer's, or over attention in torch operations."""
    pool, num_rows = runner.pool, config.max_num_seqs
    if (reason := runner.model.reason_not_captured) is not None:
        raise ConfigError(f"decode_graphs=True: {reason}; leave decode_graphs out")
    source: DecodeSource
    max_pages = config.max_table_pages
    if attention.name == "triton":
        source = BackendSource(runner.backend, pool)
    elif attention.name == "flashinfer" and reason_not_captured(spec) is None:
        source = BackendSource(captured_attention(runner.backend, max_pages), pool)
    else:
        reason = TorchSource.supports(spec)
        if reason is not None:
            raise ConfigError(f"decode_graphs=True: {reason}; leave decode_graphs out")
        source = TorchSource(spec, pool, num_rows=num_rows, max_pages=max_pages)
    graphs = CudaGraphs(pool.device)
    return DecodeGraphs(runner, source, graphs, CudaStream(), num_rows=num_rows)


def captured_attention(backend: PagedBackend, max_pages: int) -> PagedBackend:
    """FlashInfer's attention, of latents too, for decode steps that graphs capture.

    Args:
        max_pages: of a request.
    """
    of_latents = backend if isinstance(backend, MlaAttention) else None
    inner = backend if of_latents is None else of_latents.backend
    assert isinstance(inner, FlashInferBackend)
    captured = inner.captured(max_pages)
    return captured if of_latents is None else of_latents.over(captured)
