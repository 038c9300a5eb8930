"""Opens a `ClusterLLM`: over children of this process, or over replicas that were started elsewhere."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ramify.cluster.client import ClusterLLM
from ramify.cluster.credentials import Credentials
from ramify.cluster.local_processes import STOP_S, LocalOptions, LocalProcesses
from ramify.engine.text.tokenizer import Tokenizer
from ramify.engine.text.tokenizer_files import has_tokenizer
from ramify.errors import ConfigError
from ramify.models.checkpoint.find import find_checkpoint, find_text_files

MAX_REPLICAS = 64  # children of one process
ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^\s,:\[\]]+):([0-9]{1,5})")


def parse_replicas(text: str) -> int | list[str]:
    """The value of `--replicas`: a number of children, or addresses of replicas.

    Raises:
        ConfigError: it is neither.
    """
    if text.strip().isdecimal():
        count = int(text)
        if not 1 <= count <= MAX_REPLICAS:
            raise ConfigError(f"--replicas {text} but it must be in 1..{MAX_REPLICAS}")
        return count
    addresses = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [address for address in addresses if not _is_address(address)]
    if wrong or not addresses:
        raise ConfigError(
            f"--replicas {text!r}: {wrong[0] if wrong else 'nothing'!r} is no HOST:PORT; give a number "
            "of replicas to start here, or addresses such as 10.0.0.1:7000,10.0.0.2:7000"
        )
    if len(set(addresses)) < len(addresses):
        raise ConfigError(f"--replicas {text!r} names an address twice")
    return addresses


def _is_address(text: str) -> bool:
    match = ADDRESS.fullmatch(text)
    return match is not None and 0 < int(match[2]) < 65536


@asynccontextmanager
async def local_cluster(
    options: LocalOptions, *, stop_s: float = STOP_S, **client_options: Any
) -> AsyncIterator[ClusterLLM]:
    """Replicas on this machine, all ready, which end with the block.

    Args:
        stop_s: for a replica without requests to end by itself.
        client_options: of `ClusterLLM`.

    Raises:
        ReplicaStartError: one cannot load its model.
        CheckpointError: there is no such model.
    """
    # With the weights: children would each download them.
    tokenizer = await asyncio.to_thread(
        load_tokenizer, find_checkpoint, options.model, options.engine
    )
    processes = LocalProcesses(options, stop_s=stop_s)
    try:
        addresses = await processes.start()
        client = ClusterLLM(
            addresses,
            tokenizer,
            credentials=processes.credentials,
            replaced=processes.use_model,
            **client_options,
        )
        try:
            # From here on: one that dies before the others are ready is started again, too.
            processes.keep(client.move)
            await client.start()
            await client.all_ready()
            yield client
        finally:
            await client.aclose()
    finally:
        await processes.stop()


@asynccontextmanager
async def remote_cluster(
    model: str,
    engine: Mapping[str, Any],
    addresses: list[str],
    credentials: Credentials,
    **client_options: Any,
) -> AsyncIterator[ClusterLLM]:
    """Replicas that were started elsewhere, and go on after the block.

    Args:
        model: whose tokenizer the replicas have.
        engine: options that name the model's revision.

    Raises:
        NoReplicaError: none answers.
    """
    tokenizer = await asyncio.to_thread(load_tokenizer, find_text_files, model, engine)
    client = ClusterLLM(
        {address: address for address in addresses},
        tokenizer,
        credentials=credentials,
        **client_options,
    )
    try:
        await client.start()
        yield client
    finally:
        await client.aclose()


def load_tokenizer(
    find: Callable[..., Path], model: str, engine: Mapping[str, Any]
) -> Tokenizer | None:
    """The tokenizer of a model; None if it has none.

    Args:
        find: `find_checkpoint` or `find_text_files`.

    Raises:
        CheckpointError: there is no such model.
    """
    path = find(model, revision=engine.get("revision"), offline=bool(engine.get("offline", False)))
    return Tokenizer.load(path) if has_tokenizer(path) else None
