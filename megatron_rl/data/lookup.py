r"""Chains of lookups in a table that only a tool knows: tasks that a tiny model solves over turns.

Question `2;4733?`: look 4733 up, then what was found, and so on, twice in all. The table maps each
key of four digits to another by a hash, so that no one needs to store it and guessing is hopeless.
A right rollout, with the turns of the policy in lines of their own:

    <bos>2;4733?
    <tool_call>{"name": "lookup", "arguments": {"key": "4733"}}</tool_call><eos>
    <tool_response>6550</tool_response>
    <tool_call>{"name": "lookup", "arguments": {"key": "6550"}}</tool_call><eos>
    <tool_response>2142</tool_response>
    \boxed{2142}<eos>

Digits are always copied over the same distance, four digits and a marker.
"""

import hashlib
import random
from collections.abc import Iterator
from itertools import product

from megatron_rl.config import ConfigError, LookupTask
from megatron_rl.data.prompt_format import BOS, CALL, CALL_END, EOS, RESPONSE, RESPONSE_END
from megatron_rl.data.question import Question

KEYS = range(1000, 10000)

# Rates of the faults in demonstrations, so that RL has something to improve.
ANSWER_AT_ONCE = 0.6
STOP_EARLY = 0.25  # before each further lookup


def lookup(key: str) -> str:
    """Look a key up in the table.

    Args:
        key: The key, four digits.

    Returns:
        The number at the key, four digits, which is a key too.
    """
    digest = hashlib.blake2b(f"lookup {key}".encode(), digest_size=8).digest()
    return str(KEYS[int.from_bytes(digest) % len(KEYS)])


def make_split(task: LookupTask, seed: int) -> tuple[list[Question], list[Question]]:
    """Make training questions and held-out ones, which are all different, numbered from 0.

    The result depends on sizes and seed only.

    Raises:
        ConfigError: there are not as many questions.
    """
    pool = list(product(range(task.hops[0], task.hops[1] + 1), KEYS))
    size = task.heldout_prompts + task.train_prompts
    if size > len(pool):
        raise ConfigError(
            f"a task of kind lookup with hops = {list(task.hops)} has {len(pool)} questions, and"
            f" train_prompts + heldout_prompts = {size}: lower them"
        )
    drawn = random.Random(f"lookup split {seed}").sample(pool, size)
    return _questions(drawn[task.heldout_prompts :]), _questions(drawn[: task.heldout_prompts])


def demonstrations(task: LookupTask, seed: int, count: int, each: int) -> Iterator[tuple[str, str]]:
    """Make demonstrations for the supervised stage, as (prompt, completion) texts.

    There are `each` of each of `count` questions, none of them held out. Every turn is a completion
    of its own after the turns before it. Many demonstrations answer before they have looked up all,
    with the last number that they know.
    """
    rng = random.Random(f"lookup demonstrations {seed}")
    questions = make_split(task, seed)[0]
    for question in rng.choices(questions, k=count):
        hops, key = question.prompt.rstrip("?").split(";")
        for _ in range(each):
            text, known = BOS + question.prompt, key
            for done in range(int(hops)):
                if rng.random() < (STOP_EARLY if done else ANSWER_AT_ONCE):
                    break
                call = f"{CALL}{known}{CALL_END}{EOS}"
                yield text, call
                known = lookup(known)
                text += f"{call}{RESPONSE}{known}{RESPONSE_END}"
            yield text, f"\\boxed{{{known}}}{EOS}"


def _questions(drawn: list[tuple[int, int]]) -> list[Question]:
    questions = []
    for i, (hops, key) in enumerate(drawn):
        answer = str(key)
        for _ in range(hops):
            answer = lookup(answer)
        question = Question(str(i), "math", f"{hops};{key}?", answer, {"ended_thinking": False})
        questions.append(question)
    return questions
