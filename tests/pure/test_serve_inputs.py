"""`ramify serve` finds wrong options before it loads a model."""

import json
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest

from ramify.cli.load import announce_load
from ramify.config import EngineConfig, resolve
from ramify.errors import CheckpointError, ConfigError, RamifyError
from ramify.reasons import reason_of
from ramify.server.http.listen_address import bind_address

pytest.importorskip("starlette")

from ramify.server.run import ServeInputs, ServeOptions, concurrency, serve
from ramify.server.tenants import ApiKeys, hash_key

LOCAL = "127.0.0.1"
HASH = hash_key("k")


@pytest.fixture
def used_port() -> object:
    with closing(socket.create_server((LOCAL, 0))) as listening:
        yield listening.getsockname()[1]


def test_a_port_in_use_is_found_before_the_model_loads(used_port: int) -> None:
    """The model does not exist, which would be the error otherwise."""
    with pytest.raises(ConfigError, match=f"port {used_port} of {LOCAL} is in use.*--port"):
        serve(ServeOptions(model="/nowhere/model", port=used_port))


def test_the_first_line_comes_before_torch(capfd: pytest.CaptureFixture[str]) -> None:
    """Importing it takes seconds; a name that only the hub may have is called so before the hub is asked."""
    code = (
        "import sys; from ramify.cli.load import announce_load; announce_load('ramify-tiny', {}); "
        "assert 'torch' not in sys.modules and 'huggingface_hub' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    lines = capfd.readouterr().err.splitlines()

    with pytest.raises(CheckpointError, match="hub model"):
        announce_load("nobody/never-cached", {"offline": True})

    assert lines == ["loading ramify-tiny: PyTorch and its kernels first"]
    assert capfd.readouterr().err.startswith("nobody/never-cached is not here: looking among")


def test_a_bound_port_does_not_answer_and_can_listen() -> None:
    """Clients are refused while the model loads; a free port is chosen at once."""
    [sock] = bind_address(LOCAL, 0)
    port = sock.getsockname()[1]

    with sock:
        assert port > 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOCAL, port), timeout=1)
        sock.listen()
        socket.create_connection((LOCAL, port), timeout=5).close()


def test_all_addresses_of_a_name_get_one_port() -> None:
    """`localhost` may be 127.0.0.1 and ::1."""
    sockets = bind_address("localhost", 0)

    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        sock.close()


def test_an_address_of_another_machine_is_named() -> None:
    """In one line, with the flag."""
    with pytest.raises(ConfigError, match=r"--host 192.0.2.1"):
        bind_address("192.0.2.1", 0)
    with pytest.raises(ConfigError, match=r"--host nowhere.invalid is no address"):
        bind_address("nowhere.invalid", 0)


@pytest.mark.parametrize("name", ["warm", "public", "record", "key_file", "generation_config"])
def test_a_file_that_cannot_be_used_is_found_before_the_model_loads(
    name: str, tmp_path: Path
) -> None:
    """Of every option that names a file; the port is not taken."""
    missing = tmp_path / "missing" / "file"
    files: dict[str, Any] = {name: missing}
    options = ServeOptions(model="/nowhere/model", port=0, **files)

    with pytest.raises(RamifyError, match="missing"):
        ServeInputs.of(options)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    """The path once and the reason: no number of the system, no name of a class."""
    missing, broken, latin = (tmp_path / name for name in ("missing", "broken", "latin"))
    broken.write_text('{"keys": [}')
    latin.write_bytes('{"é": 1}'.encode("latin-1"))

    reasons = {}
    for path in (missing, broken, latin):
        with pytest.raises(ConfigError) as caught:
            ApiKeys.load(path)
        reasons[path] = str(caught.value).removeprefix(f"the key file {path} cannot be read: ")

    assert reasons == {
        missing: "No such file or directory",
        broken: "it is not JSON: Expected value at line 1, column 11",
        latin: "it is not UTF-8: byte 0xe9 at 2",
    }


@pytest.mark.parametrize(
    ("error", "named", "reason"),
    [
        (OSError(13, "Permission denied", "a/b"), "a/./b", "Permission denied"),
        (OSError(13, "Permission denied", "a/b"), Path("a"), "a/b: Permission denied"),
        (OSError(13, "Permission denied", b"a/b"), None, "a/b: Permission denied"),
        (OSError(5, "Input/output error"), "a", "Input/output error"),
        (TimeoutError("timed out"), None, "timed out"),
        (OSError(), None, "OSError"),
        (URLError(OSError(111, "Connection refused")), None, "Connection refused"),
        (URLError("unknown url type: x"), None, "unknown url type: x"),
        (RecursionError("maximum recursion depth"), None, "it is nested too deeply"),
        (ValueError("out of range"), None, "out of range"),
    ],
)
def test_the_reason_of_an_error_names_a_path_that_the_message_lacks(
    error: Exception, named: str | Path | None, reason: str
) -> None:
    """And none that it has."""
    assert reason_of(error, named) == reason


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ([], 'is no object with a list "keys"'),
        ({"keys": {}}, 'is no object with a list "keys"'),
        ({"keys": []}, "has no keys"),
        ({"keys": ["k"]}, "keys[0] is 'k' but it must be an object with hash, tenant"),
        (
            {"keys": [{"hash": "sha256:xyz"}]},
            "keys[0] has hash='sha256:xyz' but it must be sha256:",
        ),
        ({"keys": [{"hash": HASH, "z": 1, "a": 1}]}, "has the unknown z, a; its fields are hash,"),
        ({"keys": [{"hash": HASH, "quota": 5}]}, "keys[0].quota is 5 but it must be an object"),
        ({"keys": [{"hash": HASH, "quota": {"x": 5}}]}, "keys[0].quota has the unknown x; its"),
        (
            {"keys": [{"hash": HASH, "quota": {"max_requests": -1}}]},
            "keys[0].quota has max_requests=-1 but it must be an integer >= 0",
        ),
    ],
)
def test_a_wrong_key_file_names_the_entry(tmp_path: Path, entries: object, problem: str) -> None:
    """With the value and what is possible, not the words of Python."""
    (tmp_path / "keys.json").write_text(json.dumps(entries))

    with pytest.raises(ConfigError) as caught:
        ApiKeys.load(tmp_path / "keys.json")

    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "flag"),
    [({"api_keys": ("k",)}, "--api-key"), ({"admin_key": "k"}, "--admin-key")],
)
def test_a_key_file_beside_a_key_names_the_flag_that_was_given(
    keys: dict[str, Any], flag: str, tmp_path: Path
) -> None:
    """Not one that was not."""
    options = ServeOptions(key_file=tmp_path / "keys.json", **keys)

    with pytest.raises(ConfigError) as caught:
        options.keys()

    assert f"both --api-key-file and {flag} are given" in str(caught.value)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (64 * 8192, "up to 64 at once, each of up to 8,192 tokens"),
        (34 * 8192 + 4096, "up to 64 at once, or 34 of the longest (8,192 tokens)"),
        (4096, "up to 64 at once, each of up to 4,096 tokens (the model allows 8,192 tokens)"),
    ],
)
def test_the_banner_says_in_words_how_many_requests_run(tokens: int, expected: str) -> None:
    """By `max_num_seqs`, and by the pool for the longest."""
    requested = EngineConfig.of(kv_cache_tokens=tokens)
    config = resolve(requested, model_max_len=8192, token_bytes=1, free_memory=0)

    assert concurrency(config) == expected
