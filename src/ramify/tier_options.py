"""Options of the cache tiers: pages that outlive the pool, in host memory, on disk and on a server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Final

from ramify.errors import ConfigError

UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
STORE_SCHEMES: Final = ("valkey", "valkeys", "redis", "rediss", "unix")
BINARY_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _option(default: Any, help: str) -> Any:  # noqa: A002 - the word of typer and argparse
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSection:
    """Pages that the pool has no room for: in host memory, on disk, and on a server that engines share.

    A page goes to the tiers when it is evicted, and to disk and server, where a restart finds it,
    already when it is used a second time.
    Pages that a waiting request needs are read back where that is sooner than computing them.
    """

    cache_dir: str | None = _option(
        None,
        "Directory of the disk tier; made if needed. Engines with other weights, options or CPUs can share it: each "
        "finds its own pages. `None`: no disk tier.",
    )
    # a thousand pages of an 8B model, 25 thousand of a small one
    cache_disk: str = _option(
        "10GB",
        "Most disk space of `cache_dir`, in bytes or as `50GB`, `512MiB`.",
    )
    cache_dir_readonly: bool = _option(
        False,
        "Read pages of a `cache_dir` that another process writes, and write none: a directory has one writer.",
    )
    cache_key: str | None = _option(
        None,
        "File whose content encrypts the pages of `cache_dir` and `cache_store` with AES-256-GCM; for its owner only, "
        "16 bytes or more. "
        "K/V reveals the prompt to whoever has the weights. Needs the extra `encryption`. `None`: pages are plain.",
    )
    cache_cost: str | None = _option(
        None,
        "File that `ramify calibrate MODEL --json FILE` wrote: what computing takes here, for the choice between "
        "loading a page and computing it. `None`: estimated at the start, and corrected by the steps that are run.",
    )
    cache_host: str | None = _option(
        None,
        "Size of a tier in host memory, in bytes or as `2GB`; useful beside a GPU, on a CPU for tests. `None`: none.",
    )

    cache_store: str | None = _option(
        None,
        "Valkey or Redis server whose pages several engines share: `valkey://HOST`, `redis://HOST`, with TLS "
        "`valkeys://` or `rediss://`, or `unix://PATH`. Needs the extra `remote`. `None`: none.",
    )

    @property
    def disk_bytes(self) -> int:
        """`cache_disk` in bytes."""
        return parse_size("cache_disk", self.cache_disk)

    @property
    def host_bytes(self) -> int:
        """`cache_host` in bytes; 0 without a host tier."""
        return 0 if self.cache_host is None else parse_size("cache_host", self.cache_host)

    @property
    def is_used(self) -> bool:
        """Whether there is any tier."""
        return self.cache_dir is not None or self.cache_store is not None or self.host_bytes > 0

    def validate(self, *, prefix_cache: bool) -> None:
        """Raise ConfigError for a value outside its range.

        Args:
            prefix_cache: whether the engine shares prefixes at all.
        """
        if self.cache_dir is not None and (
            not isinstance(self.cache_dir, str) or not self.cache_dir
        ):
            raise ConfigError(f"cache_dir={self.cache_dir!r} but it must be a directory")
        if self.disk_bytes < 1:
            raise ConfigError(
                f"cache_disk={self.cache_disk!r} but it must be above 0; leave out cache_dir"
            )
        if not isinstance(self.cache_dir_readonly, bool):
            raise ConfigError(
                f"cache_dir_readonly={self.cache_dir_readonly!r} but it must be True or False"
            )
        if self.cache_dir_readonly and self.cache_dir is None:
            raise ConfigError(
                "cache_dir_readonly=True without cache_dir; say whose pages to read, or leave it out"
            )
        if self.cache_key is not None and (
            not isinstance(self.cache_key, str) or not self.cache_key
        ):
            raise ConfigError(f"cache_key={self.cache_key!r} but it must be a file")
        _check_store(self.cache_store)
        if self.cache_key is not None and self.cache_dir is None and self.cache_store is None:
            raise ConfigError(
                f"cache_key={self.cache_key!r} without cache_dir and cache_store; say whose pages to "
                "encrypt, or leave it out"
            )
        if self.cache_cost is not None and (
            not isinstance(self.cache_cost, str) or not self.cache_cost
        ):
            raise ConfigError(f"cache_cost={self.cache_cost!r} but it must be a file")
        if self.cache_cost is not None and not self.is_used:
            raise ConfigError(
                f"cache_cost={self.cache_cost!r} without cache_dir, cache_host or cache_store: "
                "nothing is loaded; add one, or leave it out"
            )
        if self.is_used and not prefix_cache:
            raise ConfigError(
                "cache_dir, cache_host and cache_store need prefix_cache=True: without it no page is shared"
            )
        assert self.host_bytes >= 0


def _check_store(url: object) -> None:
    if url is None:
        return
    scheme, separator, where = url.partition("://") if isinstance(url, str) else ("", "", "")
    if scheme not in STORE_SCHEMES or not where:
        # The rest of the URL may have a password.
        shown = f"{scheme}://…" if separator else repr(url)
        raise ConfigError(
            f"cache_store={shown} but it must be {', '.join(f'{s}://HOST' for s in STORE_SCHEMES[:-1])} or "
            "unix://PATH"
        )


def parse_size(name: str, value: object) -> int:
    """A size in bytes, of an integer or of a text like `50GB` or `512MiB`.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", str(value), re.IGNORECASE)
    if match is None or not isinstance(value, str) or (match[3] and not match[2]):
        raise ConfigError(
            f"{name}={value!r} but it must be a number of bytes, or like 50GB or 512MiB"
        )
    units = BINARY_UNITS if match[3] else UNITS
    return int(float(match[1]) * units[match[2].upper()])
