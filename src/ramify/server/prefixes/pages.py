"""Pages of named prefixes: computed and pinned at every engine, unpinned again."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence

from ramify.cache.key import CacheKey
from ramify.engine.cache_admin.warmup import PUBLIC, WarmPrompt, WarmupResult
from ramify.engine.prefix_namespaces import owner_of_namespace
from ramify.errors import ConfigError, PinError, RamifyError
from ramify.server.conversation.conversation import NamedPrefix
from ramify.server.errors import ApiError
from ramify.server.service import RequestService
from ramify.server.tenants import Caller

logger = logging.getLogger(__name__)

RETRY_S = 1


async def compute(prefix: NamedPrefix, service: RequestService, caller: Caller) -> None:
    """Compute a prefix at every engine, and pin its whole pages; counts for the tenant's quota.

    Raises:
        ApiError: 409, it cannot be pinned; some of it may be; 429, the quota is used up; 503, it
            cannot be computed now.
    """
    num_whole = len(_whole_pages(prefix, service))
    if not num_whole or not service.prefix_cache:
        return
    service.quotas.acquire(caller, num_whole)
    num_computed = 0
    try:
        if prefix.is_public:
            result = await _share(prefix, service)
        else:
            result = await _warm(prefix, service, caller)
        num_computed = result.computed_tokens
    finally:
        service.quotas.release(caller, num_whole, num_computed)
    if result.num_failed:
        raise ApiError(
            503,
            f"the prefix could not be computed: {result.errors[0]}",
            code="not_computed",
            retry_after_s=RETRY_S,
        )
    [num_pinned] = await pinned_tokens([prefix], service, caller.tenant)
    if num_pinned < num_whole:
        raise ApiError(
            409,
            f"the {num_whole} tokens of the prefix {prefix.name!r} cannot be pinned beside what is pinned "
            f"already: the pool has {service.engine.config.kv_cache_tokens} tokens, of which pins may hold "
            "a part; delete a prefix, shorten this one, or start the server with a larger pool "
            "(--kv-cache-tokens) or share (max_pinned_share)",
            param="name",
            code="not_pinned",
        )


async def _warm(prefix: NamedPrefix, service: RequestService, caller: Caller) -> WarmupResult:
    ids, tenant, cache = _whole_pages(prefix, service), caller.tenant, service.engine.cache
    # A pin that a request has made there may end sooner.
    await cache.unpin_prefix(ids, owner=tenant, tenant=tenant)
    retention = ((len(ids), prefix.ttl_s),)
    prompt = WarmPrompt(
        ids, tenant=tenant, retention=retention, pin_share=service.pin_share(caller)
    )
    return await cache.warm([prompt])


async def _share(prefix: NamedPrefix, service: RequestService) -> WarmupResult:
    try:
        return await service.engine.cache.share([WarmPrompt(_whole_pages(prefix, service))])
    except (ConfigError, PinError) as error:
        raise ApiError(409, str(error), param="name", code="not_pinned") from error


async def share_again(service: RequestService) -> None:
    """Compute and pin all public prefixes again, after the weights were replaced.

    Those of tenants are by the next requests with them.
    """
    for prefix in service.public_prefixes.of(""):
        if isinstance(prefix, NamedPrefix):
            try:
                await _share(prefix, service)
            except RamifyError as error:
                logger.warning("the public prefix %s is not pinned: %s", prefix.name, error)


async def unpin(prefix: NamedPrefix, service: RequestService, tenant: str) -> None:
    """End the pins of a prefix whose name is gone, unless another name has the same pages."""
    if not prefix.is_public:
        await service.unpin_unnamed(prefix.ids, tenant)
        return
    pages = _whole_pages(prefix, service)
    others = [other for other in service.public_prefixes.of("") if isinstance(other, NamedPrefix)]
    if pages and all(_whole_pages(other, service) != pages for other in others):
        await service.engine.cache.unpin_prefix(pages, owner=PUBLIC)


async def pinned_tokens(
    prefixes: Sequence[NamedPrefix], service: RequestService, tenant: str
) -> list[int]:
    """Tokens of each prefix that are pinned now, at the engine where most are."""
    owners = {PUBLIC if prefix.is_public else tenant for prefix in prefixes}
    pins = {owner: await service.engine.cache.pins(owner) for owner in owners}

    def longest(prefix: NamedPrefix) -> int:
        keys = [pin.key for pin in pins[PUBLIC if prefix.is_public else tenant]]
        return max((len(key) for key in keys if _is_start(key, prefix.ids)), default=0)

    return [longest(prefix) for prefix in prefixes]


def _is_start(key: CacheKey, ids: array[int]) -> bool:
    """Whether a key without a client's salt is of the first tokens of a prompt.

    After a public prefix, the first token of a tenant's own part is a content atom in the key.
    """
    tokens, owner = key.tokens(), key.namespace
    if len(tokens) > len(ids):
        return False
    for at, atom in key.marks:
        if atom.salt is not None:
            tokens[at], owner = ids[at], atom.salt
    return not owner_of_namespace(owner)[1] and tokens == ids[: len(tokens)]


def _whole_pages(prefix: NamedPrefix, service: RequestService) -> list[int]:
    """The tokens of a prefix that can be cached."""
    return prefix.ids[: len(prefix.ids) // service.page_size * service.page_size].tolist()
