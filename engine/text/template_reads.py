"""How a chat template uses messages, by its syntax tree.

A kind classifies an expression: the messages, one of them, its content, a part of it. A name has
all kinds that the template gives it in any scope.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from jinja2 import nodes

_LISTS = ("list", "reverse", "sort", "unique", "select", "reject", "selectattr", "rejectattr", "default", "d")
_ONE = ("first", "last", "random")
MISTRAL_ID_CHARS = 9

_Condition = nodes.If | nodes.CondExpr
_ELSE = ("elif_", "else_", "expr2")  # branches of conditions


class _Kind(Enum):
    MESSAGES = "messages"
    MESSAGE = "message"
    CONTENT = "content"
    PART = "part"
    CALLS = "calls"
    CALL = "call"
    CALL_ID = "call id"


_NOTHING: frozenset[_Kind] = frozenset()
_ITEM = {_Kind.MESSAGES: _Kind.MESSAGE, _Kind.CONTENT: _Kind.PART, _Kind.CALLS: _Kind.CALL}
_FIELD = {
    (_Kind.MESSAGE, "content"): _Kind.CONTENT,
    (_Kind.MESSAGE, "tool_calls"): _Kind.CALLS,
    (_Kind.MESSAGE, "tool_call_id"): _Kind.CALL_ID,
    (_Kind.CALL, "id"): _Kind.CALL_ID,
}


@dataclass(frozen=True, kw_only=True)
class TemplateReads:
    """`parts`: renders parts of a content. `strings`: also renders a string. `null`: tests content
    for null. `calls_beside_null`: renders calls only with null content. `one_call`: accepts one
    call per message. `short_ids`: requires call ids of nine letters and digits. `names`: all
    fields.
    """

    parts: bool
    strings: bool
    null: bool
    calls_beside_null: bool
    one_call: bool
    short_ids: bool
    names: frozenset[str]


def reads_of(tree: nodes.Template) -> TemplateReads:
    kinds = _Kinds(tree)
    texts = list(_guards(tree, partial(_reads_text, kinds), partial(_wants_string, kinds)))
    calls = list(_guards(tree, partial(_loops_over_calls, kinds), partial(_wants_null, kinds)))
    return TemplateReads(
        parts=bool(texts),
        strings=all(texts),
        null=any(_is_null(kinds, node) for node in _all(tree)),
        calls_beside_null=bool(calls) and all(calls),
        one_call=not calls
        and any(_Kind.CALL in kinds.of(node) for node in tree.find_all((nodes.Getitem, nodes.Filter))),
        short_ids=any(_wants_nine(kinds, node) for node in tree.find_all(nodes.Compare)),
        names=frozenset(_names(tree)),
    )


class _Kinds:
    def __init__(self, tree: nodes.Template) -> None:
        self._names: dict[str, frozenset[_Kind]] = {"messages": frozenset((_Kind.MESSAGES,))}
        macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        binders = tree.find_all((nodes.Assign, nodes.With, nodes.For, nodes.Macro, nodes.Call))
        bindings = [binding for node in binders for binding in _bindings(node, macros)]
        while self._learn(bindings):
            pass

    def of(self, node: nodes.Node | None) -> frozenset[_Kind]:
        match node:
            case nodes.Name():
                return self._names.get(node.name, _NOTHING)
            case nodes.Getattr():
                return self._field(node.node, node.attr)
            case nodes.Getitem(arg=nodes.Slice()):
                return self.of(node.node)
            case nodes.Getitem(arg=nodes.Const(value=str() as name)):
                return self._field(node.node, name)
            case nodes.Getitem():
                return _items(self.of(node.node))
            case nodes.Call(node=nodes.Getattr(node=of, attr="get"), args=[nodes.Const(value=str() as name), *_]):
                return self._field(of, name)
            case nodes.Filter():
                kinds = self.of(node.node)
                return kinds if node.name in _LISTS else _items(kinds) if node.name in _ONE else _NOTHING
            case nodes.CondExpr():
                return self.of(node.expr1) | self.of(node.expr2)
            case nodes.And() | nodes.Or():
                return self.of(node.left) | self.of(node.right)
            case nodes.Add():
                return (self.of(node.left) | self.of(node.right)) & {_Kind.MESSAGES}
            case nodes.List():
                inside = frozenset[_Kind]().union(*map(self.of, node.items))
                return frozenset((_Kind.MESSAGES,)) if _Kind.MESSAGE in inside else _NOTHING
        return _NOTHING

    def is_content(self, node: nodes.Node | None) -> bool:
        return _Kind.CONTENT in self.of(node)

    def _field(self, node: nodes.Node, name: str) -> frozenset[_Kind]:
        held = self._names.get(f"{node.name}.{name}", _NOTHING) if isinstance(node, nodes.Name) else _NOTHING
        return held | {_FIELD[kind, name] for kind in self.of(node) if (kind, name) in _FIELD}

    def _learn(self, bindings: list[tuple[str, nodes.Node, bool]]) -> bool:
        before = dict(self._names)
        for name, value, is_item in bindings:
            of = self.of(value)
            self._names[name] = self._names.get(name, _NOTHING) | (_items(of) if is_item else of)
        return self._names != before


def _items(kinds: frozenset[_Kind]) -> frozenset[_Kind]:
    return frozenset(_ITEM[kind] for kind in kinds if kind in _ITEM)


def _bindings(node: nodes.Node, macros: dict[str, nodes.Macro]) -> Iterator[tuple[str, nodes.Node, bool]]:
    match node:
        case nodes.Assign(target=nodes.Name() as target):
            yield target.name, node.node, False
            if isinstance(node.node, nodes.Call):  # namespace(name=value)
                yield from ((f"{target.name}.{given.key}", given.value, False) for given in node.node.kwargs)
        case nodes.Assign(target=nodes.NSRef() as target):
            yield f"{target.name}.{target.attr}", node.node, False
        case nodes.Assign(target=nodes.Tuple() as target, node=nodes.Tuple() as values):
            yield from _pairs(target.items, values.items)
        case nodes.With():
            yield from _pairs(node.targets, node.values)
        case nodes.Macro() if node.defaults:
            yield from _pairs(node.args[-len(node.defaults) :], node.defaults)
        case nodes.For(target=nodes.Name() as target):
            yield target.name, node.iter, True
        case nodes.Call(node=nodes.Name() as called) if called.name in macros:
            yield from _pairs(macros[called.name].args, node.args)
            yield from ((given.key, given.value, False) for given in node.kwargs)


def _pairs(targets: Sequence[nodes.Node], values: Sequence[nodes.Node]) -> Iterator[tuple[str, nodes.Node, bool]]:
    for target, value in zip(targets, values, strict=False):
        if isinstance(target, nodes.Name):
            yield target.name, value, False


def _guards(
    node: nodes.Node,
    is_site: Callable[[nodes.Node], bool],
    is_guard: Callable[[_Condition, bool], bool],
    *,
    guarded: bool = False,
) -> Iterator[bool]:
    """For each site in `node`: is there a guard around it?

    `is_guard` also gets whether the site is in the `else`.
    """
    if is_site(node):
        yield guarded
    for children, in_else in ((node.iter_child_nodes(exclude=_ELSE), False), (node.iter_child_nodes(only=_ELSE), True)):
        guards = guarded or (isinstance(node, _Condition) and is_guard(node, in_else))
        for child in children:
            yield from _guards(child, is_site, is_guard, guarded=guards)


def _reads_text(kinds: _Kinds, node: nodes.Node) -> bool:
    """True if it reads a part's text or writes parts: strings would be split into characters."""
    match node:
        case nodes.Getattr(attr="text") | nodes.Getitem(arg=nodes.Const(value="text")):
            return _Kind.PART in kinds.of(node.node)
        case nodes.Call(node=nodes.Getattr(node=of, attr="get"), args=[nodes.Const(value="text"), *_]):
            return _Kind.PART in kinds.of(of)
        case nodes.Filter(name="map"):
            return kinds.is_content(node.node) and any(map(_is_text, node.iter_child_nodes()))
        case nodes.For(target=nodes.Name() as part):
            return kinds.is_content(node.iter) and any(map(partial(_writes, part.name), node.find_all(nodes.Output)))
    return False


