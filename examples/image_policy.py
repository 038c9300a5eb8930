"""An action policy over camera frames that reads the K/V of known frames from the cache.

A small model in plain PyTorch (random weights: this is about the cache) sees frames of a camera,
reads an instruction and names a few actions, one after the other. Two ways to run it:

- `Policy.act`: one shot, no cache, every step computes everything;
- `CachedPolicy.act`: a batch of observations through `RadixAttentionPlanner`, `KVPool` and an
  attention backend, without Ramify's engine. Frames are known by their content, so that a scene
  that was seen before is read from the cache: neither its tokens nor its patches are computed.

Attention is causal over image tokens too: what is cached must not depend on what follows it. Run
it with `python examples/image_policy.py`; it checks that both ways name the same actions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from ramify import PrefixCache, RadixAttentionPlanner, RadixSequence
from ramify.attention import AttentionBatch, AttentionSpec, RadixAttentionBlock, select_backend
from ramify.cache import Media
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVLayout, KVPool

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MAX_TOKENS = 64, 2, 4, 2, 16, 256
FRAME, PATCH = 32, 8  # pixels
FRAME_TOKENS = (FRAME // PATCH) ** 2
PLACEHOLDER, FIRST_ACTION, NUM_BINS = 0, 256, 32  # ids below 256 are bytes of text
ACTIONS = 4  # per observation
PAGE_SIZE, NUM_PAGES = 4, 256


@dataclass(frozen=True)
class Observation:
    """Camera frames, oldest first, each [3, FRAME, FRAME], and the instruction."""

    frames: tuple[Tensor, ...]
    instruction: str

    def tokens(self) -> list[int]:
        """Placeholders for the frames, then the instruction."""
        return [PLACEHOLDER] * (FRAME_TOKENS * len(self.frames)) + list(self.instruction.encode())

    def media(self) -> list[Media]:
        """Digest and token range of each frame; the digest covers the patch size."""
        return [
            Media(Media.digest_of(frame.numpy().tobytes(), PATCH), at * FRAME_TOKENS, FRAME_TOKENS)
            for at, frame in enumerate(self.frames)
        ]


class Layer(nn.Module):
    """A decoder layer: RMSNorm, attention, RMSNorm, MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = RadixAttentionBlock(
            HIDDEN, HEADS, HEAD_DIM, MAX_TOKENS, num_kv_heads=KV_HEADS
        )
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.SiLU(), nn.Linear(4 * HIDDEN, HIDDEN)
        )


class Policy(nn.Module):
    """A model from frame patches and token ids to logits over action bins, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, HIDDEN, PATCH, stride=PATCH)
        self.ids = nn.Embedding(FIRST_ACTION + NUM_BINS, HIDDEN)
        self.layers = cast("list[Layer]", nn.ModuleList(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, NUM_BINS)
        self.frames_encoded = 0

    def embed(self, seen: Observation, tokens: Sequence[int], start: int, end: int) -> Tensor:
        """Embeddings [end - start, HIDDEN]; encodes only the frames with a token in that range."""
        rows: Tensor = self.ids(torch.tensor(tokens[start:end]))
        for at, frame in enumerate(seen.frames):
            first = at * FRAME_TOKENS
            low, high = max(start, first), min(end, first + FRAME_TOKENS)
            if low < high:
                encoded = self.patches(frame[None]).flatten(2)[0].T
                rows[low - start : high - start] = encoded[low - first : high - first]
                self.frames_encoded += 1
        return rows

    def actions(self, hidden: Tensor) -> Tensor:
        """Logits over action bins from the last layer's hidden states."""
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    @torch.inference_mode()
    def act(self, seen: Observation) -> tuple[list[int], Tensor]:
        """Actions of one observation and their logits; every step computes all tokens anew."""
        tokens, logits = seen.tokens(), []
        for _ in range(ACTIONS):
            x = self.embed(seen, tokens, 0, len(tokens))[None]
            for layer in self.layers:
                x = x + layer.attention(layer.attention_norm(x))[0]
                x = x + layer.mlp(layer.mlp_norm(x))
            logits.append(self.actions(x[0, -1]))
            tokens.append(FIRST_ACTION + int(logits[-1].argmax()))
        return tokens[-ACTIONS:], torch.stack(logits)


