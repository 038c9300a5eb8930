"""Model names: aliases, `*`, and `/v1/models` in the form of either API."""

from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from ramify.cli import app
from tests.pure.server_bench import Answer, ServerBench, chat, run

pytest.importorskip("starlette")

VERSION = {"anthropic-version": "2023-06-01"}
NAMES = ("tiny", "b", "c", "d", "e")


def ask(bench: ServerBench, target: str, **options: Any) -> Any:
    return bench.call("GET", target, **options)


def test_each_name_has_an_entry_and_is_echoed() -> None:
    """The response names the model as the request did; an unknown name is a 404."""

    async def main() -> None:
        async with ServerBench(aliases=["b", "tiny", "c"]).running() as bench:
            listed = await ask(bench, "/v1/models")
            assert [entry["id"] for entry in listed.json["data"]] == ["tiny", "b", "c"]
            assert [entry["display_name"] for entry in listed.json["data"]] == ["tiny", "b", "c"]

            for name in ("tiny", "b", "c"):
                answer = await bench.post("/v1/chat/completions", chat("x", model=name))
                assert answer.json["model"] == name
            assert (await bench.post("/v1/chat/completions", chat("x"))).json["model"] == "tiny"
            unknown = await bench.post("/v1/chat/completions", chat("x", model="*"))
            assert unknown.status == 404

    run(main())


def test_any_name_is_served_with_a_star() -> None:
    """By all APIs; `/v1/models` lists only the real names."""

    async def main() -> None:
        async with ServerBench(aliases=["*"]).running() as bench:
            listed = await ask(bench, "/v1/models")
            assert [entry["id"] for entry in listed.json["data"]] == ["tiny"]

            name = "claude-any/4:latest"
            body = {"model": name, "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
            for path, request in (
                ("/v1/chat/completions", chat("x", model=name)),
                ("/v1/responses", {"model": name, "input": "x", "max_output_tokens": 2}),
                ("/v1/completions", {"model": name, "prompt": "x", "max_tokens": 2}),
                ("/v1/messages", body),
            ):
                answer = await bench.post(path, request)
                assert answer.status == 200, answer.body
                assert answer.json["model"] == name
            assert (await ask(bench, f"/v1/models/{name}")).json["id"] == name
            nameless = await ask(bench, "/v1/models/")
            assert nameless.status == 404
            assert "send /v1/models" in nameless.json["error"]["message"]
            assert (await ask(bench, "/v1/models/" + "x" * 257)).status == 404

    run(main())


def test_models_in_anthropics_form() -> None:
    """With the version header: fields, pages in both directions, and errors."""

    async def main() -> None:
        async with ServerBench(aliases=NAMES).running() as bench:

            async def page(query: str = "") -> Answer:
                answer = await ask(bench, f"/v1/models{query}", headers=VERSION)
                assert isinstance(answer, Answer)
                return answer

            whole = (await page()).json
            assert [entry["id"] for entry in whole["data"]] == list(NAMES)
            assert (whole["has_more"], whole["first_id"], whole["last_id"]) == (False, "tiny", "e")
            for entry in whole["data"]:
                assert entry["type"] == "model"
                assert entry["display_name"] == entry["id"]
                assert entry["created_at"].endswith("Z")

            # Every limit visits all names once, forward by `after_id`, backward by `before_id`.
            for limit in range(1, 7):
                for cursor, edge in (("after_id", "last_id"), ("before_id", "first_id")):
                    seen: list[str] = []
                    query = f"?limit={limit}"
                    if cursor == "before_id":
                        query += "&before_id=e"
                    while True:
                        part = (await page(query)).json
                        names = [entry["id"] for entry in part["data"]]
                        seen = [*names, *seen] if cursor == "before_id" else [*seen, *names]
                        if not part["has_more"]:
                            break
                        query = f"?limit={limit}&{cursor}={part[edge]}"
                    assert seen == list(NAMES if cursor == "after_id" else NAMES[:-1])

            for query, param in (
                ("?limit=0", "limit"),
                ("?limit=x", "limit"),
                ("?after_id=z", "after_id"),
                ("?after_id=b&before_id=c", "before_id"),
            ):
                wrong = await page(query)
                assert (wrong.status, wrong.json["type"]) == (400, "error")
                assert wrong.json["error"]["message"].startswith(param)

    run(main())


def test_the_context_is_what_the_pool_holds() -> None:
    """Agents compact by `max_model_len`: a request of more tokens than it says would be refused."""

    async def main() -> None:
        async with ServerBench(pool_tokens=512).running() as bench:
            [entry] = (await ask(bench, "/v1/models")).json["data"]
            [other] = (await ask(bench, "/v1/models", headers=VERSION)).json["data"]
            [ollama] = (await ask(bench, "/api/ps")).json["models"]
            context = entry["max_model_len"]
            assert context == other["max_input_tokens"] == ollama["context_length"] == 513

            longest, longer = [
                await bench.post("/v1/completions", {"prompt": [5] * length, "max_tokens": 1})
                for length in (context - 1, context)
            ]
            assert longest.status == 200
            assert f"context length is {context} tokens" in longer.json["error"]["message"]

            last = {"prompt": [5] * 600, "max_tokens": 4, "truncate_prompt_tokens": -1}
            answer = await bench.post("/v1/completions", last)
            assert answer.json["usage"]["prompt_tokens"] == context - 4

    run(main())


@pytest.mark.parametrize("name", ["b", "nobody"])
def test_one_model_in_both_forms(name: str) -> None:
    """Errors have the form of the API that the headers name."""

    async def main() -> None:
        async with ServerBench(aliases=NAMES).running() as bench:
            openai = await ask(bench, f"/v1/models/{name}")
            anthropic = await ask(bench, f"/v1/models/{name}", headers=VERSION)
            if name == "b":
                assert openai.json["object"] == "model"
                assert anthropic.json["type"] == "model"
            else:
                assert (openai.status, anthropic.status) == (404, 404)
                assert openai.json["error"]["code"] == "model_not_found"
                assert anthropic.json["error"]["type"] == "not_found_error"

    run(main())


def test_several_names_after_one_flag() -> None:
    """`serve DIR --served-model-name a b c`, as for vLLM; or the flag once for each name."""
    group: Any = typer.main.get_command(app)

    def names(*args: str) -> tuple[Any, ...]:
        params = group.commands["serve"].make_context("serve", list(args)).params
        return params["model"], *params["served_model_name"], *(params["more_names"] or ())

    flag = "--served-model-name"
    assert names("DIR", flag, "a", "b", "*", "--port", "1") == ("DIR", "a", "b", "*")
    assert names(flag, "a", flag, "b", "DIR") == ("DIR", "a", "b")


def test_names_without_the_flag_are_refused() -> None:
    """Exit code 2, as for an argument too many."""
    result = CliRunner().invoke(app, ["serve", "DIR", "b"])

    assert result.exit_code == 2
    assert "--served-model-name" in result.output
