"""Schemas are closed, self-contained and enforceable; what is not enforced is told or refused."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.logits.grammar import GrammarCompiler
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import InvalidParamsError
from ramify.params import StructuredOutput
from ramify.server.errors import ApiError
from ramify.server.grammars.constraint import schema_format
from ramify.server.grammars.schema_keywords import UNENFORCED
from ramify.server.grammars.tool_schemas import (
    MAX_WARNINGS,
    SchemaTooLargeError,
    SchemaWarnings,
    enforceable_schema,
)
from ramify.testing import write_tiny_checkpoint
from tests.budget import examples

pytest.importorskip("llguidance", reason="llguidance is missing: the extra 'structured'")

Accepts = Callable[[dict[str, Any], str], bool]
OBJECT = {"type": "object"}
A = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"properties": {"b": {"type": "integer"}}}
NODE = OBJECT | {"properties": {"value": {}, "next": {"$ref": "#/$defs/node"}}}


@pytest.fixture(scope="module")
def accepts(tmp_path_factory: pytest.TempPathFactory) -> Accepts:
    """Whether a text is valid by the grammar of a schema, as it is enforced."""
    tokenizer = Tokenizer.load(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))
    compiler = GrammarCompiler(tokenizer.to_json, vocab_size=300, eos_token_ids=[2])

    def accepts(schema: dict[str, Any], text: str) -> bool:
        rewritten = enforceable_schema(schema, "tools[0]", SchemaWarnings(), strict=False)
        matcher = compiler.compile(StructuredOutput(json_schema=rewritten))
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        for position, token in enumerate(ids):
            mask = matcher.token_bitmasks(ids[:position], ())[0]
            assert mask is not None
            if not mask[token // 8] >> (token % 8) & 1:
                return False
        if matcher.advance(ids):
            return True
        mask = matcher.token_bitmasks(ids, ())[0]
        return mask is not None and bool(mask[0] >> 2 & 1)

    return accepts


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (OBJECT, ['{"x": 1}', "{}"], ["1"]),
        (OBJECT | {"properties": {}}, ["{}"], ['{"x": 1}']),
        (OBJECT | A, ['{"a": 1}'], ['{"a": 1, "b": 2}', "{}", '{"a": "1"}']),
        (OBJECT | A | {"additionalProperties": True}, ['{"a": 1, "b": 2}'], ["{}"]),
        (OBJECT | A | {"unevaluatedProperties": False}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        ({"allOf": [A, B]}, ['{"a": 1, "b": 2}', '{"a": 1}'], ['{"b": 2}', '{"a": 1, "c": 1}']),
        (
            OBJECT | {"properties": {"z": {}}, "allOf": [OBJECT | A, OBJECT | B]},
            ['{"z": 1, "a": 1, "b": 2}'],
            ['{"a": 1, "c": 2}'],
        ),
        (
            OBJECT | {"properties": {"t": {}}, "anyOf": [A, B | {"required": ["b"]}]},
            ['{"t": 1, "b": 2}', '{"a": 1}', '{"t": 1, "a": 1}'],
            ['{"t": 1}', '{"t": 1, "a": 2, "b": 2}'],
        ),
        ({"anyOf": [OBJECT | A, {"type": "null"}]}, ['{"a": 1}', "null"], ['{"a": 1, "b": 1}']),
        (
            {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
            ['{"value": 1, "next": {"value": 2}}'],
            ['{"next": {"next": {"x": 1}}}'],
        ),
        (
            {"$defs": {"node": NODE}, "$ref": "#/$defs/node", "properties": {"name": {}}},
            ['{"value": 1, "name": 2}', '{"next": {"value": 2}}'],
            ['{"next": {"name": 1}}', '{"x": 1}'],
        ),
        (
            OBJECT | {"properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}},
            ['{"kids": [{"kids": []}]}'],
            ['{"kids": [{"x": 1}]}'],
        ),
        (
            OBJECT
            | {
                "definitions": {"d/e~": OBJECT | A},
                "properties": {
                    "x": {"allOf": [{"$ref": "#/definitions/d~1e~0"}], "description": "d"}
                },
            },
            ['{"x": {"a": 1}}'],
            ['{"x": {"a": 1, "b": 1}}'],
        ),
        (OBJECT | A | {"required": ["a", "x"]}, ['{"a": 1, "x": [2]}'], ['{"a": 1}']),
        ({"type": "array", "items": [{"type": "integer"}]}, ["[1]"], ['["a"]']),
        ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
        ({"type": "string", "nullable": True}, ['"a"', "null"], ["1"]),
        (OBJECT | {"patternProperties": {"^x": {"type": "null"}}}, ['{"xy": null}'], ['{"y": 1}']),
        (OBJECT | {"properties": {"a": {"type": "any"}}}, ['{"a": [1]}'], ['{"b": 1}']),
        ({"type": "array"}, ["[1,\n    2]", "[1, 2]"], ["[1,  2]", "[\n\n1]", f"[\n{' ' * 41}1]"]),
    ],
)
def test_a_schema_means_what_it_says_and_no_more(
    schema: dict[str, Any], valid: list[str], invalid: list[str], accepts: Accepts
) -> None:
    """Objects have no further keys, whatever describes them; references and recursion hold."""
    assert [text for text in valid if not accepts(schema, text)] == []
    assert [text for text in invalid if accepts(schema, text)] == []


UNENFORCED_VALUES: dict[str, Any] = {
    "uniqueItems": True,
    "propertyNames": {"pattern": "^a"},
    "not": {"type": "null"},
    "if": {"type": "string"},
    "contains": {"type": "null"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
    "unevaluatedItems": False,
    "$dynamicRef": "#a",
    "$recursiveRef": "#",
    "unevaluatedProperties": {"type": "null"},
    "format": "zip-code",
    "pattern": "^(?!a)b",
    "type": "any",
    "minLength": -1,
    "$ref": "#/nowhere",
}


@pytest.mark.parametrize("keyword", UNENFORCED_VALUES)
def test_what_cannot_be_enforced_is_told_or_refused(keyword: str, accepts: Accepts) -> None:
    """A keyword is ignored with a warning that names it and its path; `strict` refuses it."""
    schema = OBJECT | {"properties": {"a": {keyword: UNENFORCED_VALUES[keyword]}}}
    warnings = SchemaWarnings()

    enforceable_schema(schema, "tools[0].parameters", warnings, strict=False)

    [message] = warnings.messages
    assert message.startswith("tools[0].parameters.properties.a: ")
    assert keyword in message
    assert accepts(schema, '{"a": "x"}')
    with pytest.raises(ApiError, match="cannot be enforced") as caught:
        enforceable_schema(schema, "tools[0].parameters", SchemaWarnings(), strict=True)
    assert caught.value.status == 400
    assert str(caught.value.param).startswith("tools[0].parameters.properties.a")
    assert keyword.removeprefix("$") in str(caught.value.message)


UNREADABLE: list[tuple[str, Any]] = [
    *(
        ("pattern", pattern)
        for pattern in (
            *(r"\bcat\b", r"\Bcat", "a{,3}", r"cat\Z", "[^]", "(?>a)", r"\cA", r"\0", "(", "a^b"),
            *("(?m)^a$", "(?#note)a", r"\1", "(?=a)", "a{3,1}", "(" * 2000 + ")" * 2000),
        )
    ),
    *(("minimum", bound) for bound in (2**63, 2**64 - 1, -(2**70), 1e300, 10**400, 1e-300)),
    *(("exclusiveMaximum", bound) for bound in (2**64, float("inf"))),
    *(("multipleOf", divisor) for divisor in (1e-300, 2**53, 1e22)),
]


@pytest.mark.parametrize(("keyword", "value"), UNREADABLE)
def test_a_value_that_the_engine_cannot_read_costs_one_keyword(
    keyword: str, value: Any, accepts: Accepts
) -> None:
    """Only that keyword is ignored, with a warning that names it; `strict` names its path."""
    item = {keyword: value, "maxLength": 3} if keyword == "pattern" else {keyword: value}
    schema = OBJECT | {"properties": {"a": item, "b": {"type": "integer"}}, "required": ["a"]}
    warnings = SchemaWarnings()

    rewritten = enforceable_schema(schema, "tools[0].parameters", warnings, strict=False)

    [message] = warnings.messages
    assert message.startswith(f"tools[0].parameters.properties.a: {keyword}")
    assert len(message) < 200
    assert rewritten["properties"]["a"] == {key: item[key] for key in item if key != keyword}
    assert accepts(schema, '{"a": 1, "b": 2}')
    assert not accepts(schema, '{"a": 1, "b": "x"}')
    with pytest.raises(ApiError, match=r"^tools\[0\].parameters.properties.a: ") as caught:
        enforceable_schema(schema, "tools[0].parameters", SchemaWarnings(), strict=True)
    assert caught.value.param == f"tools[0].parameters.properties.a.{keyword}"


def test_a_pattern_of_names_that_cannot_be_read_leaves_the_others(accepts: Accepts) -> None:
    """Of `patternProperties`, only the unreadable pattern is dropped."""
    schema = OBJECT | {"patternProperties": {r"\bx": {}, "^y": {"type": "integer"}}}
    warnings = SchemaWarnings()

    rewritten = enforceable_schema(schema, "p", warnings, strict=False)

    assert list(rewritten["patternProperties"]) == ["^y"]
    assert warnings.messages == [r"p: patternProperties: '\\bx' is not enforced"]
    assert accepts(schema, '{"y1": 2}')
    assert not accepts(schema, '{"y1": "a"}')


@pytest.mark.parametrize("pattern", ["(?i)cat", r"^\d{3}\.$", "[[:alpha:]]", r"\p{L}+", "(?<n>a)"])
def test_patterns_that_can_be_read_are_kept(pattern: str) -> None:
    """No warning, and the keyword stays."""
    warnings = SchemaWarnings()

    rewritten = enforceable_schema({"pattern": pattern}, "p", warnings, strict=True)

    assert (rewritten, warnings.messages) == ({"pattern": pattern}, [])


def test_every_unenforced_keyword_is_tried() -> None:
    """The table above has all keywords that are ignored as a whole."""
    assert set(UNENFORCED) <= UNENFORCED_VALUES.keys()


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"type": "integer", "format": "int32"},
        {"if": True},
        {"title": "t", "description": "d", "default": 1, "examples": [1], "x-own": 2, "$id": "i"},
    ],
)
def test_what_restricts_nothing_is_dropped_in_silence(schema: dict[str, Any]) -> None:
    """Annotations, and keywords without an effect, are neither told nor refused."""
    warnings = SchemaWarnings()
    rewritten = enforceable_schema(schema, "x", warnings, strict=True)
    assert warnings.messages == []
    assert rewritten.keys() <= {"type"}


@pytest.mark.parametrize("reference", ["https://example.com/schema", "other.json#/a", "#name", "a"])
def test_a_reference_to_elsewhere_allows_any_value(reference: str, accepts: Accepts) -> None:
    """A `$ref` that cannot be followed is named in a warning; `strict` refuses it."""
    schema = OBJECT | {"properties": {"a": {"$ref": reference}}}
    warnings = SchemaWarnings()

    enforceable_schema(schema, "tools[0]", warnings, strict=False)

    assert warnings.messages == [f"tools[0].properties.a: $ref: {reference!r} is not enforced"]
    assert accepts(schema, '{"a": [1]}')
    with pytest.raises(ApiError, match="cannot be enforced") as caught:
        enforceable_schema(schema, "tools[0]", SchemaWarnings(), strict=True)
    assert caught.value.param == "tools[0].properties.a.$ref"


@pytest.mark.parametrize("kind", ["int", ["string", "None"]])
def test_a_format_with_a_type_that_does_not_exist_is_refused(kind: object) -> None:
    """Ignored with a warning in a header, it would give answers of any shape; tools keep their warning."""
    schema = OBJECT | {"properties": {"a": {"type": kind}}}

    with pytest.raises(
        ApiError, match=r"there is no type '(int|None)'; the types are array"
    ) as caught:
        schema_format(schema, "format", [], strict=False)
    assert (caught.value.status, caught.value.param) == (400, "format.properties.a.type")

    warnings = list[str]()
    schema_format(OBJECT | {"properties": {"a": {"type": "any"}}}, "format", warnings, strict=False)
    assert warnings == ["format.properties.a: type: 'any' is not enforced"]


def test_the_work_on_a_schema_is_bounded() -> None:
    """Chains of references, shared ones and long names take no more than linear time, or are refused."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}", "properties": {"a": {}}} for i in range(1500)}
    pairs = {
        f"d{i}": {"properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"}}
        for i in range(500)
    }
    began = time.process_time()

    users = {f"p{i}": {"$ref": "#/$defs/d0", "properties": {"b": {}}} for i in range(1000)}
    with pytest.raises(SchemaTooLargeError):
        enforceable_schema(
            {"$defs": chain, "properties": users}, "x", SchemaWarnings(), strict=False
        )
    named = {"d0": {"$ref": f"#/{'%41' * 300_000}"}}
    with pytest.raises(SchemaTooLargeError):
        enforceable_schema(
            {"$defs": named, "properties": users}, "x", SchemaWarnings(), strict=False
        )
    shared = enforceable_schema(
        {"$defs": pairs, "$ref": "#/$defs/d0"}, "x", SchemaWarnings(), strict=False
    )
    long = {"x" * 10**6: {"properties": {f"p{i}": {"not": {"type": "null"}} for i in range(5000)}}}
    warnings = SchemaWarnings()
    enforceable_schema({"properties": long}, "x", warnings, strict=False)

    assert time.process_time() - began < 5
    assert len(json.dumps(shared)) < 2 * len(json.dumps(pairs))
    assert len(warnings.messages) == MAX_WARNINGS
    assert all(len(message) < 300 for message in warnings.messages)


