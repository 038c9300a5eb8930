"""Grammars that force a tool call."""

from ramify.server.tool_calls import tool_call_schema

NAMES = ["add", "look_up"]


def test_a_grammar_allows_the_chosen_tool_only() -> None:
    """The grammar allows only the chosen tool, or every tool if none is chosen."""
    tools = [{"function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]
    add_schema = tool_call_schema(tools, "add").json_schema
    all_tools_schema = tool_call_schema(tools, None).json_schema
    assert isinstance(add_schema, str)
    assert isinstance(all_tools_schema, str)
    assert "look_up" not in add_schema
    assert "look_up" in all_tools_schema
