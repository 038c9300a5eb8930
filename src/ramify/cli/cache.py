"""`ramify cache`: list, verify, export, import and purge a disk tier that no server uses."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from ramify.cli.options import exit_on_error
from ramify.cli.usage_errors import Command, Group
from ramify.counts import counted
from ramify.errors import RamifyError

cache = typer.Typer(
    cls=Group,
    help="Look after a directory of --cache-dir that no server uses.",
    no_args_is_help=True,
)

CacheDir = Annotated[Path, typer.Option("--cache-dir", help="The directory of the disk tier.")]
Identity = Annotated[
    str | None,
    typer.Option(help="First digits of an identity; unset: the only one in the directory."),
]
CacheKey = Annotated[
    Path | None, typer.Option(help="The key file with which the pages were encrypted.")
]

# Files that cannot be read or deleted are the user's to mend, too.
_ERRORS = (RamifyError, OSError)


def _key(path: Path | None) -> bytes | None:
    from ramify.kv.stores.payload_codec import read_cache_key

    return None if path is None else read_cache_key(path)


@cache.command("ls", cls=Command)
def list_directory(cache_dir: CacheDir) -> None:
    """List identities: size, last use, and the fields that make them."""
    with exit_on_error(_ERRORS):
        from ramify.kv.stores.segment_tools import identities

        for item in identities(cache_dir):
            when = datetime.datetime.fromtimestamp(item.modified_s, datetime.UTC)
            last = f"{when:%Y-%m-%d %H:%M}" if item.modified_s else "never"
            typer.echo(
                f"{item.path.name}  {counted(item.num_segments, 'segment'):>15}  "
                f"{item.allocated_bytes / 1e9:>9.3f} GB  last written {last}"
            )
            for name, value in sorted(item.identity.fields.items() if item.identity else ()):
                typer.echo(f"    {name} = {value}")


@cache.command("verify", cls=Command)
def verify_pages(
    cache_dir: CacheDir,
    identity: Identity = None,
    cache_key: CacheKey = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave damaged pages listed, and take no lock.")
    ] = False,
) -> None:
    """Read every page and compare its checksum; damaged ones are removed. Exit code 1 if there are any."""
    with exit_on_error(_ERRORS):
        from ramify.kv.stores import segment_tools

        directory = segment_tools.choose(cache_dir, identity)
        with segment_tools.opened(directory, cache_key=_key(cache_key), read_only=keep) as store:
            report = segment_tools.verify(store)
    typer.echo(f"{counted(report.num_pages, 'page')}, {report.num_damaged:,} damaged")
    if report.num_damaged:
        raise typer.Exit(1)


@cache.command("export", cls=Command)
def export_pages(
    archive: Annotated[Path, typer.Argument(help="The tar file to write.")],
    cache_dir: CacheDir,
    identity: Identity = None,
) -> None:
    """Write an identity's pages to a tar file. It has the key of their names: keep it as private."""
    with exit_on_error(_ERRORS):
        from ramify.kv.stores import segment_tools

        count = segment_tools.export(segment_tools.choose(cache_dir, identity), archive)
    typer.echo(f"{counted(count, 'file')} in {archive}")


@cache.command("import", cls=Command)
def import_pages(
    archive: Annotated[Path, typer.Argument(help="A tar file that `ramify cache export` wrote.")],
    cache_dir: CacheDir,
    cache_key: CacheKey = None,
) -> None:
    """Add the pages of an archive, each verified. Exit code 1 if some were damaged or had no room."""
    with exit_on_error(_ERRORS):
        from ramify.kv.stores import segment_tools

        report = segment_tools.import_archive(archive, cache_dir, cache_key=_key(cache_key))
    typer.echo(f"{counted(report.num_pages, 'page')}, {report.num_damaged:,} damaged or refused")
    if report.num_damaged:
        raise typer.Exit(1)


@cache.command("purge", cls=Command)
def purge(
    cache_dir: CacheDir,
    identity: Identity = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only pages that this tenant's requests wrote first.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(min=0, help="Only segments last written so many days ago.")
    ] = None,
    cache_key: CacheKey = None,
) -> None:
    """Delete an identity, or a tenant's pages or old segments of it."""
    with exit_on_error(_ERRORS):
        from ramify.kv.stores import segment_tools

        directory = segment_tools.choose(cache_dir, identity)
        if older_than is not None:
            count = segment_tools.purge_older(directory, older_than)
            typer.echo(f"{counted(count, 'segment')} deleted")
        if tenant is not None:
            with segment_tools.opened(
                directory, cache_key=_key(cache_key), read_only=False
            ) as store:
                typer.echo(f"{counted(segment_tools.purge_tenant(store, tenant), 'page')} removed")
        if older_than is None and tenant is None:
            num_bytes = segment_tools.purge_identity(directory)
            typer.echo(f"{directory.path.name} deleted, {num_bytes / 1e9:.3f} GB")