def _writes(name: str, node: nodes.Node) -> bool:
    match node:
        case nodes.Name():
            return node.name == name
        case nodes.Filter():
            return node.node is not None and _writes(name, node.node)
        case nodes.CondExpr():
            return _writes(name, node.expr1) or (node.expr2 is not None and _writes(name, node.expr2))
        case nodes.Add():
            return _writes(name, node.left) or _writes(name, node.right)
        case nodes.Output() | nodes.Concat():
            return any(_writes(name, one) for one in node.nodes)
    return False


def _is_text(given: nodes.Node) -> bool:
    return isinstance(given, nodes.Keyword) and given.value == nodes.Const("text")


def _loops_over_calls(kinds: _Kinds, node: nodes.Node) -> bool:
    return isinstance(node, nodes.For) and _Kind.CALLS in kinds.of(node.iter)


def _wants_string(kinds: _Kinds, node: _Condition, in_else: bool) -> bool:
    """True if a condition or its `elif`s separates strings from other contents.

    After a string test with `and`, other strings reach the `else`.
    """
    conditions = [node, *(node.elif_ if isinstance(node, nodes.If) else ())]
    whole = [one.test for one in conditions if not (in_else and _wants_more(kinds, one.test))]
    return any(_is_string(kinds, test) for one in whole for test in _all(one))


def _wants_more(kinds: _Kinds, test: nodes.Node) -> bool:
    """True if only for some strings; an empty one may go either way."""
    if isinstance(test, nodes.And):
        return _wants_more(kinds, test.left) or _wants_more(kinds, test.right)
    asked = test.node if isinstance(test, nodes.Not) else test
    asked = asked.node if isinstance(asked, nodes.Test) else asked
    return not (kinds.is_content(asked) or any(_is_string(kinds, one) for one in _all(test)))


def _is_string(kinds: _Kinds, node: nodes.Node) -> bool:
    return isinstance(node, nodes.Test) and node.name == "string" and kinds.is_content(node.node)


def _wants_null(kinds: _Kinds, node: _Condition, in_else: bool) -> bool:
    todo: list[nodes.Node] = [] if in_else else [node.test]
    while todo:
        test = todo.pop()
        if _is_null(kinds, test) and not (isinstance(test, nodes.Compare) and test.ops[0].op == "ne"):
            return True
        todo += [test.left, test.right] if isinstance(test, nodes.And) else []
    return False


def _is_null(kinds: _Kinds, node: nodes.Node) -> bool:
    match node:
        case nodes.Test(name="none"):
            return kinds.is_content(node.node)
        case nodes.Compare(ops=[nodes.Operand(expr=nodes.Const(value=None)), *_]):
            return kinds.is_content(node.expr)
    return False


def _wants_nine(kinds: _Kinds, node: nodes.Compare) -> bool:
    of = node.expr.node if isinstance(node.expr, nodes.Filter) and node.expr.name in ("length", "count") else None
    return _Kind.CALL_ID in kinds.of(of) and node.ops[0].expr == nodes.Const(MISTRAL_ID_CHARS)


def _names(tree: nodes.Template) -> Iterator[str]:
    yield from (node.attr for node in tree.find_all(nodes.Getattr))
    yield from (node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


def _all(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _all(child)
