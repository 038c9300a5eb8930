"""DeepSeek models through the executor of a device, on the CPU: answers of the engine of the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify import LLM, SamplingParams
from ramify.attention.backends.eager import EagerBackend
from ramify.attention.backends.triton import TritonBackend
from ramify.attention.batch import AttentionBatch
from ramify.attention.device_probe import batch_variant_requests
from ramify.attention.exactness import Exactness
from ramify.attention.expanded_heads import ExpandedHeads
from ramify.attention.mla import MlaAttention, MlaCostModel
from ramify.attention.paged_index import PagedIndex
from ramify.attention.spec import AttentionSpec
from ramify.engine.execution.decode_sources import BackendSource
from ramify.engine.execution.device_executor import DeviceExecutor
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.execution.step_graphs import DecodeGraphs
from ramify.kv.pool import KVPool
from ramify.models.kv_cache_spec import attention_spec, build_attention, kv_layout
from ramify.models.loader import load_model
from ramify.outputs import RequestOutput
from tests.cpu.attention_cases import spec_of
from tests.cpu.engine_cases import Engine, Model, Sizes, assert_idle, differences
from tests.cpu.recorded_graphs import LateStream, RecordedGraphs
from tests.cpu.test_device import OTHER, PAGE, OneDevice, plan_of_two
from tests.cpu.test_device_executor import on_device

pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")

CPU = torch.device("cpu")
EXPANDED_IS_FREE = MlaCostModel(0.0, 1.0, 0.0, 0.0)
# No group of experts: a router's choice is read by the host, and the stand-in has no values.
DENSE: dict[str, dict[str, Any]] = {
    "v3": {"first_k_dense_replace": 2},
    "v32": {"mlp_layer_types": ["dense", "dense"], "index_topk": 8},
}
SMALL: dict[str, Any] = {"num_hidden_layers": 2}
CLOSE = 5e-5  # tolerance of log probabilities, whose standard deviation is about 1


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny DeepSeek checkpoints by name: of V2, V3 and V3.2 with experts, or dense."""
    pytest.importorskip("transformers", reason="writes the checkpoint; the extra ramify[hf]")
    from tests.cpu.deepseek_cases import save_oracle

    paths: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name not in paths:
            base, _, dense = name.partition(" ")
            changes = SMALL | (DENSE[base] if dense else {})
            if base == "v32" and not dense:
                changes = changes | {"mlp_layer_types": ["dense", "sparse"], "index_topk": 8}
            paths[name] = tmp_path_factory.mktemp(name.replace(" ", "-"))
            save_oracle(base, paths[name], **changes)
        return paths[name]

    return path_of


def engine(path: Path, **options: Any) -> LLM:
    return LLM(path, dtype="float32", kv_cache_tokens=512, page_size=PAGE, **options)


def prompts() -> list[list[int]]:
    """Two that share a prefix, and one that does not."""
    return [[*range(3, 24)], [*range(3, 20), 40, 41], [*range(50, 61)]]


def assert_same_answers(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """The same tokens, with log probabilities that are close."""
    for output, reference in zip(outputs, expected, strict=True):
        assert output.error is None
        assert output.token_ids == reference.token_ids
        logprobs, others = (
            [entry.logprob for entry in answer.completions[0].logprobs or ()]
            for answer in (output, reference)
        )
        assert logprobs == pytest.approx(others, abs=CLOSE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("v2", {"ops": "torch", "exact": False}),
        ("v3", {"ops": "torch", "exact": False, "attention_backend": "triton"}),
        ("v3", {"ops": "triton", "attention_backend": "triton"}),
        ("v32", {"ops": "torch", "exact": False}),
        ("v32", {"ops": "triton", "attention_backend": "triton"}),
        ("v32", {"ops": "triton", "attention_backend": "triton", "kv_dtype": "int8"}),
    ],
    ids=str,
)
def test_answers_are_those_of_the_cpu(
    checkpoint_of: Callable[[str], Path], name: str, options: dict[str, Any]
) -> None:
    """Absorbed and, where it may be, expanded; cold, warm, in chunks; with steps begun ahead."""
    path, kv_dtype = checkpoint_of(name), options.get("kv_dtype", "auto")
    params = [SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0) for count in (4, 3, 4)]
    expected = engine(path, kv_dtype=kv_dtype).generate(prompts(), params)
    llm = on_device(engine(path, max_batch_tokens=16, **options))
    attention = llm.engine.attention
    assert isinstance(attention, MlaAttention)
    attention._costs = EXPANDED_IS_FREE

    for is_warm in (False, True):
        outputs = llm.generate(prompts(), params)
        assert_same_answers(outputs, expected)
        assert not is_warm or outputs[0].cache.read_tokens

    assert llm.engine.core.pipeline.num_ahead > 2
    is_paged = options.get("attention_backend") == "triton" and name == "v32"
    assert isinstance(attention.index, PagedIndex) == is_paged
    assert_idle(llm)


