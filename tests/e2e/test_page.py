"""The live page in a headless Chromium: keyboard, screen reader rules, large trees, hostile texts, tenants."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify.cache.key import CacheKey
from ramify.engine.cache_admin.branch_view import BranchQuery, view_branches
from ramify.engine.core import EngineCore
from ramify.server.tenants import ApiKeys, Caller, hash_key
from tests.browser import Browser, browser, chromium
from tests.pure.live_server import Live, ids, live

ROOT = Path(__file__).resolve().parents[2]
AXE = Path(os.environ.get("RAMIFY_AXE", ROOT / "build" / "browser" / "axe.min.js"))
KEYS = ApiKeys(
    {
        hash_key("a"): Caller("ann"),
        hash_key("b"): Caller("bob"),
        hash_key("o"): Caller("operator", is_admin=True),
    }
)
SYSTEM = "You answer questions about the lamps of Mara, who lives in Rome. " * 4
HOSTILE = (
    "<img src=x onerror='window.owned=1'><script>window.owned=1</script>"
    "\"><svg/onload=window.owned=1>{{constructor.constructor('window.owned=1')()}}"
)
NUM_NODES = 100_000
TREE_LABELS = (
    "return [...document.querySelectorAll('[role=treeitem]')].map(x => x.ariaLabel).join('\\n')"
)

pytestmark = pytest.mark.skipif(
    chromium() is None, reason="no chromium with chromedriver: `make browser`"
)


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def served() -> Iterator[Live]:
    with live() as server:
        yield server


def converse(server: Live, *questions: str, system: str = SYSTEM, key: str = "") -> None:
    """Ask questions behind the same system prompt."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for question in questions:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": 4}
        assert server.post("/v1/chat/completions", body, headers=headers).status_code == 200


def show(tab: Browser, server: Live, key: str = "") -> None:
    """Open the page, with a key, and wait until it shows the server's state."""
    tab.open(f"{server.url}/ui")
    tab.run("sessionStorage.setItem('ramify-key', arguments[0])", key)
    tab.messages()
    tab.open(f"{server.url}/ui")
    tab.until("document.querySelector('#status').textContent.startsWith('ramify ')")
    tab.until("document.querySelector('#tree-count').textContent")


def active_text(tab: Browser) -> str:
    return str(tab.run("return document.querySelector('#tree-details').innerText"))


def test_the_page_shows_what_the_cache_did(tab: Browser, served: Live) -> None:
    """Headline, charts and tree after a few questions; no message in the console."""
    converse(served, "Who lives in Rome?", "Who has lamps?", "Who has 4 boats?")

    show(tab, served)

    assert "prompt tokens were not computed" in tab.text("#headline")
    assert tab.run("return document.querySelectorAll('#charts canvas').length") == 4
    assert tab.run("return document.querySelectorAll('#tree-chart [role=treeitem]').length") >= 4
    assert "lamps of Mara" in tab.text("#tree-chart")
    assert tab.messages() == []


def test_everything_is_reached_by_keyboard_alone(tab: Browser, served: Live) -> None:
    """Tab reaches each control; arrows, Enter and Escape walk and zoom the tree; Enter sends a chat."""
    converse(served, "Who lives in Rome?", "Who has lamps?")
    show(tab, served)
    reached: list[str] = []
    for _ in range(24):
        tab.press("Tab")
        reached.append(
            tab.run(
                "const a = document.activeElement; return a.id || a.role || a.value || a.tagName"
            )
        )
        if reached[-1] == "tree":
            break
    assert {"hits", "tree-search"} <= set(reached)
    assert reached[-1] == "tree"
    assert "token" in active_text(tab)
    above = active_text(tab)
    tab.press("Right")
    below = active_text(tab)
    tab.press("Down", "Left")
    assert (below != above, active_text(tab)) == (True, above)
    tab.press("Enter")
    tab.until("!document.querySelector('#tree-path').hidden")
    assert tab.run("return document.activeElement.role") == "tree"
    tab.press("Escape")
    tab.until("document.querySelector('#tree-path').hidden")

    for _ in range(24):
        tab.press("Tab")
        if tab.run("return document.activeElement.id") == "chat-input":
            break
    tab.write("Hi")
    tab.press("Enter")

    tab.until("document.querySelector('#chat-log .why')")
    assert "computed" in tab.text("#chat-log")


