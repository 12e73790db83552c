"""Forms as sets of numbers: intervals, absolute values, roots of polynomials."""

import re
from itertools import chain, pairwise

import mpmath
from mpmath import mp

from megatron_rl.rewards.math.equal import same_value
from megatron_rl.rewards.math.evaluate import Context, Undefined, evaluate, to_mp
from megatron_rl.rewards.math.forms import Collection, Expression, Form, NamedSet, Relation, Union
from megatron_rl.rewards.math.node import Node, OverLimit, number, substitute

INFINITY = Node("infinity")
MINUS_INFINITY = Node("neg", (INFINITY,))
FLIPPED = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
MAX_DEGREE = 6
_TWO = (number(2),)
_FUNCTION = re.compile(r"[A-Za-z]\([A-Za-z]\)$")


def difference(relation: Relation) -> Node | None:
    """Return the left side minus the right one, None if a side is no expression."""
    if len(relation.parts) != 2:
        return None
    left, right = relation.parts
    if not isinstance(left, Expression) or not isinstance(right, Expression):
        return None
    return Node("add", (left.node, Node("neg", (right.node,))))


def solves(equation: Relation, answer: Form) -> bool:
    """Return True if the answer has all roots of a polynomial, as many as its degree."""
    side = difference(equation)
    if equation.operators != ("=",) or side is None or len(side.symbols) != 1:
        return False
    (name,) = side.symbols
    roots = _roots(answer, name)
    if roots is None or not 1 < len(roots) <= MAX_DEGREE or len(roots) != _degree(side, name):
        return False
    pairs = ((a, b) for i, a in enumerate(roots) for b in roots[:i])
    return not any(same_value(a, b) for a, b in pairs) and all(
        same_value(substitute(side, {name: root}), number(0)) for root in roots
    )


def _roots(form: Form, name: str) -> list[Node] | None:
    if isinstance(form, Expression):
        return None if form.node.symbols else [form.node]
    if isinstance(form, Relation):
        named = form.operators == ("=",) and form.parts[0] == Expression(Node("sym", name=name))
        return _roots(form.parts[1], name) if named else None
    if not isinstance(form, Collection) or form.opening not in ("", "{"):
        return None
    parts = [_roots(item, name) for item in form.items]
    return None if None in parts else list(chain(*(p or () for p in parts)))


def _degree(node: Node, name: str) -> int:
    """Return the degree of a polynomial; -1 if it is none, or has a high one."""
    values = [Context({name: number(n).value}) for n in range(2 * MAX_DEGREE)]
    try:
        row = [evaluate(node, context) for context in values]
    except (Undefined, ZeroDivisionError, OverflowError, OverLimit):
        return -1
    for degree in range(-1, MAX_DEGREE + 1):
        if not any(row):
            return degree
        row = [b - a for a, b in pairwise(row)]
    return -1


def _interval(brackets: str, low: Node, high: Node) -> Collection:
    """Return the numbers between two ends; a single number is closed with equal ends."""
    return Collection(brackets[0], brackets[1], (Expression(low), Expression(high)))


def _between(low: Collection, high: Collection) -> Collection:
    """Return the numbers from the lower end of one interval to the upper end of another."""
    return Collection(low.opening, high.closing, (low.items[0], high.items[1]))


def as_intervals(form: Form) -> list[Collection] | None:
    """Return a form as parts of the real line; None if it is not a set of numbers."""
    if isinstance(form, NamedSet):
        line = [_interval("()", MINUS_INFINITY, INFINITY)]
        return line if form.name == "R" else [] if form.name == "empty" else None
    if isinstance(form, Union) or (isinstance(form, Collection) and not form.opening):
        parts = [as_intervals(item) for item in form.items]
        joined = None if None in parts else list(chain(*(p or () for p in parts)))
        # Of "x > 2, x < 5" both may have to hold.
        is_union = isinstance(form, Union) or form.closing == "or"
        return _merged(joined) if joined and is_union else joined
    if isinstance(form, Relation):
        return _relation_intervals(form)
    if not isinstance(form, Collection):
        return None
    nodes = [item.node for item in form.items if isinstance(item, Expression)]
    if len(nodes) != len(form.items):
        return None
    if form.opening == "{":
        return [_interval("[]", n, n) for n in nodes]
    return [form] if len(nodes) == 2 else None


