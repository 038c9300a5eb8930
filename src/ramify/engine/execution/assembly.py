"""`LocalEngine`: an engine built from a checkpoint; replaces its weights later."""

from __future__ import annotations

import hashlib
from functools import partial
from math import prod
from pathlib import Path

import torch

from ramify.attention.backend import COMPILED_BACKENDS, BackendChoice, select_backend
from ramify.attention.backend_timing import faster_choice
from ramify.attention.backends.flashinfer import reason_not_captured
from ramify.attention.device_probe import batch_variant_requests, batch_variant_scores
from ramify.attention.exactness import Exactness
from ramify.attention.paged import PagedBackend
from ramify.attention.paged_index import PagedIndex
from ramify.attention.spec import AttentionSpec
from ramify.cache.key import namespace_of
from ramify.config import EngineConfig, ResolvedConfig, resolve
from ramify.engine.core import CLOSE_LIMIT_S, EngineCore
from ramify.engine.description import EngineDescription
from ramify.engine.execution.content_digest import checkpoint_files
from ramify.engine.execution.device import (
    DeviceChoice,
    check_computable,
    check_exact,
    check_graphs,
    choose_device,
    current,
)
from ramify.engine.execution.executors import build_executor
from ramify.engine.execution.identity import identity_of
from ramify.engine.execution.open_tiers import open_tiers
from ramify.engine.execution.prefill_probe import step_model
from ramify.engine.execution.ranks.open_ranks import Ranks, check_ranks, open_ranks
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.identity import EngineIdentity
from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.request import DetokenizerFactory
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.end_tokens import end_token_ids
from ramify.engine.text.tokenizer import Tokenizer
from ramify.engine.text.tokenizer_files import has_tokenizer
from ramify.errors import CheckpointError, ConfigError, ModelError
from ramify.kv.pool import KVPool
from ramify.models.checkpoint.find import find_checkpoint
from ramify.models.checkpoint.tensors import checkpoint_shapes
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.pooling import PoolingConfig
from ramify.models.configs.sharding import rank_config
from ramify.models.decoders.decoder import CausalDecoder
from ramify.models.gguf.config import read_pooling
from ramify.models.gguf.container import is_gguf
from ramify.models.kv_cache_spec import (
    attention_spec,
    build_attention,
    kv_layout,
    longest_window,
    resolve_kv_dtype,
)
from ramify.models.loader import (
    load_decoder,
    open_weights,
    read_config,
    resolve_dtype,
)
from ramify.models.ops.registry import OpsChoice, select_ops
from ramify.reasons import reason_of


