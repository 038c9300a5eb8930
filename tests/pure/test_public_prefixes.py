"""Public prefixes: every tenant hits the declared prefixes, and no tenant hits another's K/V."""

import asyncio
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey, Explanation, Media, PrefixCache, Salt
from ramify.cache.inspection import count_pages
from ramify.engine.cache_admin.warmup import WarmPrompt, pin_public_prefixes, read_prompts
from ramify.engine.llm import LLM
from ramify.engine.weight_reload import swap_weights
from ramify.errors import ConfigError, PinError
from ramify.params import SamplingParams
from ramify.server.tenants import ApiKeys, Caller, Quota, hash_key
from tests.pure.async_bench import AsyncBench
from tests.pure.engine_bench import Bench, expected
from tests.pure.server_bench import Answer, ServerBench, chat, run
from tests.pure.test_partial_pages import common as num_common

ONE = SamplingParams(max_tokens=1)
STEM = list(range(1, 15))  # three pages of 4 and a half
RULES = "You answer questions about the harbour of Oslo, and nothing else. " * 6
SECRET = "zanzibar-quokka"
KEYS = ApiKeys.of("key-ann", "key-bob", admin="key-admin")


def read(llm: LLM, prompt: list[int], tenant: str, salt: str = "") -> int:
    """Generate a token from a tenant's prompt; returns the number of cached prompt tokens."""
    (output,) = llm.generate(prompt, ONE, tenant=tenant, salt=salt)
    assert output.error is None
    return output.cache.read_tokens


def test_all_tenants_read_its_whole_pages_and_nothing_behind_them() -> None:
    """A public prefix is computed once; tokens after it hit only for the same tenant and salt."""
    llm = LLM.from_core(Bench().core)
    report = llm.cache.share([WarmPrompt(STEM)])
    assert (report.computed_tokens, report.num_failed) == (14, 0)
    prompt = [*STEM, *range(30, 45)]

    assert [read(llm, prompt, tenant) for tenant in "abab"] == [12, 12, 28, 28]
    assert [read(llm, prompt, "a", "s") for _ in range(2)] == [12, 28]
    assert read(llm, prompt, "") == 12
    assert read(llm, STEM[:12], "c") == 11  # its last token is computed, as in every prompt
    assert read(llm, [*STEM[:11], 49, 5, 5], "c") == 0  # not all of the prefix: nobody's but c's
    assert {node.tenant for node in llm.cache.tree().nodes} == {"", "a", "b", "c"}
    assert not any(node.is_stale for node in llm.cache.tree().nodes)
    llm.cache.check()


@pytest.mark.parametrize("length", [1, 6, 12, 13, 14, 20])
def test_what_is_private_goes_with_its_tenant(length: int) -> None:
    """`clear` by tenant and `pin` act on a tenant's pages after a public prefix, and on no others.

    The cleared prefix ends inside the public prefix, at its end, or after it.
    """
    llm = LLM.from_core(Bench().core)
    llm.cache.share([WarmPrompt(STEM[:4]), WarmPrompt(STEM)])
    prompt = [*STEM, *range(30, 45)]
    for tenant in "abc":
        read(llm, prompt, tenant)
    early, late = [*STEM[:4], *range(20, 30)], [*STEM[:5], *range(20, 30)]
    for branch in (early, late):  # behind the shorter public prefix
        read(llm, branch, "a")

    pin = llm.cache.pin(prompt, tenant="b")
    assert llm.cache.clear(prefix=prompt[:length], tenant="b").num_kept == 4
    assert llm.cache.clear(prefix=prompt[:length]).num_pages == 0  # of no tenant: pinned, public
    cleared = llm.cache.clear(prefix=prompt[:length], tenant="a").num_pages
    assert cleared == 4 + 2 * (length <= 4) + 2 * (length <= 5)
    llm.cache.unpin(pin)
    assert llm.cache.clear(tenant="b").num_pages == 4
    assert [read(llm, prompt, tenant) for tenant in "abc"] == [12, 12, 28]


