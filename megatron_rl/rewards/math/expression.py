r"""A strict parser of LaTeX formulas: the whole text is one expression, or it is rejected.

Nothing is evaluated, so `9^{9^9}` takes microseconds. Nothing is guessed either: a text that is not
understood raises, and no number is picked out of it.
"""

from __future__ import annotations

from fractions import Fraction

from megatron_rl.rewards.math.node import (
    FUNCTIONS,
    GREEK,
    MAX_DEPTH,
    Node,
    OverLimit,
    Unreadable,
    tokenize,
)

_STOPS = set(r") ] } \} \rceil \rfloor \rangle , = < > & ;".split()) | {""}
_SIGNS = {"+": "plus", "-": "neg", "\\pm": "pm", "\\mp": "mp"}
_TIMES = {"*": "mul", "\\times": "mul", "/": "inv", "\\div": "inv", ":": "inv"}
_SUM, _PRODUCT = 10, 20


def read_expression(text: str) -> Node:
    """Parse a normalized text (see `normalize.clean`) as one expression.

    Raises:
        Unreadable: it is not an expression.
        OverLimit: it is nested too deep or too long.
    """
    return _Parser(tokenize(text)).all()


class _Parser:
    """Operator-precedence parser over the tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens, self.i, self.depth = tokens, 0, 0
        self.bars = self.functions = 0

    def all(self) -> Node:
        if not self.tokens:
            raise Unreadable("empty expression")
        node = self.expression()
        if self.i < len(self.tokens):
            raise Unreadable(f"cannot read {self.peek()!r} after {' '.join(self.tokens[: self.i])}")
        return node

    def peek(self, ahead: int = 0) -> str:
        i = self.i + ahead
        return self.tokens[i] if i < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        if not token:
            raise Unreadable("the expression ends too early")
        self.i += 1
        return token

    def expect(self, token: str) -> None:
        if self.peek() != token:
            raise Unreadable(f"expected {token!r}, got {self.peek() or 'the end'!r}")
        self.i += 1

    def expression(self, above: int = 0) -> Node:
        self.deeper()
        parts, made = [self.prefix()], ""
        while (token := self.peek()) not in _STOPS and not self.closes_bar(token):
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

    def closes_bar(self, token: str) -> bool:
        return token in ("|", "\\vert", "\\|") and self.bars > 0

    def juxtapose(self, left: Node) -> tuple[str, Node]:
        token = self.peek()
        if (token[0].isdigit() or token[0] == ".") and self.peek(-1) != "!":
            raise Unreadable(f"two numbers side by side before {token!r}")
        mixed = token == "\\frac" and left.op == "num" and left.decimals < 0
        right = self.postfix(self.atom())
        if (
            mixed
            and right.op == "div"
            and all(a.op == "num" and a.decimals < 0 for a in right.args)
        ):
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
            token = self.peek()
            if token == "^":
                self.i += 1
                if self.degrees():
                    base = Node("mul", (base, Node("pi"), Node("num", value=Fraction(1, 180))))
                else:
                    base = Node("pow", (base, self.script()))
            elif token == "!":
                self.i += 1
                if self.peek() == "!":
                    raise Unreadable("a double factorial")
                base = Node("fact", (base,))
            elif token == "\\%":
                self.i += 1
                base = Node("percent", (base,))
            else:
                return base
        raise OverLimit("more than 8 powers and factorials in a row")

    def degrees(self) -> bool:
        r"""Consume `\circ` or `{\circ}`, which only the argument of a function may have."""
        size = 1 if self.peek() == "\\circ" else 3
        if "\\circ" not in (self.peek(), self.peek(1) if self.peek() == "{" else ""):
            return False
        if not self.functions:
            raise Unreadable("degrees inside an expression")
        self.i += size
        return True

    def script(self) -> Node:
        """Parse an exponent: a group, or one token (with a sign in plain text)."""
        if self.peek() == "{":
            return self.group()
        if self.peek() in ("-", "+"):
            sign = self.take()
            inner = self.atom()
            return Node("neg", (inner,)) if sign == "-" else inner
        node = self.atom()
        if self.peek() == "^":
            self.deeper()
            self.i += 1
            node = Node("pow", (node, self.script()))
            self.depth -= 1
        return node

    def group(self) -> Node:
        self.expect("{")
        outer, self.bars = self.bars, 0
        node = self.expression()
        self.bars = outer
        self.expect("}")
        return node

    def argument(self) -> Node:
        r"""Parse the argument of a command: a group, or one token; `\frac12` has 1 and 2."""
        if self.peek() == "{":
            return self.group()
        token = self.peek()
        if len(token) > 1 and token.isdigit():
            self.tokens[self.i : self.i + 1] = [token[0], token[1:]]
        return self.atom()

    def atom(self) -> Node:
        self.deeper()
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            node = self.number(token)
        elif token.isalpha():
            node = self.letter(token)
        elif token in ("(", "[", "{"):
            outer, self.bars = self.bars, 0
            node = self.expression()
            self.bars = outer
            self.expect({"(": ")", "[": "]", "{": "}"}[token])
        elif token in ("|", "\\vert"):
            node = Node("abs", (self.bar(token),))
        elif token in ("\\lfloor", "\\lceil"):
            inner = self.expression()
            self.expect("\\rfloor" if token == "\\lfloor" else "\\rceil")
            node = Node("floor" if token == "\\lfloor" else "ceil", (inner,))
        elif token[0] == "\\":
            node = self.command(token[1:])
        else:
            raise Unreadable(f"cannot read {token!r} here")
        self.depth -= 1
        return node

    def bar(self, token: str) -> Node:
        self.bars += 1
        inner = self.expression()
        self.bars -= 1
        self.expect(token)
        return inner

    def number(self, token: str) -> Node:
        token, _, exponent = token.lower().partition("e")
        if exponent:
            digits = Node("num", value=Fraction(abs(int(exponent))))
            signed = Node("neg", (digits,)) if int(exponent) < 0 else digits
            power = Node("pow", (Node("num", value=Fraction(10)), signed))
            return Node("mul", (self.number(token), power))
        whole, point, decimals = token.partition(".")
        if self.peek() == "\\overline" and point:
            self.i += 1
            period = self.digits()
            scale = 10 ** len(decimals)
            value = Fraction(int(whole + decimals or "0"), scale)
            return Node("num", value=value + Fraction(int(period), scale * (10 ** len(period) - 1)))
        if not point:
            return Node("num", value=Fraction(int(token)))
        return Node(
            "num",
            value=Fraction(int(whole + decimals), 10 ** len(decimals)),
            decimals=len(decimals),
        )

    def digits(self) -> str:
        digits = self.take()
        if digits == "{":
            digits = self.take()
            self.expect("}")
        if not digits.isdigit():
            raise Unreadable(f"{digits!r} is not a repeating decimal")
        return digits

    def letter(self, token: str) -> Node:
        if token == "e" and self.peek() != "_":
            return Node("e")
        if token == "i" and self.peek() != "_":
            return Node("imaginary")
        return Node("sym", name=token + self.subscript())

    def subscript(self) -> str:
        out = ""
        while self.peek() == "'":
            self.i += 1
            out += "'"
        if self.peek() != "_":
            return out
        self.i += 1
        if self.peek() != "{":
            return f"{out}_{self.take()}"
        start = self.i + 1
        while self.peek() not in ("}", ""):
            self.i += 1
        inside = "".join(self.tokens[start : self.i])
        self.expect("}")
        return f"{out}_{inside}"

    def command(self, name: str) -> Node:
        if name == "frac":
            return Node("div", (self.argument(), self.argument()))
        if name == "binom":
            return Node("call", (self.argument(), self.argument()), name="binom")
        if name == "sqrt":
            index = Node("num", value=Fraction(2))
            if self.peek() == "[":
                self.i += 1
                index = self.expression()
                self.expect("]")
            # \sqrt(2) is not LaTeX, but always means the root of 2.
            return Node("root", (self.argument(), index))
        if name == "pi":
            return Node("pi")
        if name == "infty":
            return Node("infinity")
        if name == "imath":
            return Node("imaginary")
        if name in GREEK:
            return Node("sym", name=f"\\{name}{self.subscript()}")
        if name in FUNCTIONS:
            return self.function(name)
        raise Unreadable(f"\\{name} is not supported")

    def function(self, name: str) -> Node:
        base: tuple[Node, ...] = ()
        power = None
        for _ in range(2):
            if self.peek() == "_" and name == "log" and not base:
                self.i += 1
                base = (self.argument(),)
            elif self.peek() == "^" and power is None:
                self.i += 1
                power = self.script()
        if name == "lg":
            name, base = "log", (Node("num", value=Fraction(10)),)
        self.functions += 1
        args = self.arguments()
        self.functions -= 1
        if len(args) > 1 and name not in ("gcd", "lcm", "max", "min"):
            raise Unreadable(f"\\{name} of {len(args)} arguments")
        if power is not None and power == Node("neg", (Node("num", value=Fraction(1)),)):
            if name not in ("sin", "cos", "tan", "cot"):
                raise Unreadable(f"\\{name}^{{-1}}")
            return Node("call", tuple(args), name=f"arc{name}")
        call = Node("call", (*args, *base), name="logbase" if base else name)
        return call if power is None else Node("pow", (call, power))

    def arguments(self) -> list[Node]:
        if self.peek() == "{":
            return [self.group()]
        if self.peek() != "(":
            return [self.run()]
        self.i += 1
        args = [self.expression()]
        while self.peek() == ",":
            self.i += 1
            args.append(self.expression())
        self.expect(")")
        return args

    def run(self) -> Node:
        r"""Parse an argument without parentheses: `\sin 2x`, up to a sum or a function."""
        negative = self.peek() == "-"
        self.i += negative
        node = self.postfix(self.atom())
        while (t := self.peek()) and (
            t.isalnum() or t in ("\\pi", "\\frac", "\\sqrt") or t[1:] in GREEK
        ):
            if t[0].isdigit():
                raise Unreadable(f"two numbers side by side before {t!r}")
            node = Node("mul", (node, self.postfix(self.atom())))
        return Node("neg", (node,)) if negative else node
