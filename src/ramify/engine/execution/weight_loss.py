"""What the weights of an engine cost: its next-token distributions of a text beside those in full precision."""

from __future__ import annotations

import gc
import json
import logging
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.exactness import cache_folder
from ramify.config import EngineConfig
from ramify.counts import counted
from ramify.engine.execution.assembly import LocalEngine
from ramify.engine.execution.loss_text import DEFAULT_TEXT, read_source
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.step import StepPlan
from ramify.errors import ConfigError
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVPool
from ramify.models.kv_cache_spec import kv_layout
from ramify.reasons import reason_of

logger = logging.getLogger(__name__)

CONTEXT = 1024  # tokens that are read together; each but the first is predicted
CHUNK_ROWS = 256  # rows of logits at a time
STORE = "weight_loss.json"


@dataclass(frozen=True, slots=True)
class WeightLoss:
    """Differences to the same model in float32, with its weights dequantised or not quantised at all.

    Args:
        text: its name.
        num_tokens: that are predicted.
        context: most tokens that a token is predicted from.
        rms_error: of logits, relative; each row less its mean, which no probability depends on.
        kl: mean Kullback-Leibler divergence of the next token, in nats.
        same_top: share of tokens of which the likeliest is the same.
    """

    text: str
    num_tokens: int
    context: int
    rms_error: float
    kl: float
    same_top: float
    perplexity: float
    full_perplexity: float

    def __str__(self) -> str:
        change = self.perplexity / self.full_perplexity - 1
        return (
            f"perplexity {self.perplexity:.3f} for {self.full_perplexity:.3f} ({change:+.2%}), KL "
            f"{self.kl:.2g}, same top token {self.same_top:.1%}, rms error of logits {self.rms_error:.2g} "
            f"({self.num_tokens:,} tokens of {self.text})"
        )


class LossSum:
    """Sums over rows of logits, from which a `WeightLoss` is made."""

    def __init__(self) -> None:
        self._num = self._same = 0
        self._error = self._square = self._kl = self._nll = self._full_nll = 0.0

    def add(self, logits: Tensor, full: Tensor, targets: Tensor) -> None:
        """Add rows: logits [n, vocab_size] of both models, and the tokens [n] that come next."""
        centred, full_centred = (rows - rows.mean(1, keepdim=True) for rows in (logits, full))
        self._error += float((centred - full_centred).square().sum(dtype=torch.float64))
        self._square += float(full_centred.square().sum(dtype=torch.float64))
        log_p, full_log_p = logits.log_softmax(1), full.log_softmax(1)
        kl = (full_log_p.exp() * (full_log_p - log_p)).sum(1)
        self._kl += float(kl.sum(dtype=torch.float64))
        self._same += int((logits.argmax(1) == full.argmax(1)).sum())
        self._nll -= float(log_p.gather(1, targets[:, None]).sum(dtype=torch.float64))
        self._full_nll -= float(full_log_p.gather(1, targets[:, None]).sum(dtype=torch.float64))
        self._num += len(targets)

    def loss(self, text: str, context: int) -> WeightLoss:
        """The figures of all rows."""
        return WeightLoss(
            text=text,
            num_tokens=self._num,
            context=context,
            rms_error=math.sqrt(self._error / self._square) if self._square else 0.0,
            kl=max(self._kl / self._num, 0.0),
            same_top=self._same / self._num,
            perplexity=_exp(self._nll / self._num),
            full_perplexity=_exp(self._full_nll / self._num),
        )


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf


def measure_loss(
    requested: EngineConfig, *, text: Path | None = None, num_tokens: int, progress: bool = False
) -> WeightLoss:
    """Compute a text with a model, then with the same in full precision; remembers the result.

    The models are loaded one after the other; between them, logits lie in a temporary file.

    Args:
        text: None: `DEFAULT_TEXT`.
        num_tokens: of the text, at most.
        progress: see `LocalEngine`.

    Raises:
        ConfigError: the text cannot be read or is too short, the model has no tokenizer, logits do not fit
            into the temporary directory.
        ModelError: see `LocalEngine`.
    """
    # A name that is wrong is refused before a model is loaded.
    read_source(text)
    engine = LocalEngine(requested, progress=progress)
    token_ids = read_text(engine, text)[:num_tokens]
    context = min(CONTEXT, engine.config.max_model_len)
    key, total = loss_key(engine), LossSum()
    with tempfile.TemporaryFile(buffering=0) as stored:
        for logits, _ in text_logits(engine, token_ids, context):
            write_rows(stored, logits)
        del engine
        gc.collect()
        stored.seek(0)
        full_config = replace(
            requested,
            model=replace(requested.model, quantize="widen", activations="int16", dtype="float32"),
            cache=replace(requested.cache, kv_dtype="auto"),
        )
        full_engine = LocalEngine(full_config, progress=progress)
        for full, targets in text_logits(full_engine, token_ids, context):
            total.add(_read_rows(stored, full.shape), full, targets)
    loss = total.loss(DEFAULT_TEXT if text is None else text.name, context)
    _remember(key, loss)
    return loss