def _relation_intervals(relation: Relation) -> list[Collection] | None:
    if relation.operators == ("in",):
        names = [p for p in relation.parts[:1] if isinstance(p, Expression) and p.node.op != "sym"]
        return None if names else as_intervals(relation.parts[1])
    nodes = [p.node for p in relation.parts if isinstance(p, Expression)]
    # 0 < f(x) < 1 is a statement on the number f(x).
    nodes = [
        Node("sym", name=text) if node.symbols and _FUNCTION.match(text) else node
        for node, text in zip(nodes, relation.texts, strict=False)
    ]
    variables = [i for i, n in enumerate(nodes) if n.symbols]
    if len(nodes) != len(relation.parts) or len(variables) != 1:
        return None
    node = nodes[at := variables[0]]
    if len(nodes) == 2:
        return _half_lines(relation.operators[0], node, nodes[1 - at], at)
    if len(nodes) != 3 or at != 1:
        return None
    low, high, (first, second) = nodes[0], nodes[2], relation.operators
    if {first, second} <= {">", "ge"}:
        low, high, first, second = high, low, FLIPPED[second], FLIPPED[first]
    if not {first, second} <= {"<", "le"} or (node.op != "sym" and not _end(low) < _end(high)):
        return None
    outside, inside = _half_lines(first, node, low, 1), _half_lines(second, node, high, 0)
    if outside is None or inside is None:
        return None
    # Above a number, or on both sides of a ring.
    *below, above = outside
    return [*(_between(inside[0], part) for part in below), _between(above, inside[0])]


def _half_lines(operator: str, node: Node, bound: Node, at: int) -> list[Collection] | None:
    """Return the numbers x, or those with |x - a|, below or above a bound; x^2 is |x| squared.

    The bound of |x - a| is positive.
    """
    operator = FLIPPED.get(operator, operator) if at == 1 else operator
    is_symbol = node.op == "sym"
    ends = (bound, bound) if is_symbol else _ends_around(node, bound)
    if ends is None:
        return None
    low, high = ends
    opening, closing = "()" if operator in ("<", ">", "ne") else "[]"
    below = _interval(f"({closing}", MINUS_INFINITY, low)
    above = _interval(f"{opening})", high, INFINITY)
    if operator in ("<", "le"):
        return [below if is_symbol else _interval(opening + closing, low, high)]
    if operator in (">", "ge"):
        return [above] if is_symbol else [below, above]
    if operator == "ne":
        return [below, above] if is_symbol else None
    return [_interval("[]", end, end) for end in dict.fromkeys(ends)]


def _ends_around(node: Node, bound: Node) -> tuple[Node, Node] | None:
    """Return the numbers with |x - a| = bound or (x - a)^2 = bound; None for other forms."""
    if node.op not in ("abs", "pow") or len(node.symbols) != 1 or node.args[1:] not in ((), _TWO):
        return None
    (name,) = node.symbols
    inside, radius = node.args[0], Node("root", (bound, number(2))) if node.args[1:] else bound
    ends = [evaluate(inside, Context({name: number(n).value})) for n in (0, 1)]
    if ends[1] - ends[0] != 1 or _degree(inside, name) != 1 or not _end(radius) > 0:
        return None
    center = Node("neg", (substitute(inside, {name: number(0)}),))
    return Node("add", (center, Node("neg", (radius,)))), Node("add", (center, radius))


def _end(node: Node) -> mpmath.mpf:
    """Return an end of an interval, or NaN if it is no real number."""
    if node.has("infinity"):
        return mpmath.mpf("-inf" if node.op == "neg" else "inf")
    try:
        with mp.workdps(100):
            value = to_mp(evaluate(node, Context()))
    except (KeyError, Undefined, ZeroDivisionError, OverflowError):
        return mpmath.nan
    return mpmath.nan if isinstance(value, mpmath.mpc) else value


def _merged(parts: list[Collection]) -> list[Collection]:
    """Join the parts that overlap or touch; unchanged if an end is no number."""
    nodes = [[i.node for i in p.items if isinstance(i, Expression)] for p in parts]
    ends = [(_end(low), _end(high)) for low, high in nodes]
    if not all(low <= high for low, high in ends):
        return parts
    out: list[tuple[Collection, mpmath.mpf]] = []
    # Closed ends first.
    for i in sorted(range(len(parts)), key=lambda i: (ends[i][0], parts[i].opening != "[")):
        part, (low, high) = parts[i], ends[i]
        last, top = out[-1] if out else (part, mpmath.ninf)
        if low > top or (low == top and last.closing != "]" and part.opening == "("):
            out.append((part, high))
        elif high > top or (high == top and part.closing == "]"):
            out[-1:] = [(_between(last, part), high)]
    return [part for part, _ in out]
