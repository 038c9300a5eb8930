"""The estimate of what steps take, at the start of an engine with cache tiers."""

import json
from pathlib import Path

import pytest
import torch

from ramify.engine.execution.prefill_probe import LENGTHS, estimate, measure_prefills
from ramify.engine.llm import LLM
from ramify.errors import ConfigError
from ramify.testing import write_tiny_checkpoint

SIZES = {"page_size": 4, "kv_cache_tokens": 512, "max_model_len": 128}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("probe") / "model", "llama")


def test_prefills_grow_and_leave_the_pool_empty(llama: Path) -> None:
    """Up to the longest prompt; the pages are zeros again."""
    with LLM(llama, **SIZES) as llm:  # type: ignore[arg-type]
        runner = llm.engine.runner

        measured = measure_prefills(llm.config, runner)

        lengths = [length for length, _ in measured]
        assert lengths == sorted({min(length, 128) for length in LENGTHS})[: len(lengths)]
        assert all(seconds > 0 for _, seconds in measured)
        for layer in range(llm.engine.model_config.num_layers):
            for plane in runner.pool.planes(layer).values():
                assert not torch.count_nonzero(plane)


def test_constants_follow_the_two_longest_prefills(llama: Path) -> None:
    """Attention has its share of the operations; of one prefill, half is the step's."""
    with LLM(llama, **SIZES) as llm:  # type: ignore[arg-type]
        config = llm.engine.model_config
    share = 4 * config.num_heads * config.head_dim / (
        2 * config.hidden_size
        * (2 * (config.num_heads + config.num_kv_heads) * config.head_dim
           + 3 * config.intermediate_size)
    )  # fmt: skip

    both, single = (
        estimate([(16, 0.3), (64, 0.5), (256, 1.5)], config),
        estimate([(16, 0.8)], config),
    )

    assert both.token_s == pytest.approx(1 / 192)
    assert both.step(256, 0) == pytest.approx(1.5)
    assert both.read_s == pytest.approx(both.token_s * share)
    assert (single.token_s, single.step_s) == pytest.approx((0.025, 0.4))


def test_a_longer_prefill_that_took_less_counts_no_tokens_as_negative(llama: Path) -> None:
    """A neighbour on the machine may slow the short one down."""
    with LLM(llama, **SIZES) as llm:  # type: ignore[arg-type]
        cost = estimate([(16, 0.5), (64, 0.4)], llm.engine.model_config)

    assert (cost.token_s, cost.read_s) == (0.0, 0.0)
    assert cost.step_s == pytest.approx(0.4)


def test_a_cost_file_is_taken_as_it_is(llama: Path, tmp_path: Path) -> None:
    """Steps that are run do not correct it; without one they do, from the first on."""
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"step_s": 1.0, "token_s": 2.0, "read_s": 3.0}))
    prefills = []
    for options in ({"cache_cost": path}, {}):
        with LLM(llama, **SIZES, cache_host="1MB", **options) as llm:  # type: ignore[arg-type]
            assert llm.core.tiering is not None
            prefill = llm.core.tiering.measurements.costs.prefill
            first_s = prefill.compute_s(0, 100)
            for start in range(4):
                llm.generate([[*range(start + 3, start + 90)]])
            prefills.append((first_s, prefill.compute_s(0, 100)))

    calibrated, measured = prefills
    assert calibrated == pytest.approx((1.0 + 200.0 + 3.0 * 5050,) * 2)
    assert 0 < measured[0] < 60
    assert measured[1] != measured[0]


def test_a_cost_file_that_cannot_be_read_is_refused(llama: Path, tmp_path: Path) -> None:
    """At the start, with the way out."""
    with pytest.raises(ConfigError, match="ramify calibrate MODEL"):
        LLM(llama, **SIZES, cache_host="1MB", cache_cost=tmp_path / "none")  # type: ignore[arg-type]
