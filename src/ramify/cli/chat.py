"""`ramify chat`: a conversation in the terminal, with an engine in this process or an OpenAI server."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TextIO

import typer

from ramify.cli.load import announce_load
from ramify.cli.options import DEFAULT_MODEL, PANELS, engine_options, exit_on_error
from ramify.errors import ConfigError, RamifyError
from ramify.params import SamplingParams
from ramify.reasons import reason_of

HELP = "/exit ends, /clear starts a new conversation, Ctrl-C stops an answer, Ctrl-D ends"
TIMEOUT_S = 600.0
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """Token counts of a turn; None where a server does not report them."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None

    def line(self, total_s: float) -> str:
        """Format the line shown at the end of a turn."""
        if self.prompt is None:
            return f"[{total_s:.1f} s]"
        if self.cached is None:
            return f"[prompt {self.prompt}, output {self.output}, {total_s:.1f} s]"
        computed = self.prompt - self.cached
        return (
            f"[prompt {self.prompt}: {self.cached} cached, {computed} computed; "
            f"output {self.output}, {total_s:.1f} s]"
        )


class Backend(Protocol):
    """Answers a conversation: an engine in this process, or a server."""

    name: str

    def answer(self, messages: list[Message]) -> Generator[str | TurnUsage]:
        """Yield pieces of text, then the usage. Closing the generator ends the request."""
        ...

    def close(self) -> None:
        """End the engine, if it is of this process: what it has cached goes to its tiers."""
        ...


class ChatError(RamifyError):
    """A turn failed; the conversation can continue."""


