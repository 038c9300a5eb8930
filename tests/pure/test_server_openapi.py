"""The OpenAPI document lists exactly the server's routes and defines every schema it uses."""

from starlette.routing import Route

from ramify.server.routes import ENDPOINTS
from tests.pure.server_bench import ServerBench, run


def test_the_document_has_every_route() -> None:
    """The document's paths and methods are those of the application's routes, without aliases."""
    bench = ServerBench()
    aliases = {path.replace(":path", "") for row in ENDPOINTS for path in row.paths[1:]}
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in bench.app.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
        if route.path.replace(":path", "") not in aliases
    }
    assert {"/chat/completions", "/messages", "/v2/rerank"} <= aliases

    async def main() -> set[tuple[str, str]]:
        async with bench.running():
            document = (await bench.call("GET", "/openapi.json")).json
        assert document["openapi"] == "3.1.0"
        assert "#/components/schemas/ChatMessage" in str(document["components"]["schemas"])
        return {
            (path, method)
            for path, operations in document["paths"].items()
            for method in operations
        }

    assert run(main()) == routes


def test_every_reference_in_the_document_leads_somewhere() -> None:
    """Every `$ref` in the document names a schema that the document defines."""
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            document = (await bench.call("GET", "/openapi.json")).json
        references: list[str] = []
        waiting = [document]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                references += [value["$ref"]] if "$ref" in value else []
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value
        schemas = document["components"]["schemas"]
        assert references
        assert {
            reference.removeprefix("#/components/schemas/") for reference in references
        } <= schemas.keys()

    run(main())
