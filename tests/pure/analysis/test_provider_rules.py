"""The dated file of rules: complete, extensible, and strict about mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace

import pytest

from ramify.analysis.providers import ModelRule, load_rules, provider_of
from ramify.analysis.providers.agreement import (
    Judged,
    judged_tables,
    our_reason,
    rules_table,
)
from ramify.analysis.providers.library_prices import LibraryPrices
from ramify.analysis.providers.prompts import Billed, Prediction
from ramify.analysis.records import LoggedRequest, Usage, VendorVerdict
from ramify.errors import RulesError


def rules_file(folder: Path, **content) -> Path:
    path = folder / "rules.json"
    path.write_text(json.dumps({"schema": 1, "date": "2027-01-01", "providers": {}, **content}))
    return path


@pytest.mark.parametrize(
    ("provider", "model", "kind", "minimum"),
    [
        ("anthropic", "claude-opus-5-5", "breakpoints", 512),
        ("anthropic", "claude-opus-5", "breakpoints", 512),
        ("anthropic", "us.anthropic.claude-haiku-4-5-20251001-v1:0", "breakpoints", 4096),
        ("anthropic", "anthropic/claude-opus-4-5", "breakpoints", 4096),
        ("anthropic", "claude-opus-4-7", "breakpoints", 2048),
        ("anthropic", "claude-sonnet-4-20250514", "breakpoints", 1024),
        ("anthropic", "claude-opus-4-20250514", "breakpoints", 1024),
        ("openai", "gpt-4o-mini", "grid", 1024),
        ("openai", "gpt-5.1", "grid", 1024),
        ("openai", "gpt-5.6", "breakpoints", 1024),
        ("openai", "gpt-5.5-2026-04-01", "grid", 1024),
        ("openai", "gpt-4-turbo", "none", 1024),
        ("openai", "openai/gpt-6-sol", "breakpoints", 1024),
        ("deepseek", "deepseek-chat", "units", 0),
        ("vllm", "Qwen/Qwen3-32B", "grid", 0),
    ],
)
def test_each_model_has_the_rule_of_its_family(
    provider: str, model: str, kind: str, minimum: int
) -> None:
    """Patterns match with and without gateway, region and date."""
    rule = load_rules().rule_of(provider, model)

    assert (rule.cache, rule.min_tokens) == (kind, minimum)


def test_an_unknown_model_takes_the_default_and_says_so() -> None:
    """`claude-future` has the default of Anthropic; the table of rules has a note."""
    rules = load_rules()

    table = rules_table(rules, [("anthropic", "claude-future"), ("anthropic", "claude-opus-5")])

    assert rules.rule_of("anthropic", "claude-future").min_tokens == 1024
    assert table["notes"] == [
        "anthropic: claude-future: no rule of its own, the provider's default is taken"
    ]
    assert table["date"] == rules.date


@pytest.mark.parametrize(
    ("provider", "model", "read", "write", "write_1h"),
    [
        ("anthropic", "claude-opus-5-5", 0.2, 5, 8),
        ("anthropic", "claude-opus-5", 0.5, 6.25, 10),
        ("anthropic", "claude-fable-5-1", 0.25, 12.5, 20),
        ("anthropic", "claude-sonnet-5", 0.2, 2.5, 4),
        ("anthropic", "claude-haiku-4-5", 0.1, 1.25, 2),
        ("openai", "gpt-6-sol", 0.2, 2.5, None),
        ("openai", "gpt-4o", 1.25, 2.5, None),
        ("deepseek", "deepseek-v4-flash", 0.006, 0.3, None),
    ],
)
def test_prices_are_those_that_vendors_publish(
    provider: str, model: str, read: float, write: float, write_1h: float | None
) -> None:
    """Multipliers of the input price give the published dollars for a million tokens."""
    rule = load_rules().rule_of(provider, model)

    assert rule.input_price is not None
    assert rule.input_price * rule.read_multiplier == pytest.approx(read)
    assert rule.input_price * rule.write_multiplier == pytest.approx(write)
    if write_1h is not None:
        assert rule.write_1h_multiplier is not None
        assert rule.input_price * rule.write_1h_multiplier == pytest.approx(write_1h)


class FakeLibrary:
    """`genai-prices` with two models, at a price for each token."""

    __version__ = "7.0"

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, datetime]] = []

    @staticmethod
    def Usage(*, input_tokens: int) -> int:  # noqa: N802 - the library's name
        return input_tokens

    def calc_price(
        self, usage: int, model: str, *, provider_id: str, genai_request_timestamp: datetime
    ) -> SimpleNamespace:
        self.calls.append((provider_id, model, genai_request_timestamp))
        known = {("google", "gemini-9"): "0.003", ("anthropic", "claude-opus-5"): "0.001"}
        return SimpleNamespace(input_price=Decimal(known[provider_id, model]) * usage / 1000)


def test_a_model_without_a_price_has_that_of_the_library() -> None:
    """The file's price wins, factors stay the file's, and the table names the source."""
    library = FakeLibrary()
    rules = replace(load_rules(), prices=LibraryPrices("2026-11-25", lambda: library))

    gemini = rules.priced_rule_of("gemini", "google/gemini-9")
    opus = rules.priced_rule_of("anthropic", "claude-opus-5")
    table = rules_table(rules, [("gemini", "gemini-9"), ("anthropic", "claude-opus-5")])

    assert (gemini.input_price, gemini.read_multiplier) == (3.0, 0.1)
    assert opus is rules.rule_of("anthropic", "claude-opus-5")
    assert library.calls[0] == ("google", "gemini-9", datetime(2026, 11, 25, 12, tzinfo=UTC))
    assert {provider for provider, _, _ in library.calls} == {"google"}
    assert table["sources"] == [*rules.sources, "genai-prices 7.0, prices of 2026-11-25"]
    assert "gemini: gemini-9: no price in the file of rules, that of a library is taken" in table["notes"]  # fmt: skip
    assert table["models"][1]["rule"]["input_price"] == 3.0


@pytest.mark.parametrize("library", [None, FakeLibrary()])
def test_a_price_that_nobody_knows_is_none(library: FakeLibrary | None) -> None:
    """Without the library, without the model in it, and for a server that sells no tokens."""
    rules = replace(load_rules(), prices=LibraryPrices("2026-11-25", lambda: library))

    for provider, model in (("gemini", "gemini-0"), ("vllm", "gemini-9"), ("gemini", None)):
        assert rules.priced_rule_of(provider, model) is rules.rule_of(provider, model)


def test_the_installed_library_has_the_prices_of_the_file() -> None:
    """The file's prices were copied from it: where both have a model of today, they agree."""
    pytest.importorskip("genai_prices", reason="the extra `prices` is not installed")
    prices = load_rules().prices
    assert prices is not None

    for provider, model in (("anthropic", "claude-opus-5"), ("openai", "gpt-4o")):
        price = load_rules().rule_of(provider, model).input_price
        assert prices.input_price(provider, model) == pytest.approx(price)


