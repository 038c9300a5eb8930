"""The device of an engine: chosen by its option, refused with a way out, and the same for all of a step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from ramify.attention.backend import backend_class
from ramify.attention.batch import AttentionBatch, Extend
from ramify.cli import app
from ramify.engine.execution.device import (
    check_computable,
    check_exact,
    check_graphs,
    choose_device,
)
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.llm import LLM
from ramify.engine.step import SampleSpec, StepPlan
from ramify.errors import ConfigError
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVPool
from ramify.models.checkpoint.on_device import WeightsOnDevice
from ramify.models.kv_cache_spec import attention_spec, build_attention, kv_layout
from ramify.models.loader import load_decoder, load_model
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat
from ramify.params import SamplingParams
from ramify.testing import write_tiny_checkpoint

PAGE = 4
# Its tensors have no values. It stands for a device that is not the CPU.
OTHER = torch.device("meta")
MAY_MIX = {"aten::copy_", "aten::_to_copy"}


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, which on CUDA raise, or wait for the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name not in MAY_MIX:
            devices = {
                tensor.device.type
                for tensor in self._tensors([*args, *(kwargs or {}).values()])
                if tensor.dim()  # a number on the CPU goes with any device
            }
            assert len(devices) < 2, f"{func} on {devices}"
        return func(*args, **(kwargs or {}))

    def _tensors(self, values: Sequence[Any]) -> list[Tensor]:
        tensors = []
        for value in values:
            if isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, list | tuple):
                tensors += self._tensors(value)
        return tensors


# -- the option ------------------------------------------------------------------------------


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that finds two CUDA devices."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize(
    ("name", "device"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu"), ("auto", "cpu")]
)
def test_a_name_is_a_device(name: str, device: str) -> None:
    """`auto` is the CPU also where there are others: that alone is exact."""
    assert choose_device(name).device == torch.device(device)


@pytest.mark.usefixtures("two_devices")
def test_a_device_beyond_the_last_names_those_that_are_there() -> None:
    """The error says what was found, and what to use."""
    with pytest.raises(ConfigError) as caught:
        choose_device("cuda:2")

    assert str(caught.value) == (
        f"device='cuda:2' is not there: torch {torch.__version__} is built with CUDA 12.8 and finds "
        "2 devices; use cuda:0 to cuda:1, or cpu"
    )


@pytest.mark.parametrize(
    ("build", "words"),
    [
        ("12.8", "is built with CUDA 12.8 and finds no device; use device='cpu'"),
        (None, "is built without CUDA; use a torch that is built with CUDA"),
    ],
)
def test_cuda_without_a_device_says_what_is_missing(
    build: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build without CUDA and a machine without a device have different ways out."""
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    with pytest.raises(ConfigError, match=r"device='cuda' is not there: torch") as caught:
        LLM(device="cuda")

    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "CPU", "cuda:0000", ""])
def test_other_names_are_refused(name: str) -> None:
    """A name that is no device is an error that lists the names."""
    with pytest.raises(ConfigError, match=r"does not exist; use auto, cpu, cuda or cuda:N"):
        choose_device(name)


def test_tiers_are_refused_elsewhere() -> None:
    """Cache tiers need pages in host memory; on the CPU nothing is refused."""
    check_computable(torch.device("cpu"), has_tiers=True)
    check_computable(OTHER, has_tiers=False)

    with pytest.raises(ConfigError, match="cache tiers copy pages of a pool in host memory"):
        check_computable(OTHER, has_tiers=True)


def test_exact_needs_two_options_of_a_gpu() -> None:
    """Operations and attention are both Triton's, or the error names both options; a CPU has no limit."""
    gpu = torch.device("cuda:1")
    check_exact(gpu, ops="triton", attention="triton")
    check_exact(torch.device("cpu"), ops="torch", attention="sdpa")

    for ops, attention in (("torch", "triton"), ("triton", "sdpa")):
        with pytest.raises(ConfigError) as caught:
            check_exact(gpu, ops=ops, attention=attention)

        assert str(caught.value).startswith(
            "exact=True on cuda:1 needs ops='triton' and attention_backend='triton', and this engine has "
            f"ops={ops!r} and attention_backend={attention!r}; name both, or use exact=False"
        )