def test_expanded_heads_of_tritons_attention_answer_alike(
    checkpoint_of: Callable[[str], Path],
) -> None:
    """As off the CPU: prompts and chunks are expanded a head at a time, decodes absorbed."""
    path = checkpoint_of("v3 dense")
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=0)
    expected = engine(path).generate(prompts(), params)
    options: dict[str, Any] = {"ops": "torch", "exact": False, "attention_backend": "triton"}
    llm = on_device(engine(path, max_batch_tokens=16, **options))
    attention, mla = llm.engine.attention, llm.engine.model_config.mla
    assert isinstance(attention, MlaAttention) and mla is not None
    attention._costs = EXPANDED_IS_FREE
    attention._heads = ExpandedHeads(
        TritonBackend,
        attention.spec,
        nope_dim=mla.nope_dim,
        value_dim=mla.value_dim,
        device=CPU,
        max_bytes=1,
    )

    for _ in ("cold", "warm"):
        assert_same_answers(llm.generate(prompts(), params), expected)


@pytest.mark.parametrize("name", ["v3", "v32"])
def test_bits_depend_on_nothing_but_the_prompt(
    checkpoint_of: Callable[[str], Path], name: str
) -> None:
    """Triton's operations, attention and index: logits and K/V cold, warm, chunked, batched."""
    model = Model(name, load_model(checkpoint_of(name), ops="triton"), backend=TritonBackend)
    batch = [tuple(prompt) for prompt in prompts()]

    llm = Engine(model, Sizes(page_size=PAGE, num_pages=100, max_batch_tokens=13))
    for _ in ("cold", "warm"):
        answers = llm.generate(batch, [2, 1, 3])
        for (output, logits), prompt in zip(answers, batch, strict=True):
            cached = llm.cached_kv(prompt + output.token_ids)
            assert not list(differences(model, prompt, output.token_ids, logits, cached))


@pytest.mark.parametrize("name", ["v3", "v32"])
def test_log_probabilities_have_the_same_bits_through_the_executor(
    checkpoint_of: Callable[[str], Path], name: str
) -> None:
    """Alone, warm, in chunks, and in one batch with decode steps begun ahead."""
    options: dict[str, Any] = {"ops": "triton", "attention_backend": "triton"}
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)
    llm = on_device(engine(checkpoint_of(name), **options))
    chunked = on_device(engine(checkpoint_of(name), max_batch_tokens=7, **options))

    alone = [llm.generate([prompt], params)[0] for prompt in prompts()]
    warm = llm.generate(prompts(), params)
    in_chunks = chunked.generate(prompts(), params)

    for outputs in (warm, in_chunks):
        for output, expected in zip(outputs, alone, strict=True):
            assert output.completions[0].logprobs == expected.completions[0].logprobs
    assert all(output.cache.read_tokens for output in warm)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("v3 dense", {"ops": "torch", "exact": False}),
        ("v32 dense", {"ops": "torch", "exact": False}),
        ("v3", {"ops": "triton", "exact": False}),
        ("v32", {"ops": "triton"}),
    ],
    ids=str,
)
def test_decode_steps_are_captured(
    checkpoint_of: Callable[[str], Path], name: str, options: dict[str, Any]
) -> None:
    """Plans of latent attention and of the index, and which experts are chosen, are read by the captured step."""
    path, options = checkpoint_of(name), options | {"attention_backend": "triton"}
    params = [SamplingParams(max_tokens=count, ignore_eos=True, logprobs=0) for count in (5, 5, 3)]
    expected = engine(path).generate(prompts(), params)
    llm = engine(path, **options)
    runner = llm.engine.runner
    assert runner.model.reason_not_captured is None and isinstance(runner.backend, MlaAttention)
    runner.backend._costs = EXPANDED_IS_FREE
    source = BackendSource(runner.backend, runner.pool)
    decode = DecodeGraphs(runner, source, RecordedGraphs(), LateStream(), num_rows=8)

    llm.engine.core.executor = DeviceExecutor(runner, decode=decode)

    outputs = llm.generate(prompts(), params)

    assert_same_answers(outputs, expected)
    assert 0 < decode.num_captured < decode.num_replayed


