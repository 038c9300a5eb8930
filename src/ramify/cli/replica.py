"""`ramify replica`: one engine behind a port, for `ramify serve --replicas HOST:PORT,…`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ramify.cli.options import DEFAULT_MODEL, PANELS, Model, engine_options, exit_on_error

Secret = Annotated[
    Path | None,
    typer.Option(
        help="File with the secret that servers and replicas share, 16 characters or more."
    ),
]
Certificate = Annotated[
    Path | None, typer.Option(help="This side's certificate (PEM); both sides show one.")
]
Key = Annotated[Path | None, typer.Option(help="Key of the certificate (PEM).")]
Authority = Annotated[
    Path | None, typer.Option(help="Certificate of the authority that signed both (PEM).")
]


@engine_options(panels=PANELS, max_waiting=1024)
def replica(
    engine: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="127.0.0.1 is this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 7000,
    cluster_secret: Secret = None,
    cluster_certificate: Certificate = None,
    cluster_key: Key = None,
    cluster_authority: Authority = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Time for live requests to end at shutdown.")
    ] = 30.0,
) -> None:
    """Serve one engine to servers of a cluster. Writes its port to stdout when it is ready."""
    with exit_on_error():
        from ramify.cluster.credentials import Credentials, import_grpc
        from ramify.cluster.run_replica import ReplicaOptions, run_replica

        import_grpc()
        credentials = Credentials.from_files(
            cluster_secret, cluster_certificate, cluster_key, cluster_authority
        )
        options = ReplicaOptions(
            model=model, engine=engine, host=host, port=port, drain_s=drain_seconds
        )
        code = run_replica(options, credentials)
    raise typer.Exit(code)
