"""Values of expressions: fractions where they are rational, else mpmath numbers of many digits.

Sizes are checked before anything is computed, so no expression takes long. Every step adds the bits
that it costs to `Context.lost` and those that it hides to `Context.spread`, so that the caller
knows how many digits of a value are sure, and how many must be.
"""

import math
from fractions import Fraction

import mpmath
import msgspec
from mpmath import mp

from megatron_rl.rewards.math.node import Node, OverLimit

MAX_BITS = 200_000  # largest integer that is computed exactly
MAX_MANTISSA = 100_000_000  # largest power whose leading digits are computed
MAX_FACTORIAL, MAX_ROOT = 20_000, 1_000_000
FEW_DIGITS = 15
GUARD_BITS = 40  # bits for the rounding errors of all steps together

type Number = Fraction | mpmath.mpf | mpmath.mpc


class Undefined(ArithmeticError):
    """The expression has no value: a division by zero, the factorial of a fraction."""


class Context(msgspec.Struct):
    r"""Values of the variables, and the base of a `\log` without one."""

    values: dict[str, Fraction] = {}
    log_base: Fraction | None = None  # None: the natural logarithm
    lost: int = 0  # bits of the working precision that cancellation and large arguments have cost
    spread: int = 0
    """Bits by which summands and small arguments differ: a value's last digits may be theirs."""
    vanished: bool = False  # True if a result below its own rounding error was taken for zero

    def real(self, x: "Number") -> mpmath.mpf | mpmath.mpc:
        """Convert to mpmath; `1 + 10^{-300}` needs its own digits to differ from 1."""
        self.spread += max(0, _bits(x) - 64) if isinstance(x, Fraction) else 0
        return to_mp(x)

    def argument(self, size: int) -> None:
        """Count the bits of an argument of 2^size: cos(2^-n) is 1 but for 2n bits."""
        self.lost += max(size, 0)
        self.spread += 2 * abs(size)

    def settled(self, x: mpmath.mpf | mpmath.mpc, size: int) -> "Number":
        """Return a result of operands of 2^size, or zero if it is below its rounding error."""
        if x == 0 or mpmath.mag(x) < size + self.lost + GUARD_BITS - mp.prec:
            self.vanished = True
            return Fraction(0)
        return x


def _bits(x: Fraction) -> int:
    return max(x.numerator.bit_length(), x.denominator.bit_length())


def _checked(x: Fraction) -> Fraction:
    if (bits := _bits(x)) > MAX_BITS:
        raise OverLimit(f"a number of {bits} bits: over the limit of {MAX_BITS}")
    return x


def to_mp(x: Number) -> mpmath.mpf | mpmath.mpc:
    """Convert a number to mpmath at the working precision."""
    return mpmath.mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else x


def evaluate(node: Node, context: Context) -> Number:
    """Return the value at the working precision, a Fraction if rational; `Undefined` if none."""
    if (handler := _HANDLERS.get(node.op)) is None:
        raise Undefined(f"{node.op} has no value")
    return handler(node, context)


def _sum(node: Node, context: Context) -> Number:
    exact, rest, sizes = Fraction(0), mpmath.mpf(0), []
    for arg in node.args:
        x = evaluate(arg, context)
        if isinstance(x, Fraction):
            exact = _checked(exact + x)
        else:
            sizes.append(mpmath.mag(x))
            rest += x
    if not sizes:
        return exact
    if exact:
        sizes.append(mpmath.mag(value := context.real(exact)))
        rest += value
    if total := context.settled(rest, max(sizes)):
        context.lost += max(0, max(sizes) - mpmath.mag(total))
    context.spread += max(sizes) - min(sizes)
    return total


def _product(node: Node, context: Context) -> Number:
    exact, rest = Fraction(1), None
    for arg in node.args:
        x = evaluate(arg, context)
        if isinstance(x, Fraction):
            exact = _checked(exact * x)
        else:
            rest = x if rest is None else rest * x
    return exact if rest is None or exact == 0 else rest * context.real(exact)


def _inverse(node: Node, context: Context) -> Number:
    if (x := evaluate(node.args[0], context)) == 0:
        raise Undefined("a division by zero")
    return 1 / x