class LocalEngine:
    """Tokenizer, model, K/V pool, attention backend, runner and core, built from a checkpoint.

    Args:
        requested: the user's options; `requested.model.model` names the checkpoint.
        progress: bars on stderr while weights load, if it is a terminal.
        memory_parts: engines that share this machine's memory.

    Raises:
        ConfigError, ModelError: see `LLM`.
    """

    def __init__(
        self, requested: EngineConfig, *, progress: bool = False, memory_parts: int = 1
    ) -> None:
        self.path = find_checkpoint(
            requested.model.model,
            revision=requested.model.revision,
            offline=requested.model.offline,
        )
        self.model_config: ModelConfig = read_config(self.path)
        self.pooling: PoolingConfig = read_pooling(self.path)
        config, exact = self.model_config, requested.attention.exact
        self.device_choice: DeviceChoice = choose_device(requested.model.device)
        device = self.device_choice.device
        check_computable(device, has_tiers=requested.tiers.is_used)
        num_ranks = requested.ranks.tensor_parallel_size
        check_ranks(requested, config, device)
        rank_model = rank_config(config, num_ranks)
        dtype = resolve_dtype(requested.model.dtype, config)
        self.kv_dtype = kv_dtype = resolve_kv_dtype(requested.cache.kv_dtype, dtype)
        layout = kv_layout(rank_model)
        self.config: ResolvedConfig = resolve(
            requested,
            model_max_len=config.max_model_len,
            default_max_len=config.default_model_len,
            token_bytes=layout.token_bytes(kv_dtype),
            free_memory=self.device_choice.free_memory()
            // (memory_parts * (num_ranks if device.type == "cpu" else 1)),
            window=longest_window(config),
        )
        self.attention_spec: AttentionSpec = attention_spec(
            rank_model,
            page_size=self.config.page_size,
            dtype=dtype,
            exact=exact,
            kv_dtype=kv_dtype,
        )
        self.ops_choice: OpsChoice = select_ops(requested.model.ops, dtype, device)
        if requested.model.decode_graphs:
            check_graphs(
                device,
                num_ranks=num_ranks,
                has_experts=config.moe is not None,
                ops=self.ops_choice.name,
            )
        if requested.model.activations != "int16" and self.ops_choice.name != "cpu":
            raise ConfigError(
                f"activations={requested.model.activations!r} is written for ops='cpu', and this engine "
                f"computes with ops={self.ops_choice.name!r}; leave it out"
            )
        self.backend_choice: BackendChoice = self._select_attention(requested)
        self.attention: PagedBackend = build_attention(
            rank_model, self.attention_spec, self.backend_choice.backend, device
        )
        if exact:
            self._check_exact()
        self.tokenizer: Tokenizer | None = _load_tokenizer(self.path)
        self.ranks: Ranks | None = None
        if num_ranks > 1:
            self.ranks = open_ranks(
                self.path,
                self.config,
                self.device_choice.device,
                ops=self.ops_choice.name,
                attention=self.backend_choice.name,
            )
        try:
            self.decoder: CausalDecoder = self._load_model(self.path, progress=progress)
            pool = KVPool(
                layout, self.config.num_pages, self.config.page_size, dtype=kv_dtype, device=device
            )
            self.runner = (
                ModelRunner(self.decoder, pool, self.attention)
                if self.ranks is None
                else self.ranks.runner(self.decoder, pool, self.attention)
            )
        except BaseException:
            self.close()
            raise
        tokenizer = self.tokenizer
        eos_token_ids = config.eos_token_ids
        if tokenizer is not None:
            eos_token_ids = tuple(dict.fromkeys((*eos_token_ids, *end_token_ids(tokenizer))))
        detokenizer_factory: DetokenizerFactory | None = None
        self.grammar_compiler: GrammarCompiler | None = None
        if tokenizer is not None:
            detokenizer_factory = partial(Detokenizer, tokenizer)
            self.grammar_compiler = GrammarCompiler(
                tokenizer.to_json, vocab_size=config.vocab_size, eos_token_ids=eos_token_ids
            )
        self.weights_epoch = 0  # counts replacements
        self._identity: tuple[int, EngineIdentity] | None = None  # with its weights_epoch
        tiers = open_tiers(
            self.config,
            pool,
            self.identity,
            lambda: step_model(self.config, self.runner, self.model_config),
        )
        executor = build_executor(
            self.runner, self.config, self.attention_spec, self.backend_choice
        )
        try:
            self.core = EngineCore(
                self.config,
                executor,
                vocab_size=config.vocab_size,
                eos_token_ids=eos_token_ids,
                namespace=self._namespace(self.path, self.decoder, self.weights_epoch),
                detokenizer_factory=detokenizer_factory,
                grammar_compiler=self.grammar_compiler.compile if self.grammar_compiler else None,
                tiers=tiers,
            )
        except BaseException:
            if tiers is not None:  # else its directory is locked until the process ends
                tiers.mover.close(CLOSE_LIMIT_S)
            raise

    def close(self) -> None:
        """End the other processes of tensor parallelism; no step may follow."""
        if self.ranks is not None:
            self.ranks.close()

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the weights in this process: packed, or in their compute dtype."""
        if self.decoder.loaded:
            return sum(weight.num_bytes for weight in self.decoder.loaded.values())
        shapes = checkpoint_shapes(self.path, self.model_config).values()
        return sum(prod(shape) for shape in shapes) * self.decoder.dtype.itemsize

    def identity(self) -> EngineIdentity:
        """See `identity_of`; computed once for the present weights."""
        epoch = self.weights_epoch
        if self._identity is None or self._identity[0] != epoch:
            self._identity = epoch, self.identity_with(self.path, self.decoder)
        return self._identity[1]

    def identity_with(self, path: Path, decoder: CausalDecoder) -> EngineIdentity:
        """The identity that the engine has with these weights; see `identity_of`."""
        return identity_of(
            path,
            self.config,
            decoder,
            self.runner.pool,
            [*decoder.exactness(), *self.attention.exactness()],
            device=self.device_choice.name,
            ops=self.ops_choice.name,
            attention=self.backend_choice.name,
        )

    @property
    def description(self) -> EngineDescription:
        """Model and implementation, for a server."""
        return EngineDescription(
            path=str(self.path),
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=tuple(sorted(self.core.lifecycle.eos_token_ids)),
            dtype=str(self.decoder.dtype).removeprefix("torch."),
            attention=self.backend_choice.name,
            hidden_size=self.model_config.hidden_size,
            pooling=self.pooling,
            wrapper=self.model_config.wrapper,
        )

    def exactness(self) -> list[Exactness]:
        """The implementation of each operation and of attention, with the reason for its choice."""
        return [*self.decoder.exactness(), *self.attention.exactness()]

    # -- other weights -----------------------------------------------------------------------

    def load_weights(self, model: str | Path, *, progress: bool = False) -> WeightSwap:
        """Load weights that can replace the present ones; the engine itself does not change.

        Any thread may call it while another one drives the core.

        Raises:
            ModelError: the checkpoint is missing, damaged, or of another architecture, size or
                vocabulary.
            ConfigError: old and new weights do not fit into memory together. (The old weights are
                dropped only after the new ones are loaded, so a failure loses nothing.)
        """
        if self.ranks is not None:
            raise ConfigError(
                f"weights are replaced in one process, and tensor_parallel_size={self.ranks.size}; start "
                "another engine with the new checkpoint"
            )
        path = find_checkpoint(model, offline=self.config.requested.model.offline)
        config = read_config(path)
        if config != self.model_config:
            names = [
                name
                for name in ModelConfig.__dataclass_fields__
                if getattr(config, name) != getattr(self.model_config, name)
            ]
            name = names[0]
            raise ModelError(
                f"{path} is another model than {self.path}: {name} is {getattr(config, name)!r} "
                f"and not {getattr(self.model_config, name)!r}; weights can only be replaced by "
                "those of the same model, so start another engine for it"
            )
        free, needed = self.device_choice.free_memory(), self.max_weight_bytes(path, config)
        if free and needed > free:
            raise ConfigError(
                f"the new weights need {needed:,} bytes beside the old ones but "
                f"only {free:,} are free; restart with the new checkpoint instead"
            )
        decoder = self._load_model(path, progress=progress)
        if self.config.requested.tiers.is_used:  # reads the files once, not in the engine's thread
            self.identity_with(path, decoder)
        return WeightSwap(self, path, decoder)

    def max_weight_bytes(self, path: Path, config: ModelConfig) -> int:
        """Most bytes that other weights of this model take: in full precision where the type is another than now.

        Raises:
            ModelError, ConfigError: see `load_weights`.
        """
        loaded, dtype = self.decoder.loaded, self.decoder.dtype
        if not loaded:
            return self.num_weight_bytes
        config = config.at_context(self.config.max_model_len)
        quantize = self.config.requested.model.quantize
        source, _ = open_weights(path, config, dtype=dtype, quantize=quantize)
        num_bytes = 0
        for name in source:
            present = loaded.get(name)
            if present is not None and present.kind == source.kind(name):
                num_bytes += present.num_bytes
            else:
                num_bytes += prod(source.shape(name)) * dtype.itemsize
        return num_bytes

    def install_weights(self, path: Path, decoder: CausalDecoder) -> bytes:
        """Compute with these weights from now on; returns their cache namespace. See `WeightSwap`."""
        namespace = self._namespace(path, decoder, self.weights_epoch + 1)
        self.path, self.decoder, self.runner.model = path, decoder, decoder
        self.weights_epoch += 1
        return namespace

    def _select_attention(self, requested: EngineConfig) -> BackendChoice:
        """The backend that is asked for, or that of "auto": on CUDA the faster of those that are installed."""
        device, name = self.device_choice.device, requested.attention.attention_backend
        choice = select_backend(
            name,
            self.attention_spec,
            device,
            last=COMPILED_BACKENDS if requested.model.ops == "torch" else (),
        )
        is_captured = requested.model.decode_graphs
        may_compete = not is_captured or reason_not_captured(self.attention_spec) is None
        if name == "auto" and device.type == "cuda" and may_compete:
            with current(device):
                choice = faster_choice(choice, self.attention_spec, device)
            torch.cuda.empty_cache()  # the pages that were timed
        return choice

    def _check_exact(self) -> None:
        """Refuse `exact=True` on a device that cannot have it, or where attention does not pass its probe."""
        device, choice = self.device_choice.device, self.backend_choice
        check_exact(device, ops=self.ops_choice.name, attention=choice.name)
        if device.type == "cpu":
            return
        spec, index = self.attention_spec, getattr(self.attention, "index", None)
        with current(device):
            differing = {"attention": batch_variant_requests(choice.backend, spec, device)}
            if isinstance(index, PagedIndex):
                differing["the sparse index"] = batch_variant_scores(index, spec)
        for name, requests in differing.items():
            if requests:
                raise ConfigError(
                    f"exact=True: on {self.device_choice.name} {name} has other bits alone than in a batch "
                    f"(requests {requests} of the probe); use exact=False (--no-exact), or device='cpu'"
                )

    def _load_model(self, path: Path, *, progress: bool) -> CausalDecoder:
        requested = self.config.requested
        with current(self.device_choice.device):  # to which kernels are launched by probes
            return load_decoder(
                path,
                dtype=requested.model.dtype,
                exact=requested.attention.exact,
                ops=(
                    self.ops_choice.factory
                    if self.ranks is None
                    else self.ranks.operations(self.ops_choice.factory, self.model_config)
                ),
                quantize=requested.model.quantize,
                activations=requested.model.activations,
                progress=progress,
                max_model_len=self.config.max_model_len,
                device=self.device_choice.device,
            )

    def _namespace(self, path: Path, decoder: CausalDecoder, epoch: int) -> bytes:
        """The cache namespace of the K/V that the weights in `path` compute.

        With cache tiers it is the same in every process that computes the same bits.
        """
        if self.config.requested.tiers.is_used:
            return namespace_of(kv=self.identity_with(path, decoder).kv_digest)
        later: dict[str, int | str] = {"epoch": epoch} if epoch else {}
        activations = self.config.requested.model.activations
        if activations != "int16":
            later["activations"] = activations
        if self.device_choice.device.type != "cpu":
            later["device"] = self.device_choice.name
        if self.ranks is not None:
            later["ranks"] = self.ranks.size
        return namespace_of(
            model=_fingerprint(path),
            weight_types=_weight_types(decoder),
            arithmetic=_arithmetic(decoder),
            kv_dtype=str(self.kv_dtype),
            exact=int(self.config.requested.attention.exact),
            **later,
        )


class WeightSwap:
    """Loaded weights. Call it between two steps, in the thread of the core, to install them."""

    def __init__(self, engine: LocalEngine, path: Path, decoder: CausalDecoder) -> None:
        self._engine, self._path, self._decoder = engine, path, decoder

    def identity(self) -> EngineIdentity:
        """That of the engine with these weights. Reads the checkpoint unless its digest is remembered.

        Raises:
            CheckpointError: a file of the checkpoint cannot be read.
        """
        return self._engine.identity_with(self._path, self._decoder)

    def __call__(self) -> bytes:
        """Install the weights; returns the cache namespace of their K/V."""
        return self._engine.install_weights(self._path, self._decoder)


def _load_tokenizer(path: Path) -> Tokenizer | None:
    if has_tokenizer(path):
        return Tokenizer.load(path)
    return None  # prompts and answers are token ids


def _weight_types(decoder: CausalDecoder) -> str:
    """Identifies the type of every weight, as it is stored and as the model holds it."""
    lines = [f"{name} {weight.kind} {weight.dtype}" for name, weight in decoder.loaded.items()]
    return _digest(lines)


def _arithmetic(decoder: CausalDecoder) -> str:
    """Identifies the implementation of each operation, and the dtype: both change the bits of K/V."""
    operations = [
        f"{op.operation} {op.shape} {op.dtype} {op.strategy}" for op in decoder.exactness()
    ]
    return _digest([str(decoder.dtype), *operations])


def _digest(lines: list[str]) -> str:
    """Of the lines in any order."""
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=16).hexdigest()


def _fingerprint(path: Path) -> str:
    """Identifies the weights by path, size and modification time of the checkpoint's files."""
    digest = hashlib.blake2b(digest_size=16)
    config = [] if is_gguf(path) else [path / "config.json"]
    for file in [*checkpoint_files(path), *config]:
        try:
            stat = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {reason_of(error, file)}") from error
        digest.update(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