class CachedPolicy:
    """The same policy over a paged prefix cache; it computes only the tokens that miss."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.tokens_computed = policy, 0
        self.planner = RadixAttentionPlanner(
            PrefixCache(NUM_PAGES, PAGE_SIZE),
            PagedBlockTable(16, MAX_TOKENS // PAGE_SIZE, PAGE_SIZE),
            max_pool_pages=NUM_PAGES,
        )
        self.pool = KVPool(KVLayout.mha(LAYERS, KV_HEADS, HEAD_DIM), NUM_PAGES, PAGE_SIZE)
        spec = AttentionSpec(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            page_size=PAGE_SIZE,
            dtype=torch.float32,
            windows=(None,) * LAYERS,
            scale=HEAD_DIM**-0.5,
        )
        self.backend = select_backend("auto", spec, torch.device("cpu")).backend

    @torch.inference_mode()
    def act(self, batch: Sequence[Observation]) -> tuple[list[list[int]], Tensor]:
        """Actions of each observation, and their logits [observations, ACTIONS, NUM_BINS].

        Raises:
            OutOfPagesError: the batch needs more pages than there are; nothing changed.
        """
        sequences = [
            RadixSequence(array("i", seen.tokens()), b"policy 1", media=seen.media())
            for seen in batch
        ]
        logits = []
        try:
            for _ in range(ACTIONS):
                logits.append(self._step(batch, sequences))
                for sequence, row in zip(sequences, logits[-1], strict=True):
                    sequence.tokens.append(FIRST_ACTION + int(row.argmax()))
        finally:
            self.planner.release(sequences)  # what was computed stays warm
        return [sequence.tokens[-ACTIONS:].tolist() for sequence in sequences], torch.stack(
            logits, 1
        )

    def _step(self, batch: Sequence[Observation], sequences: list[RadixSequence]) -> Tensor:
        arrays = self.planner.plan(sequences)
        x = torch.cat(
            [
                self.policy.embed(
                    seen, sequence.tokens, sequence.num_computed, len(sequence.tokens)
                )
                for seen, sequence in zip(batch, sequences, strict=True)
            ]
        )
        hidden = self._forward(x, arrays)
        self.planner.commit(sequences)
        self.tokens_computed += arrays.num_tokens
        last = torch.tensor(arrays.cu_seqlens_q[1:] - 1)
        return self.policy.actions(hidden[last])

    def _forward(self, x: Tensor, arrays: AttentionBatch) -> Tensor:
        """Hidden states [tokens, HIDDEN] after the last layer, sequences concatenated."""
        positions = torch.tensor(arrays.positions)[None]
        slots = torch.tensor(arrays.slot_mapping)
        plan = self.backend.plan(arrays)
        for number, layer in enumerate(self.policy.layers):
            attention = layer.attention
            heads = attention.project(layer.attention_norm(x)[None], positions)
            q, k, v = (projected[0].transpose(0, 1) for projected in heads)
            self.pool.write_kv(number, slots, k=k, v=v)  # first write, then read back
            mixed = self.backend.run(plan, number, q.contiguous(), self.pool.planes(number))
            x = x + attention.o_proj(mixed.flatten(1))
            x = x + layer.mlp(layer.mlp_norm(x))
        return x


def frame(seed: int) -> Tensor:
    """A camera frame [3, FRAME, FRAME] of noise, the same for equal seeds."""
    return torch.rand(3, FRAME, FRAME, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    """Run four calls and compare each with the policy without a cache."""
    torch.manual_seed(0)
    policy = Policy().eval()
    cached = CachedPolicy(policy)
    scene = (frame(1), frame(2))
    calls = {
        "a new scene": [Observation(scene, "pick up the red cube")],
        "the same scene, told otherwise": [Observation(scene, "open the drawer")],
        "two robots, the same scene": [
            Observation(scene, "pick up the red cube"),
            Observation(scene, "put it into the box"),
        ],
        "another second frame": [Observation((frame(1), frame(3)), "pick up the red cube")],
    }
    print(f"{'call':32} {'tokens':>6} {'computed':>8} {'frames encoded':>14}")
    for name, batch in calls.items():
        tokens = sum(len(seen.tokens()) + ACTIONS - 1 for seen in batch)
        cached.tokens_computed = policy.frames_encoded = 0

        actions, logits = cached.act(batch)

        print(f"{name:32} {tokens:6} {cached.tokens_computed:8} {policy.frames_encoded:14}")
        for seen, cached_actions, rows in zip(batch, actions, logits, strict=True):
            wanted, one_shot = policy.act(seen)
            if cached_actions != wanted or not torch.allclose(rows, one_shot, atol=1e-4):
                raise SystemExit(f"{name}: {cached_actions} from the cache, {wanted} without it")
    cached.planner.cache.check()
    print("the same actions as without the cache, in every call")


if __name__ == "__main__":
    main()