def _power(base: Number, exponent: Number, context: Context) -> Number:
    if isinstance(exponent, Fraction):
        whole, order = exponent.numerator, exponent.denominator
        if isinstance(base, Fraction) and order == 1:
            return _integer_power(base, whole, context)
        if base == 0:
            if exponent > 0:
                return Fraction(0)
            raise Undefined("a power of zero")
        if order != 1:
            if order > MAX_ROOT:
                raise OverLimit(f"a root of order {order}")
            return _power(_root(base, order, context), Fraction(whole), context)
    a, b = context.real(base), context.real(exponent)
    if a == 0:
        raise Undefined("a power of zero")
    with mp.workdps(FEW_DIGITS):
        logarithm = b * mpmath.log(a)
    if abs(logarithm) > 10**9:
        raise OverLimit("a power whose value has over 10^8 digits")
    if logarithm:
        context.argument(mpmath.mag(logarithm))
    return a**b


def _power_node(node: Node, context: Context) -> Number:
    base, exponent = (evaluate(a, context) for a in node.args)
    fraction = isinstance(exponent, Fraction) and exponent.denominator != 1
    if fraction and node.args[1].symbols and isinstance(base, Fraction) and base < 0:
        # (-1)^n at a fraction is the principal power, unlike (-8)^{1/3}, which is the real root.
        return mpmath.mpc(to_mp(base)) ** to_mp(exponent)
    return _power(base, exponent, context)


def _integer_power(base: Fraction, n: int, context: Context) -> Number:
    if base == 0 and n <= 0:
        raise Undefined("0 to the power of 0 or less")
    bits = abs(n) * max(_bits(base) - 1, 1)
    if abs(base) in (0, 1) or bits <= MAX_BITS:
        return base ** (n % 2 if abs(base) == 1 else n)
    if bits > MAX_MANTISSA:
        size = str(bits) if bits < 10**15 else "over 10^15"
        raise OverLimit(f"a power of about {size} bits: over the limit of {MAX_MANTISSA}")
    context.lost += n.bit_length()
    return context.real(base) ** n


def _root(x: Number, n: int, context: Context) -> Number:
    """Return the real n-th root if there is one, exact if rational, else the principal root."""
    negative = not isinstance(x, mpmath.mpc) and x < 0
    if negative and n % 2:
        return -_root(-x, n, context)
    if isinstance(x, Fraction) and not negative:
        roots = [_exact_root(v, n) for v in (x.numerator, x.denominator)]
        if all(r is not None for r in roots):
            return Fraction(roots[0], roots[1])  # type: ignore[arg-type]
    value = context.real(x)
    return mpmath.root(value, n) if not negative else mpmath.mpc(value) ** (mpmath.mpf(1) / n)


def _root_node(node: Node, context: Context) -> Number:
    x, n = (evaluate(a, context) for a in node.args)
    if not isinstance(n, Fraction) or n == 0:
        raise Undefined("a root whose order is not a rational number, or 0")
    return _power(x, 1 / n, context)


def _exact_root(x: int, n: int) -> int | None:
    if x < 2:
        return x
    if n == 2:
        r = math.isqrt(x)
    elif x.bit_length() > 2000 or n >= x.bit_length():
        return None
    else:
        with mp.workprec(x.bit_length() + 20):
            r = int(mpmath.nint(mpmath.root(mpmath.mpf(x), n)))
    return r if r**n == x else None


def _factorial(node: Node, context: Context) -> Number:
    x = evaluate(node.args[0], context)
    if node.op == "gamma":
        if not isinstance(x, Fraction) or x.denominator > 2 or x <= 0 or x > MAX_FACTORIAL:
            raise Undefined("a Gamma function of other than halves")
        if x.denominator == 2:
            return mpmath.gamma(context.real(x))
        x -= 1
    if not isinstance(x, Fraction) or x.denominator != 1 or x < 0:
        raise Undefined("the factorial of a number that is not natural")
    if x > MAX_FACTORIAL:
        raise OverLimit(f"a factorial over {MAX_FACTORIAL}!")
    if node.op == "double":
        return _checked(Fraction(math.prod(range(x.numerator, 1, -2))))
    return _checked(Fraction(math.factorial(x.numerator)))


def _real(x: Number) -> Fraction | mpmath.mpf:
    if isinstance(x, mpmath.mpc) and x.imag != 0:
        raise Undefined("an order of complex numbers")
    return x.real if isinstance(x, mpmath.mpc) else x


