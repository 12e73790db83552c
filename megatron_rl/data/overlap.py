"""Detection of questions that share text: n-grams of words.

Words are runs of letters and numbers in lower case, each with the signs before it (`x+1` is `x` and
`+1`), so spaces, punctuation and LaTeX's delimiters do not matter. Scripts without spaces between
words (Chinese, Japanese, Thai ...) have a word for each character. Two questions overlap when at
least a given share of the distinct n-grams of either one is in the other: then one is the other
with words before or after it. Questions too short for an n-gram overlap when their words are the
same.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable

from megatron_rl.data.published import load_benchmark

_CHARACTERS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\U00020000-\U0003ffff"
)
_SIGN = r"[^\w\s$\\.,;:?\"`&~#、。]"
_NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?"
_LETTERS = rf"[{_CHARACTERS}]|[^\W\d_{_CHARACTERS}]+"
_WORD = re.compile(rf"(?:{_SIGN}\s*)*(?:{_NUMBER}|{_LETTERS})|{_SIGN}")
_DECORATION = re.compile(r"\\(?:left|right)(?![a-z])|\\[!,;: ]|\{\s*(\w+)\s*\}")
_SPELLINGS = str.maketrans({"−": "-", "’": "'", "²": "^2", "³": "^3"})


def words(text: str) -> tuple[str, ...]:
    r"""Return the words of a text.

    Example: `Let $x^2 = 4$. Find \textbf{x}.` gives let, x, ^2, =4, find, textbf, x.
    """
    text = unicodedata.normalize("NFKC", text.translate(_SPELLINGS)).casefold()
    parts = _WORD.findall(_DECORATION.sub(r" \1 ", text))
    return tuple("".join(part.replace(",", "").split()) for part in parts)


class Overlap:
    """An index over questions by n-grams of `size` words.

    Two questions overlap from a `share` of the n-grams of the shorter one on.
    """

    def __init__(self, size: int = 8, share: float = 0.5) -> None:
        self.size, self.share = size, share
        self._questions: list[tuple[str, int]] = []  # (name, number of n-grams)
        self._holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)

    def add(self, name: str, text: str) -> None:
        """Add a question under a name."""
        grams = self._grams(text)
        for gram in grams:
            self._holders[gram].append(len(self._questions))
        self._questions.append((name, len(grams)))

    def add_benchmarks(self, against: Iterable[str]) -> None:
        """Add evaluation sets (`data.published.load_benchmark`).

        Raises `DataError`, with the remedy, if one is unknown or cannot be loaded.
        """
        for entry in against:
            for question in load_benchmark(entry):
                self.add(f"{entry.partition('=')[0]}/{question.id}", question.prompt)

    def find(self, text: str) -> str | None:
        """Return the name of the question with the largest overlap, or None."""
        grams = self._grams(text)
        shared = Counter(i for gram in grams for i in self._holders.get(gram, ()))
        ratios = ((n / min(self._questions[i][1], len(grams)), -i) for i, n in shared.items())
        ratio, index = max(ratios, default=(0.0, 0))
        return self._questions[-index][0] if shared and ratio >= self.share else None

    def _grams(self, text: str) -> set[tuple[str, ...]]:
        sequence = words(text)
        if len(sequence) <= self.size:
            # The marker "" keeps a short question apart from the n-grams of longer ones.
            return {("", *sequence)} if sequence else set()
        return {sequence[i : i + self.size] for i in range(len(sequence) - self.size + 1)}