def test_a_chat_shows_thoughts_and_where_it_was_cut(tab: Browser, served: Live) -> None:
    """Of a model that thinks, too, something is seen before the answer."""
    show(tab, served)
    choices = (
        {"delta": {"reasoning_content": "Rome is"}},
        {"delta": {"reasoning_content": " a city."}},
        {"delta": {"content": "In It"}, "finish_reason": "length"},
    )
    lines = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices)
    tab.run("const body = arguments[0]; window.fetch = async () => new Response(body)", lines)

    tab.run("document.querySelector('#chat-input').focus()")
    tab.write("Where?")
    tab.press("Enter")
    tab.until("document.querySelector('#chat-log').textContent.includes('ends here')")
    turn = tab.text("#chat-log .turn:last-child")

    assert turn.index("Rome is a city.") < turn.index("In It") < turn.index("512 tokens")


def test_a_pasted_request_is_explained(tab: Browser, served: Live) -> None:
    """What would hit, the fields of the request, and the reason for the miss."""
    converse(served, "Who lives in Rome?")
    show(tab, served)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Who has boats?"},
    ]
    script = "document.querySelector('#explain-input').value = arguments[0];"
    tab.run(script, json.dumps({"messages": messages}))

    tab.run("document.querySelector('#explain-form').requestSubmit()")
    tab.until("document.querySelector('#explain-result table')")

    shown = tab.text("#explain-result")
    assert "would hit" in shown
    assert "A cached prompt is the same up to here" in shown
    assert "messages[1].content" in shown


def test_hostile_texts_never_run(tab: Browser, served: Live) -> None:
    """Markup in prompts, answers, tenants and pasted requests is text wherever it is shown."""
    converse(served, HOSTILE, HOSTILE + "!", system=HOSTILE)
    served.ask(HOSTILE * 3)
    show(tab, served)
    tab.run(
        "window.owned = 0; document.querySelector('#tree-search').value = arguments[0]", HOSTILE
    )
    tab.run("document.querySelector('#tree-chart svg').focus()")
    tab.press("Down", "Right", "Enter")
    for place in ("explain", "chat"):
        tab.run(
            "document.querySelector(`#${arguments[0]}-input`).value = arguments[1];"
            "document.querySelector(`#${arguments[0]}-form`).requestSubmit()",
            place,
            HOSTILE,
        )
    tab.until(
        "document.querySelector('#chat-log .why') && document.querySelector('#explain-result table')"
    )

    assert "<script>" in tab.text()
    assert tab.run("return window.owned") == 0
    assert tab.run("return document.querySelectorAll('main img, main script').length") == 0
    assert tab.messages() == []


def test_the_policy_stops_what_markup_would_start(tab: Browser, served: Live) -> None:
    """Even a script that got into the page would not run: neither inline, nor as a string."""
    show(tab, served)
    tab.run(
        "window.owned = 0; const script = document.createElement('script');"
        "try { script.textContent = 'window.owned = 1' } catch {} document.body.append(script);"
    )

    with pytest.raises(AssertionError, match="TrustedHTML"):
        tab.run("document.body.innerHTML = '<b>'")

    assert tab.run("return window.owned") == 0
    assert any("has been blocked" in message for message in tab.messages())


def test_a_tenant_sees_only_its_own(tab: Browser) -> None:
    """With keys the page asks for one, and shows that tenant's texts, requests and figures."""
    with live(KEYS) as server:
        converse(server, "Who has 3 boats?", key="a", system="Ann likes boats. " * 9)
        converse(server, "Who has 5 kites?", key="b", system="Bob likes kites. " * 9)
        tab.open(f"{server.url}/ui")
        tab.run("sessionStorage.clear()")
        tab.open(f"{server.url}/ui")
        tab.until("document.querySelector('#key-dialog').open")
        tab.write("a")
        tab.press("Enter")
        tab.until("document.querySelector('#tree-chart').textContent.includes('boats')")
        everything = tab.run("return document.documentElement.textContent")
        tab.run("document.querySelector('#key-button').click()")
        reason = tab.text("#key-reason")
        tab.run("document.querySelector('#key-input').value = 'x'")
        tab.press("Enter")
        tab.until("document.querySelector('#key-reason').textContent.includes('does not know')")
        with_wrong_key = tab.run("return document.documentElement.textContent")
        show(tab, server, "o")
        operators = tab.run("return document.documentElement.textContent")

    assert "may see" in reason
    assert "boats" not in with_wrong_key  # nor anything else of ann's
    assert "kites" not in everything
    assert "as ann" in everything
    assert "boats" in operators and "kites" in operators


