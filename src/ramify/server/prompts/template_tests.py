"""What chat templates test in a conversation, read from their sources.

`TemplateTests.of` knows the tests that chat templates usually have: of roles, of fields that are missing
or empty, of words in texts, of the first message and the last. Anything else is `is_unknown`: numbers of
messages, lengths of texts, texts compared with each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from jinja2 import TemplateError, nodes

from ramify.engine.text.chat_template import parse_template

_FILTERS = frozenset(
    "capitalize count d default dictsort e escape first indent items join last length list lower map "
    "reject rejectattr replace reverse safe select selectattr string title tojson trim upper".split()
)
_LAYOUT_FILTERS = frozenset({"tojson", "indent"})  # their numbers decide nothing
_TESTS = frozenset(
    "boolean defined eq equalto false integer iterable mapping ne none number sequence string true "
    "undefined".split()
)
_FUNCTIONS = frozenset({"dict", "namespace", "raise_exception", "range", "strftime_now"})
_PLAIN_METHODS = frozenset(
    "append capitalize extend format get items join keys lower pop title update upper values".split()
)
_STRIP_METHODS = frozenset({"strip", "lstrip", "rstrip"})
_SEARCH_METHODS = frozenset(
    "count endswith find index partition removeprefix removesuffix replace rfind rpartition rsplit "
    "split startswith".split()
)
_ROLES = frozenset({"assistant", "developer", "function", "system", "tool", "user"})
_TEXT_FIELDS = frozenset({"arguments", "content", "name", "reasoning_content", "text"})
_ARITHMETIC = (nodes.Mod, nodes.FloorDiv, nodes.Div, nodes.Mul, nodes.Pow)
_LITERALS = (nodes.List, nodes.Tuple)


@dataclass(frozen=True, slots=True)
class TemplateTests:
    """What templates test in the texts of a conversation.

    Args:
        words: are looked for in texts: `'</think>' in content`, `content.split('</think>')`.
        values: are compared with whole texts: `message.name == 'python'`.
        is_unknown: there are tests that this reader does not know.
    """

    words: frozenset[str]
    values: frozenset[str]
    is_unknown: bool

    @classmethod
    def of(cls, sources: Iterable[str]) -> TemplateTests:
        """The tests of templates."""
        readers = [_Reader(source) for source in sources]
        return cls(
            frozenset(word for reader in readers for word in reader.words),
            frozenset(value for reader in readers for value in reader.values),
            any(reader.is_unknown for reader in readers),
        )

    def are_passed_by(self, text: str) -> bool:
        """Whether a template may find in a text what it looks for."""
        return text.strip() in self.values or any(word in text for word in self.words)


class _Reader:
    """The tests of one template."""

    def __init__(self, source: str) -> None:
        self.words: set[str] = set()
        self.values: set[str] = set()
        self.is_unknown = False
        try:
            self._tree = parse_template(source)
        except (TemplateError, RecursionError):  # rendering reports it
            self.is_unknown = True
            return
        self._macros = {macro.name for macro in self._tree.find_all(nodes.Macro)}
        self._mappings = set(_mapping_names(self._tree))
        self._read(self._tree, _refusing_tests(self._tree))

    def _read(self, tree: nodes.Node, skipped: Collection[int]) -> None:
        waiting: list[nodes.Node] = [tree]
        while waiting:
            node = waiting.pop()
            if id(node) in skipped:
                continue
            match node:
                case nodes.Const(value=int() as number):
                    self.is_unknown |= number > 1
                case nodes.Filter():
                    self._read_filter(node)
                case nodes.Test():
                    self.is_unknown |= node.name not in _TESTS
                    self.values |= _texts(node.args)
                case nodes.Call():
                    self._read_call(node)
                case nodes.Compare():
                    self._read_compare(node)
                case nodes.Include() | nodes.Import() | nodes.FromImport() | nodes.Extends():
                    self.is_unknown = True
                case nodes.BinExpr() if isinstance(node, _ARITHMETIC):
                    # `'%s' % x` writes a text
                    self.is_unknown |= not _is_text(node.left)
            if isinstance(node, nodes.Filter) and node.name in _LAYOUT_FILTERS:
                waiting += [] if node.node is None else [node.node]
            else:
                waiting += node.iter_child_nodes()

    def _read_filter(self, node: nodes.Filter) -> None:
        self.is_unknown |= node.name not in _FILTERS
        if node.name == "replace":
            self._look_for(node.args[:1])
        elif node.name not in {"join", "default", "d"}:
            self.values |= _texts(node.args)

    def _read_call(self, node: nodes.Call) -> None:
        match node.node:
            case nodes.Name(name=name):
                self.is_unknown |= name not in _FUNCTIONS | self._macros
            case nodes.Getattr(attr=method) if method in _SEARCH_METHODS:
                self._look_for(node.args[:1])
            case nodes.Getattr(attr=method) if method in _STRIP_METHODS:
                # Other characters than white space may be those of a text.
                is_blank = all(_text(arg).isspace() for arg in node.args)
                self.is_unknown |= not is_blank
            case nodes.Getattr(attr=method):
                self.is_unknown |= method not in _PLAIN_METHODS
            case _:
                self.is_unknown = True

    def _read_compare(self, node: nodes.Compare) -> None:
        calls = node.find_all(nodes.Call)
        if any(getattr(call.node, "name", "") == "strftime_now" for call in calls):
            self.is_unknown = True  # true today only
        left = node.expr
        for operand in node.ops:
            right = operand.expr
            if operand.op in {"in", "notin"}:
                self._read_membership(left, right)
            elif _is_text(left) or _is_text(right):
                text, other = (left, right) if _is_text(left) else (right, left)
                self._compare(other, {_text(text)})
            elif not (isinstance(left, nodes.Const) or isinstance(right, nodes.Const)):
                self.is_unknown |= bool({_last_name(left), _last_name(right)} & _TEXT_FIELDS)
            left = right

    def _read_membership(self, left: nodes.Expr, right: nodes.Expr) -> None:
        if _is_text(left):
            if not self._is_mapping(right):
                self.words.add(_text(left))
        elif isinstance(right, _LITERALS) and all(map(_is_text, right.items)):
            self._compare(left, _texts(right.items))
        else:
            self.is_unknown = True

    def _compare(self, other: nodes.Expr, texts: set[str]) -> None:
        """Read a comparison with texts: of a field, or of what may be a piece of it."""
        is_field = isinstance(other, nodes.Getattr) or (
            isinstance(other, nodes.Getitem) and _is_text(other.arg)
        )
        for text in texts:
            (self.values if is_field or not text or text in _ROLES else self.words).add(text)

    def _look_for(self, args: list[nodes.Expr]) -> None:
        texts = _texts(args)
        self.words |= texts - {""}
        self.is_unknown |= len(texts) != 1

    def _is_mapping(self, node: nodes.Expr) -> bool:
        """Whether a node is a message, a tool or a call, and no text."""
        match node:
            case nodes.Name(name=name):
                return name in self._mappings
            case nodes.Getitem(node=nodes.Name(name="messages"), arg=arg):
                return not isinstance(arg, nodes.Slice)
            case nodes.Getattr(attr="function"):
                return True
        return False


def _is_text(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const) and isinstance(node.value, str)


def _text(node: nodes.Node) -> str:
    """A text that stands in the template; "" for anything else."""
    return str(node.value) if isinstance(node, nodes.Const) and _is_text(node) else ""


def _texts(items: Iterable[nodes.Node]) -> set[str]:
    return {_text(item) for item in items if _is_text(item)}


def _last_name(node: nodes.Node) -> str:
    """The name of a variable, or of the field that is read."""
    match node:
        case nodes.Name(name=name) | nodes.Getattr(attr=name):
            return str(name)
        case nodes.Getitem(arg=nodes.Const(value=str() as name)):
            return name
        case nodes.Filter(node=nodes.Node() as inner) | nodes.Call(node=nodes.Getattr(node=inner)):
            return _last_name(inner)
        case nodes.Getitem(node=inner):
            return _last_name(inner)
    return ""


def _mapping_names(tree: nodes.Node) -> Iterator[str]:
    """Names of variables of which a template reads fields."""
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        match node:
            case nodes.Getattr(node=nodes.Name(name=name)) if id(node) not in called:
                yield name
            case nodes.Getitem(node=nodes.Name(name=name), arg=arg) if _is_text(arg):
                yield name


def _refusing_tests(tree: nodes.Node) -> set[int]:
    """Tests of which nothing depends but whether the template refuses the conversation, by `id`."""
    return {
        id(branch.test)
        for branch in tree.find_all(nodes.If)
        if not branch.else_ and not branch.elif_ and all(map(_only_refuses, branch.body))
    }


def _only_refuses(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Output) and all(
        (isinstance(inner, nodes.TemplateData) and not inner.data.strip())
        or (isinstance(inner, nodes.Call) and getattr(inner.node, "name", "") == "raise_exception")
        for inner in node.nodes
    )
