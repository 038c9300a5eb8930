"""FlashInfer's wrappers, by a stand-in that computes from the arguments it gets: parity, and the calls."""

import ast
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify import LLM, SamplingParams
from ramify.attention.backends.eager import EagerBackend
from ramify.attention.backends.flashinfer import (
    NUM_STAGES,
    FlashInferBackend,
    reason_not_captured,
    reason_not_importable,
    reason_not_servable,
    reason_too_old,
)
from ramify.engine.execution.decode_sources import BackendSource
from ramify.engine.execution.device_executor import DeviceExecutor
from ramify.engine.execution.executors import captured_attention
from ramify.engine.execution.step_graphs import DecodeGraphs
from ramify.testing import write_tiny_checkpoint
from tests.cpu.attention_cases import CPU, batch_of, run, spec_of, step_of
from tests.cpu.engine_cases import assert_idle
from tests.cpu.flashinfer_signatures import OLD_SIGNATURES, SIGNATURES
from tests.cpu.recorded_flashinfer import RecordedFlashInfer
from tests.cpu.recorded_graphs import LateStream, RecordedGraphs, RecordedStep
from tests.cpu.test_device_executor import on_device

BF16: dict[str, Any] = {"dtype": torch.bfloat16, "head_dim": 64, "scale": 0.125}
KINDS: dict[str, dict[str, Any]] = {
    "gqa": BF16,
    "mqa, pages of 3": BF16 | {"num_heads": 5, "num_kv_heads": 1, "page_size": 3},
    "window": BF16 | {"windows": (40,)},
    "soft_cap": BF16 | {"soft_cap": 2.0},
    "float8": BF16 | {"kv_dtype": torch.float8_e4m3fn},
    "sinks": BF16 | {"sinks": True},
    "sinks and window": BF16 | {"sinks": True, "windows": (9,)},
    "float16": BF16 | {"dtype": torch.float16},
}
LATENT: dict[str, Any] = {
    "kind": "mla", "dtype": torch.bfloat16, "num_heads": 4, "num_kv_heads": 1, "head_dim": 576,
    "value_dim": 512, "scale": 0.07,
}  # fmt: skip
MIXED = [(0, 5), (37, 1), (130, 1), (63, 1), (60, 9)]
DECODES = [(37, 1), (130, 1), (63, 1)]


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ramify.attention.backends.flashinfer.WORKSPACE_BYTES", 16)