def test_a_file_goes_in_front_of_the_built_in_rules(tmp_path: Path) -> None:
    """A new price of one model, with all else as it was."""
    path = rules_file(
        tmp_path,
        providers={"anthropic": {"models": [{"models": ["claude-opus-5"], "input_price": 3}]}},
    )

    rules = load_rules(path)

    assert rules.rule_of("anthropic", "claude-opus-5").input_price == 3
    assert rules.rule_of("anthropic", "claude-opus-5").lookback == 20
    assert rules.rule_of("anthropic", "claude-opus-5-5").input_price == 4
    assert rules.rule_of("openai", "gpt-4o").step_tokens == 128
    assert rules.date == "2027-01-01"


def test_a_file_can_replace_the_built_in_rules(tmp_path: Path) -> None:
    """Nothing of the built-in file remains."""
    path = rules_file(
        tmp_path, replace=True, providers={"mine": {"defaults": {"cache": "grid"}, "models": []}}
    )

    rules = load_rules(path)

    assert list(rules.providers) == ["mine"]
    assert rules.prices is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no rules file"),
        ('{"schema": 1}', "missing required field `date`"),
        (
            '{"schema": 7, "date": "x", "providers": {}}',
            "has schema 7; this version reads schema 1",
        ),
        (
            '{"schema": 1, "date": "x", "providers": {"openai": {"models": [{"min_tokens": -1}]}}}',
            r"openai: models\[0\].*>= 0.*min_tokens",
        ),
        (
            '{"schema": 1, "date": "x", "providers": {"openai": {"models": [{"min_token": 1}]}}}',
            "unknown field `min_token`",
        ),
        (
            '{"schema": 1, "date": "x", "providers": {"mine": {"models": [{"models": ["m"]}]}}}',
            "missing required field `cache`",
        ),
        (
            '{"schema": 1, "date": "x", "providers": {"openai": {"models": [{"family": "x"}]}}}',
            "no family 'x'; the families are breakpoints, none, steps, steps_24h",
        ),
        ('{"schema": 1, "date": "x", "providers": {"a": {"defaults": {"cache": "lru"}}}}', "lru"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    """The error has the file, the place and what is wrong."""
    path = tmp_path / "rules.json"
    path.write_text(content)

    with pytest.raises(RulesError, match=message):
        load_rules(path)


def test_a_missing_file_and_an_unknown_provider_are_errors(tmp_path: Path) -> None:
    """Both say what to do."""
    with pytest.raises(RulesError, match=r"cannot read rules from .*No such file"):
        load_rules(tmp_path / "absent.json")
    with pytest.raises(RulesError, match=r"no cache rules for provider 'acme'.*anthropic.*vllm"):
        load_rules().rule_of("acme", "m")


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        (LoggedRequest("f", 1, api="anthropic-messages"), "anthropic"),
        (LoggedRequest("f", 1, api="openai-chat", model="deepseek-chat"), "deepseek"),
        (LoggedRequest("f", 1, api="openai-chat", provider="vllm", model="gpt-4o"), "vllm"),
        (LoggedRequest("f", 1, provider="azure", model="gpt-4o"), "openai"),
        (LoggedRequest("f", 1, provider="vertex_ai", model="claude-opus-5"), "anthropic"),
        (LoggedRequest("f", 1), None),
    ],
)
def test_provider_of_a_request(info: LoggedRequest, expected: str | None) -> None:
    """The name in the log, then the model's family, then the API."""
    assert provider_of(info, load_rules().providers) == expected


