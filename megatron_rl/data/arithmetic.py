r"""Integer expressions with precedence: tasks that a model of 0.3M parameters learns on a CPU.

Question `5+7+5*8=?`; a right completion is
`5*8=40;5+7=12;12+40=52</think>\boxed{52}<eos>`: one operation at a time, then the answer.
Operands are 1 to 9 (2 to 9 in a product, at most one product), every intermediate is in 0..50.

In words, for a model with a chat template: `What is five plus seven plus five times eight? Put the
final answer in \boxed{}.`, and `5*8=40; 5+7=12; 12+40=52. \boxed{52}`.
"""

import random
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from megatron_rl.config import ArithmeticTask
from megatron_rl.data.prompt_format import TINY
from megatron_rl.data.question import BOX_INSTRUCTION, Question

OPERATORS = ("+", "-", "*")
OPERATOR_WEIGHTS = (0.4, 0.3, 0.3)
WORDS: dict[str | int, str] = {
    **dict(zip(OPERATORS, ("plus", "minus", "times"), strict=True)),
    **dict(enumerate("one two three four five six seven eight nine".split(), 1)),  # noqa: SIM905
}
LARGEST_INTERMEDIATE = 50

# Rates of the faults in demonstrations, so that RL has something to improve.
WRONG_STEP = 0.15
LEFT_TO_RIGHT = 0.5
DROP_LAST_OPERATION = 0.25
GUESS_AFTER_PREFIX = 0.4
REDO_WORK = 0.05


@dataclass(frozen=True, slots=True)
class ArithmeticProblem:
    """An expression. Example: `ArithmeticProblem((5, 7, 5, 8), ("+", "+", "*"))` is 5+7+5*8."""

    operands: tuple[int, ...]
    operators: tuple[str, ...]

    def question(self, in_words: bool) -> str:
        """Return the text of the question, or a sentence with the form of the answer."""
        pairs = zip(self.operands, (*self.operators, ""), strict=True)
        *parts, _ = [x for pair in pairs for x in pair]
        if in_words:
            return f"What is {' '.join(WORDS[x] for x in parts)}? {BOX_INSTRUCTION}"
        return "".join(map(str, parts)) + "=?"


def make_split(
    task: ArithmeticTask, seed: int
) -> tuple[list[ArithmeticProblem], list[ArithmeticProblem]]:
    """Make training problems and held-out ones, which are all different.

    The result depends on sizes and seed only. Both lists have the same shares of lengths. Training
    problems may repeat: there are only some 150 different expressions of two operands.
    """
    rng = random.Random(f"arithmetic split {seed}")
    heldout: dict[ArithmeticProblem, None] = {}
    edges = list(accumulate(task.operand_weights))
    while len(heldout) < task.heldout_prompts:
        position = (len(heldout) + 0.5) / task.heldout_prompts
        operands = 2 + bisect_left(edges, position * edges[-1])  # shares are exact, not drawn
        heldout.setdefault(_draw(rng, task, operands))
    train = [_draw_outside(heldout, rng, task) for _ in range(task.train_prompts)]
    return train, list(heldout)


def questions(task: ArithmeticTask, problems: Iterable[ArithmeticProblem]) -> list[Question]:
    """Convert problems to questions, numbered from 0."""
    kind = "math" if task.in_words else "exact"
    return [
        Question(str(i), kind, p.question(task.in_words), str(_solve(p)[-1][3]))
        for i, p in enumerate(problems)
    ]


def demonstrations(
    task: ArithmeticTask, seed: int, count: int, per_problem: int, thinking: int
) -> Iterator[tuple[str, str]]:
    """Make noisy demonstrations for the supervised stage, as (prompt, completion) texts.

    There are `per_problem` of each of `count` problems, none of them held out. A thinking part over
    `thinking` [tokens] is truncated as by an interruption. Those in words are (question, response),
    without a model's markers.
    """
    heldout = set(make_split(task, seed)[1])
    rng = random.Random(f"arithmetic demonstrations {seed}")
    for _ in range(count):
        problem = _draw_outside(heldout, rng, task)
        question = problem.question(task.in_words)
        for _ in range(per_problem):
            body, answer = _demonstration(rng, problem)
            if task.in_words:
                yield question, "; ".join(body) + ". " * bool(body) + f"\\boxed{{{answer}}}"
            else:
                text = ";".join(body)[:thinking]
                yield TINY(question), f"{text}</think>\\boxed{{{answer}}}<eos>"


def _demonstration(rng: random.Random, problem: ArithmeticProblem) -> tuple[list[str], int]:
    """Return the operations that are written down, and the answer."""
    steps = _solve(problem, precedence=rng.random() >= LEFT_TO_RIGHT, slip=rng)
    style = rng.random()
    body = [f"{a}{op}{b}={c}" for a, op, b, c in steps]
    answer = steps[-1][3]
    if len(body) > 1 and rng.random() < DROP_LAST_OPERATION:
        body, answer = body[:-1], steps[-2][3]
    if style < GUESS_AFTER_PREFIX:
        body = body[: rng.randint(0, len(body) - 1)]
    elif style < GUESS_AFTER_PREFIX + REDO_WORK:
        body = body + body
    return body, answer


def _draw_outside(
    excluded: Container[ArithmeticProblem], rng: random.Random, task: ArithmeticTask
) -> ArithmeticProblem:
    lengths = range(2, 2 + len(task.operand_weights))
    while (problem := _draw(rng, task, rng.choices(lengths, task.operand_weights)[0])) in excluded:
        pass
    return problem


def _draw(rng: random.Random, task: ArithmeticTask, operands: int) -> ArithmeticProblem:
    allowed = {"some": (0, 1), "none": (0,), "one": (1,)}[task.products]
    while True:
        operators = tuple(rng.choices(OPERATORS, OPERATOR_WEIGHTS, k=operands - 1))
        if operators.count("*") not in allowed:
            continue
        factors = {i for i, op in enumerate(operators) if op == "*"}
        factors |= {i + 1 for i in factors}
        numbers = tuple(rng.randint(2 if i in factors else 1, 9) for i in range(operands))
        problem = ArithmeticProblem(numbers, operators)
        if all(0 <= c <= LARGEST_INTERMEDIATE for *_, c in _solve(problem)):
            return problem


def _solve(
    problem: ArithmeticProblem, precedence: bool = True, slip: random.Random | None = None
) -> list[tuple[int, str, int, int]]:
    """Return the operations in order as (left, operator, right, result); `slip` adds errors."""
    numbers, operators, steps = list(problem.operands), list(problem.operators), []
    while operators:
        i = operators.index("*") if precedence and "*" in operators else 0
        a, op, b = numbers[i], operators[i], numbers[i + 1]
        c = {"+": a + b, "-": a - b, "*": a * b}[op]
        if slip is not None:
            if slip.random() < WRONG_STEP:
                c += slip.choice((-10, 10, -1, 1, -2, 2))
            c = c % 100 if c > 99 else max(c, 0)
        steps.append((a, op, b, c))
        numbers[i : i + 2] = [c]
        del operators[i]
    return steps
