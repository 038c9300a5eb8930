"""`make gpu-check`: its clocks with a fake device, its figures' bookkeeping, its table."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_check
import gpu_deepseek
import gpu_figures
import pytest
import torch
from gpu_attention import Limits
from gpu_check import GOALS, Goal, Outcome, exit_status, run_all, summary, table
from gpu_clock import DeviceClock, best_seconds, seconds_per_step

from ramify.engine.llm import LLM


class Device:
    """A device with a clock of its own: a call is done when everything before it is."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_waited_for = False
        self.num_calls = 0

    def call(self) -> None:
        """Takes 100 ms while it is cold, then 7 ms."""
        self.now += 100.0 if self.num_calls < 3 else 7.0
        self.num_calls += 1

    def wait(self) -> None:
        self.is_waited_for = True


class Mark:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.at = self.device.now

    def elapsed_time(self, end: Any) -> float:
        assert self.device.is_waited_for, "read before the device passed the event"
        assert self.at >= 0 and end.at >= 0
        return float(end.at - self.at)


def test_a_device_clock_counts_warm_calls_only() -> None:
    """Calls before the warm-up ends do not count; events are read after the wait."""
    device = Device()
    clock = DeviceClock(lambda: Mark(device), device.wait, repeats=4, warmup=3)

    assert clock.times(device.call) == [7.0] * 4
    assert device.num_calls == 7
    assert DeviceClock(lambda: Mark(device), device.wait, 2, 0).milliseconds(device.call) == 7.0


def test_a_decode_step_is_the_difference_of_two_generations() -> None:
    """What both have in common, and the first generation, which compiles, cancel."""
    clock = {"now": 0.0}
    lengths: list[int] = []

    def generate(num_tokens: int) -> None:
        clock["now"] += 5.0 if lengths else 60.0
        clock["now"] += 0.25 * num_tokens
        lengths.append(num_tokens)

    seconds = seconds_per_step(generate, 4, 12, repeats=2, now=lambda: clock["now"])

    assert seconds == 0.25
    assert lengths == [4, 4, 4, 12, 12]


def test_the_best_of_some_calls_is_taken() -> None:
    """A call that others disturbed does not count."""
    times = iter([0.0, 3.0, 3.0, 4.0, 4.0, 9.0])

    assert best_seconds(lambda: None, now=lambda: next(times)) == 1.0


def test_a_figure_that_fails_does_not_lose_the_others() -> None:
    """Its reason is in the table, and everything measured is saved after each figure."""
    saved: list[int] = []
    goals = [
        Goal("a", "A", 0.5, "of it"),
        Goal("b", "B", 2.0, "× it", False),
        Goal("c", "C", 1.0, "s"),
    ]

    def measure(name: str) -> tuple[float, Mapping[str, Any]]:
        if name == "b":
            raise RuntimeError("CUDA error: an illegal memory | access\nmore lines")
        return {"a": 0.7, "c": 0.9}[name], {"from": name}

    times = map(float, range(100))
    outcomes = run_all(
        goals, measure, save=lambda all_: saved.append(len(all_)), now=lambda: next(times)
    )

    assert saved == [1, 2, 3]
    assert [outcome.is_met for outcome in outcomes] == [True, None, False]
    assert outcomes[1] == Outcome(
        "b", None, None, "RuntimeError: CUDA error: an illegal memory | access\nmore lines", 1, {}
    )
    lines = table(goals, outcomes).splitlines()
    assert lines[2] == "| A | 0.70 of it | ≥ 0.5 of it | yes |"
    assert lines[3].startswith("| B | not measured | ≤ 2 × it | RuntimeError: CUDA error")
    assert "more lines" not in lines[3]
    assert lines[4] == "| C | 0.90 s | ≥ 1 s | no |"


def test_the_exit_status_says_what_failed() -> None:
    """A figure that was not measured and a test that failed are failures; a missed goal is one if strict."""
    goals = [Goal("a", "A", 1.0, ""), Goal("b", "B", 1.0, ""), Goal("c", "C", 1.0, "")]
    reached, missed = Outcome("a", 2.0, True, None, 1, {}), Outcome("b", 0.5, False, None, 1, {})
    failed, other = Outcome("c", None, None, "why", 1, {}), Outcome("c", 1.0, True, None, 1, {})

    verdict = summary(goals, [reached, missed, failed], None)

    assert verdict == {
        "tests": None, "reached": ["a"], "missed": ["b"], "failed": ["c"], "not_run": [],
    }  # fmt: skip
    assert exit_status(verdict, is_strict=False) == 1
    verdict = summary(goals, [reached, missed, other], 0)
    assert (verdict["tests"], verdict["missed"], verdict["failed"]) == ("passed", ["b"], [])
    assert (exit_status(verdict, is_strict=False), exit_status(verdict, is_strict=True)) == (0, 1)
    assert exit_status(summary(goals, [reached, missed, other], 5), is_strict=False) == 1
    assert summary(goals, [reached], 0)["not_run"] == ["b", "c"]
    assert exit_status(summary(goals, [reached], 0), is_strict=False) == 1


