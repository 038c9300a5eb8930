"""Chat templates that run too long or write too much, and templates that do neither."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from ramify.engine.text import template_limits
from ramify.engine.text.chat_template import ChatTemplates
from ramify.errors import ChatTemplateLimitError
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench, run

BIG = "{% set x = 'abcdefgh' * 100000 %}"
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{{ body }}{% endfor %}{% endfor %}"
RUNS_LONG = {
    "nested loops": NESTED.replace("{{ body }}", ""),
    "loops in a macro": "{% macro f() %}" + NESTED.replace("{{ body }}", "") + "{% endmacro %}{{ f() }}",
    "macros that call themselves": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"
    ),
    "a call block": (
        "{% macro f() %}{{ caller() }}{% endmacro %}{% for i in range(99999) %}{% call f() %}"
        "{% for j in range(99999) %}{% endfor %}{% endcall %}{% endfor %}"
    ),
    "a recursive loop": (
        "{% for a in [range(99999)] recursive %}{% for b in range(99999) %}"
        "{% set _ = loop.index %}{% endfor %}{{ loop(a) if a is iterable }}{% endfor %}"
        + NESTED.replace("{{ body }}", "")
    ),
}  # fmt: skip
WRITES_MUCH = {
    "constant text": NESTED.replace("{{ body }}", "x" * 5000),
    "expressions": NESTED.replace("{{ body }}", "{{ 'x' * 5000 }}"),
    "captured text": BIG + "{% for i in range(99) %}{% set ns %}{{ x }}{{ x }}{% endset %}{% endfor %}",
    "captured and doubled": (
        "{% set n = namespace(x='a') %}{% for i in range(99) %}"
        "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}"
    ),
    "joined by ~": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "added": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a list added": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "multiplied": "{{ 'abc' * 10 ** 9 }}",
    "a list multiplied": "{{ [1] * 10 ** 9 }}",
    "joined": BIG + "{{ ([x] * 1000) | join }}",
    "joined by a method": BIG + "{{ x.join(['a'] * 1000) }}",
    "replaced": BIG + "{{ x | replace('a', x) }}",
    "replaced by a method": BIG + "{{ x.replace('a', x) }}",
}  # fmt: skip
COMPUTES_MUCH = {
    "a power": "{{ 10 ** (10 ** 9) }}",
    "a large product": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a width": "{{ 'a'.center(10 ** 9) }}",
    "a width of a filter": "{{ 'a' | center(10 ** 9) }}",
    "an indent": "{{ 'a' | indent(10 ** 9, first=true) }}",
    "an indent of JSON": "{{ {'a': 1} | tojson(indent=10 ** 9) }}",
    "a batch": "{{ [1] | batch(10 ** 9, 'x') | list }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "a format filter": "{{ '%1000000000d' | format(1) }}",
    "a format method": "{{ '{:>1000000000}'.format(1) }}",
    "a width among the arguments": "{{ '%-*d' % (10 ** 9, 1) }}",
    "a precision among the arguments": "{{ '%.*f' % (10 ** 9, 1) }}",
    "a width among the arguments of a filter": "{{ '%*d' | format(10 ** 9, 1) }}",
    "a width among the arguments of a method": "{{ '{:{}}'.format(1, 10 ** 9) }}",
    "a width in a map": "{{ '{x:{w}}'.format_map({'x': 1, 'w': '1000000000'}) }}",
    "a table of characters": "{{ ('a' * 9999).translate({97: 'b' * 9999}) }}",
}  # fmt: skip


DOUBLED = (
    "{% set n = namespace(x=['a']) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
CUBED = (  # a list that is doubled and batched needs no brackets
    "{% set n = namespace(x=['a']) %}{% for i in range(40) %}"
    "{% set n.x = (n.x * 2) | batch(2) | list %}{% endfor %}"
)
LONG = "{% set x = ('ab ' * 1000000) %}"
WORD = "{% set x = ('ab' * 1000000) %}"
MANY = "{% set x = (range(99999) | list) * 40 %}"
IN_ONE_CALL = {
    "a date": "{{ strftime_now('%c' * 20000000) | length }}",
    "doubled": DOUBLED,
    "doubled and written": DOUBLED + "{{ n.x }}",
    "doubled in batches": CUBED + "{{ n.x }}",
    "doubled in batches and joined": CUBED + "{{ n.x ~ '' }}",
    "doubled in dicts": "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}",
    "doubled in dict()": "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}",
    "doubled namespaces": "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = namespace(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "doubled in tuples": "{% set n = namespace(x=1) %}{% for i in range(40) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ n.x in {} }}",
    "compared": CUBED + "{% set a = n.x %}{{ a == (n.x | list) }}",
    "sorted": MANY + "{{ x | sort | length }}",
    "unique": MANY + "{{ x | unique | list | length }}",
    "grouped": MANY + "{{ x | groupby('real') | length }}",
    "wrapped": WORD + "{{ x | wordwrap(1) }}",
    "wrapped words": LONG + "{{ x | wordwrap(1) }}",
    "pretty": MANY + "{{ x | pprint }}",
    "linked": LONG + "{{ x | urlize }}",
    "formatted often": LONG + "{{ '{0}' * 1000 }}{{ ('{0}' * 1000).format(x) }}",
    "formatted often by %": LONG + "{{ ('%(a)s' * 1000) % {'a': x} }}",
    "indented lines": "{{ ('\n' * 1000000) | indent(1000) }}",
    "indented JSON": "{{ (range(9999) | list) | tojson(indent=100000) }}",
    "tabs": "{{ ('\t' * 1000000).expandtabs(1000) }}",
    "split": "{{ ('a ' * 30000000).split() | length }}",
    "a long list": "{{ ([1] * 10000000) | length }}",
}  # fmt: skip


def render(source: str, *messages: dict[str, object]) -> str:
    templates = ChatTemplates({"default": source}, {})
    return templates.render(list(messages), add_generation_prompt=True, tools=None)


@pytest.mark.parametrize("name", RUNS_LONG)
def test_long_running_templates_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template is stopped once it has used its processor time, whatever it loops over."""
    monkeypatch.setattr(template_limits, "MAX_RENDER_S", 0.05)
    begin = time.thread_time()

    with pytest.raises(ChatTemplateLimitError, match=r"runs for more than 0\.05 s"):
        render(RUNS_LONG[name], {"role": "user", "content": "a"})

    assert time.thread_time() - begin < 2