def test_no_text_of_others_is_guessed() -> None:
    """After a public prefix, drafts from the radix tree come only from the tenant's own pages."""
    stem = STEM[:12]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    bench = Bench(speculative="tree")
    llm = LLM.from_core(bench.core)
    llm.cache.share([WarmPrompt(stem)])
    for prompt in (stem, [*stem, 7], [*stem, 7, 8, 9, 10, 11]):
        drafted = []
        for tenant in ("", "a", "b", "b"):
            (output,) = llm.generate(prompt, params, tenant=tenant)
            assert list(output.token_ids) == expected(prompt, 40, ends=())
            drafted.append(output.metrics.num_drafted)
        assert drafted[1] == drafted[2] == 0 < drafted[3], prompt


def test_the_longest_prefix_counts_and_requests_go_on_through_everything() -> None:
    """With n = 2, preemption and reloaded weights, tokens stay the same and pages stay private.

    No other tenant hits tokens after the public prefix, and the engine is never rebuilt.
    """
    alone = expected([*STEM, 7, 8, 9, 10, 11], 20, ends=())
    bench = Bench(pool_tokens=96)
    llm = LLM.from_core(bench.core)
    llm.cache.share([WarmPrompt(STEM[:4]), WarmPrompt(STEM)])
    prompt = [*STEM, 7, 8, 9, 10, 11]
    request_ids = [
        bench.add(prompt, tenant=tenant, max_tokens=20, ignore_eos=True, n=2) for tenant in "abcabc"
    ]
    while bench.core.has_unfinished:
        bench.step()
        assert_private(llm, 12)
        if (
            sum(request.preemptions for request in bench.core.live)
            and not bench.core.namespaces.base
        ):
            swap_weights(bench.core, lambda: b"other weights")

    assert bench.core.namespaces.base == b"other weights"
    for request_id in request_ids:
        assert all(
            list(completion.token_ids) == alone
            for completion in bench.outputs[request_id].completions
        )
    assert sum(bench.outputs[request_id].metrics.preemptions for request_id in request_ids)
    assert bench.core.recovery.counts.rebuilds == 0
    llm.cache.clear(tenant="d")
    assert [read(llm, [*prompt, 7], tenant) for tenant in "dd"] == [12, 19]
    swap_weights(bench.core, lambda: b"the third ones")
    assert {node.is_stale for node in llm.cache.tree().nodes} == {True}
    assert [read(llm, [*STEM, 7, 8, 9], tenant) for tenant in "abb"] == [0, 12, 16]
    llm.cache.check()


def assert_private(llm: LLM, num_public: int) -> None:
    """Check that every node that ends after the public prefix has a tenant."""
    ends = [(node.start + node.num_tokens, node.tenant) for node in llm.cache.tree().nodes]
    assert all(tenant for end, tenant in ends if end > num_public), ends


TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=14)


