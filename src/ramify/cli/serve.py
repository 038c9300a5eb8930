"""The commands `serve` and `keys`; what is heavy is imported when they run."""

from __future__ import annotations

import json
import secrets
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ramify.config import AttentionSection, CacheSection, ModelSection, SchedulerSection
from ramify.errors import ConfigError, RamifyError

_MODEL, _CACHE = ModelSection(), CacheSection()
_SCHEDULER, _ATTENTION = SchedulerSection(), AttentionSection()
MODEL, CACHE, LOAD, SAFETY, OPERATIONS = "Model", "Cache", "Load", "Safety", "Operations"


class LogForm(str, Enum):
    """How log lines look."""

    text = "text"
    json = "json"


def serve(
    model: Annotated[
        str, typer.Argument(help="Checkpoint directory, cached hub id, or ramify-tiny (built in).")
    ] = _MODEL.model,
    host: Annotated[str, typer.Option(help="127.0.0.1 is this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    dtype: Annotated[
        str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=MODEL)
    ] = _MODEL.dtype,
    max_model_len: Annotated[
        int | None, typer.Option(help="Tokens of the longest request.", rich_help_panel=MODEL)
    ] = _MODEL.max_model_len,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call it; several are possible.", rich_help_panel=MODEL),
    ] = None,
    attention_backend: Annotated[
        str, typer.Option(help="auto, or a name `ramify info` lists.", rich_help_panel=MODEL)
    ] = _ATTENTION.attention_backend,
    exact: Annotated[
        bool, typer.Option(help="Same bits whatever was cached.", rich_help_panel=MODEL)
    ] = _ATTENTION.exact,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(help="Size of the K/V pool in tokens.", rich_help_panel=CACHE)
    ] = _CACHE.kv_cache_tokens,
    kv_cache_memory: Annotated[
        int | None, typer.Option(help="The same in bytes.", rich_help_panel=CACHE)
    ] = _CACHE.kv_cache_memory,
    kv_dtype: Annotated[
        str, typer.Option(help="auto, int8 or fp8.", rich_help_panel=CACHE)
    ] = _CACHE.kv_dtype,
    page_size: Annotated[
        int, typer.Option(help="Tokens per page, the unit of sharing.", rich_help_panel=CACHE)
    ] = _CACHE.page_size,
    prefix_cache: Annotated[
        bool, typer.Option(help="Share prefixes.", rich_help_panel=CACHE)
    ] = _CACHE.prefix_cache,
    policy: Annotated[
        str, typer.Option(help="What is evicted first.", rich_help_panel=CACHE)
    ] = _CACHE.policy,
    warm: Annotated[
        Path | None,
        typer.Option(help="Prompts to compute before the server is ready.", rich_help_panel=CACHE),
    ] = None,
    public: Annotated[
        Path | None,
        typer.Option(help="Prefixes that all tenants may share.", rich_help_panel=CACHE),
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Requests that run at once.", rich_help_panel=LOAD)
    ] = _SCHEDULER.max_num_seqs,
    max_batch_tokens: Annotated[
        int, typer.Option(help="New tokens per step.", rich_help_panel=LOAD)
    ] = _SCHEDULER.max_batch_tokens,
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; then 503.", rich_help_panel=LOAD)
    ] = 1024,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="RAMIFY_API_KEY", help="Each is a tenant of its own.", rich_help_panel=SAFETY
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            envvar="RAMIFY_ADMIN_KEY", help="May look at the cache.", rich_help_panel=SAFETY
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="Hashed keys, tenants, quotas: `ramify keys`.", rich_help_panel=SAFETY),
    ] = None,
    insecure: Annotated[
        bool, typer.Option(help="Let everybody call, from anywhere.", rich_help_panel=SAFETY)
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(help="Append a line per request: hashes.", rich_help_panel=OPERATIONS),
    ] = None,
    record_tokens: Annotated[
        bool, typer.Option(help="Token ids in it too.", rich_help_panel=OPERATIONS)
    ] = False,
    log_format: Annotated[
        LogForm, typer.Option(help="Of the lines on stderr.", rich_help_panel=OPERATIONS)
    ] = LogForm.text,
    drain_seconds: Annotated[
        float,
        typer.Option(min=0, help="For live requests at the end.", rich_help_panel=OPERATIONS),
    ] = 30.0,
) -> None:
    """Serve OpenAI's and Anthropic's APIs, prompt caching included.

    Ctrl-C lets live requests end; a second one does not.
    """
    from ramify.server.run import ServeOptions, serve

    options = ServeOptions(
        model=model,
        engine={
            "dtype": dtype,
            "max_model_len": max_model_len,
            "attention_backend": attention_backend,
            "exact": exact,
            "kv_cache_tokens": kv_cache_tokens,
            "kv_cache_memory": kv_cache_memory,
            "kv_dtype": kv_dtype,
            "page_size": page_size,
            "prefix_cache": prefix_cache,
            "policy": policy,
            "max_num_seqs": max_num_seqs,
            "max_batch_tokens": max_batch_tokens,
            "max_waiting": max_waiting,
        },
        host=host,
        port=port,
        served_names=tuple(served_model_name or ()),
        api_keys=tuple(api_key or ()),
        admin_key=admin_key,
        key_file=api_key_file,
        insecure=insecure,
        warm=warm,
        public=public,
        record=record,
        record_tokens=record_tokens,
        log_json=log_format is LogForm.json,
        drain_s=drain_seconds,
    )
    try:
        code = serve(options)
    except RamifyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(code)


def chat(
    model: Annotated[
        str | None,
        typer.Argument(help="As for `serve`; with --url a name that the server lists."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Of a server with OpenAI's API, in place of an engine here.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="Text of a system message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = _MODEL.dtype,
) -> None:
    """Talk in the terminal; each turn shows how much of it was cached.

    /exit ends, /clear begins anew, Ctrl-C stops an answer.
    """
    import sys

    from ramify.cli.chat import Backend, Chat, LocalBackend, RemoteBackend, read_line
    from ramify.params import SamplingParams

    try:
        if url is not None:
            options = {"max_tokens": max_tokens, "temperature": temperature}
            backend: Backend = RemoteBackend(url, key=api_key, model=model, options=options)
        else:
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
            backend = LocalBackend(model or _MODEL.model, params, {"dtype": dtype})
    except RamifyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    Chat(backend, lines=read_line, out=sys.stdout, notes=sys.stderr, system=system).run()


def keys(
    file: Annotated[Path, typer.Argument(help="The key file; made if it is not there.")],
    tenant: Annotated[str, typer.Option(help="Whose key; by default a tenant of its own.")] = "",
    admin: Annotated[bool, typer.Option(help="May look at the cache and work on it.")] = False,
) -> None:
    """Add a key to a key file. The key is shown once; the file has its hash."""
    from ramify.server.tenants import ApiKeys, hash_key

    key = f"rk-{secrets.token_urlsafe(32)}"
    try:
        if file.exists():
            ApiKeys.load(file)
            found = json.loads(file.read_text("utf-8"))
        else:
            found = {"keys": []}
        entry: dict[str, object] = {"hash": hash_key(key), "admin": admin}
        found["keys"].append(entry | ({"tenant": tenant} if tenant else {}))
        new = file.with_name(file.name + ".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        new.replace(file)
    except (ConfigError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(key)
