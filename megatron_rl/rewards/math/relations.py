"""Equations and inequalities: as statements, as assigned values, as sets of numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from megatron_rl.rewards.math.equal import proportional
from megatron_rl.rewards.math.evaluate import Context, Undefined, evaluate
from megatron_rl.rewards.math.forms import (
    Collection,
    Expression,
    Form,
    NamedSet,
    Relation,
    Union,
    Words,
)
from megatron_rl.rewards.math.node import Node

Same = Callable[[Form, Form], bool]
INFINITY = Node("infinity")
MINUS_INFINITY = Node("neg", (INFINITY,))
_FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
_NAME = re.compile(
    r"^(?:\\?[A-Za-z]+|\\(?:overline|angle|widehat|vec|hat|bar)\s*\{?[A-Za-z]+\}?)(?:_\{?\w+\}?|')*"
    r"(?:\^\{?-1\}?)?(?:\([A-Za-z_0-9,+\\-]*\))?$"
)


@dataclass(frozen=True, slots=True)
class RealInterval:
    """Real numbers between two ends; a single number is closed with equal ends."""

    low: Node
    high: Node
    open_below: bool
    open_above: bool


def is_name(form: Form, text: str) -> bool:
    """Return True if a side only names the other one: `x`, `f(x)`, `AB`, `Area`, `(x, y)`."""
    if isinstance(form, Words):
        return True
    if isinstance(form, Collection):
        return all(isinstance(i, Expression) and i.node.op == "sym" for i in form.items)
    return isinstance(form, Expression) and (form.node.op == "sym" or bool(_NAME.match(text)))


def value_of(relation: Relation, same: Same, *, is_gold: bool) -> Form | None:
    """Return the value that an equation assigns, or None.

    Args:
        relation: equation, or a membership such as `x in {1, 2}`.
        same: comparison of two forms, gold first.
        is_gold: the equation is the gold answer; then its left side must be a name.
    """
    if relation.operators == ("in",):
        return relation.parts[1]
    if set(relation.operators) != {"="}:
        return None
    *heads, value = relation.parts
    if is_name(heads[0], relation.texts[0]):
        # x = a+b = 5 may name its value twice; x = 2+2 = 5 contradicts itself.
        constants = [h for h in heads[1:] if isinstance(h, Expression) and not h.node.symbols]
        return value if all(same(value, h) for h in constants) else None
    if is_gold or not isinstance(heads[0], Expression):
        return None
    node = heads[0].node
    if not node.symbols:
        return value if all(same(h, value) for h in heads) else None
    # m+n=11 assigns a value to a quantity; x+1=5 is an equation that is not solved.
    try:
        at_zero = evaluate(node, Context(values=dict.fromkeys(node.symbols, Fraction(0))))
    except Undefined:
        return None
    return value if len(node.symbols) > 1 and at_zero == 0 else None


def variables(relation: Relation) -> frozenset[str]:
    """Return the names of the variables of a relation."""
    nodes = (p.node for p in relation.parts if isinstance(p, Expression))
    return frozenset().union(*(n.symbols for n in nodes))


def same_relation(gold: Relation, answer: Relation, same: Same) -> bool:
    """Return True if two relations are equivalent."""
    if set(gold.operators) == set(answer.operators) == {"="}:
        return _same_equation(gold, answer, same)
    if gold.operators == answer.operators and _parts_agree(gold.parts, answer.parts, same):
        return True
    flipped = tuple(_FLIPPED.get(o, o) for o in reversed(answer.operators))
    if gold.operators == flipped and _parts_agree(gold.parts, answer.parts[::-1], same):
        return True
    return _same_inequality(gold, answer)


def _parts_agree(gold: tuple[Form, ...], answer: tuple[Form, ...], same: Same) -> bool:
    try:
        return all(map(same, gold, answer))
    except Undefined:
        return False


def _same_equation(gold: Relation, answer: Relation, same: Same) -> bool:
    if all(is_name(r.parts[0], r.texts[0]) for r in (gold, answer)):
        if isinstance(gold.parts[0], Words) or isinstance(answer.parts[0], Words):
            return same(gold.parts[-1], answer.parts[-1])
        if gold.texts[0] == answer.texts[0]:
            g, a = (value_of(r, same, is_gold=True) for r in (gold, answer))
            return g is not None and a is not None and same(g, a)
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return sorted(gold.texts) == sorted(answer.texts)
    left, right = _difference(gold), _difference(answer)
    if left is None or right is None:
        return gold.texts == answer.texts and _parts_agree(gold.parts, answer.parts, same)
    return left.symbols == right.symbols and proportional(left, right, positive=False)


def _difference(relation: Relation) -> Node | None:
    left, right = relation.parts
    if not isinstance(left, Expression) or not isinstance(right, Expression):
        return None
    return Node("add", (left.node, Node("neg", (right.node,))))


def _same_inequality(gold: Relation, answer: Relation) -> bool:
    if len(gold.operators) != 1 or len(answer.operators) != 1:
        return False
    differences = []
    for relation in (gold, answer):
        difference, operator = _difference(relation), relation.operators[0]
        if difference is None or operator == "in":
            return False
        if operator in (">", "ge"):
            difference, operator = Node("neg", (difference,)), _FLIPPED[operator]
        differences.append((difference, operator))
    (a, first), (b, second) = differences
    return first == second and proportional(a, b, positive=first != "ne")


def as_intervals(form: Form) -> list[RealInterval] | None:
    """Return a form as disjoint parts of the real line; None if it is not a set of numbers."""
    if isinstance(form, NamedSet):
        line = [RealInterval(MINUS_INFINITY, INFINITY, True, True)]
        return line if form.name == "R" else [] if form.name == "empty" else None
    if isinstance(form, Union) or (isinstance(form, Collection) and not form.opening):
        parts = [as_intervals(item) for item in form.items]
        if any(p is None for p in parts):
            return None
        return [interval for part in parts if part is not None for interval in part]
    if isinstance(form, Relation):
        return _relation_intervals(form)
    if not isinstance(form, Collection):
        return None
    nodes = [item.node for item in form.items if isinstance(item, Expression)]
    if len(nodes) != len(form.items):
        return None
    if form.opening == "{":
        return [RealInterval(n, n, False, False) for n in nodes]
    if len(nodes) != 2:
        return None
    return [RealInterval(nodes[0], nodes[1], form.opening == "(", form.closing == ")")]


def _relation_intervals(relation: Relation) -> list[RealInterval] | None:
    if relation.operators == ("in",):
        return as_intervals(relation.parts[1])
    nodes = [p.node for p in relation.parts if isinstance(p, Expression)]
    variables = [i for i, n in enumerate(nodes) if n.op == "sym"]
    if len(nodes) != len(relation.parts) or len(variables) != 1:
        return None
    at = variables[0]
    if any(n.symbols for i, n in enumerate(nodes) if i != at):
        return None
    if len(nodes) == 2:
        operator, bound = relation.operators[0], nodes[1 - at]
        operator = _FLIPPED.get(operator, operator) if at == 1 else operator
        below = RealInterval(MINUS_INFINITY, bound, True, operator != "le")
        above = RealInterval(bound, INFINITY, operator != "ge", True)
        point = RealInterval(bound, bound, False, False)
        sets = {"<": [below], ">": [above], "ne": [below, above], "=": [point]}
        return {**sets, "le": [below], "ge": [above]}.get(operator)
    if len(nodes) != 3 or at != 1:
        return None
    first, second = relation.operators
    if set(relation.operators) <= {"<", "le"}:
        return [RealInterval(nodes[0], nodes[2], first == "<", second == "<")]
    if set(relation.operators) <= {">", "ge"}:
        return [RealInterval(nodes[2], nodes[0], second == ">", first == ">")]
    return None
