r"""One spelling for equal texts: unicode, spacing, `\left`, `\dfrac`, plain `pi/2`."""

import re
from itertools import batched

from megatron_rl.rewards.math.node import FUNCTIONS

_SYMBOLS = r"""
≤ \le ⩽ \le ≥ \ge ⩾ \ge ≠ \ne ≈ \approx ≡ \equiv ± \pm ∓ \mp × \times ✕ \times · \cdot ⋅ \cdot
∙ \cdot ÷ / ∞ \infty ∪ \cup ∩ \cap ∈ \in ∅ \emptyset ∀ \forall ∃ \exists √ \sqrt … \ldots ⋯ \ldots
ℝ \mathbb{R} ℤ \mathbb{Z} ℕ \mathbb{N} ℚ \mathbb{Q} ℂ \mathbb{C}
½ \frac{1}{2} ⅓ \frac{1}{3} ⅔ \frac{2}{3} ¼ \frac{1}{4} ¾ \frac{3}{4} ⅛ \frac{1}{8}
′ ' ％ \% ， , （ ( ） ) ： :
α \alpha β \beta γ \gamma δ \delta ε \epsilon θ \theta λ \lambda μ \mu ν \nu ξ \xi π \pi ρ \rho
σ \sigma τ \tau φ \phi χ \chi ψ \psi ω \omega Δ \Delta Γ \Gamma Θ \Theta Λ \Lambda Σ \Sigma Φ \Phi
Ψ \Psi Ω \Omega
"""
_UNICODE = {
    **dict.fromkeys("−–—‒﹣-", "-"),
    **dict.fromkeys("\xa0\u2009\u202f\u200b\u2002\u2003\u3000\t\n\r", " "),
    "∛": "\\sqrt[3] ",
    "°": "^\\circ ",
    **dict(zip("０１２３４５６７８９", "0123456789", strict=True)),
    # A command that ends in a letter needs a space.
    **{k: f"{v} " if v[-1].isalpha() else v for k, v in batched(_SYMBOLS.split(), 2)},
}
_TABLE = str.maketrans(_UNICODE)
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
_SUBSCRIPT = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