def test_captured_steps_have_the_bits_of_others(checkpoint_of: Callable[[str], Path]) -> None:
    """With experts, latent attention and the index of Triton's kernels: log probabilities of both are equal."""
    options: dict[str, Any] = {"ops": "triton", "attention_backend": "triton"}
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=2)
    llm = on_device(engine(checkpoint_of("v32"), **options))
    expected = llm.generate(prompts(), params)
    llm.cache.clear()
    runner = llm.engine.runner
    source = BackendSource(runner.backend, runner.pool)
    decode = DecodeGraphs(runner, source, RecordedGraphs(), LateStream(), num_rows=8)
    llm.engine.core.executor = DeviceExecutor(runner, decode=decode)

    outputs = llm.generate(prompts(), params)

    assert decode.num_replayed
    for output, other in zip(outputs, expected, strict=True):
        assert output.completions[0].logprobs == other.completions[0].logprobs


# -- a device whose tensors have no values -----------------------------------------------------


class Shapes:
    """In place of a backend that has no arithmetic there."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._width = spec.v_head_dim

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        return None

    def exactness(self) -> list[Exactness]:
        return []

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def run(
        self, plan: AttentionBatch, layer: int, q: Tensor, planes: Any, **options: Any
    ) -> Tensor:
        return q.new_empty(*q.shape[:2], self._width)


@pytest.mark.parametrize("name", ["v3 dense", "v32 dense"])
def test_all_tensors_of_a_step_are_on_its_device(
    checkpoint_of: Callable[[str], Path], name: str
) -> None:
    """From token ids to logits, expanded requests and the index included."""
    model = load_model(checkpoint_of(name), exact=False, ops="torch", device=OTHER)
    spec = attention_spec(model.config, page_size=PAGE, dtype=model.dtype, exact=False)
    pool = KVPool(kv_layout(model.config), 16, PAGE, dtype=model.dtype, device=OTHER)
    attention = build_attention(model.config, spec, Shapes(spec, OTHER), OTHER)
    assert isinstance(attention, MlaAttention)
    attention._costs = EXPANDED_IS_FREE
    runner, plan = ModelRunner(model, pool, attention), plan_of_two()

    with OneDevice():
        hidden = runner.forward(plan)
        logits = runner.logits(hidden, [spec.row for spec in plan.samples])

    assert hidden.device == logits.device == OTHER
    assert (attention.plan(plan.batch).by_heads is not None) == (name == "v3 dense")


@pytest.mark.parametrize(("name", "num_copies"), [("v3 dense", 2), ("v32 dense", 1)])
def test_a_step_is_uploaded_in_one_copy(
    checkpoint_of: Callable[[str], Path],
    name: str,
    num_copies: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slots of all expanded requests travel together; so do those of all tiles of the index.

    A copy more names the rows of absorbed and of expanded requests; the backends copy what is theirs.
    """
    model = load_model(checkpoint_of(name), exact=False, ops="torch", device=OTHER)
    spec = attention_spec(model.config, page_size=PAGE, dtype=model.dtype, exact=False)
    attention = build_attention(model.config, spec, Shapes(spec, OTHER), OTHER)
    assert isinstance(attention, MlaAttention)
    attention._costs = EXPANDED_IS_FREE
    copies, move = list[torch.Size](), Tensor.to

    def moved(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if tensor.device == CPU:
            copies.append(tensor.shape)
        return move(tensor, *args, **options)

    monkeypatch.setattr(Tensor, "to", moved)

    attention.plan(plan_of_two().batch)

    assert len(copies) == num_copies, copies


# -- the probe of exact=True -------------------------------------------------------------------


class VariantBackend(EagerBackend):
    """Its rows depend on the number of rows."""

    def run(self, plan: Any, layer: int, q: Tensor, planes: Any, **options: Any) -> Tensor:
        return super().run(plan, layer, q, planes, **options) * (1 + 2**-20 * len(q))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_latent_attention_is_probed(is_sparse: bool) -> None:
    """Planes of latents, and selected keys; what depends on the batch is found."""
    spec = replace(
        spec_of(kind="mla", num_heads=3, num_kv_heads=1, head_dim=24, value_dim=16, exact=True),
        sparse=is_sparse,
    )
    requests = ((0, 7), (5, 1), (9, 4))

    assert batch_variant_requests(EagerBackend(spec, CPU), spec, CPU, requests) == []
    assert batch_variant_requests(TritonBackend(spec, CPU), spec, CPU, requests) == []
    differing = batch_variant_requests(VariantBackend(spec, CPU), spec, CPU, requests)
    assert differing == np.arange(3).tolist()
