"""Branches of the tree: bounded work, levels on demand, and nothing of others."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from ramify.cache import Salt
from ramify.cache import branches as module
from ramify.cache.branches import SEES_ALL, read_branches
from ramify.cache.key import CacheKey
from ramify.cache.prefix_cache import PrefixCache
from ramify.engine.cache_admin.branch_view import BranchQuery, BranchView, view_branches
from ramify.engine.cache_admin.warmup import WarmPrompt
from ramify.engine.llm import LLM
from ramify.errors import ConfigError
from ramify.params import SamplingParams
from tests.pure.async_bench import AsyncBench
from tests.pure.engine_bench import Bench
from tests.pure.tier_bench import TierBench

CHAIN = 60  # nodes
STEM = list(range(1, 13))  # three pages of four tokens
ONE = SamplingParams(max_tokens=1)


def view(llm: LLM, **query: Any) -> BranchView:
    return view_branches(llm.core, BranchQuery(**query))


def cache_with(num_prompts: int) -> PrefixCache:
    """A cache of prompts that share their first page, as leaves of one node."""
    cache = PrefixCache(num_prompts + 8, 4)
    for number in range(num_prompts):
        lease = cache.acquire(CacheKey([1, 2, 3, 4, *number.to_bytes(4, "big")]))
        private = cache.reserve(2 - len(lease.pages))
        key = CacheKey([1, 2, 3, 4, *number.to_bytes(4, "big")])
        cache.release(cache.publish(lease, key, private))
    return cache


class CountedList(list[int]):
    """A column of a tree that counts how often it is read."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def deep_cache() -> tuple[PrefixCache, int, CountedList]:
    """A chain of nodes of one page, with evicted leaves at its end; the id of the last one."""
    cache = PrefixCache(2 * CHAIN, 4)
    trunk = [7] * (4 * CHAIN)
    prompts = [trunk]
    prompts += [trunk + [number] * 4 for number in range(20, 20 + CHAIN)]
    prompts += [trunk[: 4 * depth] + [8] * 4 for depth in range(1, CHAIN)]
    for prompt in prompts:
        key = CacheKey(prompt, salts=[Salt(2, b"salt")])
        lease = cache.acquire(key)
        private = cache.reserve(len(prompt) // 4 - len(lease.pages))
        cache.release(cache.publish(lease, key, private))
    tree = cache._store.tree
    end = max(range(1, len(tree.parent)), key=lambda node: len([*tree.children(node)]))
    parents = CountedList(tree.parent)
    tree.parent = parents
    return cache, end, parents


def test_the_depth_of_a_node_is_no_factor_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Salts and hashes of a node's path are read once for all nodes below it, not for each."""
    cache, end, parents = deep_cache()
    for max_hashed in (1 << 16, 8 * 4):
        monkeypatch.setattr(module, "MAX_HASHED_TOKENS", max_hashed)
        parents.num_reads = 0

        shown = read_branches(cache, end, max_nodes=100, max_levels=3, hashes_evicted=True)

        assert len(shown.nodes) > CHAIN // 2
        assert {node.salt for node in shown.nodes} == {b"salt"}
        evicted = [node for node in shown.nodes if node.cached_tokens < node.num_tokens]
        assert len(evicted) > CHAIN // 4
        assert {bool(node.evicted_hash) for node in evicted} == {max_hashed > 8 * 4}
        assert parents.num_reads < 8 * (CHAIN + len(shown.nodes))


def test_a_node_comes_before_its_children_with_its_tokens_and_hits() -> None:
    """Two prompts with a common beginning are a node and its two branches."""
    llm = LLM.from_core(Bench().core)
    llm.generate([[*STEM, 20, 21, 22, 23, 9], [*STEM, 30, 31, 32, 33, 9]], ONE)
    llm.generate([[*STEM, 30, 31, 32, 33, 9]], ONE)

    shown = view(llm)

    stem, first, second = shown.nodes
    assert (stem.parent, stem.start, stem.num_tokens) == (0, 0, 12)
    assert (first.parent, first.start, first.num_tokens) == (stem.id, 12, 4)
    assert first.token_ids == (30, 31, 32, 33)  # it was hit, so it comes first
    assert (first.hits, second.hits) == (1, 0)
    assert {node.tier for node in shown.nodes} == {"pool"}
    assert (shown.num_nodes, shown.is_cut) == (3, False)


def test_levels_and_nodes_are_read_on_demand() -> None:
    """A node whose children are left out says so, and is where a later call goes on."""
    llm = LLM.from_core(Bench().core)
    llm.generate([[*STEM, 20, 21, 22, 23, 9], [*STEM, 30, 31, 32, 33, 9], STEM[::-1]], ONE)

    [stem, other] = view(llm, max_levels=1).nodes
    below = view(llm, below=stem.id, max_nodes=2)

    assert (stem.is_cut, other.is_cut) == (True, False)
    assert below.nodes[0].id == stem.id
    assert (len(below.nodes), below.nodes[0].is_cut) == (2, True)
    assert view(llm, max_nodes=1).is_cut
    with pytest.raises(ConfigError, match="node 999 is not in the cache"):
        view(llm, below=999)


def test_a_call_looks_at_a_bounded_number_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many children a node has, a call visits MAX_VISITS at most, and says that it did."""
    cache = cache_with(200)
    monkeypatch.setattr(module, "MAX_VISITS", 50)

    shown = read_branches(cache, max_nodes=1000, max_levels=9, shows=SEES_ALL)

    assert len(shown.nodes) == 49  # a root, and the others
    assert shown.nodes[0].is_cut


def test_a_tenant_sees_its_own_nodes_only() -> None:
    """Neither nodes nor ids of others; a shared prefix as a bare beginning of its own prompts."""
    llm = LLM.from_core(Bench().core)
    llm.cache.share([WarmPrompt(STEM)])
    llm.generate([[*STEM, 20, 21, 22, 23, 9]], ONE, tenant="ann")
    llm.generate([[*STEM, 30, 31, 32, 33, 9]] * 3, ONE, tenant="bob")
    llm.generate([STEM[::-1]], ONE, tenant="bob")
    llm.generate([STEM[2:]], ONE)

    everything, ann, nobody = view(llm), view(llm, tenant="ann"), view(llm, tenant="eve")

    assert {node.tenant for node in everything.nodes} == {"", "ann", "bob"}
    stem, own = ann.nodes
    assert (stem.is_own, stem.hits, stem.leases, stem.idle_s) == (False, 0, 0, 0.0)
    assert (own.is_own, own.tenant) == (True, "ann")
    assert own.token_ids[:3] == (21, 22, 23)  # a salt stands in the place of 20
    assert ann.num_nodes is None
    assert nobody == BranchView((), False, None)
    for node in everything.nodes:
        if node.id not in {stem.id, own.id}:  # bob's, and what belongs to no tenant
            with pytest.raises(ConfigError, match="not in the cache"):
                view(llm, below=node.id, tenant="ann")
    with pytest.raises(ConfigError, match="not in the cache"):
        view(llm, below=stem.id, tenant="eve")


def test_the_order_of_shared_prefixes_does_not_depend_on_hits() -> None:
    """Which public prefix others read most is not to be seen."""
    llm = LLM.from_core(Bench().core)
    llm.cache.share([WarmPrompt(STEM), WarmPrompt(STEM[::-1])])
    for stem in (STEM, STEM[::-1]):
        llm.generate([[*stem, 20, 21, 22, 23, 9]], ONE, tenant="ann")
    before = [node.id for node in view(llm, tenant="ann").nodes]

    llm.generate([[*STEM[::-1], 30, 31, 32, 33, 9]] * 3, ONE, tenant="bob")
    llm.generate([[*STEM, 30, 31, 32, 33, 9]] * 9, ONE, tenant="bob")
    after = [node.id for node in view(llm, tenant="ann").nodes]
    llm.generate([[*STEM[::-1], 30, 31, 32, 33, 9]] * 20, ONE, tenant="bob")

    assert before == after == [node.id for node in view(llm, tenant="ann").nodes]
    assert len(before) == 4


def test_evicted_tokens_name_the_tier_that_has_them() -> None:
    """Of a prompt whose pages were copied out and evicted, the tier; of one not copied, "evicted"."""
    bench = TierBench(disk_pages=0, host_pages=12)
    for number in range(1, 12):
        bench.answer([number, *range(20, 42)])
        bench.settle()

    nodes = view_branches(bench.core, BranchQuery()).nodes

    assert {node.tier for node in nodes} == {"pool", "host", "evicted"}
    for node in nodes:
        assert (node.tier == "pool") == (node.cached_tokens == node.num_tokens)


def test_the_event_loop_reads_what_the_engine_has() -> None:
    """`AsyncLLM.cache.branches` is the same view."""

    async def main() -> tuple[BranchView, BranchView]:
        bench = AsyncBench()
        async with bench.llm as llm:
            await llm.generate(STEM, ONE)
            return await llm.cache.branches(BranchQuery()), view_branches(
                bench.bench.core, BranchQuery()
            )

    shown, direct = asyncio.run(main())

    assert [node.id for node in shown.nodes] == [node.id for node in direct.nodes] != []


def test_a_tenant_sees_its_nodes_however_many_others_have_come_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call visits the newest namespaces only, and before them those of the tenant."""
    monkeypatch.setattr(module, "MAX_VISITS", 8)
    core = Bench().core
    for tenant in ("first", *map(str, range(9))):
        key = core.namespaces.key(array("i", [*STEM, 9]), tenant)
        lease = core.cache.acquire(key)
        private = core.cache.reserve(3 - len(lease.pages))
        core.cache.release(core.cache.publish(lease, key, private))

    of_first = view_branches(core, BranchQuery(tenant="first"))
    of_all = view_branches(core, BranchQuery())

    assert [(node.tenant, node.num_tokens) for node in of_first.nodes] == [("first", 12)]
    assert "first" not in {node.tenant for node in of_all.nodes}
    assert of_all.is_cut
