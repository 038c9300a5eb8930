"""`ramify serve` and `ramify keys`: the OpenAI and Anthropic server, and its API keys."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ramify.cli.cluster_options import (
    Authority,
    Certificate,
    CertificateName,
    ClusterOptions,
    Key,
    Replicas,
    Secret,
    Stride,
    Threads,
    refuse_engine_options,
)
from ramify.cli.kv_event_options import (
    Endpoint,
    EventsForm,
    Form,
    Replay,
    Tiers,
    Topic,
    kv_event_options,
)
from ramify.cli.load import announce_load
from ramify.cli.options import DEFAULT_MODEL, PANELS, Model, engine_options, exit_on_error
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.server.run import OpenClient, ServeOptions
    from ramify.server.telemetry.options import OtlpOptions

# Headings of the help page, and the flags below them that are no engine options.
MODEL, CACHE, SAFETY, OPERATIONS = "Model", "Cache", "Safety", "Operations"
CacheOption = partial(typer.Option, rich_help_panel=CACHE)
SafetyOption = partial(typer.Option, rich_help_panel=SAFETY)
OperationsOption = partial(typer.Option, rich_help_panel=OPERATIONS)


LogFile = Annotated[
    Path | None,
    OperationsOption(
        help="Append log lines to this file in place of stderr; when it is renamed, the next line makes "
        "a new one."
    ),
]


class LogFormat(str, Enum):
    """Format of log lines."""

    text = "text"
    json = "json"


MAX_WAITING = 1024


@engine_options(panels=PANELS, max_waiting=MAX_WAITING)
def serve(
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    more_names: Annotated[
        list[str] | None,
        typer.Argument(help="Further model names: `ramify serve DIR --served-model-name a b c`."),
    ] = None,
    host: Annotated[str, typer.Option(help="127.0.0.1 is this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Model names for clients; '*' serves any name.", rich_help_panel=MODEL),
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(
            help="Format of tool calls; default: the chat template's.", rich_help_panel=MODEL
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Format of reasoning; default: the chat template's.", rich_help_panel=MODEL
        ),
    ] = None,
    generation_config: Annotated[
        str,
        typer.Option(
            help="Sampling parameters of requests that omit them: `auto` (the checkpoint's "
            "generation_config.json), `none`, or a directory that has the file.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    drop_forbidden_tools: Annotated[
        bool,
        typer.Option(
            help="Leave tools out of the prompt if tool_choice is none; else calls are forbidden.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    tools_first: Annotated[
        bool,
        typer.Option(
            help="Write tools before the system prompt where the chat template can, so that they "
            "stay cached when it changes.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    prompt_rules: Annotated[
        str | None,
        CacheOption(
            metavar="NAME,...",
            help="Move changing text of known clients out of the system prompt, by named rules "
            "(docs/server.md, Prompt rules).",
        ),
    ] = None,
    warm: Annotated[
        Path | None, CacheOption(help="Prompts to compute before the server is ready.")
    ] = None,
    public: Annotated[Path | None, CacheOption(help="Prefixes that all tenants may share.")] = None,
    api_key: Annotated[
        list[str] | None,
        SafetyOption(envvar="RAMIFY_API_KEY", help="Each key is a tenant of its own."),
    ] = None,
    admin_key: Annotated[
        str | None,
        SafetyOption(envvar="RAMIFY_ADMIN_KEY", help="Key for the cache admin endpoints."),
    ] = None,
    api_key_file: Annotated[
        Path | None, SafetyOption(help="Hashed keys, tenants, quotas: `ramify keys`.")
    ] = None,
    insecure: Annotated[bool, SafetyOption(help="Allow a non-local --host without keys.")] = False,
    allowed_hosts: Annotated[
        list[str] | None,
        SafetyOption(
            help="Host header to answer beside localhost; repeat it, '*' is any. Default: without "
            "keys on this machine only localhost, else any."
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        SafetyOption(help="Origin whose web pages may call; repeat it, '*' is any."),
    ] = None,
    replicas: Replicas = None,
    threads_per_replica: Threads = None,
    cluster_secret: Secret = None,
    cluster_certificate: Certificate = None,
    cluster_key: Key = None,
    cluster_authority: Authority = None,
    cluster_certificate_name: CertificateName = None,
    routing_stride: Stride = 1,
    kv_events: Endpoint = None,
    kv_events_replay: Replay = None,
    kv_events_topic: Topic = None,
    kv_events_form: EventsForm = Form.map,
    kv_events_tiers: Tiers = False,
    record: Annotated[
        Path | None,
        OperationsOption(help="Append a line of token hashes per request to this file."),
    ] = None,
    record_tokens: Annotated[bool, OperationsOption(help="Record token ids as well.")] = False,
    otlp_endpoint: Annotated[
        str | None,
        OperationsOption(
            metavar="URL",
            help="Send traces and metrics to this OpenTelemetry collector by OTLP over HTTP, such as "
            "http://127.0.0.1:4318 (`pip install 'ramify[otel]'`). Default: OTEL_EXPORTER_OTLP_ENDPOINT.",
        ),
    ] = None,
    log_format: Annotated[
        LogFormat, OperationsOption(help="Format of log lines.")
    ] = LogFormat.text,
    log_file: LogFile = None,
    drain_seconds: Annotated[
        float, OperationsOption(min=0, help="Time for live requests to end at shutdown.")
    ] = 30.0,
    max_connections: Annotated[
        int | None,
        OperationsOption(
            min=1,
            help="Open connections; idle ones are closed for new ones, and new ones wait if none is "
            "idle. Default: the descriptors of the process (`ulimit -n`) less 128.",
        ),
    ] = None,
    batch_dir: Annotated[
        Path | None,
        OperationsOption(
            help="Directory of /v1/files and batches, which a restart goes on with; without it they "
            "are off."
        ),
    ] = None,
    batch_disk: Annotated[
        str,
        OperationsOption(
            help="Most disk space of --batch-dir, in bytes or as 50GB, 512MiB; with several tenants, "
            "each gets at most half."
        ),
    ] = "10GB",
    max_connections_per_address: Annotated[
        int | None,
        OperationsOption(
            min=1,
            help="Open connections of one client address (IPv6: one /64); with a proxy in front, "
            "give it all. Default: three quarters of --max-connections.",
        ),
    ] = None,
) -> None:
    """Serve OpenAI's and Anthropic's APIs, prompt caching included; with --replicas, by several engines.

    Ctrl-C drains live requests; a second Ctrl-C stops at once.
    """
    if more_names and not served_model_name:
        raise typer.BadParameter(
            f"{more_names[0]!r} follows the model; more names need --served-model-name before them"
        )
    from ramify.server.run import ServeOptions, serve

    options = ServeOptions(
        model=model,
        engine=engine,
        host=host,
        port=port,
        served_names=(*(served_model_name or ()), *(more_names or ())),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        generation_config=generation_config,
        drops_forbidden_tools=drop_forbidden_tools,
        tools_first=tools_first,
        prompt_rules=tuple((prompt_rules or "").split(",")),
        api_keys=tuple(api_key or ()),
        admin_key=admin_key,
        key_file=api_key_file,
        insecure=insecure,
        allowed_hosts=tuple(allowed_hosts or ()),
        allowed_origins=tuple(allowed_origins or ()),
        warm=warm,
        public=public,
        record=record,
        record_tokens=record_tokens,
        log_json=log_format is LogFormat.json,
        log_file=log_file,
        drain_s=drain_seconds,
        batch_dir=batch_dir,
        batch_disk=batch_disk,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
    )
    cluster = ClusterOptions(
        replicas,
        threads_per_replica,
        (cluster_secret, cluster_certificate, cluster_key, cluster_authority),
        cluster_certificate_name,
        routing_stride,
    )
    with exit_on_error():
        events = kv_event_options(
            kv_events, kv_events_replay, kv_events_topic, kv_events_form, kv_events_tiers
        )
        options = replace(options, kv_events=events, otlp=otlp_options(otlp_endpoint))
        if replicas is None:
            cluster.require_replicas()
            announce_load(model, engine)
            code = serve(options)
        else:
            code = serve(*_cluster(options, replicas, cluster))
    raise typer.Exit(code)


def otlp_options(endpoint: str | None) -> OtlpOptions | None:
    """Where traces and metrics go; None: nowhere."""
    from ramify.server.telemetry.options import OtlpOptions

    return OtlpOptions.of(endpoint)


def _cluster(
    options: ServeOptions, replicas: str, cluster: ClusterOptions
) -> tuple[ServeOptions, OpenClient]:
    """What `serve` gets for the value of `--replicas`."""
    from ramify.cluster.cpu_shares import shares_of_this_machine
    from ramify.cluster.credentials import Credentials, import_grpc
    from ramify.cluster.launch import local_cluster, parse_replicas, remote_cluster
    from ramify.cluster.local_processes import LocalOptions
    from ramify.cluster.routes import CacheRoutes

    import_grpc()
    if options.kv_events is not None:
        raise ConfigError(
            f"--kv-events {options.kv_events.endpoint} publishes the cache of one engine, and --replicas "
            "has several; give it to each `ramify replica`, or leave it out"
        )
    chosen, threads = parse_replicas(replicas), cluster.threads_per_replica
    routes = CacheRoutes(stride=cluster.routing_stride)
    if isinstance(chosen, int):
        if cluster.has_credentials:
            raise ConfigError(
                f"--replicas {chosen} starts replicas on this machine, which get a secret of their own; "
                "leave out --cluster-secret, --cluster-certificate, --cluster-certificate-name, "
                "--cluster-key, --cluster-authority"
            )
        local = LocalOptions(
            model=options.model,
            engine=options.engine,
            shares=shares_of_this_machine(chosen, threads),
            warm=options.warm,
            public=options.public,
            log_json=options.log_json,
            log_file=options.log_file,
            drain_s=options.drain_s,
        )
        # Each replica computes them when it starts, those that take another's place as well.
        return replace(options, warm=None), partial(local_cluster, local, routes=routes)
    if threads is not None:
        raise ConfigError(
            "--threads-per-replica is for replicas that this command starts; set OMP_NUM_THREADS where "
            "`ramify replica` runs"
        )
    refuse_engine_options(options.engine, max_waiting=MAX_WAITING)
    credentials = Credentials.from_files(*cluster.credential_files, name=cluster.certificate_name)
    return options, partial(
        remote_cluster, options.model, options.engine, chosen, credentials, routes=routes
    )


def keys(
    file: Annotated[Path, typer.Argument(help="The key file; created if it is missing.")],
    tenant: Annotated[
        str, typer.Option(help="Tenant of the key; default: a tenant of its own.")
    ] = "",
    admin: Annotated[
        bool, typer.Option(help="Key of an operator: may read and change the cache.")
    ] = False,
) -> None:
    """Add a key to a key file. The key is printed once; the file holds its hash."""
    from ramify.server.tenants import ApiKeys, hash_key

    key = f"rk-{secrets.token_urlsafe(32)}"
    with exit_on_error((ConfigError, OSError)):
        if file.exists():
            ApiKeys.load(file)
            contents = json.loads(file.read_text("utf-8"))
        else:
            contents = {"keys": []}
        entry: dict[str, object] = {"hash": hash_key(key), "admin": admin}
        contents["keys"].append(entry | ({"tenant": tenant} if tenant else {}))
        new = file.with_name(file.name + ".new")
        new.touch(mode=0o600)
        new.write_text(json.dumps(contents, indent=2) + "\n", "utf-8")
        try:
            ApiKeys.load(new)
        except ConfigError:  # of a tenant that may not be
            new.unlink()
            raise
        new.replace(file)
    typer.echo(key)