@settings(deadline=None)
@given(st.lists(TOKENS, max_size=2), st.lists(st.tuples(st.sampled_from("ab"), TOKENS), max_size=8))
def test_a_tenant_reads_what_is_public_or_his_own(
    public: list[list[int]], requests: list[tuple[str, list[int]]]
) -> None:
    """A tenant hits its own pages and the longest declared prefix that matches whole, to the token."""
    llm = LLM.from_core(Bench().core)
    declared = [prefix[: len(prefix) // 4 * 4] for prefix in public if len(prefix) >= 4]
    llm.cache.share([WarmPrompt(prefix) for prefix in declared])
    seen: set[tuple[str, tuple[int, ...]]] = set()

    for tenant, prompt in requests:
        common = max(
            (len(prefix) for prefix in declared if prompt[: len(prefix)] == prefix), default=0
        )
        shared = (f"{tenant} behind {common}") if common else tenant
        own = [pages for owner, pages in seen if owner == shared]
        known = [num_common(prompt[:-1], pages) for pages in own]
        assert read(llm, prompt, tenant) == max([*known, min(common, len(prompt) - 1)])
        seen |= {(shared, tuple(prompt[:at])) for at in range(4, len(prompt) + 1, 4)}


@pytest.mark.parametrize(
    ("prefixes", "problem"),
    [
        ([WarmPrompt(STEM, tenant="a")], "tenant='a'"),
        ([WarmPrompt(STEM, salt="s")], "salt='s'"),
        ([WarmPrompt([1, 2, 3])], "has 3 tokens"),
        ([WarmPrompt(STEM), WarmPrompt([])], "public prefix 2 is no prompt"),
        ([WarmPrompt(STEM), WarmPrompt([1] * 5000)], "refused: 1 public prefix:"),
    ],
)
def test_a_prefix_that_cannot_be_public_shares_none(
    prefixes: list[WarmPrompt], problem: str
) -> None:
    """One ConfigError names the problem, and the call shares no prefix at all."""
    llm = LLM.from_core(Bench().core)

    with pytest.raises(ConfigError, match=problem):
        llm.cache.share(prefixes)

    assert not llm.cache.pins()
    assert [read(llm, [*STEM, 5], tenant) for tenant in "cd"] == [0, 0]


def test_more_than_may_be_pinned_is_refused_as_a_whole() -> None:
    """Prefixes that exceed `max_pinned_share` raise PinError, and the call shares none."""
    llm = LLM.from_core(Bench(pool_tokens=64).core)
    prefixes = [WarmPrompt([token] * 20) for token in (1, 2, 3)]

    with pytest.raises(PinError, match="max_pinned_share"):
        llm.cache.share(prefixes)

    assert not llm.cache.pins()
    assert [read(llm, [1] * 21, tenant) for tenant in "cd"] == [0, 0]


def test_what_is_evicted_before_it_is_pinned_is_told() -> None:
    """A prefix evicted before its pin raises ConfigError; sharing a prefix twice makes one pin."""
    core = Bench().core
    llm = LLM.from_core(core)
    report = llm.cache.warm([WarmPrompt(STEM)])
    core.cache.evict_if(lambda node: node.depth > 2, 1)

    with pytest.raises(ConfigError, match="only 8 of 12 tokens are still cached"):
        pin_public_prefixes(core, [array("i", STEM[:12])], report)

    assert not llm.cache.pins()
    for _ in range(2):
        llm.cache.share([WarmPrompt(STEM)] * 2)
    assert [pin.num_pages for pin in llm.cache.pins()] == [3]
    with pytest.raises(ConfigError, match="prefix_cache"):
        LLM.from_core(Bench(prefix_cache=False).core).cache.share([WarmPrompt(STEM)])


def test_an_async_engine_and_a_file_share_too(tmp_path: Path) -> None:
    """`AsyncLLM` shares the prompts of a file; a line may hold the tools that its messages need."""
    file = tmp_path / "public.jsonl"
    file.write_text(json.dumps({"token_ids": STEM}))
    async_bench = AsyncBench()

    async def main() -> list[int]:
        async with async_bench.llm as llm:
            await llm.cache.share(file)
            requests = [llm.generate([*STEM, 5], ONE, tenant=tenant) for tenant in "ab"]
            return [output.cache.read_tokens for output in await asyncio.gather(*requests)]

    assert run(main()) == [12, 12]
    messages = [{"role": "system", "content": "x"}]
    file.write_text(json.dumps({"messages": messages, "tools": [{"type": "function"}]}))
    assert read_prompts(file)[0].tools == [{"type": "function"}]
    for bad in ({"token_ids": STEM, "tools": [{}]}, {"messages": messages, "tools": "x"}):
        file.write_text(json.dumps(bad))
        with pytest.raises(ConfigError, match='"tools" must be a list'):
            read_prompts(file)


# -- over HTTP -------------------------------------------------------------------------------


def talk(text: str, **others: Any) -> dict[str, Any]:
    body = chat(text, **others)
    body["messages"].insert(0, {"role": "system", "content": RULES})
    return body


def test_no_answer_tells_what_others_asked_behind_it() -> None:
    """Other tenants' text after the prefix changes neither cached tokens nor the miss reason."""
    bench = ServerBench(keys=KEYS)
    words = f"The password is {SECRET}, and the door is green. " * 3

    async def main() -> list[Answer]:
        async with bench.running():
            system = [{"role": "system", "content": RULES}]
            await bench.llm.cache.share([WarmPrompt(system)])
            await bench.llm.cache.warm([WarmPrompt([*system, {"role": "user", "content": words}])])
            for path in ("/v1/chat/completions", "/v1/cache/explain"):
                await bench.post(path, talk(words), "key-ann")
            answers = []
            for text in (words, words.replace("green", "red"), "Hello."):
                answers.append(await bench.post("/v1/cache/explain", talk(text), "key-bob"))
            ann = KEYS.caller("key-ann").tenant
            gone = await bench.call("DELETE", f"/v1/cache?tenant={ann}", key="key-admin")
            assert gone.json["pages"] > 0
            answers.append(await bench.post("/v1/cache/explain", talk(words), "key-bob"))
            answers.append(await bench.post("/v1/chat/completions", talk(words), "key-bob"))
            again = await bench.post("/v1/chat/completions", talk(words), "key-bob")
            assert again.json["usage"]["ramify_cache"]["read"] > 200
            changed = talk(words.replace("green", "red"))
            mine = await bench.post("/v1/cache/explain", changed, "key-bob")
            assert mine.json["miss"]["reason"] == "diverged"
            assert "green" in mine.json["miss"]["had"]
            return answers

    *explained, answered = run(main())

    public = len(RULES) // 16 * 16  # the tiny model has a token for each byte, or nearly
    for answer in explained:
        assert 0 < answer.json["cached_tokens"] <= public + 32
        assert answer.json["miss"]["reason"] in ("cold", "page_tail"), answer.json
        assert not {"had", "got"} & set(answer.json["miss"])
        assert SECRET not in str(answer.json)
    assert len({answer.json["cached_tokens"] for answer in explained}) == 1
    assert explained[0].json["miss"] == explained[3].json["miss"]  # Ann's are gone
    use = answered.json["usage"]["ramify_cache"]
    assert use["read"] == explained[0].json["cached_tokens"]


def test_a_flood_behind_it_leaves_the_prefix_and_the_others() -> None:
    """Pages after a public prefix count towards their tenant's quota, which evicts them first."""
    keys = ApiKeys(
        {hash_key(name): Caller(name, quota=Quota(max_cached_share=0.5)) for name in ("ann", "bob")}
    )
    bench = ServerBench(keys=keys, pool_tokens=2048)
    stem = [9] * 64

    async def main() -> list[int]:
        async with bench.running():
            await bench.llm.cache.share([WarmPrompt(stem)])
            ann_request = {"prompt": [stem + [10] * 200], "max_tokens": 3}
            await bench.post("/v1/completions", ann_request, "ann")
            flood = [{"prompt": [stem + [at + 20] * 300], "max_tokens": 3} for at in range(40)]
            for body in flood:
                assert (await bench.post("/v1/completions", body, "bob")).status == 200
            answers = [
                await bench.post("/v1/completions", request, who)
                for request, who in ((ann_request, "ann"), (flood[-1], "bob"))
            ]
            return [answer.json["usage"]["ramify_cache"]["read"] for answer in answers]

    assert run(main()) == [256, 352]


# -- in the cache itself -----------------------------------------------------------------------


def salted(text: str, at: int, salt: str) -> CacheKey:
    return CacheKey(list(text.encode()), salts=[Salt(at, salt)] if salt and at < len(text) else [])


def serve(cache: PrefixCache, key: CacheKey) -> None:
    begun = cache.acquire(key)
    private = cache.reserve(-(-len(key) // cache.page_size) - len(begun.pages))
    lease = cache.publish(begun, key, private)
    cache.release(lease, private[len(lease.pages) - len(begun.pages) :])


MINE = ["abcdefghXYZ", "abcdefghijklXYZ", "abcdefghijklmnopX", "abcdefghij", "abcdXYZ", "abXYZ"]


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("mine", MINE)
@pytest.mark.parametrize("salts", [("mine", "theirs"), ("mine", ""), ("", "theirs")])
@pytest.mark.parametrize("state", ["cached", "joint", "evicted", "pending"])
def test_explanations_stop_where_only_one_has_a_salt(
    state: str, salts: tuple[str, str], mine: str, index: str
) -> None:
    """After the public prefix, explanations show neither another salt's text nor its presence."""
    if len(mine) <= 8 and not salts[1]:
        return  # none of both has a salt
    explanations: list[Explanation] = []
    for others in ("abcdefghijklmnopqrst", "abcdefgh"):
        cache = PrefixCache(64, 4, index=index)
        if state != "joint":  # else the salt is in the middle of a node
            serve(cache, CacheKey(list(b"abcdefgh")))
        theirs = salted(others, 8, salts[1])
        if state == "pending" and len(others) > 8:
            lease = cache.acquire(theirs)
            cache.announce(lease, theirs, cache.reserve(3))
        elif state != "pending":
            serve(cache, theirs)
        if state == "evicted":
            cache.evict_if(lambda node: node.depth > 2)
        explanations.append(cache.explain(salted(mine, 8, salts[0])))

    assert replace(explanations[0], sibling=b"") == replace(explanations[1], sibling=b"")
    for explanation in explanations:
        assert (
            CacheKey(list(b"abcdefgh"))
            .atoms[explanation.hit_tokens * 4 :]
            .startswith(explanation.sibling)
        )


def test_private_siblings_hide_no_others() -> None:
    """A miss is explained against the caller's own text, however many salts follow the prefix."""
    cache = PrefixCache(1024, 4)
    serve(cache, salted("abcdefghijkl", 8, "mine"))
    for at in range(300):
        serve(cache, salted("abcdefghijkl", 8, f"theirs {at}"))

    explanation = cache.explain(salted("abcdefghiXYZ...", 8, "mine"))

    assert (explanation.reason, explanation.hit_tokens, explanation.diverged_at) == (
        "diverged",
        8,
        9,
    )


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_a_node_tells_the_salt_above_its_end(index: str) -> None:
    """A node's salt is the last salt that begins before its end; None if there is none."""
    cache = PrefixCache(64, 4, index=index)
    serve(cache, CacheKey(list(b"abcdefgh")))
    image, salts = Media(Media.digest_of(b"an image"), 16, 2), [Salt(8, "one"), Salt(13, b"two")]
    serve(cache, CacheKey(list(b"abcdefghijklmnopqrst"), media=[image], salts=salts))
    salts_by_page: dict[int, set[bytes | None]] = {}

    def look(node: Any) -> bool:
        for depth in range(node.start, node.depth):
            salts_by_page.setdefault(depth, set()).add(node.salt)
        return False

    count_pages(cache, look)

    if index == "hash":  # a page is a node
        assert salts_by_page == {0: {None}, 1: {None}, 2: {b"one"}, 3: {b"two"}, 4: {b"two"}}
    else:
        assert salts_by_page == {0: {None}, 1: {None}, 2: {b"two"}, 3: {b"two"}, 4: {b"two"}}


def test_a_key_ends_before_a_salt_that_begins_later() -> None:
    """A prompt within the public prefix has the same key for every tenant."""
    core = Bench().core
    core.namespaces.declare_public(array("i", STEM))

    assert core.namespaces.key(array("i", STEM[:12]), "a") == core.namespaces.key(
        array("i", STEM[:12])
    )
    assert core.namespaces.key(array("i", STEM), "a") != core.namespaces.key(array("i", STEM))
    core.namespaces.declare_public(array("i", STEM))
    core.namespaces.declare_public(array("i", [1, 2]))
    assert core.namespaces._public == [array("i", STEM[:12])]
