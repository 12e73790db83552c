r"""A strict parser of LaTeX formulas: the whole text is one expression, or it is rejected.

Nothing is evaluated, so `9^{9^9}` takes microseconds. Nothing is guessed either: a text that is not
understood raises, and no number is picked out of it.
"""

import re
from fractions import Fraction

from megatron_rl.rewards.math.node import (
    FUNCTIONS,
    GREEK,
    MAX_DEPTH,
    Node,
    OverLimit,
    Unreadable,
    number,
    tokenize,
)

_CLOSERS = r") ] } \} \rceil \rfloor \rangle , = < > & ;"
_STOPS = {"", *_CLOSERS.split()}
_SIGNS = {"+": "plus", "-": "neg", "\\pm": "pm", "\\mp": "mp"}
_TIMES = {"*": "mul", "\\times": "mul", "/": "inv", "\\div": "inv", ":": "inv", "\\bmod": "mod"}
_BARS = ("|", "\\vert", "\\|")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_LETTERS = {"e": "e", "i": "imaginary"}
_CONSTANTS = {"pi": "pi", "infty": "infinity", "imath": "imaginary"}
_DEGREES = re.compile(r"\^\s*\{\s*\\circ\s*\}")
_SUM, _PRODUCT = 10, 20


def read_expression(text: str) -> Node:
    """Parse a normalized text (see `normalize.clean`) as one expression, or raise `Unreadable`."""
    parser = _Parser(tokenize(_DEGREES.sub(r"^\\circ", text)))
    if not parser.tokens:
        raise Unreadable("empty expression")
    node = parser.expression()
    if token := parser.peek():
        raise Unreadable(f"cannot read {token!r} after {' '.join(parser.tokens[: parser.i])}")
    return node


