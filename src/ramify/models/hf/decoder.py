"""`HfDecoder`: any other causal decoder as transformers' modules, with paged K/V and our linears.

transformers lets a library register an attention function and a mask function. Ours hand queries, keys
and values to the step's attention, so that planner, prefix cache and backends are the same as for the
families of `models/configs/families`. What a model does besides attention is its own code; every
`torch.nn.Linear` in it becomes a linear of `models.ops`.

`load_hf_decoder` checks what a configuration claims about attention: it runs the model on a few tokens
and compares masks, shapes and results, whole and with a cached prefix.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ramify.attention.exactness import FP32_ROW_MULTIPLE, Exactness, dtype_name
from ramify.attention.paged import PagedBackend
from ramify.errors import CheckpointError, UnsupportedModelError, shortened
from ramify.kv.pool import KVPool
from ramify.models.checkpoint.loaded_weights import LoadedWeight
from ramify.models.checkpoint.stored_tensor import StoredTensor, stored_tensors
from ramify.models.configs.model_config import ModelConfig
from ramify.models.hf.checks import AttentionCall, ProbeAttention, Run, check_calls, check_results
from ramify.models.hf.config import first_line, is_foreign, may_be_recurrent
from ramify.models.ops.protocol import ForwardStep, Linear, Ops
from ramify.models.ops.registry import OpsFactory

T = TypeVar("T")
_log = logging.getLogger(__name__)
NAME = "ramify_paged"
# What the modules of transformers raise where they cannot do what is asked.
FORWARD_ERRORS = (RuntimeError, IndexError, TypeError, ValueError, AttributeError)
CROSS_ATTENTION = (".encoder_attn", ".crossattention")  # names of modules
# What attends in the forward pass of this context.
_ATTEND: ContextVar[Callable[[AttentionCall], Tensor]] = ContextVar("attend")
_MASK: ContextVar[Callable[..., Any]] = ContextVar("mask")


class HfDecoder:
    """A decoder of transformers with the interface of `Decoder`."""

    def __init__(self, config: ModelConfig, model: Any, ops: Ops, row_multiple: int) -> None:
        self.config, self.dtype, self.row_multiple = config, ops.dtype, row_multiple
        self.loaded: Mapping[str, LoadedWeight] = {}
        self.reason_not_captured = "modules of transformers run on a CPU"
        self._model, self._ops = model, ops
        self._decoder = _decoder_of(model)
        self._head, self._hidden = _head_of(model, self._decoder)

    def exactness(self) -> list[Exactness]:
        """The linears, and the rest of the model as one operation."""
        reason = f"modules of transformers, rows compared in multiples of {self.row_multiple}"
        rest = Exactness(
            self.config.architecture, (self.config.hidden_size,), dtype_name(self.dtype),
            "transformers", reason,
        )  # fmt: skip
        return [*self._ops.exactness(), rest]

    def warm_up(self, backend: PagedBackend, pool: KVPool) -> None:
        """Nothing to compile."""

    def forward(self, token_ids: Tensor, step: ForwardStep) -> Tensor:
        """Hidden rows [T, hidden_size] behind the final norm, which `logits` does not apply again."""

        def attend(call: AttentionCall) -> Tensor:
            sinks = None if call.sinks is None else call.sinks.float().contiguous()
            query = call.scaled_query(self._scale)
            return step.attention(call.layer, query, call.key, call.value, sinks=sinks)

        with _set(_ATTEND, attend):
            return run_decoder(self._decoder, token_ids, step.positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` [R, hidden_size] -> [R, vocab_size] float32."""
        padding = -len(hidden) % self.row_multiple
        rows = nn.functional.pad(hidden, (0, 0, 0, padding))
        self._hidden.rows = rows[None]
        token_ids = torch.zeros((1, len(rows)), dtype=torch.int64)
        logits: Tensor = self._head(input_ids=token_ids, use_cache=False).logits[0]
        return logits[: len(hidden)].float()

    def embeddings(self, hidden: Tensor) -> Tensor:
        """Rows of `forward` [R, hidden_size], which have the final norm, in float32."""
        return hidden.float()

    @property
    def _scale(self) -> float:
        return self.config.variant.attention_scale or self.config.head_dim**-0.5