def write_rows(file: IO[bytes], logits: Tensor) -> None:
    """Append logits to a temporary file without a buffer; ConfigError if they do not fit."""
    # Not `tofile`, which loses what it cannot flush.
    rest = logits.contiguous().numpy().data.cast("B")
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        raise ConfigError(
            f"logits do not fit into {tempfile.gettempdir()}: {reason_of(error)}; take fewer tokens, or name another "
            "directory in the environment (TMPDIR)"
        ) from error


def _read_rows(file: IO[bytes], shape: torch.Size) -> Tensor:
    return torch.from_numpy(np.fromfile(file, np.float32, shape.numel())).view(shape)


def read_text(engine: LocalEngine, path: Path | None) -> list[int]:
    """Token ids of a text file, or of `DEFAULT_TEXT`.

    Raises:
        ConfigError: see `measure_loss`.
    """
    if engine.tokenizer is None:
        raise ConfigError(
            f"{engine.path} has no tokenizer to read a text with; put its tokenizer.json there, or take a GGUF "
            "file that has one"
        )
    token_ids = engine.tokenizer.encode(read_source(path))
    if len(token_ids) < 2:
        raise ConfigError(
            f"{path or DEFAULT_TEXT} has {counted(len(token_ids), 'token')}; at least 2 are needed"
        )
    return list(token_ids)


@torch.inference_mode()
def text_logits(
    engine: LocalEngine, token_ids: Sequence[int], context: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [n, vocab_size] of a text, and the tokens [n] that come next; `CHUNK_ROWS` at a time.

    The text is cut into pieces of `context` tokens, which do not see each other.
    """
    page_size = engine.config.page_size
    pool = KVPool(
        kv_layout(engine.model_config), -(-context // page_size), page_size, dtype=engine.kv_dtype
    )
    runner = ModelRunner(engine.decoder, pool, engine.attention)
    table = PagedBlockTable.of([range(pool.num_pages)], page_size)
    for start in range(0, len(token_ids), context):
        piece = np.array(token_ids[start : start + context], np.int64)
        for first in range(0, len(piece) - 1, CHUNK_ROWS):
            rows = piece[first : first + CHUNK_ROWS]
            batch = AttentionBatch.build([Extend(0, 0, first, len(rows))], table)
            hidden = runner.forward(StepPlan(batch, rows, (), (), (0,)))
            targets = piece[first + 1 : first + 1 + len(rows)]
            yield (
                runner.logits(hidden[: len(targets)], range(len(targets))),
                torch.from_numpy(targets),
            )


# -- what was measured -----------------------------------------------------------------------------


def loss_key(engine: LocalEngine) -> str:
    """Identifies the weights and the arithmetic of an engine."""
    dtype = str(engine.decoder.dtype).removeprefix("torch.")
    return f"{engine.core.namespaces.base.hex()} {dtype} {engine.ops_choice.name}"


def known_loss(engine: LocalEngine) -> WeightLoss | None:
    """What `measure_loss` found for such an engine; None: nothing, or nothing that can be shown."""
    entry = _read_store().get(loss_key(engine))
    try:
        loss = WeightLoss(**({} if entry is None else entry))
        str(loss)
    except (TypeError, ValueError, ArithmeticError):
        return None
    return loss


def _read_store() -> dict[str, Any]:
    folder = cache_folder()
    try:
        entries = json.loads((folder / STORE).read_text("utf-8")) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _remember(key: str, loss: WeightLoss) -> None:
    """Write atomically; a folder that cannot be written to is no error."""
    folder = cache_folder()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, prefix=f".{STORE}-", delete=False, encoding="utf-8"
        ) as file:
            json.dump(_read_store() | {key: asdict(loss)}, file, indent=1, sort_keys=True)
        Path(file.name).replace(folder / STORE)
    except OSError as error:
        logger.info("cannot remember the loss of the weights in %s: %s", folder, error)
