"""The probes of `exact=True` on a device, tried on the CPU: they pass what is invariant, and find what is not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.attention.backends.eager import EagerBackend
from ramify.attention.device_probe import batch_variant_requests
from ramify.attention.exactness import Exactness, ProbeStore
from ramify.attention.spec import AttentionSpec

CPU = torch.device("cpu")
FEW = ((0, 7), (5, 1), (9, 4))


def spec_of(**options: Any) -> AttentionSpec:
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "page_size": 4}
    return AttentionSpec(**sizes, scale=0.25, dtype=torch.float32, exact=True, **options)


class VariantBackend(EagerBackend):
    """Its rows depend on the number of rows, in layers with a window."""

    def run(
        self, plan: Any, layer: int, q: Tensor, planes: Mapping[str, Tensor], **options: Any
    ) -> Tensor:
        out = super().run(plan, layer, q, planes, **options)
        return out if self.spec.windows[layer] is None else out * (1 + 2**-20 * len(q))


@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=str)
def test_attention_of_one_layer_of_each_window_is_probed(kv_dtype: torch.dtype | None) -> None:
    """Alone, in chunks and together: the same bits, or the requests that differ."""
    spec = spec_of(windows=(None, 6, None, 6), kv_dtype=kv_dtype)

    assert batch_variant_requests(EagerBackend(spec, CPU), spec, CPU, FEW) == []
    assert batch_variant_requests(VariantBackend(spec, CPU), spec, CPU, FEW) == [0, 1, 2]


def test_triton_passes_in_its_interpreter() -> None:
    """With attention sinks and a window."""
    pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")
    from ramify.attention.backends.triton import TritonBackend

    spec = spec_of(windows=(None, 6), sinks=True)

    assert batch_variant_requests(TritonBackend(spec, CPU), spec, CPU, FEW) == []


def test_verdicts_of_a_device_are_its_own(tmp_path: Path) -> None:
    """What passes on the CPU is tried again elsewhere, and remembered apart."""
    store = ProbeStore(tmp_path / "verdicts.json")
    other = store.on(torch.device("meta"))

    assert store.on(CPU) is store
    for place, reason in ((store, "on the CPU"), (other, "elsewhere")):
        assert verdict_of(place, reason).reason == reason
    again = ProbeStore(tmp_path / "verdicts.json")
    for place, reason in ((again, "on the CPU"), (again.on(torch.device("meta")), "elsewhere")):
        assert verdict_of(place, "tried again").reason == reason


def verdict_of(store: ProbeStore, reason: str) -> Exactness:
    return store.verdict("linear", (8, 4), torch.float32, lambda: ("a", reason), strategies=("a",))