KEYWORDS = st.sampled_from(
    ["type", "properties", "required", "allOf", "anyOf", "oneOf", "$ref", "items", "enum", "not"]
)
VALUES = st.recursive(
    st.sampled_from(["object", "string", "#", "#/$defs/a", "#/properties/a", 1, True, None, "a"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYWORDS | st.sampled_from(["a", "b", "$defs"]), inner, max_size=4)
    ),
    max_leaves=25,
)


@settings(max_examples=examples(150), deadline=None)
@given(schema=st.dictionaries(KEYWORDS | st.just("$defs"), VALUES, max_size=5))
def test_any_schema_can_be_compiled_or_says_why_not(
    schema: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever a client sends ends in a grammar, or in a 400, and the result is JSON."""
    fault = ""
    try:
        rewritten = enforceable_schema(schema, "x", SchemaWarnings(), strict=False)
        json.dumps(rewritten)
        _compiler(tmp_path_factory.getbasetemp()).compile(StructuredOutput(json_schema=rewritten))
    except ApiError as error:
        assert error.status == 400  # noqa: PT017 - not every schema is refused
    except InvalidParamsError as error:
        fault = str(error)
    assert "Unimplemented" not in fault
    assert "Expected" not in fault


def _compiler(folder: Path) -> GrammarCompiler:
    if not _COMPILERS:
        tokenizer = Tokenizer.load(write_tiny_checkpoint(folder / "schemas", "llama"))
        compiler = GrammarCompiler(tokenizer.to_json, vocab_size=300, eos_token_ids=[2])
        _COMPILERS.append(compiler)
    return _COMPILERS[0]


_COMPILERS: list[GrammarCompiler] = []