def finite(planes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The planes with zeros for NaN: the stand-in reads whole pages."""
    return {name: x.nan_to_num() if x.dtype.itemsize > 1 else x for name, x in planes.items()}


@pytest.mark.parametrize("shares", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_of_the_reference(kind: str, shares: list[tuple[int, int]]) -> None:
    """Prefills, chunks, drafts and decodes over the pages of the batch; padding rows are zeros."""
    spec = spec_of(**KINDS[kind])
    assert reason_not_servable(spec) is None
    step, library = step_of(spec, shares), RecordedFlashInfer()
    step.planes.update(finite(step.planes))

    out = run(FlashInferBackend(spec, CPU, library=library), step, padding=3)

    expected = run(EagerBackend(spec, CPU), step).double()
    assert out.dtype == spec.dtype and not out[-3:].any()
    error = (out[:-3].double() - expected).abs() / (1 + expected.abs())
    assert float(error.max()) < 2e-2
    name = "Attention" if spec.sinks else "Decode" if shares is DECODES else "Prefill"
    assert [made.removeprefix("Batch").startswith(name) for made in library.calls.made] == [True]


@pytest.mark.parametrize("is_old", [False, True], ids=["0.7.4", "0.2.10"])
@pytest.mark.parametrize("shares", [MIXED, DECODES], ids=["mixed", "decodes"])
def test_attention_to_latents_is_that_of_the_reference(
    shares: list[tuple[int, int]], *, is_old: bool
) -> None:
    """Absorbed queries over the planes of latents and ropes, by the calls of two versions."""
    spec, library = spec_of(**LATENT), RecordedFlashInfer(is_old=is_old)
    assert reason_not_servable(spec) is None
    step = step_of(spec, shares)
    step.planes.update(finite(step.planes))

    out = run(FlashInferBackend(spec, CPU, library=library), step, padding=3)

    expected = run(EagerBackend(spec, CPU), step).double()
    assert out.dtype == spec.dtype and not out[-3:].any()
    assert out.shape[1:] == (4, 512)
    error = (out[:-3].double() - expected).abs() / (1 + expected.abs())
    assert float(error.max()) < 2e-2
    assert library.calls.made == ["BatchMLAPagedAttentionWrapper"]


@pytest.mark.parametrize("is_old", [False, True], ids=["0.7.4", "0.2.10"])
def test_a_plan_of_latents_reads_nothing_from_the_device(*, is_old: bool) -> None:
    """0.7.4 asks for the least and the largest page: pages stay on the host, or the step before is waited for."""
    spec, library = spec_of(**LATENT), RecordedFlashInfer(is_old=is_old)
    backend = FlashInferBackend(spec, torch.device("meta"), library=library)

    backend.plan(batch_of(spec, DECODES, [[*range(6)], [*range(20)], [*range(9)]]))

    [(_, planned)] = library.calls.planned
    assert planned["indices"].device == CPU


def test_every_window_has_a_wrapper_of_its_own() -> None:
    """Layers of a window run on its wrapper, which is made once; a plan is of all of them."""
    spec, library = spec_of(windows=(None, 9, None, 9), **BF16), RecordedFlashInfer()
    backend, step = FlashInferBackend(spec, CPU, library=library), step_of(spec_of(**BF16), DECODES)
    planes = {name: plane.nan_to_num() for name, plane in step.planes.items()}

    plan = backend.plan(step.batch)
    outs = [backend.run(plan, layer, step.q, planes) for layer in range(4)]

    assert [planned["window_left"] for _, planned in library.calls.planned] == [-1, 8]
    assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[3])
    assert not torch.equal(outs[0], outs[1])


def test_a_plan_does_not_overwrite_that_of_the_step_before() -> None:
    """Two steps are in flight: the wrappers of the first still hold its plan when the second is planned."""
    spec, library = spec_of(**BF16), RecordedFlashInfer()
    backend = FlashInferBackend(spec, CPU, library=library)
    step = step_of(spec, [(90, 1)], rows=[list(range(12))])
    planes = {name: plane.nan_to_num() for name, plane in step.planes.items()}
    batches = [batch_of(spec, [(cached, 1)], [list(range(12))]) for cached in (90, 40, 70)]
    expected = [backend.run(backend.plan(batch), 0, step.q, planes) for batch in batches]

    for first, second in ((0, 1), (1, 2)):
        plans = [backend.plan(batches[first]), backend.plan(batches[second])]
        outs = [backend.run(plan, 0, step.q, planes) for plan in plans]
        assert torch.equal(outs[0], expected[first]) and torch.equal(outs[1], expected[second])
    assert len(library.calls.made) == NUM_STAGES


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exact": True}, "exact=True"),
        ({"dtype": torch.float32}, "queries are in half precision"),
        ({"kv_dtype": torch.int8}, "K/V are float8_e4m3fn or the half"),
        ({"head_dim": 80}, "head_dim=80"),
        ({"value_dim": 32}, "value_dim=32"),
        ({"sparse": True}, "sparse"),
        ({"kind": "mla", "num_kv_heads": 1}, "kind=mla"),
        (LATENT | {"head_dim": 528}, "latents of 512 and ropes of 16"),
        (LATENT | {"num_heads": 20}, "20 heads"),
        (LATENT | {"num_heads": 256}, "256 heads"),
        (LATENT | {"kv_dtype": torch.int8}, "kv_dtype=torch.int8"),
        (LATENT | {"sparse": True}, "sparse"),
        (LATENT | {"soft_cap": 3.0}, "latents with soft_cap"),
        ({"sinks": True, "soft_cap": 3.0}, "attention sinks with soft_cap=3.0"),
        ({"sinks": True, "kv_dtype": torch.float8_e4m3fn}, "attention sinks with"),
    ],
)
def test_what_it_cannot_compute_has_a_reason(changes: dict[str, Any], words: str) -> None:
    """The reason names the value."""
    reason = reason_not_servable(spec_of(**(BF16 | changes)))

    assert reason is not None and words in reason


def test_a_package_that_cannot_be_imported_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its parts have different versions; not an error of the engine."""
    (tmp_path / "flashinfer.py").write_text(
        "raise RuntimeError('parts of 0.6 and 0.7\\nsee there')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)

    assert reason_not_importable() == "flashinfer cannot be imported: parts of 0.6 and 0.7"


def test_what_an_old_package_lacks_has_a_reason() -> None:
    """Float8 needs a parameter of `plan`, sinks a wrapper."""
    library: Any = RecordedFlashInfer()
    float8, sinks = spec_of(**KINDS["float8"]), spec_of(**KINDS["sinks"])
    assert reason_too_old(float8, library) is reason_too_old(sinks, library) is None

    class Old:
        class BatchPrefillWithPagedKVCacheWrapper:
            def plan(self, qo_indptr: Any, causal: bool) -> None: ...

    assert "reads no scales of tokens" in str(reason_too_old(float8, Old))
    for spec in (sinks, spec_of(**LATENT)):
        assert "no wrapper for them" in str(reason_too_old(spec, Old))
    assert reason_too_old(spec_of(**LATENT), library) is None
    assert reason_too_old(spec_of(**BF16), Old) is None


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_an_engine_answers_as_on_the_cpu(kv_dtype: str, tmp_path: Path) -> None:
    """Through the executor of a device, cold and warm, with steps begun ahead."""
    path = write_tiny_checkpoint(
        tmp_path, "qwen3", num_hidden_layers=2, hidden_size=128, head_dim=64
    )
    options: dict[str, Any] = {
        "kv_cache_tokens": 256, "page_size": 4, "exact": False, "dtype": "bfloat16",
        "kv_dtype": kv_dtype, "ops": "torch", "attention_backend": "eager",
    }  # fmt: skip
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (6, 9)]
    prompts = [[*range(3, 24)], [*range(3, 20), 40, 41]]
    expected = LLM(path, **options).generate(prompts, params)
    llm, library = on_device(LLM(path, **options)), RecordedFlashInfer()
    llm.engine.runner.backend = FlashInferBackend(llm.engine.attention_spec, CPU, library=library)

    for _ in ("cold", "warm"):
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]

    assert {name.split("With")[0] for name in library.calls.made} == {"BatchPrefill", "BatchDecode"}
    assert library.calls.num_runs == 2 * len(library.calls.planned)
    assert llm.engine.core.pipeline.num_ahead > 5
    assert_idle(llm)