def test_rules_of_accessibility_hold(tab: Browser, served: Live) -> None:
    """axe-core has no serious finding, light or dark, with requests, answers and a zoomed tree."""
    if not AXE.is_file():
        pytest.skip(f"no axe-core at {AXE}: `make browser`")
    converse(served, "Who lives in Rome?", "Who has lamps?")
    show(tab, served)
    tab.run("document.querySelector('#chat-input').value = 'Hi';")
    tab.run("document.querySelector('#chat-form').requestSubmit()")
    tab.run("document.querySelector('#explain-input').value = 'Who?';")
    tab.run("document.querySelector('#explain-form').requestSubmit()")
    tab.until(
        "document.querySelector('#chat-log .why') && document.querySelector('#explain-result table')"
    )
    tab.run("document.querySelector('#tree-chart svg').focus()")
    tab.press("Enter")
    tab.until("!document.querySelector('#tree-path').hidden")
    # The driver's scripts are not bound by the page's policy.
    tab.run(AXE.read_text("utf-8"))
    findings: list[str] = []
    for scheme in ("light", "dark"):
        tab.set_scheme(scheme)
        result: dict[str, Any] = tab.run_async(
            "const done = arguments[arguments.length - 1];"
            "axe.run(document).then(done, (error) => done({ failed: String(error) }))"
        )
        assert "failed" not in result, result
        findings += [
            f"{scheme}: {violation['id']}: {violation['nodes'][0]['html'][:200]}"
            for violation in result["violations"]
            if violation["impact"] in ("serious", "critical", "moderate")
        ]
    tab.set_scheme("light")

    assert findings == []


def fill(core: EngineCore) -> None:
    """10⁵ nodes: many prompts behind one beginning."""
    cache = core.cache
    stem = [7] * cache.page_size
    for number in range(NUM_NODES):
        key = CacheKey([*stem, *(8 + byte for byte in number.to_bytes(4, "big"))])
        lease = cache.acquire(key)
        private = cache.reserve(2 - len(lease.pages))
        cache.release(cache.publish(lease, key, private))


def test_a_hundred_thousand_nodes_stall_neither_engine_nor_page(tab: Browser) -> None:
    """The engine gives a few milliseconds, the page draws a few hundred nodes and stays quick."""
    with live(pool_tokens=4 * (NUM_NODES + 64)) as server:
        server.look(fill)

        def measure(core: EngineCore) -> float:
            begin = time.thread_time()
            view_branches(core, BranchQuery(max_nodes=240, max_levels=12))
            return time.thread_time() - begin

        engine_s = min(server.look(measure) for _ in range(5))
        show(tab, server)
        num_drawn = tab.run("return document.querySelectorAll('[role=treeitem]').length")
        draw_ms = tab.run(
            "const search = document.querySelector('#tree-search'); let least = Infinity;"
            "for (let at = 0; at < 5; at += 1) {"
            "  const begin = performance.now(); search.value = String(at);"
            "  search.dispatchEvent(new Event('input', { bubbles: true }));"
            "  document.querySelector('#tree-chart').getBoundingClientRect();"
            "  least = Math.min(least, performance.now() - begin);"
            "} return least;"
        )
        tab.until("document.querySelector('#tree-count').textContent.includes('of 1,000 nodes')")

    assert engine_s < 0.05
    assert draw_ms < 200
    assert num_drawn == 240


def test_find_looks_beyond_the_drawing(tab: Browser, served: Live) -> None:
    """A node of few hits among more than are drawn: it is read, drawn with what leads to it, and marked."""
    texts = [f"{number} lamps stand in the house of Mara." for number in range(300)]

    def fill_texts(core: EngineCore) -> None:
        for text in ("Heliotrope grows in Rome by the river.", *texts, *texts):
            key = CacheKey(ids(text))
            lease = core.cache.acquire(key)
            private = core.cache.reserve(len(key) // 4 - len(lease.pages))
            core.cache.release(core.cache.publish(lease, key, private))

    served.look(fill_texts)
    show(tab, served)
    assert "Heliotrope" not in tab.run(TREE_LABELS)

    tab.run(
        "const search = document.querySelector('#tree-search'); search.value = 'heliotrope';"
        "search.dispatchEvent(new Event('input', { bubbles: true }));"
    )

    tab.until(
        "/^1 of [3-9]\\d\\d nodes match/.test(document.querySelector('#tree-count').textContent)"
    )
    assert "Heliotrope" in tab.run(TREE_LABELS)
    assert tab.run("return document.querySelectorAll('[role=treeitem]').length") < 10
