"""The examples of the supervised stage: rows of prompt and response as token ids, step by step.

Rows are streamed. The next one is drawn from a window of `sft.shuffle_rows`, so the order depends
on seed, epoch, window and rows only, and memory does not grow with the source. A `Position` in
this order is all that a checkpoint keeps.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import batched, islice
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from megatron_rl.config import TINY_MODELS, ArithmeticTask, ConfigError, DataSetTask, RunConfig
from megatron_rl.data.overlap import Overlap
from megatron_rl.data.prompt_format import PromptFormat, Turn, read_format
from megatron_rl.data.prompts import demonstrations, load_split
from megatron_rl.data.question import DataError
from megatron_rl.data.tables import Fields, Source, make_conversation, read_rows

Example = tuple[list[int], list[int]]  # (prompt, completion) as token ids
Row = tuple[list[Turn], str]  # (turns before the response, response)
ENCODED_ROWS = 64  # rows that the tokenizer's threads encode at once


@dataclass(frozen=True, slots=True)
class Position:
    """Place in the order of rows, after those that were taken."""

    epoch: int = 0
    rows: int = 0  # rows taken in this epoch
    digest: str = ""  # hash of these rows: a resumed stage rejects changed data
    dropped: dict[str, int] = field(default_factory=dict)  # in all epochs, by reason

    def after(self, row: Row, reason: str = "") -> Self:
        """Return the position after one more row, dropped if there is a reason."""
        text = (self.digest + json.dumps(row)).encode()
        dropped = dict(Counter(self.dropped) + Counter([reason] if reason else []))
        digest = hashlib.blake2b(text, digest_size=16).hexdigest()
        return replace(self, rows=self.rows + 1, digest=digest, dropped=dropped)


class Examples:
    """The rows of `config.sft`, or else demonstrations of the tasks, for one model.

    Args:
        config: `sft`, `seed`, `tasks` and `generation.think_start` count.
        directory: Hugging Face model, for tokenizer and chat template.

    Raises:
        ConfigError: no source, and a model that does not learn from demonstrations.
        DataError: held-out questions cannot be read, or the tokenizer has no end of a response.
    """

    def __init__(self, config: RunConfig, directory: Path) -> None:
        self.config, self.source = config, config.sft.source
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        # Demonstrations of a tiny model have all markers.
        self._form, self._heldout = PromptFormat(bos="", think_start=""), Overlap()
        self._generated: set[str] = set()
        in_words = all(isinstance(t, ArithmeticTask) and t.in_words for t in config.tasks.values())
        if self.source is None and not in_words:
            if config.model not in TINY_MODELS:
                raise ConfigError(
                    f"sft.source is missing: model = {config.model!r} learns from rows of prompt"
                    " and response; only arithmetic tasks with in_words have demonstrations for it"
                )
            return
        self._form = read_format(directory, config.generation.think_start)
        if not self._form.eos:
            raise DataError(f"{directory}/tokenizer_config.json has no eos_token to end a response")
        self._heldout.add_benchmarks(config.sft.against)
        for name, task in config.tasks.items():
            for question in load_split(task, config.seed_of(name))[1]:
                if isinstance(task, DataSetTask):
                    self._heldout.add(f"{name}/{question.id}", question.prompt)
                else:  # expressions differ in more than their words
                    self._generated.add(question.prompt)

    def check(self) -> str:
        """Read every row once; return a line about them.

        Raises:
            DataError: a broken row or one without response, by file and line, or no row is left.
        """
        overlapping = [self._overlaps(row) for row in self._rows()]
        line = (
            f"{self.source or 'demonstrations'}: {len(overlapping)} rows, {sum(overlapping)} of"
            " them dropped, as they overlap with held-out questions"
        )
        if all(overlapping):
            raise DataError(f"no row to train on in {line}")
        return line

    def steps(self, start: Position) -> Iterator[tuple[list[Example], Position]]:
        """Yield the examples of every step after `start`, and the position after them, forever.

        A step has as many rows as fit into `sft.tokens_per_step`, at least one.

        Raises:
            DataError: other rows than before `start`, a broken row, or all of them too long.
        """
        examples: list[Example] = []
        size, last = 0, start
        for example, position in self._examples(start):
            tokens = sum(map(len, example))
            if examples and size + tokens > self.config.sft.tokens_per_step:
                yield examples, last
                examples, size = [], 0
            examples.append(example)
            size, last = size + tokens, position

    def _examples(self, start: Position) -> Iterator[tuple[Example, Position]]:
        limit = self.config.sft.max_sequence_tokens
        position, rows = Position(start.epoch, dropped=start.dropped), self._shuffled(start.epoch)
        for row in islice(rows, start.rows):
            position = position.after(row)
        if position != start:
            raise DataError(
                f"{self.source}: its rows, sft.shuffle_rows or the seed are not those of the"
                " checkpoint: resume with the same, or start again without --resume"
            )
        kept = start.rows
        while True:
            for chunk in batched(rows, ENCODED_ROWS):
                for row, example in zip(chunk, self._encode(chunk), strict=True):
                    long = sum(map(len, example)) > limit
                    reason = "long" if long else "overlapping" * self._overlaps(row)
                    position = position.after(row, reason)
                    if not reason:
                        kept += 1
                        yield example, position
            if not kept:
                raise DataError(
                    f"{self.source}: no row is within sft.max_sequence_tokens = {limit}; dropped"
                    f" were {position.dropped}"
                )
            position, kept = Position(position.epoch + 1, dropped=position.dropped), 0
            rows = self._shuffled(position.epoch)

    def _encode(self, rows: tuple[Row, ...]) -> Iterator[Example]:
        prompts = [self._form(turns) for turns, _ in rows]
        completions = [self._form.completion(p, r[1]) for p, r in zip(prompts, rows, strict=True)]
        encoded = self._tokenizer.encode_batch(prompts + completions, add_special_tokens=False)
        ids = [encoding.ids for encoding in encoded]
        return zip(ids[: len(rows)], ids[len(rows) :], strict=True)

    def _overlaps(self, row: Row) -> bool:
        text = "\n".join(turn["content"] for turn in row[0] if turn["role"] == "user")
        return text in self._generated or self._heldout.find(text) is not None

    def _shuffled(self, epoch: int) -> Iterator[Row]:
        rng, window = random.Random(f"supervised order {self.config.seed} {epoch}"), []
        for row in self._rows():
            window.append(row)
            if len(window) > self.config.sft.shuffle_rows:
                i = rng.randrange(len(window))
                window[i], window[-1] = window[-1], window[i]
                yield window.pop()
        rng.shuffle(window)
        yield from window

    def _rows(self) -> Iterator[Row]:
        s = self.config.sft
        if s.source is None:
            for prompt, completion in demonstrations(self.config):
                yield [{"role": "user", "content": prompt}], completion
            return
        fields = Fields(prompt=s.prompt_field, response=s.response_field)
        for row in read_rows(Source(s.source, s.subset, s.split, s.revision)):
            try:
                yield make_conversation(row, fields)
            except DataError as e:
                raise DataError(f"{self.source}: {row.file}:{row.line}: {e}") from None