@pytest.mark.parametrize("kind", ["gqa", "window", "float8", "latents"])
def test_captured_steps_read_later_plans(kind: str) -> None:
    """A graph of eight requests holds for all steps of eight: buffers stay, nothing that is frozen differs."""
    spec, library = spec_of(**(KINDS | {"latents": LATENT})[kind]), RecordedFlashInfer()
    assert reason_not_captured(spec) is None
    backend = FlashInferBackend(spec, CPU, library=library).captured(max_pages=40)
    steps = [
        step_of(spec, [(first + 9 * request, 1) for request in range(8)]) for first in (20, 3, 61)
    ]
    planes = finite(max(steps, key=lambda step: len(next(iter(step.planes.values())))).planes)
    q, plans = steps[0].q.clone(), [backend.plan(steps[0].batch)]
    captured = RecordedStep(lambda: (backend.run(plans[-1], 0, q, planes),))

    for step in steps:
        for name, plane in finite(step.planes).items():
            planes[name][: len(plane)] = plane
        q.copy_(step.q)
        plans.append(backend.plan(step.batch))
        assert plans[-1].signature == plans[0].signature
        [out] = captured.replay()
        expected = run(EagerBackend(spec, CPU), step).double()
        assert float(((out.double() - expected).abs() / (1 + expected.abs())).max()) < 2e-2
    assert len(library.calls.made) == 1
    assert backend.plan(step_of(spec, DECODES).batch).signature != plans[0].signature


