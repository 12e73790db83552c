"""Tokens and trees of formulas, and their limits."""

import re
from collections.abc import Iterator
from fractions import Fraction

import msgspec

MAX_CHARACTERS = 4096
"""Longest text that is parsed as a formula; longer ones are only compared as text."""
MAX_TOKENS, MAX_DEPTH = 1200, 60
MAX_DIGITS = 40_000  # longest integer literal

_FUNCTIONS = """
sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot ln log lg exp gcd lcm max
min arg
"""
_GREEK = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi
chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega ell
"""
FUNCTIONS, GREEK = frozenset(_FUNCTIONS.split()), frozenset(_GREEK.split())
_TRANSCENDENTAL = ("call", "floor", "ceil", "fact", "double", "gamma")
_OF_INTEGERS = ("binom", "gcd", "lcm", "mod")
_TOKEN = re.compile(
    r"\s*(\d+\.\d*(?=\s*\\overline)|(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4}(?!\d))?"
    r"|\\[A-Za-z]+|\\[{}|%$&#_^]|[A-Za-z]|[-+*/^_!(){}\[\]|,=<>:'&;])"
)


class Unreadable(ValueError):
    """The text is not an expression; the message says where parsing stopped."""


class OverLimit(ValueError):
    """Parsing or evaluation would exceed a limit, which the message names."""


class Node(msgspec.Struct, frozen=True):
    """Part of an expression. Example: `Node("neg", (Node("sym", name="x"),))` is -x."""

    op: str
    """num, sym, imaginary, e, pi, infinity, add, mul, inv, div, neg, pow, fact, abs, floor, ceil,
    root, pm, mp, call, percent, double (factorial), gamma."""
    args: "tuple[Node, ...]" = ()
    name: str = ""
    value: Fraction = Fraction(0)
    decimals: int = -1  # digits after the point of a decimal literal; -1 for integers

    @property
    def is_integer(self) -> bool:
        """True for a number without decimals."""
        return self.op == "num" and self.decimals < 0

    def walk(self) -> "Iterator[Node]":
        """Yield this node and all below it."""
        yield self
        for arg in self.args:
            yield from arg.walk()

    @property
    def symbols(self) -> frozenset[str]:
        """Names of the variables."""
        return frozenset(n.name for n in self.walk() if n.op == "sym")

    @property
    def is_transcendental(self) -> bool:
        """True if a function is called, or a variable is rounded or an exponent."""
        return any(
            n.op in _TRANSCENDENTAL or (n.op == "pow" and bool(n.args[1].symbols))
            for n in self.walk()
        )

    @property
    def integer_symbols(self) -> frozenset[str]:
        """Names of the variables in functions that only integers have."""
        of_integers = (
            n for n in self.walk() if n.op in ("fact", "double") or n.name in _OF_INTEGERS
        )
        return frozenset(name for n in of_integers for name in n.symbols)

    def has(self, *ops: str) -> bool:
        """Return True if one of these operations occurs."""
        return any(n.op in ops for n in self.walk())


def over_length(text: str, limit: int = MAX_CHARACTERS) -> OverLimit:
    """Return the error for an answer that is too long."""
    return OverLimit(f"an answer of {len(text)} characters: over the limit of {limit}")


def number(value: Fraction | int, decimals: int = -1) -> Node:
    """Return the node of a number."""
    return Node("num", value=Fraction(value), decimals=decimals)


def tokenize(text: str) -> list[str]:
    """Split a formula into tokens; `Unreadable` for a character that no formula has."""
    if len(text) > MAX_CHARACTERS and not text.strip().isdigit():
        raise over_length(text)
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        if (match := _TOKEN.match(text, position)) is None:
            raise Unreadable(f"cannot read {text[position : position + 12].strip()!r}")
        token = match[1]
        if len(token) > MAX_DIGITS:
            raise OverLimit(f"an integer of {len(token)} digits: over the limit of {MAX_DIGITS}")
        tokens.append(token)
        if len(tokens) > MAX_TOKENS:
            raise OverLimit(f"a formula of over {MAX_TOKENS} tokens")
        position = match.end()
    return tokens


def with_sign(node: Node, upper: bool) -> Node:
    r"""Replace every `\pm` by plus (upper) or minus, `\mp` by the opposite."""
    if node.op in ("pm", "mp"):
        inner = with_sign(node.args[0], upper)
        return inner if (node.op == "pm") == upper else Node("neg", (inner,))
    return msgspec.structs.replace(node, args=tuple(with_sign(a, upper) for a in node.args))


def substitute(node: Node, values: dict[str, Node]) -> Node:
    """Replace variables, all at once."""
    if node.op == "sym":
        return values.get(node.name, node)
    return msgspec.structs.replace(node, args=tuple(substitute(a, values) for a in node.args))
