"""Which questions share text with others: n-grams of words, against whole evaluation sets.

Words are runs of letters and digits in lower case, so LaTeX's signs, spaces and case don't matter.
Two questions overlap when at least a share of the distinct n-grams of either one is in the other:
then one is the other with words before or after it. Questions too short for an n-gram overlap when
their words are the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_WORD = re.compile(r"[^\W_]+")


def words(text: str) -> tuple[str, ...]:
    r"""Example: `Let $x^2 = 4$. Find \textbf{x}.` gives let, x, 2, 4, find, textbf, x."""
    return tuple(_WORD.findall(text.casefold()))


class Overlap:
    """An index over questions.

    Args:
        size: words of an n-gram.
        share: of the n-grams of the shorter question, from which on two questions overlap.
    """

    def __init__(self, size: int, share: float) -> None:
        self.size, self.share = size, share
        self._names: list[str] = []
        self._counts: list[int] = []
        self._holders: dict[tuple[str, ...], list[int]] = {}

    def add(self, name: str, text: str) -> None:
        """Add a question under a name."""
        grams = self._grams(text)
        for gram in grams:
            self._holders.setdefault(gram, []).append(len(self._names))
        self._names.append(name)
        self._counts.append(len(grams))

    def extend(self, questions: Iterable[tuple[str, str]]) -> None:
        """Add several (name, text)."""
        for name, text in questions:
            self.add(name, text)

    def find(self, text: str) -> str | None:
        """Name of the question that a text overlaps with most; None without one."""
        grams = self._grams(text)
        shared: Counter[int] = Counter()
        for gram in grams:
            shared.update(self._holders.get(gram, ()))
        best = max(
            ((n / min(self._counts[i], len(grams)), -i) for i, n in shared.items()),
            default=None,
        )
        return None if best is None or best[0] < self.share else self._names[-best[1]]

    def _grams(self, text: str) -> set[tuple[str, ...]]:
        found = words(text)
        if len(found) <= self.size:
            # Marked by its length, so that a short question is no n-gram of a longer one.
            return {("", *found)} if found else set()
        return {found[i : i + self.size] for i in range(len(found) - self.size + 1)}
