"""The terminal chat: turns, commands, Ctrl-C, errors; over a pipe against a server."""

import io
import os
import subprocess
import sys
from collections.abc import Generator, Iterator

import pytest

from ramify.cli.chat import Chat, ChatError, Message, RemoteBackend, TurnUsage
from ramify.errors import ConfigError
from tests.pure.live_server import Live, live


class Scripted:
    """A backend that plays back the given answers and raises any exception among them."""

    name = "scripted"

    def __init__(self, *answers: list[str | TurnUsage | BaseException]) -> None:
        self.answers = list(answers)
        self.conversations: list[list[Message]] = []
        self.num_closed = 0

    def answer(self, messages: list[Message]) -> Generator[str | TurnUsage]:
        self.conversations.append(messages)
        try:
            for piece in self.answers.pop(0):
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            self.num_closed += 1


def talk(
    backend: object, *lines: str | type[BaseException], system: str | None = None
) -> tuple[str, str]:
    left = list(lines)

    def line() -> str | None:
        if not left:
            return None
        next_line = left.pop(0)
        if isinstance(next_line, str):
            return next_line
        raise next_line

    out, notes = io.StringIO(), io.StringIO()
    Chat(backend, lines=line, out=out, notes=notes, system=system).run()  # type: ignore[arg-type]
    return out.getvalue(), notes.getvalue()


def test_each_turn_has_all_before_it_and_tells_what_was_cached() -> None:
    """A turn sends all earlier turns and prints its cached tokens; /exit ends the chat."""
    backend = Scripted(["a", "b", TurnUsage(20, 16, 2)], ["c"])
    out, notes = talk(backend, "one", "", "two", "/exit", "three", system="be brief")

    assert out == "ab\nc\n"
    assert "[prompt 20: 16 cached, 4 computed; output 2, " in notes
    assert [[message["content"] for message in messages] for messages in backend.conversations] == [
        ["be brief", "one"],
        ["be brief", "one", "ab", "two"],
    ]


def test_clear_begins_anew() -> None:
    """/clear keeps the system message only; an unknown command prints the help."""
    backend = Scripted(["a"], ["b"])
    _, notes = talk(backend, "one", "/clear", "/what", "two", system="s")

    assert [message["content"] for message in backend.conversations[1]] == ["s", "two"]
    assert notes.count("/exit ends") == 2


def test_ctrl_c_ends_the_answer_and_keeps_the_chat() -> None:
    """Ctrl-C closes the request and keeps the partial answer; at the prompt it does nothing."""
    backend = Scripted(["half", KeyboardInterrupt()], ["b"])
    out, notes = talk(backend, "one", KeyboardInterrupt, "two")

    assert out == "half\nb\n"
    assert "(stopped)" in notes
    assert [message["content"] for message in backend.conversations[1]] == ["one", "half", "two"]
    assert backend.num_closed == 2


def test_an_error_loses_the_turn_only() -> None:
    """An error is printed, and the next turn is sent without the failed turn."""
    backend = Scripted([ChatError("503: busy")], ["b"])
    _, notes = talk(backend, "one", "two")

    assert "error: 503: busy" in notes
    assert [message["content"] for message in backend.conversations[1]] == ["two"]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as live_server:
        yield live_server


def test_an_unknown_command_is_called_so() -> None:
    """It is sent to nobody, and the line has the commands that exist."""
    backend = Scripted(["a"])
    _, notes = talk(backend, "/what is it", "one")

    assert "unknown command /what; /exit ends, /clear" in notes
    assert len(backend.conversations) == 1


def test_over_a_pipe_with_a_server(server: Live) -> None:
    """`ramify chat` over a pipe: the second turn hits the first, and the end of input ends it."""
    lines = "Who lives in Rome, and who lives in Paris?\nAnd in Pisa?\n"
    command = [sys.executable, "-m", "ramify", "chat", "--url", server.url, "--max-tokens", "5"]
    done = subprocess.run(
        command,
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
        check=True,
    )

    first, second = (line for line in done.stderr.splitlines() if line.startswith("[prompt"))
    assert ": 0 cached," in first
    assert ": 0 cached," not in second
    assert "output 5," in second
    assert len(done.stdout) > 5
    server.until_idle()


def test_a_server_may_be_of_another_kind(server: Live) -> None:
    """A server's errors are printed; a server that cannot be reached raises ConfigError."""
    wrong = RemoteBackend(server.url, key=None, model="gpt-6", options={})
    _, notes = talk(wrong, "hello")
    assert "error: 404: the model 'gpt-6' is not served here" in notes
    assert RemoteBackend(server.url + "/v1/", key="k", model=None, options={}).name == "fake"
    for url in ("http://127.0.0.1:9", "file:///etc/passwd", "127.0.0.1"):
        with pytest.raises(ConfigError):
            RemoteBackend(url, key="k", model=None, options={})
