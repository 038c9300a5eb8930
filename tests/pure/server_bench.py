"""A whole server in this process, over an engine on a fake device; requests are ASGI calls."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Coroutine, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette

import ramify
from ramify.config import EngineConfig, resolve
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.text.detokenizer import Detokenizer
from ramify.engine.text.tokenizer import Tokenizer
from ramify.models.configs.pooling import PoolingConfig
from ramify.models.configs.sampling_defaults import SamplingDefaults
from ramify.server.app import Server
from ramify.server.generation import Generation
from ramify.server.service import RequestService
from ramify.server.tenants import ApiKeys
from ramify.testing import FAKE_EMBEDDING_SIZE, FakeExecutor
from tests.pure.async_bench import Gate

T = TypeVar("T")
LIMIT_S = 300.0
TINY = Path(ramify.__file__).parent / "data" / "ramify-tiny"


@dataclass(frozen=True)
class Answer:
    """The response to a call."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of the server-sent events, without `[DONE]`."""
        lines = self.body.decode().split("\n")
        payloads = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(payload) for payload in payloads if payload != "[DONE]"]


# Writes tools, calls, results and thoughts; ramify-tiny's own template has neither.
TOOL_TEMPLATE = """
{{- bos_token -}}
{%- if tools -%}
{{- '<|system|>Call one of these as <tool_call>JSON</tool_call>:' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|user|>' if message.role == 'tool' else '<|' + message.role + '|>' -}}
{%- if message.reasoning_content -%}
{{- '<think>' + message.reasoning_content + '</think>' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def tokenizer_with(chat_template: str | None) -> Tokenizer:
    """The tokenizer of the built-in model, with another chat template if there is one."""
    if chat_template is None:
        return Tokenizer.load(TINY)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TINY / file, folder / file)
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
        return Tokenizer.load(folder)


class ServerBench:
    """A server over a fake device; use `call` and `post` inside `async with bench.running()`."""

    def __init__(
        self,
        *,
        keys: ApiKeys | None = None,
        local_admin: bool = True,
        pool_tokens: int = 8192,
        page_size: int = 16,
        max_model_len: int = 2048,
        max_num_seqs: int = 16,
        max_waiting: int = 64,
        prefix_cache: bool = True,
        chat_template: str | None = None,
        tokenizer: Tokenizer | None = None,
        aliases: Sequence[str] = (),
        pooling: PoolingConfig | None = None,
        sampling_defaults: SamplingDefaults | None = None,
        wrapper: str | None = None,
        tools_first: bool = False,
        prompt_rules: Sequence[str] = (),
        **server_options: Any,
    ) -> None:
        requested = EngineConfig.of(
            kv_cache_tokens=pool_tokens,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=2048,
            prefix_cache=prefix_cache,
            max_waiting=max_waiting,
        )
        config = resolve(requested, model_max_len=max_model_len, token_bytes=1, free_memory=0)
        tokenizer = tokenizer_with(chat_template) if tokenizer is None else tokenizer
        vocab = tokenizer.vocab_size
        ends = tokenizer.eos_token_ids
        self.device = FakeExecutor(config.num_pages, page_size, vocab_size=vocab)
        formats = GrammarCompiler(tokenizer.to_json, vocab_size=vocab, eos_token_ids=ends)
        self.core = EngineCore(
            config,
            self.device,
            vocab_size=vocab,
            eos_token_ids=ends,
            namespace=b"",
            detokenizer_factory=partial(Detokenizer, tokenizer),
            grammar_compiler=formats.compile,
        )
        self.llm = AsyncLLM.from_core(self.core, tokenizer)
        self.service = RequestService(
            self.llm,
            tokenizer,
            model="tiny",
            aliases=aliases,
            pooling=pooling,
            sampling_defaults=sampling_defaults,
            wrapper=wrapper,
            embedding_size=FAKE_EMBEDDING_SIZE,
            tools_first=tools_first,
            prompt_rules=prompt_rules,
        )
        self.ended: list[Generation] = []
        self.service.listeners.append(self.ended.append)
        self.server = Server(self.service, keys, local_admin=local_admin, **server_options)
        self.app = self.server.app(self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.server.health.is_ready = True  # the engine ends with `running`, not here
        yield

    @asynccontextmanager
    async def running(self) -> AsyncIterator["ServerBench"]:
        """Run the engine; at the end of the block nothing of any request may be left."""
        self.server.health.is_ready = True
        async with self.llm:
            yield self
            await self.until_idle()
            self.assert_nothing_left()

    async def until_idle(self) -> None:
        while await self.llm.run(lambda core: core.has_unfinished):
            pass

    def assert_nothing_left(self) -> None:
        assert not self.core.live
        assert not self.llm._engine_thread._collectors
        assert not self.service.quotas.num_live
        for pin in self.core.cache.pins():
            self.core.cache.unpin(pin)
        stats = self.core.cache.stats()
        assert (stats.num_leases, stats.private_pages) == (0, 0)
        self.core.cache.check()

    async def call(
        self,
        method: str,
        target: str,
        body: object = b"",
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request and wait for its response; a body that is not bytes is sent as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        request_headers = {"content-type": "application/json", **(headers or {})}
        if key is not None:
            request_headers["authorization"] = f"Bearer {key}"
        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (a.lower().encode(), b.encode("latin-1")) for a, b in request_headers.items()
            ],
            "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
        }
        incoming: list[dict[str, Any]] = [{"type": "http.request", "body": raw, "more_body": False}]
        messages: list[MutableMapping[str, Any]] = []
        is_over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await is_over.wait()
            return {"type": "http.disconnect"}

        async def send(message: MutableMapping[str, Any]) -> None:
            messages.append(message)

        await self.app(scope, receive, send)
        is_over.set()
        assert messages[0]["type"] == "http.response.start"
        response_headers = {
            name.decode(): value.decode("latin-1") for name, value in messages[0]["headers"]
        }
        response_body = b"".join(message.get("body", b"") for message in messages[1:])
        assert not messages[-1].get("more_body")
        return Answer(messages[0]["status"], response_headers, response_body)

    async def post(self, path: str, body: object, key: str | None = None) -> Answer:
        return await self.call("POST", path, body, key=key)


def run(main: Coroutine[Any, Any, T], limit_s: float = LIMIT_S) -> T:
    """`asyncio.run` with a time limit; `main` may leave no task behind."""

    async def watched() -> T:
        result = await asyncio.wait_for(main, limit_s)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return result

    return asyncio.run(watched())


def chat(text: str, **others: Any) -> dict[str, Any]:
    """The body of a chat request for 4 tokens, with further fields."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    return body | others


def ask(path: str, body: object, *, next_text: str | None = None, **options: Any) -> Answer:
    """The answer of a new server; with `next_text`, its model continues with that text.

    Args:
        options: of the `ServerBench`.
    """
    bench = ServerBench(**options)
    if next_text is not None:
        tokenizer = bench.service.tokenizer
        script = tokenizer.encode(next_text, add_special_tokens=False)
        begins: list[int] = []

        def next_token(context: Any) -> int:
            begins[:] = begins or [len(context)]
            done = len(context) - begins[0]
            return script[done] if done < len(script) else tokenizer.eos_token_ids[0]

        bench.device.next_token = next_token

    async def main() -> Answer:
        async with bench.running():
            return await bench.post(path, body)

    return run(main())


def gated(bench: ServerBench) -> Gate:
    """The device of an engine behind a gate that is closed."""
    gate = Gate(bench.device)
    gate.is_open = False
    bench.core.executor = gate
    return gate