class _Parser:
    """Operator-precedence parser over the tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.i, self.depth = tokens, 0, 0
        self.bars = self.functions = 0

    def peek(self) -> str:
        return self.tokens[self.i] if self.i < len(self.tokens) else ""

    def take(self) -> str:
        if not (token := self.peek()):
            raise Unreadable("the expression ends too early")
        self.i += 1
        return token

    def accept(self, token: str) -> bool:
        """Consume the token if it is the next one."""
        accepted = self.peek() == token
        self.i += accepted
        return accepted

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise Unreadable(f"expected {token!r}, got {self.peek() or 'the end'!r}")

    def expression(self, above: int = 0) -> Node:
        self.deeper()
        parts, made = [self.prefix()], ""
        while (token := self.peek()) not in _STOPS and not (self.bars and token in _BARS):
            if token in _SIGNS:
                if above >= _SUM:
                    break
                self.i += 1
                right = self.expression(_SUM)
                op, term = "add", Node(_SIGNS[token], (right,)) if token != "+" else right
            elif above >= _PRODUCT:
                break
            elif token in _TIMES:
                self.i += 1
                right = self.expression(_PRODUCT)
                if _TIMES[token] == "mod":
                    left = Node(made, tuple(parts)) if made else parts[0]
                    parts, made = [Node("call", (left, right), name="mod")], ""
                    continue
                op, term = "mul", Node("inv", (right,)) if _TIMES[token] == "inv" else right
            else:
                op, term = self.juxtapose(parts[0] if len(parts) == 1 else Node("mul"))
            # Sums and products are flat, so that long expressions do not recurse.
            if made not in ("", op):
                parts = [Node(made, tuple(parts))]
            parts.append(term)
            made = op
        self.depth -= 1
        return Node(made, tuple(parts)) if made else parts[0]

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise OverLimit(f"nested deeper than {MAX_DEPTH // 2} levels")

    def juxtapose(self, left: Node) -> tuple[str, Node]:
        token = self.peek()
        if (token[0].isdigit() or token[0] == ".") and self.tokens[self.i - 1] != "!":
            raise Unreadable(f"two numbers side by side before {token!r}")
        right = self.postfix(self.atom())
        integers = all(node.is_integer for node in (left, *right.args))
        if token == "\\frac" and right.op == "div" and integers:
            # 2\frac12 is a mixed number.
            if right.args[0].value < right.args[1].value:
                return "add", right
            raise Unreadable("a mixed number with an improper fraction")
        return "mul", right

    def prefix(self) -> Node:
        token = self.peek()
        if token not in _SIGNS:
            return self.postfix(self.atom())
        self.i += 1
        # A sign binds weaker than a product: -2x is -(2x).
        inner = self.expression(_SUM)
        return inner if token == "+" else Node(_SIGNS[token], (inner,))

    def postfix(self, base: Node) -> Node:
        for _ in range(8):
            if self.accept("^"):
                if not self.accept("\\circ"):
                    base = Node("pow", (base, self.script()))
                elif self.functions:
                    base = Node("mul", (base, Node("pi"), number(Fraction(1, 180))))
                else:
                    raise Unreadable("degrees inside an expression")
            elif self.accept("!"):
                base = Node("double" if self.accept("!") else "fact", (base,))
            elif self.accept("\\%"):
                base = Node("percent", (base,))
            else:
                return base
        raise OverLimit("more than 8 powers and factorials in a row")

    def script(self) -> Node:
        """Parse an exponent: a group, or one token (with a sign in plain text)."""
        if self.accept("{"):
            return self.group("}")
        if self.accept("-"):
            return Node("neg", (self.atom(),))
        if self.accept("+"):
            return self.atom()
        node = self.atom()
        if self.accept("^"):
            self.deeper()
            node = Node("pow", (node, self.script()))
            self.depth -= 1
        return node

    def group(self, closing: str) -> Node:
        """Parse the rest of a group whose opening bracket is consumed."""
        outer, self.bars = self.bars, 0
        node = self.expression()
        self.bars = outer
        self.expect(closing)
        return node

    def argument(self) -> Node:
        r"""Parse the argument of a command: a group, or one token; `\frac12` has 1 and 2."""
        if self.accept("{"):
            return self.group("}")
        token = self.peek()
        if len(token) > 1 and token.isdigit():
            self.tokens[self.i : self.i + 1] = [token[0], token[1:]]
        return self.atom()

    def atom(self) -> Node:
        self.deeper()
        token = self.take()
        if token in _BRACKETS:
            node = self.group(_BRACKETS[token])
        elif token[0].isdigit() or token[0] == ".":
            node = self.number(token)
        elif token.isalpha():
            constant = self.peek() != "_" and _LETTERS.get(token)
            node = Node(constant) if constant else self.symbol(token)
        elif token in ("|", "\\vert"):
            self.bars += 1
            node = Node("abs", (self.expression(),))
            self.bars -= 1
            self.expect(token)
        elif token in ("\\lfloor", "\\lceil"):
            node = Node("floor" if token == "\\lfloor" else "ceil", (self.expression(),))
            self.expect("\\rfloor" if token == "\\lfloor" else "\\rceil")
        elif token[0] == "\\":
            node = self.command(token[1:])
        else:
            raise Unreadable(f"cannot read {token!r} here")
        self.depth -= 1
        return node

    def number(self, token: str) -> Node:
        token, _, exponent = token.lower().partition("e")
        if exponent:
            power = Node("pow", (number(10), number(int(exponent))))
            return Node("mul", (self.number(token), power))
        whole, point, decimals = token.partition(".")
        if not point:
            return number(int(token))
        scale = 10 ** len(decimals)
        value = Fraction(int(whole + decimals or "0"), scale)
        if not self.accept("\\overline"):
            return number(value, len(decimals))
        period = self.take()
        if period == "{":
            period = self.take()
            self.expect("}")
        if not period.isdigit():
            raise Unreadable(f"{period!r} is not a repeating decimal")
        return number(value + Fraction(int(period), scale * (10 ** len(period) - 1)))

    def symbol(self, name: str) -> Node:
        """Parse the primes and the subscript of a variable."""
        while self.accept("'"):
            name += "'"
        if self.accept("_"):
            if self.accept("{"):
                start = self.i
                while self.peek() not in ("}", ""):
                    self.i += 1
                name += "_" + "".join(self.tokens[start : self.i])
                self.expect("}")
            else:
                name += "_" + self.take()
        return Node("sym", name=name)

    def command(self, name: str) -> Node:
        if name == "frac":
            return Node("div", (self.argument(), self.argument()))
        if name == "binom":
            return Node("call", (self.argument(), self.argument()), name="binom")
        if name == "sqrt":
            # \sqrt(2) is not LaTeX, but always means the root of 2.
            index = self.group("]") if self.accept("[") else number(2)
            return Node("root", (self.argument(), index))
        if name in _CONSTANTS:
            return Node(_CONSTANTS[name])
        if name == "Gamma" and self.peek() == "(":
            return Node("gamma", (self.atom(),))
        if name in GREEK:
            return self.symbol(f"\\{name}")
        if name in FUNCTIONS:
            return self.function(name)
        raise Unreadable(f"\\{name} is not supported")

    def function(self, name: str) -> Node:
        base: tuple[Node, ...] = ()
        power = None
        for _ in range(2):
            if name == "log" and not base and self.accept("_"):
                base = (self.argument(),)
            elif power is None and self.accept("^"):
                power = self.script()
        if name == "lg":
            name, base = "log", (number(10),)
        self.functions += 1
        args = self.arguments()
        self.functions -= 1
        if len(args) > 1 and name not in ("gcd", "lcm", "max", "min"):
            raise Unreadable(f"\\{name} of {len(args)} arguments")
        if power == Node("neg", (number(1),)):
            if name not in ("sin", "cos", "tan", "cot"):
                raise Unreadable(f"\\{name}^{{-1}}")
            return Node("call", tuple(args), name=f"arc{name}")
        call = Node("call", (*args, *base), name="logbase" if base else name)
        return call if power is None else Node("pow", (call, power))

    def arguments(self) -> list[Node]:
        if self.accept("{"):
            return [self.group("}")]
        if not self.accept("("):
            return [self.run()]
        args = [self.expression()]
        while self.accept(","):
            args.append(self.expression())
        self.expect(")")
        return args

    def run(self) -> Node:
        r"""Parse an argument without parentheses: `\sin 2x`, up to a sum or a function."""
        negative = self.accept("-")
        node = self.postfix(self.atom())
        while (t := self.peek()) and (
            t.isalnum() or t in ("\\pi", "\\frac", "\\sqrt") or t[1:] in GREEK
        ):
            if t[0].isdigit():
                raise Unreadable(f"two numbers side by side before {t!r}")
            node = Node("mul", (node, self.postfix(self.atom())))
        return Node("neg", (node,)) if negative else node
