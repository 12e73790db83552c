"""Comparison of the forms of two answers. Every function takes the gold answer first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from itertools import chain

import mpmath
from mpmath import mp

from megatron_rl.rewards.math.equal import same_value
from megatron_rl.rewards.math.evaluate import Context, Undefined, evaluate, to_mp
from megatron_rl.rewards.math.forms import (
    Based,
    Collection,
    Expression,
    Form,
    Matrix,
    NamedSet,
    Relation,
    Statement,
    Union,
    Words,
)
from megatron_rl.rewards.math.node import Node
from megatron_rl.rewards.math.relations import (
    RealInterval,
    as_intervals,
    same_relation,
    value_of,
    variables,
)

ROUNDED_DECIMALS = 4
ROUNDED_DIGITS = 6
"""A decimal with at least this many decimals and digits equals any value that rounds to it."""


def same(gold: Form, answer: Form) -> bool:
    """Return True if the two forms have the same meaning; `Undefined` if a side has no value."""
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _with_relation(gold, answer)
    if isinstance(gold, Expression) and isinstance(answer, Expression):
        return same_expression(gold.node, answer.node)
    if isinstance(gold, Words | Statement) or isinstance(answer, Words | Statement):
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
    with mp.workdps(places + 40):
        other = to_mp(evaluate(exact, Context()))
        error = abs(other - to_mp(value))
        return bool(mpmath.isfinite(error) and error <= mpmath.mpf(10) ** -places / 2)


def _with_relation(gold: Form, answer: Form) -> bool:
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        if same_relation(gold, answer, same):
            return True
        if variables(gold) != variables(answer):
            return False
    elif isinstance(answer, Relation):
        value = value_of(answer, same, is_gold=False)
        if value is not None:
            return same(gold, value)
    elif isinstance(gold, Relation):
        value = value_of(gold, same, is_gold=True)
        if value is not None:
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
        return _based_value(gold) == _based_value(answer) is not None
    based, other = (gold, answer) if isinstance(gold, Based) else (answer, gold)
    assert isinstance(based, Based)
    # The base is optional: the question names it.
    if not isinstance(other, Expression) or not other.node.is_integer:
        return False
    return based.digits.lstrip("0") == str(other.node.value)


def _based_value(number: Based) -> int | None:
    try:
        return int(number.digits, number.base)
    except ValueError:
        return None


def _same_union(gold: Form, answer: Form) -> bool:
    """Compare as sets of real numbers."""
    golds, answers = as_intervals(gold), as_intervals(answer)
    return golds is not None and answers is not None and _matched(golds, answers, _same_interval)


def _same_interval(gold: RealInterval, answer: RealInterval) -> bool:
    return (
        (gold.open_below, gold.open_above) == (answer.open_below, answer.open_above)
        and same_expression(gold.low, answer.low)
        and same_expression(gold.high, answer.high)
    )


def _same_collection(gold: Form, answer: Form) -> bool:
    items = [f.items if isinstance(f, Collection) else (f,) for f in (gold, answer)]
    brackets = [f.opening + f.closing if isinstance(f, Collection) else "" for f in (gold, answer)]
    if brackets == ["{}", "{}"] or ("{}" in brackets and "" in brackets):
        return _matched(_distinct(items[0]), _distinct(items[1]), same)
    if brackets == ["", ""]:
        return _matched(list(items[0]), list(items[1]), same)
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


def _matched[T](gold: list[T], answer: list[T], equal: Callable[[T, T], bool]) -> bool:
    """Return True if the lists have equal members, in any order."""
    if len(gold) != len(answer):
        return False
    rest = list(answer)
    for g in gold:
        for i, a in enumerate(rest):
            with suppress(Undefined):
                if equal(g, a):
                    del rest[i]
                    break
        else:
            return False
    return True