class RemoteBackend:
    """A server with OpenAI's API.

    Args:
        url: with or without `/v1`.
        model: None takes the first that the server lists.
    """

    def __init__(
        self, url: str, *, key: str | None, model: str | None, options: Mapping[str, Any]
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url} must begin with http:// or https://")
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._options = dict(options)
        self.name = model or self._first_model()

    def _first_model(self) -> str:
        try:
            with self._open("/models", None) as response:
                return str(json.load(response)["data"][0]["id"])
        except (ChatError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{self._base} lists no model: {reason_of(error)}") from error

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)  # noqa: S310
        try:
            return urllib.request.urlopen(request, timeout=TIMEOUT_S)  # noqa: S310 - http only
        except urllib.error.HTTPError as error:
            raise ChatError(f"{error.code}: {_message_of(error.read())}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(reason_of(error)) from error

    def close(self) -> None:
        """See `Backend`; the server goes on."""

    def answer(self, messages: list[Message]) -> Generator[str | TurnUsage]:
        """See `Backend`."""
        body = {
            "model": self.name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        usage = TurnUsage()
        with self._open("/chat/completions", body | self._options) as response:
            for event in _events(response):
                if event.get("error"):
                    raise ChatError(str(event["error"].get("message", event["error"])))
                usage = _usage_of(event.get("usage")) or usage
                for choice in event.get("choices") or ():
                    text = (choice.get("delta") or {}).get("content")
                    if text:
                        yield text
        yield usage


def _events(response: Any) -> Iterator[dict[str, Any]]:
    try:
        for line in response:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield json.loads(line[5:])
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ChatError(f"the answer broke off: {reason_of(error)}") from error


def _usage_of(usage: Mapping[str, Any] | None) -> TurnUsage | None:
    if not usage:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return TurnUsage(
        usage.get("prompt_tokens"), details.get("cached_tokens"), usage.get("completion_tokens")
    )


def _message_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", "replace")


class LocalBackend:
    """An engine in this process, stepped by this thread."""

    def __init__(self, model: str, params: SamplingParams, options: Mapping[str, Any]) -> None:
        from ramify.engine.llm import LLM

        self.name = model
        self._llm = LLM(model, progress=sys.stderr.isatty(), **options)
        if self._llm.tokenizer is None or not self._llm.tokenizer.has_chat_template:
            raise ConfigError(f"{model} has no chat template, which a conversation needs")
        self._params = params

    def close(self) -> None:
        """See `Backend`."""
        self._llm.close()

    def answer(self, messages: list[Message]) -> Generator[str | TurnUsage]:
        """See `Backend`."""
        llm = self._llm
        assert llm.tokenizer is not None
        request_id = llm.add_request(llm.tokenizer.encode_chat(messages), self._params)
        output = None
        try:
            while output is None:
                for event in llm.step():
                    output = event.output or output
                    if event.text:
                        yield event.text
        finally:
            if output is None:
                llm.abort(request_id)
            llm.take_output(request_id)
        if output.error is not None:
            raise ChatError(str(output.error))
        usage = output.usage
        yield TurnUsage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


class Chat:
    """Reads the user's lines, sends the conversation to a backend and prints its answers.

    Args:
        lines: returns the user's next line; None at the end of the input.
        out: receives the answers.
        notes: receives everything else: usage, errors, help.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        lines: Callable[[], str | None],
        out: TextIO,
        notes: TextIO,
        system: str | None = None,
    ) -> None:
        self._backend, self._lines, self._out, self._notes = backend, lines, out, notes
        self._initial: list[Message] = [] if system is None else [_message("system", system)]
        self.messages = list(self._initial)

    def run(self) -> None:
        """Answer lines until /exit or the end of the input."""
        self._note(f"{self._backend.name}: {HELP}")
        while True:
            try:
                line = self._lines()
            except KeyboardInterrupt:
                self._note("")
                continue
            if line is None or line.strip() == "/exit":
                return
            if line.strip() == "/clear":
                self.messages = list(self._initial)
                self._note("cleared")
            elif line.strip().startswith("/"):
                self._note(f"unknown command {line.split()[0]}; {HELP}")
            elif line.strip():
                self._turn(line.strip())

    def _turn(self, text: str) -> None:
        """Send a question; after Ctrl-C the partial answer stays in the conversation."""
        messages = [*self.messages, _message("user", text)]
        start, pieces, usage = time.monotonic(), [], TurnUsage()
        try:
            with closing(self._backend.answer(messages)) as answer:
                for piece in answer:
                    if isinstance(piece, TurnUsage):
                        usage = piece
                        continue
                    pieces.append(piece)
                    self._out.write(piece)
                    self._out.flush()
        except KeyboardInterrupt:
            self._note("\n(stopped)")
        except RamifyError as error:
            self._note(f"error: {error}")
            return
        self._out.write("\n")
        self._out.flush()
        self.messages = [*messages, _message("assistant", "".join(pieces))]
        self._note(usage.line(time.monotonic() - start))

    def _note(self, text: str) -> None:
        self._notes.write(text + "\n")
        self._notes.flush()


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def read_line() -> str | None:
    """Read the next line of stdin, with a prompt on a terminal; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


@engine_options(panels=PANELS)
def chat(
    engine: dict[str, Any],
    model: Annotated[
        str | None,
        typer.Argument(
            help="Checkpoint as for `serve`; with --url a model name that the server lists."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="URL of a server with OpenAI's API, in place of an engine in this process."
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Output tokens of an answer at most.")
    ] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
) -> None:
    """Chat in the terminal; each turn shows how many of its prompt tokens were cached.

    /exit ends, /clear starts a new conversation, Ctrl-C stops an answer.
    """
    with exit_on_error():
        if url is not None:
            options = {"max_tokens": max_tokens, "temperature": temperature}
            backend: Backend = RemoteBackend(url, key=api_key, model=model, options=options)
        else:
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
            announce_load(model or DEFAULT_MODEL, engine)
            backend = LocalBackend(model or DEFAULT_MODEL, params, engine)
    with closing(backend):
        Chat(backend, lines=read_line, out=sys.stdout, notes=sys.stderr, system=system).run()