@pytest.mark.parametrize(
    ("device", "num_ranks", "has_experts", "ops", "words"),
    [
        ("cpu", 1, False, "triton", "this engine computes on cpu"),
        ("cuda", 2, False, "triton", "with tensor_parallel_size=2"),
        ("cuda", 1, True, "torch", "the experts of this model are chosen by the router"),
    ],
)
def test_graphs_are_refused_where_a_step_cannot_be_captured(
    device: str, num_ranks: int, has_experts: bool, ops: str, words: str
) -> None:
    """On a CPU, over ranks, and with experts whose choice the host reads in each step, as it does in torch."""
    for is_moe, others in ((False, "torch"), (False, "triton"), (True, "triton")):
        check_graphs(torch.device("cuda"), num_ranks=1, has_experts=is_moe, ops=others)

    with pytest.raises(ConfigError, match=rf"{words}.*leave decode_graphs out"):
        check_graphs(torch.device(device), num_ranks=num_ranks, has_experts=has_experts, ops=ops)


def test_quantised_weights_are_refused_elsewhere() -> None:
    """The error names the weight and the way out."""
    codes, scales = torch.ones(2, 6, dtype=torch.int8), torch.ones(2, 2)
    rounded = QuantizedWeight(WeightFormat(8, 3), codes, scales, None, torch.float32)
    weights = WeightsOnDevice({"a": torch.ones(2), "b": rounded}, OTHER)

    assert weights["a"].device == OTHER
    with pytest.raises(ConfigError, match=r"b is quantised.*quantize='widen' on meta"):
        weights["b"]


def test_info_names_the_device_and_the_reason() -> None:
    """`ramify info` says which device computes, and why not another."""
    result = CliRunner().invoke(app, ["info", "--json", "--kv-cache-tokens", "256"])

    device = json.loads(result.stdout)["device"]
    assert device["kind"] == "cpu"
    assert device["chosen"].startswith("auto: exact arithmetic is tested on CPUs; torch ")


# -- a step on another device ----------------------------------------------------------------


def checkpoint_of(family: str, folder: Path) -> Path:
    return write_tiny_checkpoint(folder / family, family, tokenizer=False)  # type: ignore[arg-type]


def runner_of(path: Path, device: torch.device) -> ModelRunner:
    model = load_model(path, exact=False, ops="torch", device=device)
    spec = attention_spec(model.config, page_size=PAGE, dtype=model.dtype, exact=False)
    pool = KVPool(kv_layout(model.config), 16, PAGE, dtype=model.dtype, device=device)
    backend = backend_class("sdpa")(spec, device)
    return ModelRunner(model, pool, build_attention(model.config, spec, backend))


def plan_of_two() -> StepPlan:
    """A chunk of a prompt and a decode; both are sampled from."""
    table = PagedBlockTable.of([[0, 1, 2], [3, 4]], PAGE)
    batch = AttentionBatch.build([Extend(0, 0, 2, 7), Extend(1, 1, 4, 1)], table)
    specs = [SampleSpec(i, row, 9, SamplingParams(), 0, None) for i, row in enumerate((6, 7))]
    return StepPlan(batch, np.arange(8), tuple(specs), (), (0, 1), all_rows=False)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_all_tensors_of_a_step_are_on_its_device(family: str, tmp_path: Path) -> None:
    """From token ids to logits no operation takes tensors of two devices."""
    runner, plan = runner_of(checkpoint_of(family, tmp_path), OTHER), plan_of_two()

    with OneDevice():
        hidden = runner.forward(plan)
        logits = runner.logits(hidden, [spec.row for spec in plan.samples])

    assert hidden.device == logits.device == OTHER
    assert logits.shape == (2, runner.model.config.vocab_size)


def test_a_mixture_of_devices_is_noticed() -> None:
    """The check above can fail."""
    with pytest.raises(AssertionError, match="aten"), OneDevice():
        torch.ones(3, 4) @ torch.ones(4, 2, device=OTHER)


def test_a_model_of_transformers_is_refused_elsewhere(tmp_path: Path) -> None:
    """Models without a decoder of ours run on the CPU."""
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"})
    )

    with pytest.raises(ConfigError, match="runs through transformers"):
        load_decoder(tmp_path, device=OTHER)
