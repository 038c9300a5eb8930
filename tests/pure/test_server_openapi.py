"""The OpenAPI document says what there is, and nothing else."""

from starlette.routing import Route

from tests.pure.server_bench import ServerBench, run


def test_the_document_has_every_route() -> None:
    """And each route that it has exists, with that method."""
    bench = ServerBench()
    routes = {
        (one.path.replace(":path", ""), method.lower())
        for one in bench.app.routes
        if isinstance(one, Route)
        for method in (one.methods or set()) - {"HEAD"}
    }

    async def main() -> set[tuple[str, str]]:
        async with bench.running():
            told = (await bench.call("GET", "/openapi.json")).json
        assert told["openapi"] == "3.1.0"
        assert "#/components/schemas/ChatMessage" in str(told["components"]["schemas"])
        return {(path, method) for path, one in told["paths"].items() for method in one}

    assert run(main()) == routes


def test_every_reference_in_the_document_leads_somewhere() -> None:
    """Types of the same name in two APIs are two schemas."""
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            told = (await bench.call("GET", "/openapi.json")).json
        found: list[str] = []
        waiting = [told]
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict):
                found += [one["$ref"]] if "$ref" in one else []
                waiting += one.values()
            elif isinstance(one, list):
                waiting += one
        schemas = told["components"]["schemas"]
        assert found
        assert {one.removeprefix("#/components/schemas/") for one in found} <= schemas.keys()

    run(main())