_SPELLINGS = """
frac dfrac tfrac cfrac; binom dbinom tbinom choose
le leq leqslant leqq; ge geq geqslant geqq; ne neq
ldots dots cdots dotsc dotsb dotsm hdots; times ast cdot bullet
emptyset varnothing; vert lvert rvert mid; circ degree degrees; cup bigcup; cap bigcap
phi varphi; epsilon varepsilon; theta vartheta; wedge land; vee lor; infty infin
{ lbrace; } rbrace; [ lbrack; ] rbrack; ( lparen; ) rparen; < lt; > gt; : colon
"""
"""Groups of a command and its other names."""
_GROUPS = [group.split() for group in re.split(r"[;\n]", _SPELLINGS.strip())]
_RENAMES = {name: first for first, *names in _GROUPS for name in names}
_DROPPED_NAMES = """
left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle displaystyle
textstyle scriptstyle limits nolimits quad qquad thinspace medspace thickspace enspace
negthinspace nobreakspace hspace boxed fbox bm boldsymbol mathbf mathit mathsf mathcal
mathrel mathord bf it rm ensuremath phantom vphantom hphantom
"""
_DROPPED = frozenset(_DROPPED_NAMES.split())
_TEXT_COMMANDS = (
    r"text|textrm|textbf|textit|textnormal|textsf|textup|mathrm|operatorname\*?|mbox|hbox|emph"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
# A line break \\ separates the rows of a matrix; at the end it is dropped.
_SPACES = re.compile(r"(\\\\)(?!\s*$)|\\[,;:! ]|~|\\\\|\s+")
_STYLE = re.compile(r"\\(?:hspace|vspace|phantom|hphantom|vphantom)\*?\{[^{}]*\}")
_E_ROMAN = re.compile(
    rf"\\(?:{_TEXT_COMMANDS})\s*\{{\s*([eidx])\s*\}}|\\(?:mathrm|rm)\s+([eid])(?![A-Za-z])"
)
_NAMED = re.compile(rf"\\(?:{_TEXT_COMMANDS})\s*\{{\s*({'|'.join(FUNCTIONS)})\s*\}}")
_PLAIN_FUNCTIONS = re.compile(
    r"(?<![A-Za-z\\])(arcsin|arccos|arctan|asin|acos|atan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc"
    # "5 min" is a time, min(2, 3) is a function.
    r"|ln|log|exp|(?:gcd|lcm|max|min)(?=\s*\())(?![A-Za-z])"
)
_PLAIN_WORDS = re.compile(
    r"(?<![A-Za-z\\])(pi|infinity|infty|oo|inf|theta|alpha|beta|gamma|lambda|omega|phi|sigma)(?![A-Za-z])"
)
_PLAIN_NAMES = {"infinity": "infty", "oo": "infty", "inf": "infty"}
_ASIN = {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}


def clean(text: str) -> str:
    r"""Return LaTeX in the one spelling that the parser accepts.

    Example: `\left( \dfrac{1}{2},\, 3 \right)` becomes `( \frac {1}{2}, 3 )` up to spaces.
    """
    text = _SUPERSCRIPT.sub(lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _SUBSCRIPT.sub(lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)
    text = text.translate(_TABLE)
    text = text.replace("\\not=", "\\ne ").replace("\\not =", "\\ne ")
    text = text if "\\$" in text else text.replace("$", "")
    text = text.replace("\\!", "")
    text = _STYLE.sub(" ", text)
    text = _E_ROMAN.sub(lambda m: f" {m[1] or m[2]} ", text)
    text = _NAMED.sub(lambda m: f"\\{m[1]} ", text)
    text = _COMMAND.sub(_rename, text)
    return _SPACES.sub(lambda m: m[1] or " ", text).strip()


def _rename(match: re.Match[str]) -> str:
    name = match[1]
    if name in _DROPPED:
        return " "
    new = _RENAMES.get(name, name)
    return new if new in "<>:[]()" else f"\\{new}"


def plain_to_latex(text: str) -> str:
    r"""Translate plain-text mathematics to LaTeX: `sqrt(2)*pi/2`, `x**2`, `>=`.

    LaTeX and the words in `\text{...}` remain as they are.
    """
    parts = _ANY_TEXT.split(text)
    return "".join(p if i % 2 else _plain_part(p) for i, p in enumerate(parts))


def _plain_part(text: str) -> str:
    text = text.replace("**", "^").replace(">=", "\\ge ").replace("<=", "\\le ")
    text = text.replace("!=", "\\ne ") if not re.search(r"[\d)]!=", text) else text
    text = text.replace("==", "=").replace("...", "\\ldots ").replace("*", "\\times ")
    text = re.sub(r"(?<![A-Za-z\\])sqrt", r"\\sqrt ", text)
    text = re.sub(r"(?<![A-Za-z\\])cbrt", r"\\sqrt[3] ", text)
    text = _PLAIN_FUNCTIONS.sub(lambda m: f"\\{_ASIN.get(m[1], m[1])} ", text)
    text = _PLAIN_WORDS.sub(lambda m: f"\\{_PLAIN_NAMES.get(m[1], m[1])} ", text)
    return re.sub(r"(?<![A-Za-z\\])[Uu]nion(?![A-Za-z])", r"\\cup ", text)


_ANY_TEXT = re.compile(rf"(\\(?:{_TEXT_COMMANDS})\s*\{{[^{{}}]*\}})")
_TEXT = re.compile(rf"\\(?:{_TEXT_COMMANDS})\s*(?:\{{([^{{}}]*)\}}|(?=\s))")


def untext(text: str) -> str:
    r"""Replace `\text{...}` by its words, with a space on both sides."""
    return _TEXT.sub(lambda m: f" {m[1] or ''} ", text)


def text_form(text: str) -> str:
    r"""Return a form in which two spellings of the same text are equal: no spaces, no `\text`.

    Example: `1, 2,\ldots ,n` and `1,2,\ldots,n` both become `1,2,\ldots,n`.
    """
    text = untext(text).replace("\\{", "⦃").replace("\\}", "⦄")
    # Braces around one character and spaces have no meaning.
    text = re.sub(r"\{\s*([^{}\\\s])\s*\}", r"\1", text)
    text = re.sub(r"\\(times|cdot)(?![A-Za-z])", "*", text)
    return re.sub(r"\s+", "", text).rstrip(".")
