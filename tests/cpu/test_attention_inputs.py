"""Every backend refuses the same wrong arguments, by name, before it computes; layers do not wrap."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend, select_backend
from ramify.attention.blocks.attention_block import RadixAttentionBlock
from ramify.attention.blocks.rotary import apply_rotary_pos_emb, rotary_tables
from ramify.attention.custom_op import AttentionCustomOp
from ramify.attention.spec import AttentionSpec
from ramify.errors import ConfigError
from ramify.kv.pool import KVLayout, KVPool
from tests.cpu.attention_cases import CPU, Step, run, spec_of, step_of, triton

NAMES = pytest.mark.parametrize("name", ["eager", "sdpa", "blocked", "flex", "triton", "cpu"])
SPEC = spec_of(windows=(None, 5))


def backend_of(name: str, spec: AttentionSpec) -> AttentionBackend:
    if name == "triton":
        pytest.importorskip("triton", reason="Triton's interpreter is needed")
        return triton(spec)
    if name == "cpu":
        pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    return select_backend(name, spec, CPU).backend


def with_planes(change: Callable[[Tensor], Tensor]) -> Callable[[Step], Step]:
    return lambda step: replace(
        step, planes={name: change(plane) for name, plane in step.planes.items()}
    )


WRONG: dict[str, tuple[Callable[[Step], Step], str]] = {
    "fewer rows": (lambda step: replace(step, q=step.q[:-1]), r"must be \(4, 4, 16\)"),
    "wider q": (lambda step: replace(step, q=step.q.repeat(1, 1, 2)), "q has shape"),
    "fewer heads": (lambda step: replace(step, q=step.q[:, :2]), "q has shape"),
    "flat q": (lambda step: replace(step, q=step.q.flatten(1)), "q has shape"),
    "q elsewhere": (lambda step: replace(step, q=step.q.to("meta")), "q is on meta"),
    "integer q": (lambda step: replace(step, q=step.q.int()), "q is torch.int32"),
    "no planes": (lambda step: replace(step, planes={}), "plane k is missing; there are none"),
    "no values": (lambda step: replace(step, planes={"k": step.planes["k"]}), "plane v is missing"),
    "narrow planes": (with_planes(lambda plane: plane[..., :-1].contiguous()), "plane k is"),
    "strided planes": (with_planes(lambda plane: torch.stack((plane, plane), 1)[:, 0]), "strides"),
    "other page size": (with_planes(lambda plane: plane.view(-1, 4, *plane.shape[2:])), "plane k"),
    "float64": (with_planes(Tensor.double), "plane k is torch.float64"),
    "no scales": (with_planes(lambda plane: plane.nan_to_num().to(torch.int8)), "no plane k_scale"),
    "selected": (
        lambda step: replace(step, selected=torch.zeros(4, 1, dtype=torch.int32)),
        "sparse=False",
    ),
}


@NAMES
@pytest.mark.parametrize("fault", WRONG)
def test_wrong_arguments_are_refused_by_name(name: str, fault: str) -> None:
    """A wrong shape, dtype, memory order or name of q or planes is a ConfigError that says it.

    Planes that were right in one call are checked again when they change.
    """
    change, message = WRONG[fault]
    step, backend = step_of(SPEC, [(3, 2), (0, 2)]), backend_of(name, SPEC)
    run(backend, step)

    with pytest.raises(ConfigError, match=message):
        run(backend, change(step))


@NAMES
@pytest.mark.parametrize("fault", WRONG)
def test_the_first_call_is_no_exception(name: str, fault: str) -> None:
    """Also where a layer has never had planes that were right."""
    change, message = WRONG[fault]
    step, backend = step_of(SPEC, [(3, 2), (0, 2)]), backend_of(name, SPEC)

    with pytest.raises(ConfigError, match=message):
        run(backend, change(step))


def test_compiled_kernels_read_no_other_device() -> None:
    """They read sinks and planes by address, which is none on another device."""
    spec = replace(SPEC, sinks=True)
    step, backend = step_of(spec, [(3, 2)]), backend_of("cpu", spec)
    plan, sinks = backend.plan(step.batch), torch.zeros(4)
    elsewhere = {**step.planes, "v": step.planes["v"].to("meta")}

    with pytest.raises(ConfigError, match="sinks is on meta; it must be on cpu"):
        backend.run(plan, 0, step.q, step.planes, sinks=sinks.to("meta"))
    with pytest.raises(ConfigError, match="plane v is on meta; it must be on cpu"):
        backend.run(plan, 0, step.q, elsewhere, sinks=sinks)


@NAMES
@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_does_not_exist_is_refused(name: str, layer: int) -> None:
    """Layer -1 is not the last."""
    step, backend = step_of(SPEC, [(3, 2)]), backend_of(name, SPEC)

    with pytest.raises(ConfigError, match=rf"layer={layer} but layers are 0\.\.1"):
        run(backend, step, layer=layer)


@NAMES
def test_sinks_that_the_spec_does_not_announce_are_refused(name: str) -> None:
    """An assertion would be our own mistake; this is the caller's."""
    step, backend = step_of(SPEC, [(3, 2)]), backend_of(name, SPEC)

    with pytest.raises(ConfigError, match="must be None"):
        backend.run(backend.plan(step.batch), 0, step.q, step.planes, sinks=torch.zeros(4))


