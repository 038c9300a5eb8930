"""A headless Chromium for tests and screenshots, driven by its chromedriver over the WebDriver protocol."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 30.0
POLL_S = 0.02
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
KEYS = {
    "Tab": "\ue004",
    "Enter": "\ue007",
    "Escape": "\ue00c",
    "Space": " ",
    "Left": "\ue012",
    "Up": "\ue013",
    "Right": "\ue014",
    "Down": "\ue015",
}
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> Path | None:
    """The Chromium of this machine; None: there is none, or no driver for it."""
    path = next(filter(None, map(shutil.which, CHROMIUMS)), None)
    return None if path is None or shutil.which("chromedriver") is None else Path(path)


class ScriptError(AssertionError):
    """The driver refused a command, or a script of it raised."""


class Browser:
    """One tab. Use `browser()`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def open(self, url: str) -> None:
        """Load a page, until its scripts have run."""
        self._post("url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The value that the body of a function returns."""
        return self._post("execute/sync", {"script": script, "args": list(args)})

    def run_async(self, script: str, *args: Any) -> Any:
        """As `run`; the value is passed to `arguments[arguments.length - 1]`."""
        return self._post("execute/async", {"script": script, "args": list(args)})

    def until(self, script: str, *args: Any) -> Any:
        """The first true value of an expression.

        Raises:
            AssertionError: it stays false.
        """
        deadline = time.monotonic() + LIMIT_S
        while not (value := self.run(f"return {script}", *args)):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.text()[:2000]}"
            time.sleep(POLL_S)
        return value

    def text(self, selector: str = "body") -> str:
        """The visible text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def press(self, *names: str) -> None:
        """Press keys by their names in `KEYS`, one after the other; "Shift+Tab" holds Shift."""
        for name in names:
            shift, key = name.startswith("Shift+"), name.removeprefix("Shift+")
            value = KEYS.get(key, key)
            strokes = [{"type": kind, "value": value} for kind in ("keyDown", "keyUp")]
            if shift:
                held = {"value": "\ue008"}
                strokes = [{"type": "keyDown", **held}, *strokes, {"type": "keyUp", **held}]
            self._post(
                "actions", {"actions": [{"type": "key", "id": "keyboard", "actions": strokes}]}
            )

    def write(self, text: str) -> None:
        """Type a text where the focus is."""
        self.press(*text)

    def cdp(self, command: str, **params: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._post("goog/cdp/execute", {"cmd": command, "params": params})

    def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """Set the size of the viewport in CSS pixels."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def set_scheme(self, scheme: str) -> None:
        """Prefer "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.cdp("Emulation.setEmulatedMedia", features=[feature])

    def screenshot(self) -> bytes:
        """The viewport as PNG."""
        return base64.b64decode(self.cdp("Page.captureScreenshot", format="png")["data"])

    def messages(self) -> list[str]:
        """What the console got since the last call, warnings and errors."""
        entries = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def _post(self, command: str, body: dict[str, Any]) -> Any:
        return _send(f"{self._url}/{command}", body)


@contextmanager
def browser(*, width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """Start a browser with a fresh profile, which ends with the block."""
    binary = chromium()
    assert binary is not None, "no chromium with chromedriver"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, _driver() as driver:
        options = {
            "binary": str(binary),
            "args": [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"],
        }
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = _send(f"{driver}/session", {"capabilities": {"alwaysMatch": capabilities}})
        url = f"{driver}/session/{session['sessionId']}"
        try:
            yield Browser(url)
        finally:
            _send(url, None, method="DELETE")


@contextmanager
def _driver() -> Iterator[str]:
    """A chromedriver on a free port; its URL."""
    process = subprocess.Popen(
        ["chromedriver", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if match := re.search(r"started successfully on port (\d+)", line):
                yield f"http://127.0.0.1:{match[1]}"
                return
        raise AssertionError("chromedriver has ended")
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        if process.stdout is not None:
            process.stdout.close()


def _send(url: str, body: dict[str, Any] | None, *, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=2 * LIMIT_S) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as error:
        value = json.load(error)["value"]
        raise ScriptError(f"{value['error']}: {value['message']}") from None
