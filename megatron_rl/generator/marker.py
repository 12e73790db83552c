"""Where thinking ends among the tokens of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BLOCK = 64
"""Tokens that are decoded at a time."""


class EndMarker:
    """The end-of-thinking marker under a tokenizer.

    Vocabularies made for thinking have it as one token. Elsewhere it is several, and a model may
    spell it in more than one way (Llama 3: `</`, `think`, `>`, but also `.</`, ...), so it is
    looked for in the text.

    Args:
        text: marker, such as `</think>`.
        tokenizer: of Hugging Face's interface.
    """

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.text, self._tokenizer = text, tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False)
        self._token = ids[0] if len(ids) == 1 else None

    def end(self, token_ids: Sequence[int]) -> int:
        """Number of tokens up to the end of the first marker; -1 if there is none.

        Example: `</`, `think`, `>\n`, `4`: 3.
        """
        if self._token is not None:
            return token_ids.index(self._token) + 1 if self._token in token_ids else -1
        for start in range(0, len(token_ids), BLOCK):
            # A marker that began before this block has at least a character in each token.
            first, last = max(0, start - len(self.text)), min(start + BLOCK, len(token_ids))
            if self._within(token_ids[first:last]):
                return next(
                    n for n in range(start + 1, last + 1) if self._within(token_ids[first:n])
                )
        return -1

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens end with the marker."""
        if self._token is not None and token_ids[-1] != self._token:
            return False
        return self._decoded(token_ids).endswith(self.text)

    def _within(self, token_ids: Sequence[int]) -> bool:
        return self.text in self._decoded(token_ids)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
