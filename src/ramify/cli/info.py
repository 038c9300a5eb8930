"""`ramify info`: versions, device, weights, operations and attention backend and why, memory, tiers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.cluster_options import (
    Authority,
    Certificate,
    CertificateName,
    ClusterOption,
    Key,
    Secret,
)
from ramify.cli.options import DEFAULT_MODEL, AsJson, Model, engine_options, exit_on_error
from ramify.counts import counted
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.attention.backend import BackendChoice
    from ramify.config import ResolvedConfig
    from ramify.engine.llm import LLM
    from ramify.models.ops.registry import OpsChoice

MEASURE_LIMIT_S = 3.0  # for the first reads of all cache tiers


@engine_options(
    "dtype",
    "quantize",
    "activations",
    "page_size",
    "kv_cache_tokens",
    "kv_cache_memory",
    "max_num_seqs",
    "max_model_len",
    "device",
    "tensor_parallel_size",
    "rank_timeout_s",
    "ops",
    "attention_backend",
    "exact",
    "cache_dir",
    "cache_disk",
    "cache_dir_readonly",
    "cache_key",
    "cache_store",
    "cache_host",
    "cache_cost",
)
def info(
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    as_json: AsJson = False,
    replicas: Annotated[
        str | None,
        ClusterOption(help="Show these replicas instead: HOST:PORT,... as `ramify serve` has it."),
    ] = None,
    cluster_secret: Secret = None,
    cluster_certificate: Certificate = None,
    cluster_key: Key = None,
    cluster_authority: Authority = None,
    cluster_certificate_name: CertificateName = None,
) -> None:
    """Show versions, device, operations and attention backend and why, exactness, memory plan."""
    with exit_on_error():
        if replicas is not None:
            files = (cluster_secret, cluster_certificate, cluster_key, cluster_authority)
            facts = _ask_replicas(replicas, files, cluster_certificate_name)
        else:
            from ramify.engine.llm import LLM

            with LLM(model, progress=True, **engine) as llm:
                facts = _collect_info(llm)
    if as_json:
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        for section, entries in facts.items():
            typer.echo(f"{section}:")
            for name, value in entries.items():
                typer.echo(f"  {name + ':':24} {value}")
    if replicas is not None and any("error" in entries for entries in facts.values()):
        raise typer.Exit(1)


def _ask_replicas(
    replicas: str, credential_files: Sequence[Path | None], certificate_name: str | None
) -> dict[str, Any]:
    """What replicas say of themselves, by address."""
    import asyncio

    from ramify.cluster.credentials import Credentials, import_grpc
    from ramify.cluster.inspection import replica_facts
    from ramify.cluster.launch import parse_replicas

    import_grpc()
    addresses = parse_replicas(replicas)
    if isinstance(addresses, int):
        raise ConfigError(
            f"--replicas {addresses}, but info asks replicas that run: give HOST:PORT,HOST:PORT"
        )
    credentials = Credentials.from_files(*credential_files, name=certificate_name)
    return asyncio.run(replica_facts(addresses, credentials))


def _collect_info(llm: LLM) -> dict[str, dict[str, Any]]:
    import platform

    import torch

    import ramify
    from ramify.attention.backend import BACKENDS
    from ramify.engine.execution.host_memory import resident_memory
    from ramify.engine.execution.weight_loss import known_loss
    from ramify.models.checkpoint.loaded_weights import weight_figures
    from ramify.models.configs.sampling_defaults import AUTO
    from ramify.models.gguf.config import read_sampling_defaults
    from ramify.models.ops.registry import OPS

    config, plan = llm.engine.model_config, llm.config
    loss, loaded = known_loss(llm.engine), llm.engine.decoder.loaded
    weights = llm.engine.num_weight_bytes
    return {
        "versions": {
            "ramify": ramify.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "device": {
            "kind": llm.engine.device_choice.name,
            "chosen": llm.engine.device_choice.reason,
            "vector instructions": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            **_ranks(llm),
        },
        "model": {
            "path": str(llm.engine.path),
            "architecture": config.architecture,
            "dtype": str(llm.engine.decoder.dtype).removeprefix("torch."),
            "layers": config.num_layers,
            "context": f"{plan.max_model_len} tokens",
            "sampling of `serve`": read_sampling_defaults(AUTO, llm.engine.path).summary(),
        },
        "weights": {
            **(
                weight_figures(loaded) if loaded else {"in all": "not counted: run by transformers"}
            ),
            "loss": "not measured: ramify verify --against-full" if loss is None else str(loss),
        },
        "operations": _explain(llm.engine.ops_choice, OPS),
        "attention backends": _explain(llm.engine.backend_choice, BACKENDS),
        "exactness": {
            "exact": plan.requested.attention.exact,
            **{
                f"{verdict.operation} {'x'.join(map(str, verdict.shape))}": (
                    f"{verdict.strategy} ({verdict.reason})"
                )
                for verdict in llm.engine.exactness()
            },
        },
        "memory": {
            "weights": _mib(weights),
            "K/V per token": f"{plan.token_bytes:,} bytes",
            "K/V pages": f"{plan.num_pages:,} of {plan.page_size} tokens",
            "K/V pool": f"{plan.kv_cache_tokens:,} tokens, at most {_mib(plan.kv_cache_bytes)}, "
            "resident as it is written",
            "K/V window": _window(plan),
            "resident": _mib(resident_memory()),
            "free": _mib(llm.engine.device_choice.free_memory()),
        },
        **_tiers(llm),
    }


def _ranks(llm: LLM) -> dict[str, str]:
    """How the model is shared between processes; nothing for one process."""
    ranks, spec = llm.engine.ranks, llm.engine.attention_spec
    if ranks is None:
        return {}
    weights = [llm.engine.num_weight_bytes, *ranks.weight_bytes()]
    return {
        "ranks": f"{ranks.size} processes; figures of memory are those of rank 0",
        "heads of a rank": f"{spec.num_heads} of queries, {spec.num_kv_heads} of K/V",
        "weights by rank": ", ".join(map(_mib, weights)),
    }


def _tiers(llm: LLM) -> dict[str, dict[str, str]]:
    """What each cache tier is worth, as a section; none without tiers."""
    tiering = llm.core.tiering
    if tiering is None:
        return {}
    tiering.wait_for_probes(MEASURE_LIMIT_S)
    page_bytes, page_size = llm.config.page_size * llm.config.token_bytes, llm.config.page_size
    facts: dict[str, str] = {}
    for tier, speed in tiering.speeds().items():
        if speed.latency_s is None or speed.page_s is None:
            facts[tier] = f"not measured: {speed.reason}"
            continue
        rate = f"{page_bytes / speed.page_s / 1e6:,.0f} MB/s" if speed.page_s else "any rate"
        pays = ""
        if speed.pays_from is not None:
            tokens = counted(speed.pays_from * page_size, "token")
            pays = f"pays from {counted(speed.pays_from, 'page')} ({tokens}); "
        facts[tier] = f"{1e3 * speed.latency_s:.3g} ms and {rate}: {pays}{speed.reason}"
    return {"cache tiers": facts}


def _window(plan: ResolvedConfig) -> str:
    """How much of a long request stays when pages run out."""
    if plan.window is None:
        return "none: a layer reads all tokens"
    num_pages = plan.num_live_pages(plan.max_model_len)
    return f"{plan.window:,} tokens: a request holds as few as {counted(num_pages, 'page')}"


def _explain(choice: BackendChoice | OpsChoice, names: Iterable[str]) -> dict[str, str]:
    """Why each backend or operation set is used or not."""
    return {
        name: f"chosen: {choice.reason}"
        if name == choice.name
        else f"not used: {choice.rejected[name]}"
        for name in names
    }


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
