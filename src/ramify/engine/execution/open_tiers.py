"""Opens the cache tiers of an engine that is built from a checkpoint."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from ramify.cache.tier_costs import StepModel
from ramify.config import ResolvedConfig
from ramify.engine.identity import EngineIdentity
from ramify.engine.tier_parts import TierParts
from ramify.errors import ConfigError, RamifyError
from ramify.kv.mover_lanes import MoverLanes
from ramify.kv.offload import MoverThreads
from ramify.kv.page_bytes import PageBytes
from ramify.kv.pool import KVPool
from ramify.kv.stores.memory import MemoryStore
from ramify.kv.stores.page_store import PageStore
from ramify.kv.stores.payload_codec import read_cache_key
from ramify.kv.stores.segment_options import SegmentOptions
from ramify.kv.stores.segments import SegmentStore
from ramify.kv.stores.valkey import ValkeyStore

logger = logging.getLogger(__name__)


def open_tiers(
    config: ResolvedConfig,
    pool: KVPool,
    identity: Callable[[], EngineIdentity],
    measure_steps: Callable[[], StepModel],
) -> TierParts | None:
    """The tiers that the options ask for; None: none.

    Args:
        identity: of the present weights; also called after they were replaced.
        measure_steps: what computing takes; called once, if there are tiers.

    Raises:
        ConfigError: the directory, the store's URL or the cache key cannot be used, or a tier has no room
            for a page.
        MissingPackageError: there is a cache key, and `cryptography` is not installed, or a store, and
            `valkey` is not.
    """
    options = config.requested.tiers
    if not options.is_used:
        return None
    # Read once: a reload of weights must not find another key, and every page lost.
    cache_key = (
        None if options.cache_key is None else read_cache_key(Path(options.cache_key).expanduser())
    )
    device = PageBytes(pool)
    num_host_pages = options.host_bytes // device.page_bytes
    if options.host_bytes and not num_host_pages:
        raise ConfigError(
            f"cache_host={options.cache_host!r} is less than a page of {device.page_bytes:,} "
            "bytes; use a larger one, or leave it out"
        )

    step_model = measure_steps()

    def open_stores(stores: list[PageStore]) -> None:
        if num_host_pages:
            stores.append(MemoryStore(device.page_bytes, num_host_pages))
        if options.cache_dir is not None:
            disk = SegmentStore(
                SegmentOptions(
                    directory=Path(options.cache_dir).expanduser(),
                    identity=identity().kv_fields(),
                    page_bytes=device.page_bytes,
                    budget_bytes=options.disk_bytes,
                    read_only=options.cache_dir_readonly,
                    cache_key=cache_key,
                )
            )
            stores.append(disk)
            logger.info("%s", disk.start_report)
        if options.cache_store is not None:
            remote = ValkeyStore(
                options.cache_store,
                identity=identity().kv_fields(),
                page_bytes=device.page_bytes,
                cache_key=cache_key,
            )
            stores.append(remote)
            logger.log(
                logging.WARNING if remote.counts().unavailable else logging.INFO,
                "%s",
                remote.start_report,
            )

    def parts() -> TierParts:
        stores: list[PageStore] = []
        try:
            open_stores(stores)
        except BaseException:
            # Another engine may try next, in this process too.
            for store in stores:
                with contextlib.suppress(RamifyError):
                    store.close()
            raise
        distant = "" if options.cache_store is None else ValkeyStore.tier
        return TierParts(
            device=device,
            stores=tuple(stores),
            mover=MoverLanes(stores, [distant]) if distant else MoverThreads(stores),
            step_model=step_model,
            is_calibrated=options.cache_cost is not None,
            read_only=frozenset(["disk"] if options.cache_dir_readonly else []),
            distant=distant,
            reopen=reopen,
        )

    def reopen() -> TierParts:
        try:
            return parts()
        except RamifyError as error:
            logger.error("there are no cache tiers for the new weights: %s", error)
            return TierParts(
                device=device,
                stores=(),
                mover=MoverThreads(()),
                step_model=step_model,
                reopen=reopen,
            )

    return parts()
