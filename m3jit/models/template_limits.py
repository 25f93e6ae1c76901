"""What bounds the work of a chat template: it comes with a model file, and must not hold a server up for ever.

jinja2's sandbox bounds a single `range`.  Here rounds of loops, calls of macros and lengths of ranges are counted over
a whole filling-in, as are the characters of its output, and no single operation makes something huge.
"""
from __future__ import annotations

import re
import threading
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError, safe_range
from jinja2.visitor import NodeTransformer

LARGEST_PRODUCT = 1_000_000         # characters or items that `*` may make
LARGEST_SUM = 1 << 26               # characters of a text that is put together, and of all output
LARGEST_POWER = 4096                # bits of what `**` may make
MOST_STEPS = 400_000                # rounds of loops, numbers of ranges; a call of a macro counts as
CALL_STEPS = 20                     # as it takes so much longer
_FILTERS = ("batch", "center", "format", "indent", "join", "replace", "slice")
# The largest number that filters and methods of texts take which make as much as it says.
_WIDTHS = {"batch": 1 << 16, "center": 1 << 16, "expandtabs": 1 << 16, "ljust": 1 << 16, "rjust": 1 << 16,
           "slice": 1 << 16, "tojson": 100, "zfill": 1 << 16}
# In a format: a width that is huge, or comes from a value.
_WIDE = re.compile(r"%(\([^)]*\))?[-+ #0]*([0-9]*\.?\*|[0-9]*\.?[0-9]{7,})|\{[^{}]*:[^{}]*([0-9]{7,}|\{)")


class _Counted(threading.local):
    """What the filling-in that runs in this thread has used."""
    steps = characters = 0


class _Steps(NodeTransformer):
    """Counts the rounds of loops and the calls of macros; `~` is joined where its length is looked at."""

    def _counting(self, node: Any) -> Any:
        self.generic_visit(node)
        steps = nodes.Const(1 if isinstance(node, nodes.For) else CALL_STEPS)
        step = nodes.ExprStmt(nodes.Call(nodes.EnvironmentAttribute("step"), [steps], [], None, None),
                              lineno=node.lineno)
        node.body.insert(0, step)
        return node
    visit_For = visit_Macro = visit_CallBlock = _counting

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("joined"), node.nodes, [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with these limits."""
    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._put_out, **options)
        self._counted = _Counted()
        self.globals["range"] = self._range
        del self.globals["lipsum"]                      # text by chance, of any length
        for name in _FILTERS:
            self.filters[name] = bounded(name, self.filters[name])

    def fill_in(self, template: Any, given: dict[str, Any]) -> str:
        """The template's text with these variables."""
        self._counted.steps = self._counted.characters = 0
        pieces, length = [], 0
        for piece in template.generate(**given):
            length += len(piece)
            _sum(length, "its output")
            pieces.append(piece)
        return "".join(pieces)

    def step(self, by: int) -> None:
        self._counted.steps += by
        if self._counted.steps > MOST_STEPS:
            raise SecurityError(f"takes more than {MOST_STEPS} steps; a loop without an end?")

    def joined(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        _sum(sum(map(len, texts)), "~")
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if operator == "+" and all(isinstance(v, (str, list, tuple)) for v in (left, right)):
            _sum(len(left) + len(right), operator)
        if operator in ("*", "**"):
            sizes = [len(v) if isinstance(v, (str, list, tuple)) else abs(v) for v in (left, right)
                     if isinstance(v, (str, list, tuple, int, float))]
            numbers = all(isinstance(v, (int, float)) for v in (left, right))
            if len(sizes) == 2 and (not numbers and sizes[0] * sizes[1] > LARGEST_PRODUCT or operator == "**" and
                                    int(sizes[0]).bit_length() * sizes[1] > LARGEST_POWER):
                raise SecurityError(f"{operator} would make something huge")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)    # jinja2 wraps str.format
        if isinstance(owner, str):
            _check_sizes(obj.__name__, owner, [*args, *kwargs.values()])
        return super().call(context, obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = _Steps().visit(super()._parse(source, name, filename))
        parsed.set_environment(self)
        return parsed

    def _put_out(self, value: Any) -> str:
        text = str(value)
        self._counted.characters += len(text)
        _sum(self._counted.characters, "its output")
        return text

    def _range(self, *bounds: int) -> range:
        found = safe_range(*bounds)
        self.step(len(found))
        return found


def _sum(length: int, what: str) -> None:
    if length > LARGEST_SUM:
        raise SecurityError(f"{what} would make something huge")


def bounded(name: str, function: Any) -> Any:
    """A filter that refuses to make something huge; jinja2 hands some of them its environment or context first."""
    @wraps(function)                                    # with the mark of what comes first
    def checked(*args: Any, **kwargs: Any) -> Any:
        rest = list(args[1:] if hasattr(function, "jinja_pass_arg") else args)
        _check_sizes(name, rest[0] if rest else "", [*rest[1:], *kwargs.values()])
        return function(*args, **kwargs)
    return checked


def _check_sizes(name: str, value: Any, given: list[Any]) -> None:
    """SecurityError when a filter or a method of a text would make something huge of `value`."""
    made = 0
    if name in ("format", "format_map"):
        _check_format(str(value))
    elif name in _WIDTHS:
        made = max((abs(v) for v in given if isinstance(v, int)), default=0) * LARGEST_SUM // _WIDTHS[name]
    elif name == "replace" and len(given) > 1:
        made = str(value).count(str(given[0])) * len(str(given[1]))
    elif name == "indent" and given:
        made = str(value).count("\n") * (given[0] if isinstance(given[0], int) else len(str(given[0])))
    elif name == "join":
        between, items = given[0] if given else "", value
        if isinstance(value, str):                      # the method: ",".join(items)
            between, items = value, between
        if isinstance(items, (list, tuple)):
            made = sum(len(v) for v in items if isinstance(v, str)) + len(str(between)) * len(items)
    _sum(made, name)


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise SecurityError("a format asks for a width that is huge, or not written in it")
