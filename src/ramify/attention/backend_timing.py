"""Choose the faster of two attention backends on a device, by timing both; the choice is remembered."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from ramify.attention.backend import AttentionBackend, BackendChoice, backend_class
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.exactness import Exactness, ProbeStore
from ramify.attention.spec import AttentionSpec
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVLayout, KVPool

NUM_DECODES, DECODE_KEYS = 16, 2048  # of the decode step
NUM_NEW, NUM_CACHED = 2048, 2048  # of the prompt's step
NUM_CALLS, NUM_ROUNDS = 10, 3
# Another backend than the first must be faster by this, or noise would decide.
LEAST_GAIN = 1.05
TIMED = ("triton", "flashinfer")  # that compete on CUDA
PACKAGES = ("triton", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class BackendTimes:
    """Seconds of a layer's attention, its part of the step's plan included."""

    decode: float  # of `NUM_DECODES` requests of `DECODE_KEYS` tokens
    prompt: float  # `NUM_NEW` tokens behind `NUM_CACHED`

    def gain_over(self, other: BackendTimes) -> float:
        """How many times as fast it is: the mean over both steps, geometric."""
        return float((self.decode_gain_over(other) * (other.prompt / self.prompt)) ** 0.5)

    def decode_gain_over(self, other: BackendTimes) -> float:
        """How many times as fast a decode is."""
        return other.decode / self.decode

    def __str__(self) -> str:
        return f"{self.decode * 1e6:,.0f} µs a decode, {self.prompt * 1e6:,.0f} µs a prompt"


def faster_backend(
    backends: Mapping[str, Callable[[], AttentionBackend]],
    spec: AttentionSpec,
    device: torch.device,
    *,
    store: ProbeStore | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[str, str]:
    """The name of the fastest backend, and the times of all.

    The first is taken unless another is faster by `LEAST_GAIN`; for latents by decodes alone, because
    prompts are expanded where that is faster (see `MlaAttention`). A backend that raises, as where a compiler
    is missing, is left out; the first is not. Remembered by device, versions, and the shape of the model.

    Args:
        backends: makes them, in order of preference.
        store: choices that were made before; None: `ProbeStore.default()`.
        clock: seconds; for tests.
    """
    store = (ProbeStore.default() if store is None else store).on(device)

    def choose() -> tuple[str, str]:
        times, notes = dict[str, BackendTimes](), list[str]()
        for name, make in backends.items():
            try:
                times[name] = time_backend(make(), spec, device, clock=clock)
            except (RuntimeError, OSError, ImportError) as error:
                if not times:
                    raise
                lines = str(error).strip().splitlines() or [type(error).__name__]
                notes.append(f"{name} fails: {lines[0]}")
            else:
                notes.append(f"{name} {times[name]}")
        gain, first = BackendTimes.gain_over, times[next(iter(times))]
        if spec.kind == "mla":
            gain = BackendTimes.decode_gain_over
        gains = {name: gain(of_name, first) for name, of_name in times.items()}
        best = max(gains, key=lambda name: gains[name])
        chosen = best if gains[best] >= LEAST_GAIN else next(iter(times))
        return chosen, f"measured on this device: {'; '.join(notes)}"

    verdict: Exactness = store.verdict(
        f"{'latent ' * (spec.kind == 'mla')}attention backend with {_versions()}, "
        f"windows {len(set(spec.windows))}, sinks {spec.sinks}",
        (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size, len(spec.windows)),
        spec.plane_dtype,
        choose,
        strategies=tuple(backends),
    )
    return verdict.strategy, verdict.reason


def faster_choice(
    choice: BackendChoice,
    spec: AttentionSpec,
    device: torch.device,
    *,
    names: Sequence[str] = TIMED,
    store: ProbeStore | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> BackendChoice:
    """The choice of `select_backend`, or the fastest of those that compete with it.

    Args:
        names: of backends that compete, in order of preference.
        store, clock: see `faster_backend`.
    """
    kinds = {name: backend_class(name) for name in names}
    usable = [name for name, kind in kinds.items() if kind.supports(spec, device) is None]
    if choice.name not in usable or len(usable) < 2:
        return choice
    made = {choice.name: choice.backend}

    def make(name: str) -> AttentionBackend:
        if name not in made:
            made[name] = kinds[name](spec, device)
        return made[name]

    name, reason = faster_backend(
        {name: partial(make, name) for name in usable}, spec, device, store=store, clock=clock
    )
    rejected = {other: why for other, why in choice.rejected.items() if other != name}
    rejected |= {other: f"slower: {reason}" for other in usable if other != name}
    return BackendChoice(name, make(name), reason, rejected)


def time_backend(
    backend: AttentionBackend,
    spec: AttentionSpec,
    device: torch.device,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> BackendTimes:
    """Time a decode step and a prompt's step over random K/V on the device; waits for it."""
    size = spec.page_size
    lengths = [DECODE_KEYS] * NUM_DECODES
    num_pages = max(-(-(NUM_CACHED + NUM_NEW) // size), -(-DECODE_KEYS // size) * NUM_DECODES)
    layout = KVLayout.mha(1, spec.num_kv_heads, spec.head_dim, spec.v_head_dim)
    if spec.kind == "mla":
        layout = KVLayout.mla(1, spec.v_head_dim, spec.head_dim - spec.v_head_dim)
    pool = KVPool(layout, num_pages, size, dtype=spec.plane_dtype, device=device)
    slots = torch.arange(num_pages * size, device=device)
    pool.write_kv(
        0,
        slots,
        **{
            plane.name: torch.randn(len(slots), *plane.shape, device=device, dtype=spec.dtype)
            for plane in layout.planes
        },
    )
    pages = iter(range(num_pages))
    tables = [[next(pages) for _ in range(-(-length // size))] for length in lengths]
    decodes = AttentionBatch.build(
        [Extend(i, i, length - 1, 1) for i, length in enumerate(lengths)],
        PagedBlockTable.of(tables, size),
    )
    prompt_pages = list(range(-(-(NUM_CACHED + NUM_NEW) // size)))
    prompt = AttentionBatch.build(
        [Extend(0, 0, NUM_CACHED, NUM_NEW)], PagedBlockTable.of([prompt_pages], size)
    )
    sinks = torch.zeros(spec.num_heads, device=device) if spec.sinks else None

    def seconds(batch: AttentionBatch) -> float:
        q = torch.randn(
            batch.num_tokens, spec.num_heads, spec.head_dim, device=device, dtype=spec.dtype
        )
        best = float("inf")
        for round_number in range(NUM_ROUNDS + 1):  # the first compiles
            begin = clock()
            plan = backend.plan(batch)
            planned = clock()
            for call in range(NUM_CALLS):
                layer = call % len(spec.windows)
                backend.run(plan, layer, q, pool.planes(0), sinks=sinks)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            of_plan = (planned - begin) / len(spec.windows)
            if round_number:
                best = min(best, of_plan + (clock() - planned) / NUM_CALLS)
        return best

    return BackendTimes(seconds(decodes), seconds(prompt))


def _versions() -> str:
    """Versions of the packages whose kernels compete."""
    names = []
    for package in PACKAGES:
        try:
            names.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            names.append(f"no {package}")
    return ", ".join(names)