def load_hf_decoder(
    path: Path, config: ModelConfig, *, dtype: torch.dtype, exact: bool, make_ops: OpsFactory, **ops_args: Any
) -> HfDecoder:  # fmt: skip
    """Load a checkpoint with transformers and check that its prefixes can be cached.

    Args:
        make_ops, ops_args: make the linears.

    Raises:
        UnsupportedModelError: the model keeps other state than K/V, does not mask causally, or its
            rows depend on the batch although `exact` forbids it.
        CheckpointError: the weights cannot be read.
    """
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
    stored = stored_tensors(path)
    _check_full_precision(stored.values(), config.architecture)
    num_tensors = len(stored)
    # Before transformers makes all those layers.
    if config.num_layers > num_tensors:
        raise CheckpointError(
            f"{path} has {num_tensors} tensors, but config.json says {config.num_layers} layers; is it "
            "of the same model?"
        )
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    # Modules that contradict their configuration raise exceptions of every kind.
    except Exception as error:
        if not is_foreign(error):
            raise
        raise CheckpointError(
            f"{path} cannot be loaded by transformers: {first_line(error)}"
        ) from error
    _check_missing(path, config, model, set(loaded["missing_keys"]))
    model.eval().requires_grad_(False)
    refuse = f"{path}: {config.architecture} "
    with torch.inference_mode():
        probe = ProbeAttention(config)
        token_ids = torch.arange(probe.num_tokens) % min(config.vocab_size, 97)
        try:
            expected = _own_hidden(model, token_ids)
        except FORWARD_ERRORS as error:
            raise UnsupportedModelError(
                f"{refuse}does not run with attention of its own: {first_line(error)}"
            ) from error
        try:
            model.set_attn_implementation(NAME)
        except (ValueError, AttributeError) as error:
            raise UnsupportedModelError(f"{refuse}takes no attention function: {error}") from None
        ops = _replace_linears(model, dtype=dtype, exact=exact, make_ops=make_ops, **ops_args)

        def run(rows: slice, positions: Tensor | None) -> Tensor:
            positions = torch.arange(len(token_ids)) if positions is None else positions
            with _set(_ATTEND, probe.attend), _set(_MASK, probe.mask):
                return run_decoder(_decoder_of(model), token_ids[rows], positions[rows])

        def own_at_positions() -> Tensor:
            model.set_attn_implementation("eager")
            return run_decoder(_decoder_of(model), token_ids, torch.arange(len(token_ids)))

        try:
            hidden = run(slice(None), None)
        except FORWARD_ERRORS as error:
            raise UnsupportedModelError(
                f"{refuse}does not run with paged attention: {first_line(error)}"
            ) from error
        reason = check_calls(
            probe, config, may_be_recurrent=may_be_recurrent(type(model))
        ) or check_results(
            probe,
            run,
            hidden,
            expected,
            own_at_positions,
            has_cross_attention=any(
                name.endswith(CROSS_ATTENTION) for name, _ in model.named_modules()
            ),
            dtype=dtype,
        )
        if reason is not None:
            raise UnsupportedModelError(refuse + reason)
        row_multiple = _row_multiple(probe, run, ops, exact=exact)
    if row_multiple is None:
        raise UnsupportedModelError(
            f"{refuse}computes rows that depend on the other rows of a step, so that the bits of an "
            "answer would depend on the cache; exact=False (--no-exact) allows that"
        )
    return HfDecoder(config, model, ops, row_multiple)


def _check_full_precision(tensors: Iterable[StoredTensor], architecture: str) -> None:
    """Refuse floats of 8 bits and fewer, and weights of integers: transformers casts them, and drops the scales beside them.

    Raises:
        UnsupportedModelError: names the tensor.
    """
    for tensor in tensors:
        is_small_float = tensor.dtype.startswith(("F4", "F6", "F8"))
        is_integer = tensor.dtype.startswith(("I", "U"))
        if is_small_float or (is_integer and tensor.name.endswith(".weight")):
            raise UnsupportedModelError(
                f"{tensor.file}: tensor {shortened(tensor.name)} is {tensor.dtype}; {architecture} runs through "
                "transformers, with float32, bfloat16 and float16 weights only, so use the original checkpoint"
            )


def _check_missing(path: Path, config: ModelConfig, model: Any, missing: set[str]) -> None:
    """Raise CheckpointError for tensors that are not in the files: transformers made random ones.

    A base model, as for embeddings, may lack the LM head: a warning says so.
    """
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    of_head = {name for name in missing if name.rpartition(".")[0] in names}
    is_base = config.architecture.endswith("Model") and "LMHead" not in config.architecture
    others = sorted(missing - of_head if is_base else missing)
    if others:
        raise CheckpointError(
            f"{path} lacks {len(others)} tensors of {type(model).__name__}, the first is {others[0]}; is "
            f"it a checkpoint of a language model? config.json says {config.architecture}"
        )
    if of_head:
        _log.warning(
            "%s has no LM head (%s): its embeddings are right, tokens that it generates are random",
            path,
            config.architecture,
        )


