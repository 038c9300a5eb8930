"""Fake executor and tiny checkpoints, for tests of Ramify and of programs around it; no download.

Importing this module loads neither torch nor a tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ramify.engine.step import SampledTokens, SampleSpec, StepPlan, StepResult
from ramify.errors import ConfigError
from ramify.models.configs.families import FAMILIES
from ramify.models.configs.model_config import ModelConfig
from ramify.outputs import TokenLogprob

if TYPE_CHECKING:
    from torch import Generator, Tensor

TinyFamily = Literal["llama", "mistral", "qwen2", "qwen3"]

TINY_SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TINY_MERGES = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "or", "es", "is", "it", "al")
TINY_CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message.role not in ('system', 'user', 'assistant') -%}"
    "{{- raise_exception('unknown role ' ~ message.role) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
_PAD, _BOS, _END = 0, 1, 2

_MULTIPLIER, _STRIDE, _WORD = 6364136223846793005, 0x9E3779B97F4A7C15, (1 << 64) - 1
_NEVER, _POISONED = -1, -2  # positions of slots that hold nothing, or what a failed step left


def fake_next_token(
    context: Iterable[int], vocab_size: int, *, draw: tuple[int, int] | None = None
) -> int:
    """The token that a `FakeExecutor` returns for a context; it depends on every token of it.

    Args:
        draw: (seed, position) of a request with a temperature, None for a greedy one.
    """
    chain = 0
    for token in context:
        chain = _link(chain, token)
    return _answer(chain, vocab_size, draw)


FAKE_EMBEDDING_SIZE = 16


class FakeExecutor:
    """An `engine.step.Executor` without a model, which detects every fault of a cache.

    For each slot it stores the token written there, its position, and a hash of its context. Like
    attention it first writes the K/V of the step, then reads what each request attends to. A slot
    that was never written, or was written for another position or context, raises AssertionError.
    The next token is `fake_next_token` of the context that was read.

    Args:
        num_pages, page_size: of the cache above it.
        vocab_size: it answers with ids below.
        next_token: a script in place of `fake_next_token`; it gets the context.
        fail_at: numbers of the steps, from 0, that leave garbage in their slots and raise `error`.
        error: what such a step raises.
        window: last tokens that a query reads, at least 2; None: all.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        vocab_size: int = 50,
        next_token: Callable[[Sequence[int]], int] | None = None,
        fail_at: Container[int] = (),
        error: BaseException | None = None,
        window: int | None = None,
    ) -> None:
        self.page_size, self.vocab_size, self.window = page_size, vocab_size, window
        self.next_token, self.fail_at = next_token, fail_at
        self.error = RuntimeError("asked to fail") if error is None else error
        self.num_steps = 0  # failed ones included
        self.num_computed_tokens = 0  # of the steps that did not fail
        self.num_erased_pages = 0
        self._result: StepResult | None = None  # of a step that was begun and is not finished
        self._tokens = np.zeros(num_pages * page_size, np.int64)
        self._positions = np.full(num_pages * page_size, _NEVER, np.int64)
        self._chains = np.zeros(num_pages * page_size, np.uint64)

    def begin(self, plan: StepPlan) -> None:
        """See `Executor.begin`; runs the whole step, as `execute` does."""
        self._result = None
        self._result = self.execute(plan)

    def finish(self) -> StepResult:
        """See `Executor.finish`."""
        result, self._result = self._result, None
        assert result is not None, "finish without begin"
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and return its result at once.

        Raises:
            AssertionError: a request reads what is not there, or two write to one slot.
        """
        batch, step = plan.batch, self.num_steps
        self.num_steps += 1
        slots = batch.slot_mapping
        assert len(np.unique(slots)) == len(slots), "two tokens are written to one slot"
        if step in self.fail_at:
            self._positions[slots] = _POISONED
            raise self.error
        self._write(plan)
        owners = np.repeat(np.arange(batch.num_seqs), np.diff(batch.cu_seqlens_q))
        first_read = [self.first_read(int(cached)) for cached in batch.num_cached]
        seen = [
            self.read(batch.kv_slots(seq)[first:], first) for seq, first in enumerate(first_read)
        ]
        self.num_computed_tokens += batch.num_tokens
        sampled: dict[int, SampledTokens] = {}
        for spec in plan.samples:
            owner = owners[spec.row]
            sampled[spec.request_id] = self._sample(plan, spec, seen[owner], first_read[owner])
        prompt_logprobs = {
            spec.request_id: tuple(
                self._logprob(int(slots[row]), target, spec.num_logprobs)
                for row, target in enumerate(spec.targets, spec.first_row)
            )
            for spec in plan.prompt_logprobs
        }
        # The same context has the same vector.
        embeddings = {
            spec.request_id: np.stack(
                [
                    np.random.default_rng(int(self._chains[slot]))
                    .standard_normal(FAKE_EMBEDDING_SIZE)
                    .astype(np.float32)
                    for slot in slots[spec.first_row : spec.first_row + spec.num_rows]
                ]
            )
            for spec in plan.embeddings
        }
        return StepResult(sampled, prompt_logprobs, embeddings=embeddings)

    def _sample(
        self, plan: StepPlan, spec: SampleSpec, context: Sequence[int], first: int
    ) -> SampledTokens:
        """Tokens of one request, until one differs from its draft token.

        Args:
            context: the tokens that its rows see, from position `first` on.
        """
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        transform = spec.logits
        num_rows = len(spec.draft) + 1 if transform is None else transform.num_rows
        for row in range(spec.row, spec.row + num_rows):
            slot, position = int(plan.batch.slot_mapping[row]), int(plan.batch.positions[row])
            assert spec.position + len(tokens) == position + 1, "a token comes after its query row"
            if self.next_token is None:
                draw = (spec.seed, position + 1) if spec.params.temperature else None
                token = _answer(int(self._chains[slot]), self.vocab_size, draw)
            else:
                token = self.next_token(context[: position + 1 - first])
            if transform is not None and transform.token_bitmasks is not None:
                mask = transform.token_bitmasks[len(tokens)]
                if mask is not None:
                    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
                    if token not in allowed:
                        token = int(allowed[token % len(allowed)])
            if spec.num_logprobs is not None:
                logprobs.append(self._logprob(slot, token, spec.num_logprobs))
            tokens.append(token)
            if spec.draft[len(tokens) - 1 : len(tokens)] not in ((), (token,)):
                break
        return SampledTokens(tuple(tokens), tuple(logprobs))

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`."""
        self.num_erased_pages += len(pages)
        for page in pages:
            self._positions[page * self.page_size : (page + 1) * self.page_size] = _NEVER

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`."""
        width = self.page_size
        for source, target in pairs:
            for plane in (self._tokens, self._positions, self._chains):
                plane[target * width : (target + 1) * width] = plane[
                    source * width : (source + 1) * width
                ]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, for cache tiers."""
        return 3 * 8 * self.page_size

    def read_page(self, page: int, into: memoryview) -> None:
        """Copy a page out, as `kv.page_bytes.PageBytes` does."""
        into[:] = np.stack([plane[self._page(page)] for plane in self._planes()]).tobytes()

    def write_page(self, page: int, data: memoryview) -> None:
        """Copy a page in; `read` detects bytes that were never read or are another page's."""
        words = np.frombuffer(data, np.int64).reshape(3, self.page_size)
        for plane, column in zip(self._planes(), words, strict=True):
            plane[self._page(page)] = column

    def _page(self, page: int) -> slice:
        return slice(page * self.page_size, (page + 1) * self.page_size)

    def _planes(self) -> tuple[NDArray[np.int64], ...]:
        return self._tokens, self._positions, self._chains.view(np.int64)

    def first_read(self, position: int) -> int:
        """The first position that a query at `position` reads."""
        return 0 if self.window is None else max(0, position + 1 - self.window)

    def read(self, slots: NDArray[np.int64], first: int = 0) -> list[int]:
        """The tokens in these slots, which hold one context from position `first` on.

        Raises:
            AssertionError: a slot holds nothing, or something of another position or context.
        """
        positions, chains, tokens = self._positions[slots], self._chains[slots], self._tokens[slots]
        wrong = np.flatnonzero(positions != np.arange(first, first + len(slots)))
        if len(wrong):
            index = int(wrong[0])
            names = {_NEVER: "nothing", _POISONED: "what a failed step left"}
            content = names.get(int(positions[index]), f"K/V of position {positions[index]}")
            raise AssertionError(
                f"position {first + index} is read from slot {slots[index]}: {content}"
            )
        before = np.concatenate([np.zeros(1, np.uint64), chains[:-1]])[: len(slots)]
        expected = before * np.uint64(_MULTIPLIER) + (tokens.astype(np.uint64) + np.uint64(1)) * (
            np.uint64(_STRIDE)
        )
        wrong = np.flatnonzero(chains != expected)
        wrong = wrong[wrong > 0] if first else wrong  # the context before `first` is not here
        if len(wrong):
            index = int(wrong[0])
            raise AssertionError(
                f"position {first + index} is read from slot {slots[index]}: K/V of another context"
            )
        token_ids: list[int] = tokens.tolist()
        return token_ids

    def _write(self, plan: StepPlan) -> None:
        """Write tokens, each with the hash of all tokens up to it, into their slots."""
        batch = plan.batch
        for seq in range(batch.num_seqs):
            start, stop = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
            first = int(batch.num_cached[seq])
            before = batch.kv_slots(seq)[:first]
            chain = int(self._chains[before[-1]]) if first else 0
            for row in range(start, stop):
                slot, token = batch.slot_mapping[row], int(plan.token_ids[row])
                chain = _link(chain, token)
                self._tokens[slot], self._chains[slot] = token, chain
            self._positions[batch.slot_mapping[start:stop]] = np.arange(first, first + stop - start)

    def _logprob(self, slot: int, token: int, num_top: int) -> TokenLogprob:
        """A hash of context and token as log probability: a row too early or too late shows."""
        first = _link(int(self._chains[slot]), token)
        values = sorted((-_mixed(first + rank) / _WORD for rank in range(num_top)), reverse=True)
        return TokenLogprob(token, -_mixed(first) / _WORD, dict(enumerate(values)))


def _link(chain: int, token: int) -> int:
    """Hash of a context and one token more; linear, so that numpy can check many at once."""
    return (chain * _MULTIPLIER + (token + 1) * _STRIDE) & _WORD


def _mixed(value: int) -> int:
    """Every bit of a 64-bit value in every bit of the result (splitmix64)."""
    value = (value + _STRIDE) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _answer(chain: int, vocab_size: int, draw: tuple[int, int] | None) -> int:
    for number in draw or ():
        chain = _link(chain, number)
    return _mixed(chain) % vocab_size


def write_tiny_checkpoint(
    path: str | Path,
    family: TinyFamily,
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shards: int = 1,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random Hugging Face checkpoint of about 0.13 million weights, and return its path.

    It knows nothing, but unlike a freshly initialised network its greedy continuations depend on
    every part of the context, so that a wrong page shows in the tokens.

    Args:
        path: directory to write to; made if needed.
        shards: number of safetensors files; with more than one there is an index.
        tokenizer: write a byte-level tokenizer and a chat template too.
        overrides: entries of `config.json`, such as num_hidden_layers or rope_scaling.

    Raises:
        ConfigError: no such family, or fewer than one shard.
        ModelError: `overrides` describe no model that Ramify supports.
    """
    import torch
    from safetensors.torch import save_file

    path = Path(path)
    config = _tiny_config(family, dtype) | overrides
    model = ModelConfig.from_hf(config, "the tiny checkpoint's configuration")
    if shards < 1:
        raise ConfigError(f"shards={shards} is not possible; at least 1 is needed")
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _tiny_weight(name, shape, generator).to(getattr(torch, dtype))
        for name, shape in model.stored_shapes().items()
    }
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(path / "generation_config.json", ends)
    names = list(weights)
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    else:
        shard_of: dict[str, str] = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: weights[name] for name in names[number::shards]}
            save_file(part, path / file, metadata={"format": "pt"})
            shard_of |= dict.fromkeys(part, file)
        total = sum(weight.numel() * weight.element_size() for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": shard_of}
        _write_json(path / "model.safetensors.index.json", index)
    if tokenizer:
        _write_tiny_tokenizer(path, model.vocab_size)
    return path


def _tiny_config(family: str, dtype: str) -> dict[str, Any]:
    """`config.json` of a family: no width is a multiple of 32 but the hidden one's."""
    architectures = {entry.model_type: name for name, entry in FAMILIES.items()}
    if family not in architectures:
        raise ConfigError(f"family={family!r} is unknown; use one of {', '.join(architectures)}")
    config: dict[str, Any] = {
        "architectures": [architectures[family]],
        "model_type": family,
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": _BOS,
        "eos_token_id": _END,
        "pad_token_id": _PAD,
        "torch_dtype": dtype,
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 3}
    return config


# Standard deviation of a projection's outputs for inputs of deviation 1. With the usual small
# deviations attention is nearly uniform and a token decides its successor almost alone.
_GAINS = {"q": 2.0, "k": 2.0, "v": 1.0, "o": 3.0, "gate": 1.5, "up": 1.0, "down": 2.0}


def _tiny_weight(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Random values of a tensor, scaled by its role, which its name gives."""
    import torch

    noise = torch.randn(shape, generator=generator)
    # The weights of a QK norm replace the gain of its projection, which the norm removes.
    if "norm" in name:
        return (2.0 if "self_attn" in name else 1.0) * (1 + 0.1 * noise)
    if name.endswith(".bias"):
        return 0.2 * noise
    if name == "model.embed_tokens.weight":
        return noise
    gain = 3.0 if name == "lm_head.weight" else _GAINS[name.split(".")[-2].removesuffix("_proj")]
    return noise * gain / math.sqrt(shape[-1])


def _write_tiny_tokenizer(path: Path, vocab_size: int) -> None:
    """Byte-level BPE: special tokens, the 256 bytes, and as many merges as there is room for."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    pieces = [*TINY_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(pieces):
        raise ConfigError(
            f"vocab_size={vocab_size} is below {len(pieces)}, the bytes and special tokens; "
            "use a larger one, or tokenizer=False"
        )
    merges = TINY_MERGES[: vocab_size - len(pieces)]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *merges])}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in merges]))
    core.add_special_tokens(list(TINY_SPECIAL_TOKENS))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    bos = TINY_SPECIAL_TOKENS[_BOS]
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, _BOS)]
    )
    core.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": TINY_SPECIAL_TOKENS[_END],
        "pad_token": TINY_SPECIAL_TOKENS[_PAD],
        "clean_up_tokenization_spaces": False,
        "chat_template": TINY_CHAT_TEMPLATE,
    }
    _write_json(path / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
