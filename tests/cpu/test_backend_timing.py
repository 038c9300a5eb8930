"""The faster of two attention backends is chosen by a clock, which is a stand-in here, and remembered."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.attention import backend_timing
from ramify.attention.backend import select_backend
from ramify.attention.backend_timing import faster_backend, faster_choice, time_backend
from ramify.attention.backends import flashinfer
from ramify.attention.backends.eager import EagerBackend
from ramify.attention.backends.flashinfer import NUM_STAGES, reason_not_servable
from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import ProbeStore
from ramify.attention.spec import AttentionSpec
from tests.cpu.attention_cases import CPU, spec_of
from tests.cpu.recorded_flashinfer import RecordedFlashInfer

SPEC = spec_of(windows=(None, 9), sinks=True)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (
        ("NUM_DECODES", 2),
        ("DECODE_KEYS", 20),
        ("NUM_NEW", 9),
        ("NUM_CACHED", 9),
    ):
        monkeypatch.setattr(backend_timing, name, count)


class Clock:
    """Advances by what a backend's calls take."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(EagerBackend):
    """Takes so many seconds for a decode, and for a prompt; planning takes as long as two layers."""

    def __init__(
        self, clock: Clock, decode: float, prompt: float, *, spec: AttentionSpec = SPEC
    ) -> None:
        super().__init__(spec, CPU)
        self._clock, self._seconds, self.num_runs = clock, (decode, prompt), 0

    def plan(self, batch: AttentionBatch) -> Any:
        self._of_step = self._seconds[batch.max_q_len > 1]
        self._clock.now += 2 * self._of_step
        return super().plan(batch)

    def run(
        self, plan: Any, layer: int, q: Tensor, planes: Mapping[str, Tensor], **options: Any
    ) -> Tensor:
        self.num_runs += 1
        self._clock.now += self._of_step
        return super().run(plan, layer, q, planes, **options)


def test_a_step_costs_its_layers_and_its_part_of_the_plan() -> None:
    """Two layers share a plan that takes as long as both: a layer costs twice its own time."""
    clock = Clock()

    times = time_backend(Slow(clock, 1.0, 5.0), SPEC, CPU, clock=clock)

    assert (times.decode, times.prompt) == pytest.approx((2.0, 10.0))


@pytest.mark.parametrize(
    ("decode", "prompt", "chosen"),
    [(0.5, 1.0, "b"), (0.5, 3.0, "a"), (0.96, 0.98, "a"), (0.2, 3.0, "b")],
)
def test_another_is_chosen_if_it_is_clearly_faster(
    decode: float, prompt: float, chosen: str, tmp_path: Path
) -> None:
    """The mean of both steps decides, and the first wins within noise; the choice is timed once."""
    clock, store = Clock(), ProbeStore(tmp_path / "verdicts.json")
    backends = {"a": Slow(clock, 1.0, 1.0), "b": Slow(clock, decode, prompt)}
    makers = {name: lambda backend=backend: backend for name, backend in backends.items()}

    name, reason = faster_backend(makers, SPEC, CPU, store=store, clock=clock)
    num_runs = backends["a"].num_runs
    again = faster_backend(
        makers, SPEC, CPU, store=ProbeStore(tmp_path / "verdicts.json"), clock=clock
    )

    assert name == chosen and again == (name, reason)
    assert "a 2,000,000 µs a decode, 2,000,000 µs a prompt; b " in reason
    assert backends["a"].num_runs == num_runs


@pytest.mark.parametrize(
    ("decode", "prompt", "chosen"), [(0.5, 3.0, "b"), (0.97, 0.1, "a"), (1.1, 0.1, "a")]
)
def test_latents_are_chosen_for_by_decodes(decode: float, prompt: float, chosen: str) -> None:
    """Over planes of latents; how fast a prompt is does not count, which may be expanded instead."""
    spec = spec_of(kind="mla", num_heads=3, num_kv_heads=1, head_dim=24, value_dim=16)
    clock = Clock()
    backends = {
        name: Slow(clock, *seconds, spec=spec)
        for name, seconds in (("a", (1.0, 1.0)), ("b", (decode, prompt)))
    }
    makers = {name: lambda backend=backend: backend for name, backend in backends.items()}

    name, reason = faster_backend(makers, spec, CPU, store=ProbeStore(None), clock=clock)

    assert name == chosen, reason


def test_flashinfer_competes_for_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wrapper is timed as others are, and named with what was measured."""
    spec = spec_of(
        kind="mla", num_heads=4, num_kv_heads=1, head_dim=576, value_dim=512, dtype=torch.bfloat16
    )
    library = RecordedFlashInfer()
    for name in ("NUM_CALLS", "NUM_ROUNDS"):
        monkeypatch.setattr(backend_timing, name, 1)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(flashinfer, "import_module", lambda _: library)
    monkeypatch.setattr(
        flashinfer.FlashInferBackend,
        "supports",
        classmethod(lambda _kind, spec, _: reason_not_servable(spec)),
    )
    choice = select_backend("eager", spec, CPU)

    timed = faster_choice(choice, spec, CPU, names=("eager", "flashinfer"), store=ProbeStore(None))

    assert timed.name in {"eager", "flashinfer"}
    assert "; flashinfer " in timed.reason and "flashinfer fails" not in timed.reason
    assert library.calls.made == ["BatchMLAPagedAttentionWrapper"] * NUM_STAGES


def test_a_backend_that_cannot_be_built_is_left_out() -> None:
    """As where kernels are compiled at the first call, and there is no compiler; the first may not fail."""
    clock = Clock()

    def fails() -> Slow:
        raise RuntimeError("no nvcc\nat line 3")

    def works() -> Slow:
        return Slow(clock, 1.0, 1.0)

    name, reason = faster_backend(
        {"a": works, "b": fails}, SPEC, CPU, store=ProbeStore(None), clock=clock
    )
    assert name == "a" and reason.endswith("; b fails: no nvcc")
    with pytest.raises(RuntimeError, match="no nvcc"):
        faster_backend({"a": fails, "b": works}, SPEC, CPU, store=ProbeStore(None), clock=clock)


def test_a_choice_names_what_was_measured() -> None:
    """`blocked` competes with the first of `auto` on the CPU; who loses is slower, the others keep their reasons."""
    spec = spec_of()
    choice = select_backend("sdpa", spec, CPU)

    timed = faster_choice(choice, spec, CPU, names=("sdpa", "blocked"), store=ProbeStore(None))

    assert timed.name in {"sdpa", "blocked"}
    loser = ({"sdpa", "blocked"} - {timed.name}).pop()
    assert timed.rejected[loser].startswith("slower: measured on this device: sdpa ")
    assert timed.rejected.keys() == choice.rejected.keys() - {timed.name} | {loser}
    assert timed.reason.startswith("measured on this device: sdpa ")


def test_a_choice_without_a_rival_is_not_timed() -> None:
    """What is not installed or not supported does not compete."""
    spec = spec_of(exact=True)
    choice = select_backend("eager", spec, CPU)

    assert faster_choice(choice, spec, CPU, names=("eager", "sdpa", "flashinfer")) is choice
    assert faster_choice(choice, spec, torch.device("meta")) is choice