def test_wrappers_that_are_not_for_graphs_are_found_in_one() -> None:
    """Each plan has tensors of its own, which a graph would not read."""
    spec, library = spec_of(**BF16), RecordedFlashInfer()
    backend, step = FlashInferBackend(spec, CPU, library=library), step_of(spec, DECODES)
    planes, plans = finite(step.planes), [backend.plan(step.batch)]
    captured = RecordedStep(lambda: (backend.run(plans[-1], 0, step.q, planes),))

    plans.append(backend.plan(step.batch))

    with pytest.raises(AssertionError, match="captured was"):
        captured.replay()


def test_an_engine_decodes_by_graphs(tmp_path: Path) -> None:
    """FlashInfer's plans, made outside of the graph, in one bucket after another."""
    path = write_tiny_checkpoint(
        tmp_path, "qwen3", num_hidden_layers=2, hidden_size=128, head_dim=64
    )
    options: dict[str, Any] = {
        "kv_cache_tokens": 256, "page_size": 4, "exact": False, "dtype": "bfloat16", "ops": "torch",
        "attention_backend": "eager",
    }  # fmt: skip
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (6, 9)]
    prompts = [[*range(3, 24)], [*range(3, 20), 40, 41]]
    expected = LLM(path, **options).generate(prompts, params)
    llm, library = LLM(path, **options), RecordedFlashInfer()
    runner = llm.engine.runner
    runner.backend = FlashInferBackend(llm.engine.attention_spec, CPU, library=library)
    attention = captured_attention(runner.backend, llm.engine.config.max_table_pages)
    source = BackendSource(attention, runner.pool)
    decode = DecodeGraphs(runner, source, RecordedGraphs(), LateStream(), num_rows=8)
    llm.engine.core.executor = DeviceExecutor(runner, decode=decode)

    outputs = llm.generate(prompts, params)

    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert 1 < decode.num_captured < decode.num_replayed
    assert_idle(llm)


def test_parameters_are_those_of_the_installed_package() -> None:
    """Names and order of what the stand-in takes, read from the package's source."""
    spec = find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("flashinfer is not installed")
    folder = Path(spec.submodule_search_locations[0])
    is_old = (folder / "mla.py").exists()
    latents = folder / "mla" / "_batch_mla"
    files = {
        "BatchPrefillWithPagedKVCacheWrapper": folder / "prefill.py",
        "BatchDecodeWithPagedKVCacheWrapper": folder / "decode.py",
        "BatchAttentionWithAttentionSinkWrapper": folder / "attention" / "_core.py",
        "BatchMLAPagedAttentionWrapper": folder / "mla.py" if is_old else latents / "_wrapper.py",
        "MLAPlanMetadata": latents / "_contracts.py",
    }
    for name, methods in (OLD_SIGNATURES if is_old else SIGNATURES).items():
        tree = ast.parse(files[name].read_text(encoding="utf-8"))
        [wrapper] = [
            node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
        ]
        for method, parameters in methods.items():
            *_, definition = [
                node
                for node in wrapper.body
                if isinstance(node, ast.FunctionDef) and node.name == method
            ]
            names = [
                argument.arg for argument in (*definition.args.args, *definition.args.kwonlyargs)
            ]
            assert [name for name in names if name in parameters] == [*parameters], (name, method)
