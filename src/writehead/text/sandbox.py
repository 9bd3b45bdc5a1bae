"""Chat templates come from strangers: a Jinja environment in which they can neither act nor exhaust the machine.

Jinja's immutable sandbox keeps templates from Python's internals and from changing what they are given. Added here: a
budget. Every loop round and call is counted, together with the literal text it may print; every printed value, and
every value that an operator, filter or method can make larger than its parts, is measured before it is made. Filters
and methods outside the lists below do not exist.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 256_000
MAX_CHARS = 16_000_000  # of one value
MAX_TOTAL_CHARS = 64_000_000  # of everything made or printed
MAX_STEPS = 1_000_000
MAX_ITEMS = 200_000  # of one list, nested ones included
MAX_SECONDS = 5.0


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS = _words(
    "abs batch capitalize count d default dictsort e escape first float forceescape format groupby indent int items "
    "join last length list lower map max min reject rejectattr replace reverse round safe select selectattr sort "
    "string title tojson trim unique upper"
)
_METHODS: dict[type, frozenset[str]] = {
    str: _words(
        "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace "
        "istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit "
        "rstrip split splitlines startswith strip swapcase title upper"
    ),
    dict: _words("copy get items keys values"),
    list: _words("copy count index"),
    tuple: _words("count index"),
}
_BUILTINS = (str, dict, list, tuple, bytes, int, float, set, frozenset, type)
_WIDE_FIELD = re.compile(r"\d{4}|\*")


@dataclass(slots=True)
class Budget:
    """What is left to one rendering. Lives as long as that rendering."""

    deadline: float
    steps: int = MAX_STEPS
    chars: int = MAX_TOTAL_CHARS

    def spend(self, *, steps: int = 0, chars: int = 0) -> None:
        self.steps -= steps
        self.chars -= chars
        if self.steps < 0 or self.chars < 0 or time.monotonic() > self.deadline:
            raise SecurityError("it loops or prints without end")


_budget: ContextVar[Budget] = ContextVar("chat_template_budget")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one kind for all templates; the budget of a rendering is found through a context variable."""

    intercepted_binops = frozenset(["+", "*", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock], finalize=_print
        )
        self.filters = {name: function for name, function in self.filters.items() if name in _FILTERS}
        self.filters |= {name: _bounded(name, self.filters[name]) for name in _GROWING}
        self.filters["tojson"] = _to_json
        self.globals = {"range": self.globals["range"], "namespace": Namespace, "dict": dict}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.tick, self.concatenate, self.cut, self.measure = _tick, _concatenate, _cut, _measure

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse, then count loop rounds and calls, and measure what operators make."""
        tree = super()._parse(source, name, filename)
        for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            parts = list(node.find_all(nodes.Node))
            cost = len(parts) + sum(len(part.data) for part in parts if isinstance(part, nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(_call("tick", nodes.Const(cost))))
        _instrument(tree)
        tree.set_environment(self)
        return tree

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is not None:
            raise SecurityError("it calls str.format, which is not offered")
        return None

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _limit(len(left) + len(right))
        if operator == "*":
            _limit_product(left, right)
        if operator == "%" and isinstance(left, str):
            _limit_format(left, right)
        if operator == "**":
            raise SecurityError("it raises to a power")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - Jinja's signature
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, _BUILTINS):
            _limit_method(owner, __obj.__name__, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        _budget.get().spend(steps=1, chars=len(result) if isinstance(result, str | list | dict) else 0)
        return result


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore: some of those mean something to Jinja itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        own, *values = args
        jinja2.utils.Namespace.__init__(own, *values, **kwargs)
        if any(str(name).startswith("_") for name in dict(*values, **kwargs)):
            raise SecurityError("it stores a name that begins with an underscore")

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError("it stores a name that begins with an underscore")
        super().__setitem__(name, value)


class GenerationBlock(Extension):
    """`{% generation %}`: marks what the assistant wrote, for training; rendering prints it as it stands."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render within a fresh budget. Errors: whatever Jinja or the template's own code raises."""
    token = _budget.set(Budget(deadline=time.monotonic() + MAX_SECONDS))
    try:
        chunks: list[str] = []
        for chunk in template.generate(**variables):
            _budget.get().spend(chars=len(chunk))
            chunks.append(chunk)
        return "".join(chunks)
    finally:
        _budget.reset(token)


def _tick(printed: int) -> None:
    _budget.get().spend(steps=1, chars=printed)


def _print(value: Any) -> Any:
    """What Jinja calls on every printed value; constants pass here already at compile time, before any budget."""
    budget = _budget.get(None)
    if budget is not None:
        budget.spend(chars=_size(value))
    return value


def _size(value: Any) -> int:
    """Characters that `value` takes when printed, at least. A list counts every time it is met."""
    if isinstance(value, str):
        return len(value)
    chars, num_items, todo = 0, 0, [value]
    while todo:
        item = todo.pop()
        num_items += 1
        if isinstance(item, str):
            chars += len(item)
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
        elif isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        if num_items > MAX_ITEMS or chars > MAX_CHARS:
            raise SecurityError("it makes a value that is too large")
    return chars + num_items


