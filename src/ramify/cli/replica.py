"""`ramify replica`: one engine behind a port, for `ramify serve --replicas HOST:PORT,…`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ramify.cli.cluster_options import Authority, Certificate, ClusterOption, Key, Secret
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
from ramify.cli.serve import CacheOption, LogFile, LogFormat, OperationsOption


@engine_options(panels=PANELS, max_waiting=1024)
def replica(
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    host: Annotated[
        str,
        ClusterOption(help="127.0.0.1 is this machine only; others need a secret or certificates."),
    ] = "127.0.0.1",
    port: Annotated[int, ClusterOption(min=0, max=65535, help="0 takes a free one.")] = 7000,
    cluster_secret: Secret = None,
    cluster_certificate: Certificate = None,
    cluster_key: Key = None,
    cluster_authority: Authority = None,
    warm: Annotated[
        Path | None, CacheOption(help="Prompts to compute before the replica is ready.")
    ] = None,
    public: Annotated[
        Path | None,
        CacheOption(help="Prefixes that all tenants may share; give servers the same file."),
    ] = None,
    kv_events: Endpoint = None,
    kv_events_replay: Replay = None,
    kv_events_topic: Topic = None,
    kv_events_form: EventsForm = Form.map,
    kv_events_tiers: Tiers = False,
    name: Annotated[str, OperationsOption(help="Name in each line of the log.")] = "",
    log_format: Annotated[
        LogFormat, OperationsOption(help="Format of log lines.")
    ] = LogFormat.text,
    log_file: LogFile = None,
    drain_seconds: Annotated[
        float, OperationsOption(min=0, help="Time for live requests to end at shutdown.")
    ] = 30.0,
) -> None:
    """Serve one engine to servers of a cluster. Writes its port to stdout when it is ready.

    Ctrl-C drains live requests; a second Ctrl-C stops at once.
    """
    with exit_on_error():
        from ramify.cluster.credentials import Credentials
        from ramify.cluster.run_replica import ReplicaOptions, StdoutStages, run_replica

        options = ReplicaOptions(
            model=model,
            engine=engine,
            host=host,
            port=port,
            credentials=Credentials.from_files(
                cluster_secret, cluster_certificate, cluster_key, cluster_authority
            ),
            warm=warm,
            public=public,
            name=name,
            log_json=log_format is LogFormat.json,
            log_file=log_file,
            drain_s=drain_seconds,
            kv_events=kv_event_options(
                kv_events, kv_events_replay, kv_events_topic, kv_events_form, kv_events_tiers
            ),
        )
        announce_load(model, engine)
        code = run_replica(options, StdoutStages())
    raise typer.Exit(code)
