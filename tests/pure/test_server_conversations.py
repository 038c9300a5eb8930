"""`/v1/conversations`, and responses that go on from one."""

import asyncio

import pytest

from ramify.server.tenants import ApiKeys, Caller, hash_key
from tests.pure.server_bench import ServerBench
from tests.pure.test_server_responses import PATH, ask, bench_run, texts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
def test_a_conversation_gets_the_items_of_each_response(stream: bool, store: bool) -> None:
    """Input and output, in order; the next response goes on from them, and reads them from the cache."""

    async def main(bench: ServerBench) -> None:
        created = await bench.post("/v1/conversations", {"metadata": {"a": "b"}})
        name = created.json["id"]
        assert created.json["object"] == "conversation"
        seen: list[str] = []
        bench.service.listeners.append(lambda ended: seen.append(ended.request.prompt.text))
        for text in ("one", "two"):
            body = ask(text, conversation=name, stream=stream, store=store)
            answer = await bench.post(PATH, body)
            assert answer.status == 200
            last = answer.events[-1]["response"] if stream else answer.json
            assert last["conversation"] == {"id": name}
            got = await bench.call("GET", f"{PATH}/{last['id']}")
            assert got.status == (200 if store else 404)
        path = f"/v1/conversations/{name}/items"
        items = (await bench.call("GET", f"{path}?order=asc")).json["data"]
        assert [item["role"] for item in items] == ["user", "assistant"] * 2
        assert texts(items)[::2] == ["one", "two"]
        assert "one" in seen[1]
        item = (await bench.call("GET", f"{path}/{items[0]['id']}")).json
        assert item == items[0]
        assert (await bench.call("DELETE", f"{path}/{items[0]['id']}")).json["id"] == name
        assert (await bench.call("GET", f"{path}/{items[0]['id']}")).status == 404
        added = await bench.post(path, {"items": [{"role": "user", "content": "three"}]})
        assert texts(added.json["data"]) == ["three"]
        left = (await bench.call("GET", f"{path}?order=asc")).json["data"]
        assert left == [*items[1:], *added.json["data"]]
        assert len({item["id"] for item in left}) == len(left)

    bench_run(main)


def test_a_conversation_can_be_changed_and_deleted() -> None:
    """`metadata` is replaced; after the deletion everything of it is 404."""

    async def main(bench: ServerBench) -> None:
        created = (await bench.post("/v1/conversations", {})).json
        path = f"/v1/conversations/{created['id']}"
        changed = (await bench.post(path, {"metadata": {"k": "v"}})).json
        assert changed == created | {"metadata": {"k": "v"}}
        assert (await bench.call("GET", path)).json == changed
        assert (await bench.call("DELETE", path)).json == {
            "id": created["id"],
            "object": "conversation.deleted",
            "deleted": True,
        }
        for method, target in (("GET", path), ("DELETE", path), ("GET", f"{path}/items")):
            assert (await bench.call(method, target)).status == 404
        assert len(bench.service.conversations) == 0

    bench_run(main)


def test_conversations_and_items_of_other_tenants_do_not_exist() -> None:
    """404 for every way to them, with the same words as for one that never was."""
    keys = ApiKeys({hash_key(f"key-{name}"): Caller(name) for name in ("ann", "bob")})

    async def main(bench: ServerBench) -> None:
        body = {"items": [{"role": "user", "content": "secret"}]}
        created = (await bench.post("/v1/conversations", body, "key-ann")).json
        path = f"/v1/conversations/{created['id']}"
        [item] = (await bench.call("GET", f"{path}/items", key="key-ann")).json["data"]
        for target in (path, f"{path}/items", f"{path}/items/{item['id']}"):
            assert (await bench.call("GET", target, key="key-ann")).status == 200
            foreign = await bench.call("GET", target, key="key-bob")
            unknown = await bench.call(
                "GET", target.replace(created["id"], "conv_0"), key="key-bob"
            )
            assert foreign.status == unknown.status == 404
            assert foreign.body.replace(created["id"].encode(), b"conv_0") == unknown.body
        for fields in (
            {"conversation": created["id"]},
            {"input": [{"type": "item_reference", "id": item["id"]}]},
        ):
            assert (await bench.post(PATH, ask("Hi") | fields, "key-bob")).status == 404
            assert (await bench.post(PATH, ask("Hi") | fields, "key-ann")).status == 200

    bench_run(main, keys=keys)


def test_a_conversation_deleted_meanwhile_stays_deleted() -> None:
    """A response that ends after the deletion does not bring it back."""

    async def main(bench: ServerBench) -> None:
        name = (await bench.post("/v1/conversations", {})).json["id"]
        task = asyncio.create_task(
            bench.post(PATH, ask("Hi", conversation=name, max_output_tokens=200))
        )
        while not bench.core.live:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await bench.call("DELETE", f"/v1/conversations/{name}")
        assert (await task).status == 200
        assert (await bench.call("GET", f"/v1/conversations/{name}")).status == 404

    bench_run(main)