def _rounded(node: Node, context: Context) -> Number:
    x = _real(evaluate(node.args[0], context))
    if isinstance(x, Fraction):
        return Fraction(math.floor(x) if node.op == "floor" else math.ceil(x))
    if abs(x) > 10**30:
        raise OverLimit("the integer part of a number over 10^30")
    near = mpmath.nint(x)
    # A value within rounding error of an integer is that integer.
    if context.settled(x - near, max(mpmath.mag(x), 0)):
        near = mpmath.floor(x) if node.op == "floor" else mpmath.ceil(x)
    return Fraction(int(near))


def _integers(numbers: list[Number], name: str) -> list[int]:
    if not all(isinstance(x, Fraction) and x.denominator == 1 for x in numbers):
        raise Undefined(f"{name} of a number that is not an integer")
    return [x.numerator for x in numbers if isinstance(x, Fraction)]


_MPMATH = "sin cos tan cot sec csc sinh cosh tanh coth exp arg"
_PERIODIC = ("sin", "cos", "tan", "cot", "sec", "csc")
_DIRECT = {name: getattr(mpmath, name) for name in _MPMATH.split()}
_DIRECT |= {f"arc{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan", "cot")}


def _call(node: Node, context: Context) -> Number:
    args = [evaluate(a, context) for a in node.args]
    if node.name in ("max", "min"):
        return {"max": max, "min": min}[node.name](map(_real, args), key=to_mp)
    if node.name in ("gcd", "lcm"):
        return _checked(Fraction(getattr(math, node.name)(*_integers(args, node.name))))
    if node.name == "mod":
        a, b = _integers(args, "a remainder")
        if b == 0:
            raise Undefined("a remainder modulo 0")
        return Fraction(a % b)
    if node.name == "binom":
        return _binomial(*_integers(args, "a binomial"))
    if node.name in ("log", "ln", "logbase"):
        return _logarithm(node.name, args, context)
    x = context.real(args[0])
    if abs(x) > 10**12:
        raise OverLimit(f"{node.name} of a number over 10^12")
    try:
        value = _DIRECT[node.name](x)
    except (ValueError, ZeroDivisionError) as e:
        raise Undefined(f"{node.name}: {e}") from None
    if x == 0 or value == 0:
        return value or Fraction(0)
    size = mpmath.mag(x)
    if node.name in _PERIODIC:
        # Their error is absolute: sin(pi) is about 1e-41, and 1/cos(pi/2) has no value.
        if not context.settled(1 / value, size):
            raise Undefined(f"{node.name} at its pole")
        value = context.settled(value, size)
    context.argument(size)
    return value


def _logarithm(name: str, args: list[Number], context: Context) -> Number:
    base = args[1] if name == "logbase" else context.log_base if name == "log" else None
    if args[0] == 0 or base in (0, 1):
        raise Undefined("a logarithm of 0 or to base 0 or 1")
    value = context.settled(mpmath.log(context.real(args[0])), 0)
    if base is None or value == 0:
        return value
    value /= mpmath.log(context.real(base))
    if isinstance(base, Fraction) and isinstance(args[0], Fraction) and base > 0:
        near = int(mpmath.nint(value.real))
        if near and _bits(base) * abs(near) < MAX_BITS and base**near == args[0]:
            return Fraction(near)  # exact
    return value


def _binomial(n: int, k: int) -> Fraction:
    if k < 0 or n < 0:
        raise Undefined("a binomial of a negative number")
    k = min(k, n - k)
    if k > MAX_FACTORIAL or (k > 0 and k * n.bit_length() > 4 * MAX_BITS):
        raise OverLimit(f"a binomial of {n.bit_length()} bits over {k}")
    return Fraction(0) if k < 0 else _checked(Fraction(math.comb(n, k)))


_HANDLERS = {
    "num": lambda n, c: n.value,
    "sym": lambda n, c: c.values[n.name],
    "pi": lambda n, c: +mp.pi,
    "e": lambda n, c: +mp.e,
    "imaginary": lambda n, c: mpmath.mpc(0, 1),
    "add": _sum,
    "mul": _product,
    "div": lambda n, c: _product(Node("mul", (n.args[0], Node("inv", n.args[1:]))), c),
    "inv": _inverse,
    "neg": lambda n, c: -evaluate(n.args[0], c),
    "pow": _power_node,
    "root": _root_node,
    "abs": lambda n, c: abs(evaluate(n.args[0], c)),
    "percent": lambda n, c: evaluate(n.args[0], c) / 100,
    "fact": _factorial,
    "double": _factorial,
    "gamma": _factorial,
    "floor": _rounded,
    "ceil": _rounded,
    "call": _call,
}
