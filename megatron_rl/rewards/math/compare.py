"""Comparison of the forms of two answers. Every function takes the gold answer first.

Equations and inequalities are compared as statements, as assigned values, as sets of numbers.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import chain

from mpmath import mp

from megatron_rl.rewards.math.equal import is_near, proportional, same_value
from megatron_rl.rewards.math.evaluate import Context, Undefined, evaluate
from megatron_rl.rewards.math.forms import (
    Based,
    Collection,
    Expression,
    Form,
    Matrix,
    NamedSet,
    Relation,
    Union,
    Words,
)
from megatron_rl.rewards.math.node import Node

ROUNDED_DECIMALS = 4
ROUNDED_DIGITS = 6
"""A decimal with at least this many decimals and digits equals any value that rounds to it."""
INFINITY = Node("infinity")
MINUS_INFINITY = Node("neg", (INFINITY,))
_FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
_NAME = re.compile(
    r"^(?:\\?[A-Za-z]+|\\(?:overline|angle|widehat|vec|hat|bar)\s*\{?[A-Za-z]+\}?)(?:_\{?\w+\}?|')*"
    r"(?:\^\{?-1\}?)?(?:\([A-Za-z_0-9,+\\-]*\))?$"
)


def same(gold: Form, answer: Form) -> bool:
    """Return True if the two forms have the same meaning; `Undefined` if a side has no value."""
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _with_relation(gold, answer)
    if isinstance(gold, Expression) and isinstance(answer, Expression):
        return same_expression(gold.node, answer.node)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return gold == answer
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_matrix(gold, answer)
    if isinstance(gold, Based) or isinstance(answer, Based):
        return _same_based(gold, answer)
    if isinstance(gold, Union | NamedSet) or isinstance(answer, Union | NamedSet):
        return gold == answer or _same_union(gold, answer)
    return _same_collection(gold, answer)


def same_expression(gold: Node, answer: Node) -> bool:
    """Compare values; a long decimal also equals a value that rounds to it."""
    if gold.has("infinity") or answer.has("infinity"):
        return _infinite(gold) == _infinite(answer) != 0
    if same_value(gold, answer):
        return True
    short, long = gold, answer
    if _decimals(short) < 0 or 0 <= _decimals(long) < _decimals(short):
        short, long = long, short
    return _is_rounding(short, long)


def _infinite(node: Node) -> int:
    """Return +1 for infinity, -1 for minus infinity, 0 for anything else."""
    return -_infinite(node.args[0]) if node.op == "neg" else int(node.op == "infinity")


def _decimals(node: Node) -> int:
    return _decimals(node.args[0]) if node.op == "neg" else node.decimals


def _is_rounding(literal: Node, exact: Node) -> bool:
    places = _decimals(literal)
    if places < ROUNDED_DECIMALS or exact.symbols or 0 <= _decimals(exact) == places:
        return False
    value = evaluate(literal, Context())
    assert isinstance(value, Fraction)
    if len(str(abs(value.numerator * 10**places // value.denominator))) < ROUNDED_DIGITS:
        return False
    return is_near(literal, exact, Fraction(1, 2 * 10**places))


def _with_relation(gold: Form, answer: Form) -> bool:
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        if _same_relation(gold, answer):
            return True
        if _variables(gold) != _variables(answer):
            return False
    elif isinstance(answer, Relation):
        if (value := _value_of(answer, is_gold=False)) is not None:
            return same(gold, value)
    elif isinstance(gold, Relation) and (value := _value_of(gold, is_gold=True)) is not None:
        return same(value, answer)
    return _same_union(gold, answer)


def _same_matrix(gold: Form, answer: Form) -> bool:
    if isinstance(gold, Matrix) and isinstance(answer, Matrix):
        return [len(r) for r in gold.rows] == [len(r) for r in answer.rows] and all(
            map(same, chain(*gold.rows), chain(*answer.rows))
        )
    matrix, other = (gold, answer) if isinstance(gold, Matrix) else (answer, gold)
    assert isinstance(matrix, Matrix)
    if not isinstance(other, Collection) or other.opening == "{":
        return False
    cells = list(chain(*matrix.rows))
    is_vector = len(matrix.rows) == 1 or all(len(row) == 1 for row in matrix.rows)
    return is_vector and len(cells) == len(other.items) and all(map(same, cells, other.items))


def _same_based(gold: Form, answer: Form) -> bool:
    if isinstance(gold, Based) and isinstance(answer, Based):
        return gold.value == answer.value
    based, other = (gold, answer) if isinstance(gold, Based) else (answer, gold)
    assert isinstance(based, Based)
    # The base is optional: the question names it.
    if not isinstance(other, Expression) or not other.node.is_integer:
        return False
    return based.digits.lstrip("0") == str(other.node.value)


def _same_union(gold: Form, answer: Form) -> bool:
    """Compare as sets of real numbers."""
    golds, answers = _as_intervals(gold), _as_intervals(answer)
    return golds is not None and answers is not None and _matched(golds, answers)


def _same_collection(gold: Form, answer: Form) -> bool:
    items = [f.items if isinstance(f, Collection) else (f,) for f in (gold, answer)]
    brackets = [f.opening + f.closing if isinstance(f, Collection) else "" for f in (gold, answer)]
    if brackets == ["{}", "{}"] or ("{}" in brackets and "" in brackets):
        return _matched(_distinct(items[0]), _distinct(items[1]))
    if brackets == ["", ""]:
        return _matched(*items)
    if "{}" in brackets or len(items[0]) != len(items[1]):
        return False
    if "" not in brackets and brackets[0] != brackets[1] and len(items[0]) == 2:
        return False  # (1, 2) and [1, 2] are different intervals
    return all(map(same, *items))


def _distinct(items: tuple[Form, ...]) -> list[Form]:
    out: list[Form] = []
    for item in items:
        if not any(same(item, other) for other in out):
            out.append(item)
    return out


def _matched(gold: Sequence[Form], answer: Sequence[Form]) -> bool:
    """Return True if they have equal members, in any order."""
    if len(gold) != len(answer):
        return False
    rest = list(answer)
    for member in gold:
        equal = next((other for other in rest if _parts_agree((member,), (other,))), None)
        if equal is None:
            return False
        rest.remove(equal)
    return True


def _is_name(form: Form, text: str) -> bool:
    """Return True if a side only names the other one: `x`, `f(x)`, `AB`, `Area`, `(x, y)`."""
    if isinstance(form, Words):
        return True
    if isinstance(form, Collection):
        return all(isinstance(i, Expression) and i.node.op == "sym" for i in form.items)
    return isinstance(form, Expression) and (form.node.op == "sym" or bool(_NAME.match(text)))


def _value_of(relation: Relation, *, is_gold: bool) -> Form | None:
    """Return the value that an equation, or a membership such as `x in {1, 2}`, assigns, or None.

    The left side of the gold answer must be a name.
    """
    if relation.operators == ("in",):
        return relation.parts[1]
    if set(relation.operators) != {"="}:
        return None
    *heads, value = relation.parts
    if _is_name(heads[0], relation.texts[0]):
        # x = a+b = 5 may name its value twice; x = 2+2 = 5 contradicts itself.
        constants = [h for h in heads[1:] if isinstance(h, Expression) and not h.node.symbols]
        return value if all(same(value, h) for h in constants) else None
    if is_gold or not isinstance(heads[0], Expression):
        return None
    node = heads[0].node
    if not node.symbols:
        return value if all(same(h, value) for h in heads) else None
    # m+n=11 assigns a value to a quantity; x+1=5 is an equation that is not solved.
    with suppress(Undefined), mp.workdps(100):
        at_zero = evaluate(node, Context(values=dict.fromkeys(node.symbols, Fraction(0))))
        return value if len(node.symbols) > 1 and at_zero == 0 else None
    return None


def _variables(relation: Relation) -> frozenset[str]:
    nodes = (p.node for p in relation.parts if isinstance(p, Expression))
    return frozenset().union(*(n.symbols for n in nodes))


def _same_relation(gold: Relation, answer: Relation) -> bool:
    if set(gold.operators) == set(answer.operators) == {"="}:
        return _same_equation(gold, answer)
    if gold.operators == answer.operators and _parts_agree(gold.parts, answer.parts):
        return True
    flipped = tuple(_FLIPPED.get(o, o) for o in reversed(answer.operators))
    if gold.operators == flipped and _parts_agree(gold.parts, answer.parts[::-1]):
        return True
    return _same_inequality(gold, answer)


def _parts_agree(gold: tuple[Form, ...], answer: tuple[Form, ...]) -> bool:
    with suppress(Undefined):
        return all(map(same, gold, answer))
    return False


def _same_equation(gold: Relation, answer: Relation) -> bool:
    if all(_is_name(r.parts[0], r.texts[0]) for r in (gold, answer)):
        if isinstance(gold.parts[0], Words) or isinstance(answer.parts[0], Words):
            return same(gold.parts[-1], answer.parts[-1])
        if gold.texts[0] == answer.texts[0]:
            g, a = (_value_of(r, is_gold=True) for r in (gold, answer))
            return g is not None and a is not None and same(g, a)
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return sorted(gold.texts) == sorted(answer.texts)
    left, right = _difference(gold), _difference(answer)
    if left is None or right is None:
        return gold.texts == answer.texts and _parts_agree(gold.parts, answer.parts)
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


def _interval(low: Node, high: Node, open_below: bool, open_above: bool) -> Collection:
    """Return the numbers between two ends; a single number is closed with equal ends."""
    brackets = "[("[open_below], "])"[open_above]
    return Collection(*brackets, (Expression(low), Expression(high)))


def _as_intervals(form: Form) -> list[Collection] | None:
    """Return a form as disjoint parts of the real line; None if it is not a set of numbers."""
    if isinstance(form, NamedSet):
        line = [_interval(MINUS_INFINITY, INFINITY, True, True)]
        return line if form.name == "R" else [] if form.name == "empty" else None
    if isinstance(form, Union) or (isinstance(form, Collection) and not form.opening):
        parts = [_as_intervals(item) for item in form.items]
        return None if None in parts else list(chain(*(p or () for p in parts)))
    if isinstance(form, Relation):
        return _relation_intervals(form)
    if not isinstance(form, Collection):
        return None
    nodes = [item.node for item in form.items if isinstance(item, Expression)]
    if len(nodes) != len(form.items):
        return None
    if form.opening == "{":
        return [_interval(n, n, False, False) for n in nodes]
    if len(nodes) != 2:
        return None
    return [_interval(nodes[0], nodes[1], form.opening == "(", form.closing == ")")]


def _relation_intervals(relation: Relation) -> list[Collection] | None:
    if relation.operators == ("in",):
        return _as_intervals(relation.parts[1])
    nodes = [p.node for p in relation.parts if isinstance(p, Expression)]
    variables = [i for i, n in enumerate(nodes) if n.symbols]
    if len(nodes) != len(relation.parts) or len(variables) != 1:
        return None
    if nodes[at := variables[0]].op != "sym":
        return None
    if len(nodes) == 2:
        operator, bound = relation.operators[0], nodes[1 - at]
        operator = _FLIPPED.get(operator, operator) if at == 1 else operator
        below = _interval(MINUS_INFINITY, bound, True, operator != "le")
        above = _interval(bound, INFINITY, operator != "ge", True)
        point = _interval(bound, bound, False, False)
        sets = {"<": [below], ">": [above], "ne": [below, above], "=": [point]}
        return {**sets, "le": [below], "ge": [above]}.get(operator)
    if len(nodes) != 3 or at != 1:
        return None
    low, high, (first, second) = nodes[0], nodes[2], relation.operators
    if {first, second} <= {">", "ge"}:
        low, high, first, second = high, low, _FLIPPED[second], _FLIPPED[first]
    if not {first, second} <= {"<", "le"}:
        return None
    return [_interval(low, high, first == "<", second == "<")]
