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


def _interval(low: Node, high: Node, open_below: bool, open_above: bool) -> Collection:
    """Return the numbers between two ends; a single number is closed with equal ends."""
    brackets = "[("[open_below], "])"[open_above]
    return Collection(*brackets, (Expression(low), Expression(high)))


def as_intervals(form: Form) -> list[Collection] | None:
    """Return a form as parts of the real line; None if it is not a set of numbers."""
    if isinstance(form, NamedSet):
        line = [_interval(MINUS_INFINITY, INFINITY, True, True)]
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
        return [_interval(n, n, False, False) for n in nodes]
    if len(nodes) != 2:
        return None
    return [_interval(nodes[0], nodes[1], form.opening == "(", form.closing == ")")]


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
    if len(nodes) == 2 and node.op != "sym":
        return _around(relation.operators[0], node, nodes[1 - at], at)
    if len(nodes) == 2:
        operator, bound = relation.operators[0], nodes[1 - at]
        operator = FLIPPED.get(operator, operator) if at == 1 else operator
        below = _interval(MINUS_INFINITY, bound, True, operator != "le")
        above = _interval(bound, INFINITY, operator != "ge", True)
        point = _interval(bound, bound, False, False)
        sets = {"<": [below], ">": [above], "ne": [below, above], "=": [point]}
        return {**sets, "le": [below], "ge": [above]}.get(operator)
    if len(nodes) != 3 or at != 1:
        return None
    low, high, (first, second) = nodes[0], nodes[2], relation.operators
    if {first, second} <= {">", "ge"}:
        low, high, first, second = high, low, FLIPPED[second], FLIPPED[first]
    if not {first, second} <= {"<", "le"}:
        return None
    if node.op != "sym":
        return _ring(node, low, high, first, second)
    return [_interval(low, high, first == "<", second == "<")]


def _ring(node: Node, low: Node, high: Node, first: str, second: str) -> list[Collection] | None:
    """Return the numbers x with |x - a| between two positive bounds."""
    if not _end(low) < _end(high):
        return None
    outside, inside = _around(first, node, low, 1), _around(second, node, high, 0)
    if outside is None or inside is None:
        return None
    (below, above), (whole,) = outside, inside
    return [
        Collection(whole.opening, below.closing, (whole.items[0], below.items[1])),
        Collection(above.opening, whole.closing, (above.items[0], whole.items[1])),
    ]


def _around(operator: str, node: Node, bound: Node, at: int) -> list[Collection] | None:
    """Return the numbers x with |x - a| below or above a positive bound; x^2 is |x| squared."""
    operator = FLIPPED.get(operator, operator) if at == 1 else operator
    if node.op not in ("abs", "pow") or len(node.symbols) != 1 or node.args[1:] not in ((), _TWO):
        return None
    (name,) = node.symbols
    inside, radius = node.args[0], Node("root", (bound, number(2))) if node.args[1:] else bound
    ends = [evaluate(inside, Context({name: number(n).value})) for n in (0, 1)]
    if ends[1] - ends[0] != 1 or _degree(inside, name) != 1 or not _end(radius) > 0:
        return None
    center = Node("neg", (substitute(inside, {name: number(0)}),))
    low, high = Node("add", (center, Node("neg", (radius,)))), Node("add", (center, radius))
    strict = operator in ("<", ">")
    if operator in ("<", "le"):
        return [_interval(low, high, strict, strict)]
    if operator in (">", "ge"):
        return [
            _interval(MINUS_INFINITY, low, True, strict),
            _interval(high, INFINITY, strict, True),
        ]
    return [_interval(end, end, False, False) for end in (low, high)] if operator == "=" else None


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
            last = Collection(last.opening, part.closing, (last.items[0], part.items[1]))
            out[-1:] = [(last, high)]
    return [part for part, _ in out]
