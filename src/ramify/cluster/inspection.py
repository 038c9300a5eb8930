"""What replicas say of themselves, for `ramify info --replicas HOST:PORT,...`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ramify.cluster.credentials import Credentials
from ramify.cluster.link import Link, LinkError
from ramify.cluster.wire import DEAD_S, PROTOCOL_VERSION, FromReplica, Hello, Welcome


async def replica_facts(
    addresses: Sequence[str], credentials: Credentials, timeout_s: float = DEAD_S
) -> dict[str, dict[str, Any]]:
    """Facts of each replica by its address; of one that does not answer, the reason as `error`.

    `same bits` compares each with the first that answers.
    """
    answers = await asyncio.gather(
        *(_ask(address, credentials, timeout_s) for address in addresses)
    )
    first = next((answer for answer in answers if isinstance(answer, Welcome)), None)
    return {
        address: _facts(answer, first) if isinstance(answer, Welcome) else {"error": str(answer)}
        for address, answer in zip(addresses, answers, strict=True)
    }


async def _ask(address: str, credentials: Credentials, timeout_s: float) -> Welcome | LinkError:
    link = Link(address, _ignore, credentials)
    try:
        return await link.open(Hello(PROTOCOL_VERSION), timeout_s)
    except LinkError as error:
        return error
    finally:
        await link.close()


def _ignore(message: FromReplica) -> None:
    """Nothing is asked for but the hello."""


def _facts(welcome: Welcome, first: Welcome | None) -> dict[str, Any]:
    config, identity = welcome.config, welcome.identity
    mismatch = None if first is None else first.identity.mismatch(identity)
    return {
        "version": welcome.version,
        "incarnation": f"{welcome.incarnation:016x}",
        "model": welcome.description.path,
        "identity": identity.digest,
        "weights": identity.weights,
        "arithmetic": identity.arithmetic,
        "threads": identity.threads,
        "exact": identity.exact,
        "K/V pages": f"{config.num_pages:,} of {config.page_size} tokens",
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "same bits": "yes" if mismatch is None else f"no: {mismatch}",
    }
