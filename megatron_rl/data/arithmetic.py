r"""Integer expressions with precedence: tasks that a model of 0.3M parameters learns on a CPU.

Question `5+7+5*8=?`; a right completion is
`5*8=40;5+7=12;12+40=52</think>\boxed{52}<eos>`: one operation at a time, then the answer.
Operands are 1 to 9 (2 to 9 in a product, at most one product), every intermediate is in 0..50.
"""

import random
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from megatron_rl.config import ArithmeticTask
from megatron_rl.data.prompt_format import TINY
from megatron_rl.data.question import Question

OPERATORS = ("+", "-", "*")
OPERATOR_WEIGHTS = (0.4, 0.3, 0.3)
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

    @property
    def question(self) -> str:
        """Text of the question."""
        pairs = zip(self.operands, (*self.operators, ""), strict=True)
        return "".join(f"{x}{o}" for x, o in pairs) + "=?"

    @property
    def answer(self) -> int:
        """Value of the expression."""
        return _solve(self)[-1][3]


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


def questions(problems: Iterable[ArithmeticProblem]) -> list[Question]:
    """Convert problems to questions, numbered from 0."""
    return [Question(str(i), "exact", p.question, str(p.answer)) for i, p in enumerate(problems)]


def demonstrations(
    task: ArithmeticTask, seed: int, count: int, per_problem: int, thinking: int
) -> Iterator[tuple[str, str]]:
    """Make noisy demonstrations for the supervised stage, as (prompt, completion) texts.

    There are `per_problem` of each of `count` problems, none of them held out. A thinking part over
    `thinking` [tokens] is truncated as by an interruption.
    """
    heldout = set(make_split(task, seed)[1])
    rng = random.Random(f"arithmetic demonstrations {seed}")
    for _ in range(count):
        problem = _draw_outside(heldout, rng, task)
        for _ in range(per_problem):
            yield TINY(problem.question), _demonstration(rng, problem, thinking)


def _demonstration(rng: random.Random, problem: ArithmeticProblem, thinking: int) -> str:
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
    return ";".join(body)[:thinking] + f"</think>\\boxed{{{answer}}}<eos>"


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