def _decoder_of(model: Any) -> nn.Module:
    """The module below the head: ids in, hidden rows out."""
    decoder: nn.Module = model.get_decoder()
    # Some models call the last linear of their head `decoder`.
    return model.base_model if isinstance(decoder, nn.Linear | _OurLinear) else decoder


def run_decoder(decoder: nn.Module, token_ids: Tensor, positions: Tensor | None) -> Tensor:
    """Hidden rows [T, hidden_size] of tokens [T] of any sequences; positions None: the model's own."""
    at = {} if positions is None else {"position_ids": positions[None]}
    output = decoder(input_ids=token_ids[None], use_cache=False, return_dict=True, **at)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _own_hidden(model: Any, token_ids: Tensor) -> Tensor | None:
    """Hidden rows with the model's own eager attention and positions; None if it has no such."""
    try:
        model.set_attn_implementation("eager")
    except (ValueError, AttributeError):
        return None
    return run_decoder(_decoder_of(model), token_ids, None)


def _row_multiple(probe: ProbeAttention, run: Run, ops: Ops, *, exact: bool) -> int | None:
    """The rows to pad a step to, so that a row's bits do not depend on the others; None: there is none."""
    if not exact:
        return ops.row_multiple
    for multiple in (ops.row_multiple, FP32_ROW_MULTIPLE):
        if multiple >= ops.row_multiple and probe.has_exact_rows(run, multiple):
            return multiple
    return None


class _OurLinear(nn.Module):
    """A linear of `models.ops` in place of a `torch.nn.Linear`."""

    def __init__(self, linear: Linear, module: nn.Linear) -> None:
        super().__init__()
        self._linear = linear
        self.in_features, self.out_features = module.in_features, module.out_features
        # Models look at its dtype and device; the elements are packed elsewhere.
        self.weight = torch.empty_like(module.weight, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        rows = self._linear(x.reshape(-1, self.in_features), None)
        return rows.view(*x.shape[:-1], self.out_features)


def _replace_linears(
    model: nn.Module, *, dtype: torch.dtype, exact: bool, make_ops: OpsFactory, **ops_args: Any
) -> Ops:
    """Put our linears in place of the model's; its own weights are freed one by one."""
    weights: dict[str, Tensor] = {}
    ops = make_ops(weights, dtype=dtype, exact=exact, **ops_args)
    linears = [(name, item) for name, item in model.named_modules() if type(item) is nn.Linear]
    for name, module in linears:
        if module.weight.dtype != dtype:
            continue
        weights[f"{name}.weight"] = module.weight.data
        if module.bias is not None:
            weights[f"{name}.bias"] = module.bias.data
        parent, _, child = name.rpartition(".")
        ours = _OurLinear(ops.linear(name), module)
        setattr(model.get_submodule(parent), child, ours)
        weights.clear()
    ops.finish()
    return ops


class _Output:
    """Output of a decoder: the hidden rows first, None for everything else."""

    def __init__(self, rows: Tensor) -> None:
        self.last_hidden_state = rows

    def __getitem__(self, key: int | slice) -> Any:
        return (self.last_hidden_state,)[key]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _HiddenRows(nn.Module):
    """Stands for the decoder below a language model's head: returns rows that were computed before."""

    rows: Tensor

    def forward(self, *_args: Any, **_kwargs: Any) -> _Output:
        return _Output(self.rows)


def _head_of(model: nn.Module, decoder: nn.Module) -> tuple[nn.Module, _HiddenRows]:
    """The model with rows in place of its decoder: what it makes of hidden rows is its own code."""
    path = next(name for name, module in model.named_modules() if module is decoder)
    hidden = _HiddenRows()
    return _with_child(model, path.split("."), hidden), hidden


def _with_child(module: nn.Module, path: list[str], child: nn.Module) -> nn.Module:
    """A shallow copy of a module with another module at a path."""
    name, *rest = path
    parent = copy.copy(module)
    inner = _with_child(module.get_submodule(name), rest, child) if rest else child
    parent._modules = {**module._modules, name: inner}  # noqa: SLF001 - copied, then changed
    return parent


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, head_dim] -> [1, T, heads, head_dim]."""
    call = AttentionCall(
        layer=module.layer_idx,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1).contiguous(),
        value=value[0].transpose(0, 1).contiguous(),
        scale=options.get("scaling"),
        soft_cap=options.get("softcap"),
        sinks=options.get("s_aux"),
        is_causal=options.get("is_causal", getattr(module, "is_causal", True)),
        mask=attention_mask,
    )
    return _ATTEND.get()(call)[None], None


def _mask(*args: Any, **options: Any) -> Any:
    """transformers' mask interface: paged attention needs no mask; a probe looks at its function."""
    probe = _MASK.get(None)
    return None if probe is None else probe(*args, **options)