@pytest.mark.parametrize("name", ["eager", "blocked", "cpu"])
def test_sinks_that_the_spec_announces_are_required(name: str) -> None:
    """Without them a softmax would be another model's."""
    spec = replace(SPEC, sinks=True)
    step, backend = step_of(spec, [(3, 2)]), backend_of(name, spec)

    with pytest.raises(ConfigError, match=r"sinks are None; they must be float32 \[4\]"):
        backend.run(backend.plan(step.batch), 0, step.q, step.planes)


# -- requests without a query row -----------------------------------------------------------------


@NAMES
@pytest.mark.parametrize("share", [(9, 0), (0, 0), (300, 0)])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_request_without_query_rows_changes_nothing(
    name: str, share: tuple[int, int], layer: int
) -> None:
    """`num_new=0`, alone, first, between and last: the other rows are those of eager attention."""
    backend, eager = backend_of(name, SPEC), backend_of("eager", SPEC)
    for shares in ([share], [share, (5, 3)], [(5, 3), share, (260, 1)], [(5, 3), share]):
        step = step_of(SPEC, shares)

        out = run(backend, step, layer=layer, padding=1)

        assert torch.allclose(out, run(eager, step, layer=layer, padding=1), atol=1e-5)
        assert len(out) == sum(new for _, new in shares) + 1


# -- the operator --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eager", "blocked", "cpu"])
def test_the_operator_passes_sinks_on(name: str) -> None:
    """Its bits are those of the backend."""
    spec, sinks = replace(SPEC, sinks=True), torch.tensor([0.0, 1.0, -1.0, 3.0])
    step, backend = step_of(spec, [(3, 2)]), backend_of(name, spec)
    attention = AttentionCustomOp(backend, spec.v_head_dim)
    attention.plan(step.batch)

    out = attention(0, step.q, step.planes, sinks=sinks)

    direct = backend.run(backend.plan(step.batch), 0, step.q, step.planes, sinks=sinks)
    assert torch.equal(out, direct)
    with pytest.raises(ConfigError, match="sinks are None"):
        attention(0, step.q, step.planes)


@NAMES
def test_the_operator_before_its_plan_says_what_to_call(name: str) -> None:
    """No attribute of a plan that is not there."""
    step, backend = step_of(SPEC, [(3, 2)]), backend_of(name, SPEC)
    attention = AttentionCustomOp(backend, SPEC.v_head_dim)

    with pytest.raises(ConfigError, match=r"call AttentionCustomOp\.plan\(batch\) first"):
        attention(0, step.q, step.planes)


def test_the_operator_of_another_value_width_says_so() -> None:
    """Compiled code would allocate its output for the width that it was told."""
    step, backend = step_of(SPEC, [(3, 2)]), backend_of("eager", SPEC)
    attention = AttentionCustomOp(backend, 8)
    attention.plan(step.batch)

    with pytest.raises(ConfigError, match="value_dim=8 but the backend's values are 16 wide"):
        attention(0, step.q, step.planes)


# -- the pool --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [-1, -2, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_pool_has_no_negative_layers(layer: int, dtype: torch.dtype) -> None:
    """Writing, gathering and looking at layer -1 is an error, and the last layer stays as it is."""
    pool = KVPool(KVLayout.mha(2, 1, 4), 2, 4, dtype=dtype)
    values, slots = torch.ones(3, 1, 4), torch.arange(3)

    for call in (
        lambda: pool.write_kv(layer, slots, k=values, v=values),
        lambda: pool.gather_kv(layer, slots),
        lambda: pool.planes(layer),
    ):
        with pytest.raises(ConfigError, match=rf"layer={layer} but layers are 0\.\.1"):
            call()

    assert not any(plane.float().any() for at in range(2) for plane in pool.planes(at).values())


# -- position ids --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bool, torch.uint8])
def test_position_ids_are_integers(dtype: torch.dtype) -> None:
    """A float, a mask or bytes (which torch reads as a mask) are refused by name; int32 serves."""
    cos, sin = rotary_tables(8, 10, 1e4)
    block, hidden = RadixAttentionBlock(16, 2, 8), torch.randn(1, 2, 16)
    q, ids = torch.randn(1, 2, 2, 8), torch.tensor([[0, 1]])

    with pytest.raises(ConfigError, match=f"position_ids are {dtype}; they must be int64 or int32"):
        apply_rotary_pos_emb(q, q, cos, sin, ids.to(dtype))
    with pytest.raises(ConfigError, match=f"position_ids are {dtype}"):
        block(hidden, position_ids=ids.to(dtype))

    narrow = apply_rotary_pos_emb(q, q, cos, sin, ids.int())
    assert all(map(torch.equal, narrow, apply_rotary_pos_emb(q, q, cos, sin, ids)))