def test_a_figure_whose_process_fails_gives_its_last_line(tmp_path: Path) -> None:
    """The last line of what a process wrote is the reason; without a CUDA device that is the status."""
    if torch.cuda.is_available():
        pytest.skip("this torch has a CUDA device: the process would measure")
    with pytest.raises(RuntimeError, match="exit status 2"):
        gpu_check.measure_in_process("extend", tmp_path)


def test_every_goal_has_a_figure() -> None:
    """The names of the goals are those of the functions, and the sizes are those of Llama 8B."""
    assert tuple(gpu_figures.FIGURES) == tuple(goal.name for goal in GOALS)
    assert gpu_figures.FIGURES.keys() >= gpu_figures.NEED_CHECKPOINT
    assert 7.4e9 < gpu_figures.weight_bytes() / 2 < 7.6e9  # 8.03e9 with the embedding
    assert gpu_figures.kv_bytes(1) == 131_072


def test_engine_figures_run_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very functions, on the CPU and a model of a few kilobytes: a ratio of times above 0."""
    shape = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 512,
    }  # fmt: skip
    small = {
        "FEW": 2,
        "MANY": 6,
        "NUM_STREAMS": 2,
        "STREAM_LEN": 8,
        "PREFIX_LEN": 64,
        "TAIL_LEN": 8,
    }
    on_cpu = {
        "device": "cpu", "dtype": "float32", "kv_cache_tokens": 2048, "ops": "torch",
        "attention_backend": "auto", "decode_graphs": False,
    }  # fmt: skip
    monkeypatch.setattr(gpu_figures, "SHAPE", shape)
    for name, size in small.items():
        monkeypatch.setattr(gpu_figures, name, size)
    monkeypatch.setattr(Limits, "measured", lambda _device: Limits(1e9, 1e9))
    monkeypatch.setattr(gpu_figures, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(
        gpu_figures, "engine", lambda path, **options: LLM(path, **(options | on_cpu))
    )
    path = tmp_path / "model"
    gpu_figures.write_checkpoint(path)

    for figure in (gpu_figures.streams, gpu_figures.warm_ttft):
        value, details = figure(path)
        assert value > 0, details


def test_work_of_a_deepseek_layer() -> None:
    """Sizes of V3: bytes of latents, keys and matrices, and multiply-adds of the products."""
    shape, limits = gpu_deepseek.SHAPE, Limits(4.3e12, 790e12)

    latents = gpu_deepseek.latent_work(shape)
    index = gpu_deepseek.index_work(shape)
    experts = gpu_deepseek.experts_work(shape, 222)

    assert latents.num_bytes == 64 * (4096 * 576 + 128 * (576 + 512)) * 2
    assert latents.flops == 2 * 64 * 4096 * 128 * (576 + 512)
    assert latents.seconds(limits) == latents.flops / 790e12 > latents.num_bytes / 4.3e12
    assert index.num_bytes == 64 * 32_768 * 256 and index.flops == 2 * 64 * 32_768 * 64 * 128
    assert experts.num_bytes == 222 * 88_080_384
    assert experts.flops == 64 * 8 * 88_080_384
    assert experts.seconds(limits) == experts.num_bytes / 4.3e12
    share, details = gpu_deepseek.share_of_bound(experts, 10.0, limits)
    assert share == pytest.approx(details["bound_ms"] / 10) == pytest.approx(0.4547, abs=1e-4)


@pytest.mark.parametrize("name", ["latent-decode", "sparse-index", "moe-step"])
def test_engine_figures_of_deepseek_run_on_a_tiny_layer(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The very functions, on the CPU in Triton's interpreter: every kernel runs and gives numbers."""
    pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")
    tiny = gpu_deepseek.Shape(
        num_heads=2, latent_dim=16, rope_dim=8, index_heads=2, index_dim=8, index_top_k=4,
        num_experts=8, top_k=2, num_groups=4, topk_groups=2, hidden_size=24, expert_size=16,
        num_requests=3, kv_len=20, index_len=40,
    )  # fmt: skip
    results: list[torch.Tensor] = []

    def milliseconds(call: Any) -> float:
        results.append(call())
        return 2.0

    monkeypatch.setattr(gpu_deepseek, "SHAPE", tiny)
    monkeypatch.setattr(gpu_deepseek, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(gpu_deepseek, "milliseconds", milliseconds)
    monkeypatch.setattr(Limits, "measured", lambda _device: Limits(1e6, 1e9))

    value, details = gpu_figures.FIGURES[name](tmp_path)

    bound = max(details["bytes"] / 1e6, details["flops"] / 1e9) * 1e3
    assert details["bound_ms"] == pytest.approx(bound)
    assert value == pytest.approx(2.0 / bound if name == "moe-step" else bound / 2.0)
    [result] = results
    assert len(result) == tiny.num_requests and bool((result != 0).any())
    assert result.dtype == torch.int32 or bool(result.isfinite().all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has a CUDA device")
def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures end with a status of their own."""
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])

    assert gpu_check.main() == 2
    assert "no CUDA device" in capsys.readouterr().out
