"""Attention inside torch.compile: one operator, no graph break, no recompilation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ramify.attention.backend import select_backend
from ramify.attention.batch import AttentionBatch
from ramify.attention.custom_op import AttentionCustomOp
from tests.cpu.attention_cases import CPU, batch_of, spec_of, step_of

SPEC = spec_of(windows=(None, 5))
WIDTH = SPEC.num_heads * SPEC.head_dim


class Block(nn.Module):
    """Two layers that attend, as a decode step does."""

    def __init__(self, attention: AttentionCustomOp, planes: dict[str, Tensor]) -> None:
        super().__init__()
        self.attention, self.planes = attention, planes
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer, project in enumerate(self.project):
            q = project(hidden).unflatten(1, (SPEC.num_heads, SPEC.head_dim))
            hidden = hidden + self.attention(layer, q, self.planes).flatten(1)
        return hidden


def block_of(name: str) -> tuple[Block, Any, list[list[int]]]:
    torch.manual_seed(0)
    rows = [[3, 5, 1], [0, 2, 4]]
    step = step_of(SPEC, [(16, 1), (20, 1)], rows=rows)
    backend = select_backend(name, SPEC, CPU).backend
    attention = AttentionCustomOp(backend, SPEC.v_head_dim)
    attention.plan(step.batch)
    planes = {key: plane.nan_to_num() for key, plane in step.planes.items()}
    return Block(attention, planes), step, rows


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex", "triton"])
@torch.inference_mode()
def test_yb2_a_decode_step_is_one_graph(name: str) -> None:
    """No graph break, the bits of the plain call, and the next step runs the same graph."""
    torch._dynamo.reset()
    block, _, rows = block_of(name)
    graphs: list[Any] = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(block, fullgraph=True, backend=counted)
    hidden = torch.randn(2, WIDTH)

    for cached in (16, 19):
        block.attention.plan(batch_of(SPEC, [(cached, 1), (cached, 1)], rows))
        assert torch.equal(compiled(hidden), block(hidden))

    assert len(graphs) == 1
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert sum("ramify.attend" in target for target in targets) == 2
    assert torch._dynamo.explain(block)(hidden).graph_break_count == 0


def test_the_operator_keeps_its_contract() -> None:
    """Schema, fake and real kernel agree: torch's own check."""
    block, step, _ = block_of("eager")
    attention = block.attention
    arguments = (step.q, list(block.planes.values()), "k,v", None, 0, attention.instance_id, 16)

    torch.library.opcheck(
        torch.ops.ramify.attend.default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_an_operator_lives_as_long_as_its_attention() -> None:
    """The id of a freed instance is a KeyError, not another instance's plan."""
    block, step, _ = block_of("eager")
    instance_id = block.attention.instance_id
    planes = block.planes
    del block

    with pytest.raises(KeyError):
        torch.ops.ramify.attend(step.q, list(planes.values()), "k,v", None, 0, instance_id, 16)


def test_a_batch_is_planned_before_it_is_run() -> None:
    """Two instances over one backend have their own plans."""
    block, step, rows = block_of("eager")
    other = AttentionCustomOp(block.attention.backend, SPEC.v_head_dim)
    batch: AttentionBatch = batch_of(SPEC, [(0, 1), (0, 1)], rows)
    other.plan(batch)

    alone = other(0, step.q, block.planes)

    assert not torch.equal(alone, block.attention(0, step.q, block.planes))