@pytest.mark.parametrize("name", [*WRITES_MUCH, *COMPUTES_MUCH])
def test_templates_cannot_fill_the_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, lists and numbers stay below limits; the error is one line."""
    monkeypatch.setattr(template_limits, "MAX_CHARS", 1 << 20)
    begin = time.thread_time()

    with pytest.raises(ChatTemplateLimitError) as caught:
        render((WRITES_MUCH | COMPUTES_MUCH)[name], {"role": "user", "content": "a"})

    assert "\n" not in str(caught.value)
    assert time.thread_time() - begin < 2


@pytest.mark.parametrize("name", IN_ONE_CALL)
def test_one_call_takes_bounded_time(name: str) -> None:
    """With the limits as they are, one call of a filter neither runs for ever nor fills the memory."""
    begin = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateLimitError) as caught:
            render(IN_ONE_CALL[name], {"role": "user", "content": "a"})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert "\n" not in str(caught.value)
    assert time.thread_time() - begin < 12
    assert peak_bytes < 500e6


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for i in range(3) %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}", "1/3,2/3,3/3"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}-{% endfor %}", "hi"),
        ("{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}", "1"),
        ("{{ 'a' ~ 1 ~ none ~ missing ~ [2] }}", "a1None[2]"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') }}{{ f(1) }}", "<a><1>"),
        ("{{ 2 * 3 }}{{ 7 % 4 }}{{ 2 ** 10 }}{{ 'ab' * 2 }}{{ '%03d' % 7 }}", "6310 24abab007".replace(" ", "")),
        ("{{ {'maximum': 10000000000} | tojson }}", '{"maximum": 10000000000}'),
        ("{{ 'a,b'.split(',') | join('-') }}{{ 'aXbX'.replace('X', '..') }}", "a-ba..b.."),
        ("{{ '{}/%s'.format('order 12345678') % 'of 2024123123' }}", "order 12345678/of 2024123123"),
        ("{{ '{}, %s' | format('tel. 5551234567') }}{{ '**{:>3}**'.format(7) }}", "{}, tel. 5551234567**  7**"),
        ("{{ 'a-b'.translate({45: none, 98: 'c'}) }}", "ac"),
        ("{{ none }}{{ true }}{{ 1.5 }}{{ missing }}", "NoneTrue1.5"),
        ("{% for a in [1, 2, 3] %}{% if a == 2 %}{% break %}{% endif %}{{ a }}{% endfor %}", "1"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x }}{{ 'b' if x is string }}", "a1b"),
    ],
)  # fmt: skip
def test_ordinary_templates_write_what_they_wrote(source: str, expected: str) -> None:
    """Counting changes no text."""
    assert render(source, {"role": "user", "content": "hi"}) == expected


@pytest.mark.parametrize("operator", ["~", "+"])
def test_a_text_that_grows_with_each_message_counts_once(operator: str) -> None:
    """1,000 messages of 800 characters, collected before they are written, are 800,000 characters."""
    collect = f"{{% for m in messages %}}{{% set n.x = n.x {operator} m.content %}}{{% endfor %}}"
    source = "{% set n = namespace(x='') %}" + collect + "{{ n.x }}"

    message: dict[str, object] = {"role": "user", "content": "x" * 800}
    text = render(source, *[message] * 1000)

    assert text == "x" * 800_000


def test_each_rendering_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier renderings wrote does not count."""
    monkeypatch.setattr(template_limits, "MAX_CHARS", 100)

    for _ in range(5):
        assert len(render("{{ 'x' * 60 }}", {"role": "user", "content": "a"})) == 60


def test_the_server_goes_on_after_a_template_that_runs_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request is a 400 that says why, and the next one is answered."""
    monkeypatch.setattr(template_limits, "MAX_RENDER_S", 0.05)
    loops = "{% if messages[0].content == 'loop' %}" + RUNS_LONG["nested loops"] + "{% endif %}"
    bench = ServerBench(chat_template=loops + TOOL_TEMPLATE)

    def body(text: str) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}

    async def scenario() -> None:
        async with bench.running():
            failed = await bench.post("/v1/chat/completions", body("loop"))
            answered = await bench.post("/v1/chat/completions", body("hello"))

        assert failed.status == 400
        assert "runs for more than 0.05 s" in failed.json["error"]["message"]
        assert answered.status == 200

    run(scenario())


@pytest.mark.parametrize("template", [RUNS_LONG["nested loops"], "{{ 'a' * (10 ** 15) }}"])
def test_a_template_that_always_meets_a_limit_stops_the_start(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error after one attempt; the probes do not try each form of a conversation."""
    monkeypatch.setattr(template_limits, "MAX_RENDER_S", 0.05)
    begin = time.thread_time()

    with pytest.raises(ChatTemplateLimitError, match=r"chat_template\.jinja"):
        ServerBench(chat_template=template)

    assert time.thread_time() - begin < 2
