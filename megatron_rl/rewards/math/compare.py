"""Comparison of the forms of two answers. Every function takes the gold answer first.

Equations and inequalities are compared as statements, as assigned values, as sets of numbers.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import batched, chain, permutations
from typing import Any

import msgspec
from mpmath import mp

from megatron_rl.rewards.math.equal import proportional, same_expression, same_value
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
from megatron_rl.rewards.math.node import Node, substitute
from megatron_rl.rewards.math.number_sets import FLIPPED, as_intervals, difference, solves

_FUNCTION = re.compile(r"^([A-Za-z])\(([A-Za-z])\)$")
_NAME = re.compile(
    r"^(?:\\?[A-Za-z]+|\\(?:overline|angle|widehat|vec|hat|bar)\s*\{?[A-Za-z]+\}?)(?:_\{?\w+\}?|')*"
    r"(?:\^\{?-1\}?)?(?:\([A-Za-z_0-9,+\\-]*\))?$"
    r"|^[A-Z]+(?:_\{?\w+\}?)?:[A-Z]+(?:_\{?\w+\}?)?$|^\\frac\{[A-Z]{2}\}\{[A-Z]{2}\}$"  # ratios
)


def same(gold: Form, answer: Form) -> bool:
    """Return True if the two forms have the same meaning; `Undefined` if a side has no value."""
    gold, answer = _tuples(_collapsed(gold)), _tuples(_collapsed(answer))
    if isinstance(gold, Collection) and isinstance(answer, Collection):
        answer = _with_parameter(gold, answer)
    elif isinstance(answer, Collection) and (target := _target(answer)) is not None:
        return same(gold, target)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _with_relation(gold, answer)
    if isinstance(gold, Expression) and isinstance(answer, Expression):
        return same_expression(gold.node, answer.node)
    if isinstance(gold, Words) or isinstance(answer, Words):
        return gold == answer or _letters(gold) == _letters(answer) != ""
    if isinstance(gold, Matrix) or isinstance(answer, Matrix):
        return _same_matrix(gold, answer)
    if isinstance(gold, Based) or isinstance(answer, Based):
        return _same_based(gold, answer)
    if isinstance(gold, Union | NamedSet) or isinstance(answer, Union | NamedSet):
        return gold == answer or _same_union(gold, answer)
    return _same_collection(gold, answer)


def _collapsed(form: Form) -> Form:
    r"""Return `1/2` for `1/2` or `50\%`, which are one value."""
    if isinstance(form, Collection) and form.closing == "or" and len(_distinct(form.items)) == 1:
        return form.items[0]
    return form


def _tuples(form: Form) -> Form:
    """Return (5, 2), (7, 2) for p = 5, q = 2; p = 7, q = 2; a tuple listed twice counts once."""
    if not isinstance(form, Collection) or form.opening:
        return form
    if all(isinstance(i, Collection) and i.opening for i in form.items):
        items = tuple(dict.fromkeys(form.items))
        return items[0] if len(items) == 1 else Collection("", form.closing, items)
    pairs = [
        (head.node.name, value)
        for item in form.items
        if isinstance(item, Relation) and item.operators == ("=",)
        for head, value in (item.parts,)
        if isinstance(head, Expression) and head.node.op == "sym"
    ]
    names = [name for name, _ in pairs]
    size = len(set(names))
    if len(names) != len(form.items) or not 1 < size < len(names):
        return form
    if names != names[:size] * (len(names) // size):
        return form
    rows = batched((value for _, value in pairs), size)
    return Collection("", "", tuple(Collection("(", ")", row) for row in rows))


def _letters(form: Form) -> str:
    """Return the letters of a name or a list: ABC is A, B, C."""
    if isinstance(form, Words):
        return form.text
    items = form.items if isinstance(form, Collection) and not form.opening else ()
    names = [i.node.name for i in items if isinstance(i, Expression) and i.node.op == "sym"]
    return "".join(names).casefold() if len(names) == len(items) else ""


def _with_parameter(gold: Collection, answer: Collection) -> Collection:
    r"""Rename the answer's parameter, as in `x = n\pi, n \in \mathbb{Z}`, to the gold's."""
    names = [
        [
            i.parts[0].node.name
            for i in c.items
            if isinstance(i, Relation)
            and i.operators == ("in",)
            and isinstance(i.parts[0], Expression)
            and isinstance(i.parts[1], NamedSet)
        ]
        for c in (gold, answer)
    ]
    if len(names[0]) != 1 or len(names[1]) != 1 or gold.opening or answer.opening:
        return answer
    return _renamed(answer, {names[1][0]: Node("sym", name=names[0][0])})


def _renamed(form: Any, values: dict[str, Node]) -> Any:
    if isinstance(form, Node):
        return substitute(form, values)
    if isinstance(form, tuple):
        return tuple(_renamed(f, values) for f in form)
    if isinstance(form, msgspec.Struct):
        fields = {f: _renamed(getattr(form, f), values) for f in form.__struct_fields__}
        return msgspec.structs.replace(form, **fields)
    return form


def _target(answer: Collection) -> Form | None:
    """Return 809 for "m=500, n=309, m+n=809", whose last quantity follows from the others."""
    relations = [i for i in answer.items if isinstance(i, Relation) and i.operators == ("=",)]
    if answer.opening or len(relations) != len(answer.items) or len(relations) < 2:
        return None
    pairs = [[p.node for p in r.parts if isinstance(p, Expression)] for r in relations]
    if any(len(p) != 2 or p[1].symbols for p in pairs) or any(p[0].op != "sym" for p in pairs[:-1]):
        return None
    values = {name.name: value for name, value in pairs[:-1]}
    quantity, value = pairs[-1]
    if quantity.op == "sym" or not quantity.symbols or not quantity.symbols <= values.keys():
        return None
    return relations[-1].parts[1] if same_value(substitute(quantity, values), value) else None


def _with_relation(gold: Form, answer: Form) -> bool:
    if isinstance(gold, Relation) and solves(gold, answer):
        return True
    for relation, other in ((gold, answer), (answer, gold)):
        if isinstance(relation, Relation) and isinstance(other, Collection):
            *names, end = relation.parts
            if len(names) > 1 and all(map(_is_symbol, names)) and set(relation.operators) == {"="}:
                return same(Collection("(", ")", (end,) * len(names)), other)  # x = y = 1
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
    rows = [i.items for i in other.items if isinstance(i, Collection) and i.opening]
    if len(rows) == len(other.items) > 0:
        return _same_matrix(matrix, Matrix(tuple(rows)))
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
    golds, answers = as_intervals(gold), as_intervals(answer)
    return golds is not None and answers is not None and _matched(golds, answers)


def _same_collection(gold: Form, answer: Form) -> bool:
    items = [f.items if isinstance(f, Collection) else (f,) for f in (gold, answer)]
    brackets = [f.opening + f.closing if isinstance(f, Collection) else "" for f in (gold, answer)]
    brackets = ["" if b == "or" else b for b in brackets]
    if brackets == ["{}", "{}"] or ("{}" in brackets and "" in brackets):
        return _matched(_distinct(items[0]), _distinct(items[1]))
    if brackets == ["", ""]:
        return _matched(*items)
    if "{}" in brackets or len(items[0]) != len(items[1]):
        return False
    if brackets[0] == "" and not all(isinstance(i, Relation) for i in items[0]):
        return False  # 1, 2 are two answers, (1, 2) is one
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
        return all(map(_is_symbol, form.items))
    return _is_symbol(form) or (isinstance(form, Expression) and bool(_NAME.match(text)))


def _is_symbol(form: Form) -> bool:
    return isinstance(form, Expression) and form.node.op == "sym"


def _value_of(relation: Relation, *, is_gold: bool) -> Form | None:
    """Return the value that an equation, or a membership such as `x in {1, 2}`, assigns, or None.

    The left side is a name or a quantity such as `|a|`; `m+n` only if it is not the gold answer.
    """
    if relation.operators == ("in",) and _is_name(relation.parts[0], relation.texts[0]):
        return relation.parts[1]
    if set(relation.operators) != {"="}:
        return None
    *heads, value = relation.parts
    if _is_name(heads[0], relation.texts[0]):
        # x = a+b = 5 may name its value twice; x = 2+2 = 5 contradicts itself.
        constants = [h for h in heads[1:] if isinstance(h, Expression) and not h.node.symbols]
        return value if all(same(value, h) for h in constants) else None
    node = heads[0].node if isinstance(heads[0], Expression) else None
    if node is None or (is_gold and not node.symbols):
        return None
    if not node.symbols:
        return value if all(same(h, value) for h in heads) else None
    if node.op in ("abs", "call", "floor", "ceil"):
        return value
    if is_gold:
        return None
    if node.op == "pow" and node.args[0].op == "sym" and not node.args[1].symbols:
        return value
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
    flipped = tuple(FLIPPED.get(o, o) for o in reversed(answer.operators))
    if gold.operators == flipped and _parts_agree(gold.parts, answer.parts[::-1]):
        return True
    return _same_inequality(gold, answer)


def _parts_agree(gold: tuple[Form, ...], answer: tuple[Form, ...]) -> bool:
    with suppress(Undefined):
        return all(map(same, gold, answer))
    return False


def _same_function(gold: Relation, answer: Relation) -> bool:
    """Compare f(x)=ax+b and f(t)=mt+c: names of the argument and of constants do not count."""
    pair = [_FUNCTION.match(r.texts[0]) for r in (gold, answer)]
    nodes = [p.node for r in (gold, answer) for p in r.parts[1:] if isinstance(p, Expression)]
    if None in pair or len(nodes) != 2 or len(gold.parts) != 2 or len(answer.parts) != 2:
        return False
    (name, x), (other_name, t) = (m.groups() for m in pair if m is not None)
    g, a = nodes
    if name.casefold() != other_name.casefold() or (x != t and x in a.symbols):
        return False
    a = substitute(a, {t: Node("sym", name=x)})
    own, others = sorted(g.symbols - a.symbols), sorted(a.symbols - g.symbols)
    if len(own) != len(others) or len(own) > 3:
        return False
    names = [dict(zip(others, p, strict=True)) for p in permutations(own)]
    renamed = [substitute(a, {k: Node("sym", name=v) for k, v in n.items()}) for n in names]
    return any(_parts_agree((Expression(g),), (Expression(r),)) for r in renamed)


def _name_the_same_function(gold: Relation, answer: Relation) -> bool:
    """Return True for f(x) = ... and y = ... of x."""
    pair = [(_FUNCTION.match(r.texts[0]), r.texts[0]) for r in (gold, answer)]
    matches = [m for m, _ in pair if m is not None]
    return len(matches) == 1 and "y" in (pair[0][1], pair[1][1]) and matches[0][2] != "y"


def _same_equation(gold: Relation, answer: Relation) -> bool:
    if _same_function(gold, answer):
        return True
    if all(_is_name(r.parts[0], r.texts[0]) for r in (gold, answer)):
        if isinstance(gold.parts[0], Words) or isinstance(answer.parts[0], Words):
            return same(gold.parts[-1], answer.parts[-1])
        if gold.texts[0] == answer.texts[0] or _name_the_same_function(gold, answer):
            g, a = (_value_of(r, is_gold=True) for r in (gold, answer))
            return g is not None and a is not None and same(g, a)
    if len(gold.parts) != 2 or len(answer.parts) != 2:
        return sorted(gold.texts) == sorted(answer.texts)
    left, right = difference(gold), difference(answer)
    if left is None or right is None:
        return gold.texts == answer.texts and _parts_agree(gold.parts, answer.parts)
    if not left.symbols:
        return _parts_agree(gold.parts, answer.parts)  # 1 = 2 is no multiple of 3 = 5
    return left.symbols == right.symbols and proportional(left, right, positive=False)


def _same_inequality(gold: Relation, answer: Relation) -> bool:
    if len(gold.operators) != 1 or len(answer.operators) != 1:
        return False
    differences = []
    for relation in (gold, answer):
        side, operator = difference(relation), relation.operators[0]
        if side is None or operator == "in":
            return False
        if operator in (">", "ge"):
            side, operator = Node("neg", (side,)), FLIPPED[operator]
        differences.append((side, operator))
    (a, first), (b, second) = differences
    return first == second and bool(a.symbols) and proportional(a, b, positive=first != "ne")