def _limit(size: int, *, most: int = MAX_CHARS) -> None:
    """Refuse a value of more than `most` characters or items, and count it."""
    if size > most:
        raise SecurityError("it makes a value that is too large")
    budget = _budget.get(None)
    if budget is not None:
        budget.spend(chars=size)


def _limit_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _limit(left.bit_length() + right.bit_length(), most=4096)
    for sequence, count in ((left, right), (right, left)):
        if hasattr(sequence, "__len__") and isinstance(count, int):
            _limit(len(sequence) * count, most=MAX_CHARS if isinstance(sequence, str) else MAX_ITEMS)


def _limit_format(template: str, values: Any) -> None:
    if _WIDE_FIELD.search(template):
        raise SecurityError("it asks for a very wide field")
    _limit(len(template) * 1000 + _size(values) * (template.count("%") + 1))


def _limit_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    allowed = next((names for kind, names in _METHODS.items() if isinstance(owner, kind)), frozenset[str]())
    if name not in allowed:
        raise SecurityError(f"it calls {type(owner).__name__}.{name}, which is not offered")
    if isinstance(owner, str) and name == "replace":
        _limit_replace(owner, *args, **kwargs)
    if isinstance(owner, str) and name == "join" and args:
        _check_join(args[0], owner)


def _limit_replace(text: str, old: str, new: str = "", count: int | None = None) -> None:
    found = text.count(old) if count is None or count < 0 else count
    _limit(len(text) + found * len(new))


def _concatenate(*parts: Any) -> str:
    _limit(sum(map(_size, parts)))
    return "".join(map(str, parts))


def _cut(value: Any, start: Any, stop: Any, step: Any) -> Any:
    part = value[start:stop:step]
    _limit(len(part))
    return part


def _measure(value: Any) -> Any:
    _limit(_size(value))
    return value


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `function`, measuring what it may make. Generators become lists first."""
    check = _GROWING[name]
    # Some of Jinja's filters take the environment or the evaluation context in front of the value.
    lead = 1 if hasattr(function, "jinja_pass_arg") else 0

    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = [list(value) if isinstance(value, Iterator) else value for value in args[lead:]]
        check(*values, **kwargs)
        result = function(*args[:lead], *values, **kwargs)
        result = list(result) if isinstance(result, Iterator) else result
        if isinstance(result, list):
            _limit(len(result), most=MAX_ITEMS)
        return result

    if lead:
        bounded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


def _check_join(value: Any, d: str = "", attribute: Any = None) -> None:
    del attribute  # an attribute is a part of its item, so measuring the items is measuring more
    _limit(_size(value) + (len(value) if hasattr(value, "__len__") else 0) * len(d))


def _check_replace(s: Any, old: str, new: str, count: int | None = None) -> None:
    _limit(_size(s))
    _limit_replace(str(s), old, new, count)


def _check_format(value: str, *args: Any, **kwargs: Any) -> None:
    _limit_format(str(value), [*args, *kwargs.values()])


def _check_indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> None:
    del first, blank
    _limit(len(s) + (s.count("\n") + 1) * (width if isinstance(width, int) else len(width)))


def _check_batch(value: Any, linecount: int, fill_with: Any = None) -> None:
    del value, fill_with
    _limit(linecount, most=MAX_ITEMS)


def _check_round(value: Any, precision: int = 0, method: str = "common") -> None:
    del value, method
    _limit(abs(precision), most=100)


def _check_text(value: Any, *args: Any) -> None:
    del args
    _limit(_size(value))


def _check_items(value: Any, *args: Any, **kwargs: Any) -> None:
    del value, args, kwargs  # no larger than what it is made of; the result is counted


_GROWING: dict[str, Callable[..., None]] = {
    "join": _check_join,
    "replace": _check_replace,
    "format": _check_format,
    "indent": _check_indent,
    "batch": _check_batch,
    "round": _check_round,
    **dict.fromkeys(
        ("string", "upper", "lower", "title", "capitalize", "trim", "escape", "e", "safe", "forceescape"), _check_text
    ),
    **dict.fromkeys(("list", "sort", "unique", "reverse", "dictsort", "groupby"), _check_items),
}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers' templates expect it: no HTML escapes, characters as they are."""
    _limit(_size(value))
    _limit(indent or 0, most=64)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateRuntimeError(str(message)[:1000])


def _strftime_now(pattern: str) -> str:
    _limit(len(pattern), most=1000)
    return datetime.now().strftime(pattern)


def _instrument(node: nodes.Node) -> None:
    """Route `~`, slices and comparisons, which Jinja compiles to plain Python, through functions that measure."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(node, name, _measured(value))
        elif isinstance(value, list):
            setattr(node, name, [_measured(item) if isinstance(item, nodes.Node) else item for item in value])


def _measured(node: nodes.Node) -> nodes.Node:
    _instrument(node)
    if isinstance(node, nodes.Concat):
        return _call("concatenate", *node.nodes)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        return _call("cut", node.node, *(nodes.Const(None) if bound is None else bound for bound in bounds))
    if isinstance(node, nodes.Compare) and not isinstance(node.expr, nodes.Const):
        node.expr = _call("measure", node.expr)
    return node


def _call(function: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(function), list(args), [], None, None)