def judged(read: int, billed: int, reason: str = "", divergence: str | None = None) -> Judged:
    verdict = VendorVerdict(reason) if reason else None
    info = LoggedRequest(
        "f", 1, model="claude-opus-5", usage=Usage(1000, billed, 0), verdict=verdict
    )
    rule = load_rules().rule_of("anthropic", "claude-opus-5")
    return Judged(info, Prediction(Billed(1000, read, money=0.001)), rule, divergence)


def test_predicted_reads_are_compared_with_the_bill() -> None:
    """Two of three requests agree to a tenth of their input; the third is an outlier."""
    items = [judged(800, 800), judged(800, 750), judged(800, 0)]

    tables = judged_tables(items)
    table = tables["agreement"]["reads"]

    assert (table["num_compared"], table["predicted"], table["billed"]) == (3, 2400, 1550)
    assert table["share_within_0.1"] == pytest.approx(2 / 3)
    assert [(row["predicted"], row["billed"]) for row in table["outliers"]] == [(800, 0)]
    assert tables["predicted"]["money"] == pytest.approx(0.003)
    assert tables["billed"]["money"] == pytest.approx((1450 * 5 + 1550 * 0.5) / 1e6)


def test_causes_are_compared_with_the_vendors_reasons() -> None:
    """Rows are the vendor's reasons, columns ours; requests without a verdict do not count."""
    items = [
        judged(0, 0, "system_changed", "system[1]"),
        judged(0, 0, "system_changed"),
        judged(0, 0, "messages_changed", "messages[3].content[0]"),
        judged(0, 0, "unavailable", "tools[0]"),
        judged(0, 0),
    ]

    table = judged_tables(items)["agreement"]["verdicts"]

    assert (table["num_compared"], table["num_equal"], table["num_reasons"]) == (3, 2, 2)
    assert table["matrix"] == {
        "messages_changed": {"messages_changed": 1},
        "system_changed": {"no_difference": 1, "system_changed": 1},
    }


def test_our_causes_in_the_vendors_words() -> None:
    """Each place of a prompt has a reason."""
    assert our_reason("settings.model") == "model_changed"
    assert our_reason("settings.tool_choice") == "setting_changed"
    assert our_reason("tools[3]") == "tools_changed"
    assert our_reason(None, ("cache_key_scattered",)) == "prompt_cache_key_changed"


DOCS = Path(__file__).resolve().parents[3] / "docs" / "cache-rules.md"


def test_the_example_of_the_documentation_is_a_valid_file(tmp_path: Path) -> None:
    """Its rules are those that the text around it promises."""
    path = tmp_path / "rules.json"
    path.write_text(DOCS.read_text(encoding="utf-8").split("```json")[1].split("```")[0])

    rules = load_rules(path)

    assert rules.rule_of("anthropic", "claude-opus-5").input_price == 3.5
    assert rules.rule_of("our-gateway", "any").step_tokens == 64


def test_the_documentation_has_every_field() -> None:
    """A field that a file may have is in the table."""
    text = DOCS.read_text(encoding="utf-8")

    assert [name for name in ModelRule.__struct_fields__ if f"`{name}`" not in text] == []
