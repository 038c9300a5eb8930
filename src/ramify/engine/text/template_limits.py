"""Limits of a chat template: processor time, characters that it writes, sizes that it computes with.

A template is foreign code. The sandbox keeps it from files and modules, but not from running for ever:
here each iteration, macro call and written character counts towards a budget, and the result of each
join, sum, product and format has a limit of its own.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ramify.engine.text.template_sizes import TreeSize, tree_size

MAX_RENDER_S = 5.0  # of the thread's processor time
MAX_CHARS = 1 << 26  # written in all, those of captured blocks and macros too
MAX_NUMBER = 1 << 20  # as an argument: widths, counts, indents
MAX_ITEMS = 1 << 22  # of one list
# Of values in one another, see `tree_size`: of all, and of those that a costly filter takes.
MAX_NODES, MAX_COSTLY_NODES = 1 << 20, 1 << 17
MAX_COSTLY_CHARS = 1 << 16  # of a text that a filter takes whose time is not linear
MAX_DATE_CHARS = 64  # that `strftime` writes for a `%`
MAX_EXPONENT = 256
MAX_NUMBER_BITS = 4096
TICKS_PER_CHECK = 64
# Widths and precisions of format strings, of `%` and of `str.format`: numbers, and arguments.
_LONG_PERCENT = re.compile(r"%(\([^)]*\))?[-+ #0]*\d*\.?(\d{7,}|\*)")
_LONG_SPEC = re.compile(r"\d{7,}|\{")
# Filters and methods whose arguments are widths and counts.
WIDENING = frozenset(
    "batch center expandtabs indent ljust rjust slice tojson truncate wordwrap zfill".split()
)
# Filters that sort or compare what they take, and those whose time on a text is not linear.
COMPARING = frozenset("groupby max min pprint sort sum unique dictsort".split())
NONLINEAR = frozenset("pprint striptags title urlize wordcount wordwrap xmlattr".split())
# Those that write values in full, or nest them.
NESTING = frozenset("batch dict format format_map join namespace slice string tojson zip".split())
_SIZED = "ramify_sized"
_TICK, _CONCAT = "ramify_tick", "ramify_concat"
N = TypeVar("N", nodes.For, nodes.Macro, nodes.CallBlock)


class TemplateLimitError(TemplateError):
    """A template exceeds a limit."""


class _Budget:
    """What is left to one rendering."""

    __slots__ = ("chars_left", "end_s", "ticks_left")

    def __init__(self) -> None:
        self.chars_left, self.ticks_left = MAX_CHARS, TICKS_PER_CHECK
        self.end_s = time.thread_time() + MAX_RENDER_S

    def write(self, num_chars: int) -> None:
        """Count characters."""
        self.chars_left -= num_chars
        if self.chars_left < 0:
            raise TemplateLimitError(f"it writes more than {MAX_CHARS:,} characters")

    def tick(self) -> None:
        """Count an iteration of a loop, or a call of a macro."""
        self.ticks_left -= 1
        if self.ticks_left > 0:
            return
        self.ticks_left = TICKS_PER_CHECK
        if time.thread_time() > self.end_s:
            raise TemplateLimitError(f"it runs for more than {MAX_RENDER_S:g} s")


_BUDGET: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Give what is rendered in this context a budget of its own."""
    token = _BUDGET.set(_Budget())
    try:
        yield
    finally:
        _BUDGET.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the limits of this module; render within `limited_rendering`."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_written, **options)
        # Paragraphs of filler text.
        del self.globals["lipsum"]

    def limit_filters(self) -> None:
        """Check arguments and results of all filters; call it once they are complete."""
        self.filters = {name: _limited(name, call) for name, call in self.filters.items()}
        self.filters |= {_TICK: _tick, _CONCAT: _concat, _SIZED: _sized}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Ticks().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        # The sandbox wraps `format`.
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        name = getattr(obj, "__name__", "").lower()
        _check_arguments(name, (owner, *args, *kwargs.values()))
        return _checked(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: D102
        if operator == "**" and _is_number(right) and abs(right) > MAX_EXPONENT:
            raise TemplateLimitError(f"it has an exponent above {MAX_EXPONENT}")
        if operator == "*":
            for text, count in ((left, right), (right, left)):
                if isinstance(text, Sized) and _is_number(count):
                    check = _check_num_items if isinstance(text, str) else _check_list
                    check(len(text) * int(count))
        if operator == "%" and isinstance(left, str):
            _check_arguments("format", (left, right))
        return _checked(super().call_binop(context, operator, left, right))


class _Ticks(NodeTransformer):
    """Makes loops and macros count, and `~` too; measures lists that are written out or compared."""

    def visit_List(self, node: nodes.List) -> nodes.Filter:  # noqa: N802
        return self._sized(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Filter | nodes.Tuple:  # noqa: N802
        # Else it is a target of an assignment.
        return self._sized(node) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Filter:  # noqa: N802
        return self._sized(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = self._measured(node.expr)
        for operand in node.ops:
            operand.expr = self._measured(operand.expr)
        return node

    @staticmethod
    def _measured(node: nodes.Expr) -> nodes.Expr:
        is_small = isinstance(node, nodes.Const | nodes.Filter)
        return node if is_small else _filter(_SIZED, node, node.lineno)

    def _sized(self, node: nodes.Expr) -> nodes.Filter:
        self.generic_visit(node)
        return _filter(_SIZED, node, node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - named by Jinja
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.CallBlock:  # noqa: N802
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802
        self.generic_visit(node)
        return _filter(_CONCAT, nodes.List(node.nodes, lineno=node.lineno), node.lineno)

    def _ticking(self, node: N) -> N:
        num_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        tick = _filter(_TICK, nodes.Const(num_chars, lineno=node.lineno), node.lineno)
        node.body = [nodes.ExprStmt(tick, lineno=node.lineno), *node.body]
        return node


def _filter(name: str, value: nodes.Expr, lineno: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=lineno)


# They take the context, so that Jinja does not call them while it compiles.
@pass_context
def _tick(_context: Context, num_chars: int) -> None:
    budget = _BUDGET.get()
    budget.tick()
    budget.write(num_chars)


@pass_context
def _sized(_context: Context, value: Any) -> Any:
    """A value of bounded size as a tree."""
    _check_tree(value, MAX_NODES)
    return value


@pass_context
def _concat(_context: Context, values: Iterable[Any]) -> str:
    # As after `+`: joined text is counted when it is written, not when it is joined.
    return str(_checked("".join(map(_as_text, values))))


@pass_context
def _written(_context: Context, value: Any) -> Any:
    """What `{{ value }}` writes."""
    text = _as_text(value)
    _BUDGET.get().write(len(text))
    return text


def _as_text(value: Any) -> str:
    if not isinstance(value, str):
        _check_tree(value, MAX_NODES)
    return str(value)


def _check_tree(value: Any, max_nodes: int, max_chars: int | None = None) -> None:
    """Raise TemplateLimitError for a value that is too large once all in it is written out."""
    if value is None or (isinstance(value, int | float | str) and max_chars is None):
        return
    max_chars = MAX_CHARS if max_chars is None else max_chars
    size = TreeSize(len(value) if isinstance(value, list | tuple) else 0, 0)
    if size.num_nodes <= max_nodes:
        size = tree_size(value, _BUDGET.get().tick)
    if size.num_nodes > max_nodes or size.num_chars > max_chars:
        raise TemplateLimitError(
            f"it makes or compares values of more than {max_nodes:,} elements or {max_chars:,} "
            "characters"
        )


def _limited(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    # Some filters take the environment or a context first.
    num_own = int(hasattr(call, "jinja_pass_arg"))

    @wraps(call)
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(name, (*args[num_own:], *kwargs.values()))
        return _checked(call(*args, **kwargs))

    return limited


def _check_arguments(name: str, args: Sequence[Any]) -> None:
    """Raise TemplateLimitError for arguments with which a small value gives a huge result.

    Args:
        name: of a filter or a method.
        args: the value that it is applied to, then its arguments.
    """
    value, *others = args or (None,)
    _BUDGET.get().tick()
    _check_cost(name, args)
    if name in WIDENING:
        for other in others:
            if _is_number(other) and abs(other) > MAX_NUMBER:
                raise TemplateLimitError(f"it calls {name} with a number above {MAX_NUMBER:,}")
    texts = [other for other in others if isinstance(other, str)]
    if name == "replace" and isinstance(value, str) and len(texts) == 2:
        old, new = texts
        _check_num_items(len(value) + value.count(old) * len(new))
    if name == "join":
        separator, parts = value, others[0] if others else ()
        if not isinstance(separator, str):
            separator, parts = next(iter(texts), ""), value
        if isinstance(parts, list | tuple):
            _check_num_items(sum(len(separator) + len(str(part)) for part in parts))
    if name == "translate" and isinstance(value, str) and others and isinstance(others[0], Mapping):
        lengths = (len(new) for new in others[0].values() if isinstance(new, str))
        _check_num_items(len(value) * max(lengths, default=0))
    if name in ("format", "format_map") and isinstance(value, str):
        _check_format(value)
    if name in _RESULT_CHARS:
        _check_num_items(_RESULT_CHARS[name](value, others))
    if name in ("split", "rsplit", "list", "splitlines") and isinstance(value, str):
        separator = next(iter(texts), "")
        _check_list(value.count(separator) if separator else len(value) // 2)


def _check_cost(name: str, args: Sequence[Any]) -> None:
    """Raise TemplateLimitError for arguments with which a filter runs long, or nests them out of bounds."""
    if args and (name in COMPARING or name in NONLINEAR):
        max_chars = MAX_COSTLY_CHARS if name in NONLINEAR else None
        _check_tree(args[0], MAX_COSTLY_NODES, max_chars)
    elif name in NESTING:
        for arg in args:
            _check_tree(arg, MAX_NODES)


def _formatted_chars(value: Any, others: Sequence[Any]) -> int:
    text = str(value) if isinstance(value, str) else ""
    num_chars = sum(tree_size(other, _BUDGET.get().tick).num_chars for other in others)
    return len(text) + max(text.count("{"), text.count("%")) * num_chars


def _expanded_chars(value: Any, others: Sequence[Any]) -> int:
    return value.count("\t") * _largest(others, default=8) if isinstance(value, str) else 0


def _indented_chars(value: Any, others: Sequence[Any]) -> int:
    lines = value.count("\n") + 1 if isinstance(value, str) else 0
    return lines * _largest(others, default=4)


def _json_chars(value: Any, others: Sequence[Any]) -> int:
    return tree_size(value, _BUDGET.get().tick).num_nodes * _largest(others, default=1)


def _dated_chars(_: Any, forms: Sequence[Any]) -> int:
    num_fields = sum(form.count("%") for form in forms if isinstance(form, str))
    return num_fields * MAX_DATE_CHARS


# Name of a filter or a method → at most as many characters as it writes, from what it is applied to and
# its arguments.
_RESULT_CHARS: dict[str, Callable[[Any, Sequence[Any]], int]] = {
    "format": _formatted_chars,
    "format_map": _formatted_chars,
    "expandtabs": _expanded_chars,
    "indent": _indented_chars,
    "strftime_now": _dated_chars,
    "tojson": _json_chars,
}


def _check_format(text: str) -> None:
    """Raise TemplateLimitError for a format string with a large width, or with one among its arguments."""
    try:
        specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(text)]
    # Not of `str.format`.
    except ValueError:
        specs = []
    if _LONG_PERCENT.search(text) or any(map(_LONG_SPEC.search, specs)):
        raise TemplateLimitError(
            f"it formats with a width above {MAX_NUMBER:,}, or with one that is an argument"
        )


def _checked(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_NUMBER_BITS:
        raise TemplateLimitError(f"it computes a number above 2**{MAX_NUMBER_BITS}")
    if isinstance(value, str):
        _check_num_items(len(value))
    elif isinstance(value, list | tuple):
        _check_list(len(value))
    return value


def _largest(values: Iterable[Any], *, default: int) -> int:
    """The largest of the numbers, and of the lengths of the texts."""
    sizes = (len(value) if isinstance(value, str) else value for value in values)
    return max((int(size) for size in sizes if _is_number(size)), default=default)


def _check_list(num_items: int) -> None:
    if num_items > MAX_ITEMS:
        raise TemplateLimitError(f"it makes a list of more than {MAX_ITEMS:,} elements")


def _check_num_items(num_items: int) -> None:
    if num_items > MAX_CHARS:
        raise TemplateLimitError(f"it makes a text or a list of more than {MAX_CHARS:,} elements")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
