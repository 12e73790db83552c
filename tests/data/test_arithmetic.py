from collections import Counter
from itertools import islice

import pytest

from megatron_rl.config import ArithmeticTask, RunConfig
from megatron_rl.data import load_prompts
from megatron_rl.data.arithmetic import ArithmeticProblem, demonstrations, make_split, questions
from megatron_rl.data.prompt_format import TINY, TOKENS, save_tiny_tokenizer
from megatron_rl.rewards import Outcome, verify_exact

TASK = ArithmeticTask(train_prompts=500, heldout_prompts=100)


def test_precedence_is_respected():
    (question,) = questions(TASK, [ArithmeticProblem((5, 7, 5, 8), ("+", "+", "*"))])
    assert (question.prompt, question.gold) == ("5+7+5*8=?", "52")
    assert TINY(question.prompt) == "<bos>5+7+5*8=?<think>"


def test_in_words_the_question_asks_for_a_box_and_the_demonstrations_have_it():
    from megatron_rl.rewards.task_verifiers import make_verifier
    from megatron_rl.rewards.verifier_settings import VerifierSettings

    task = ArithmeticTask(in_words=True, train_prompts=300, heldout_prompts=60)
    problem = ArithmeticProblem((5, 7, 5, 8), ("+", "-", "*"))
    (question,) = questions(task, [problem])
    expected = "What is five plus seven minus five times eight? Put the final answer in \\boxed{}."
    assert (question.prompt, question.kind, question.gold) == (expected, "math", "-28")
    heldout = questions(task, make_split(task, 3)[1])
    train = questions(task, make_split(task, 3)[0])
    golds = {q.prompt: q.gold for q in train}
    rows = list(demonstrations(task, 3, 1500, 2, 1))
    assert not {q.prompt for q in heldout} & {prompt for prompt, _ in rows}
    settings = VerifierSettings.model_validate({"math": {"ended_thinking": False}})
    verify = make_verifier("math", settings)
    known = [(golds[prompt], response) for prompt, response in rows if prompt in golds]
    outcomes = Counter(verify(response, gold, {}).outcome for gold, response in known)
    assert set(outcomes) == {Outcome.CORRECT, Outcome.WRONG}
    assert 0.2 < outcomes[Outcome.CORRECT] / outcomes.total() < 0.8


def test_answers_equal_pythons_own():
    for question in questions(TASK, make_split(TASK, 3)[0]):
        assert int(question.gold) == eval(question.prompt.removesuffix("=?"))


def test_heldout_problems_are_unique_and_in_neither_stage():
    train, held = make_split(TASK, 3)
    heldout = {TINY(p.question(False)) for p in held}
    assert len(heldout) == 100
    assert not heldout & {TINY(p.question(False)) for p in train}
    assert not heldout & {prompt for prompt, _ in demonstrations(TASK, 3, 500, 2, 28)}


def test_both_lists_have_the_same_shares_of_lengths():
    pool, heldout = make_split(ArithmeticTask(train_prompts=4000, heldout_prompts=100), 3)
    assert Counter(len(p.operands) for p in heldout) == {2: 20, 3: 40, 4: 40}
    train = Counter(len(p.operands) for p in pool)
    for operands, share in {2: 0.2, 3: 0.4, 4: 0.4}.items():
        assert abs(train[operands] / 4000 - share) < 0.03


def test_the_split_depends_on_the_seed_alone():
    assert make_split(TASK, 3) == make_split(TASK, 3)
    assert make_split(TASK, 3)[1] != make_split(TASK, 4)[1]


def test_demonstrations_are_noisy_and_often_right():
    outcomes = Counter(
        verify_exact(completion, str(eval(prompt[len("<bos>") : -len("=?<think>")]))).outcome
        for prompt, completion in islice(demonstrations(ArithmeticTask(), 3, 3000, 2, 28), 6000)
    )
    assert set(outcomes) == {Outcome.CORRECT, Outcome.WRONG}
    assert 0.2 < outcomes[Outcome.CORRECT] / outcomes.total() < 0.6


def test_text_survives_the_tokenizer(tmp_path):
    from tokenizers import Tokenizer

    save_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for prompt, completion in demonstrations(TASK, 3, 200, 1, 28):
        ids = tokenizer.encode(prompt + completion, add_special_tokens=False).ids
        assert max(ids) < len(TOKENS) <= 32
        assert tokenizer.decode(ids, skip_special_tokens=False) == prompt + completion
    assert tokenizer.encode("</think>\\boxed{", add_special_tokens=False).tokens == [
        "</think>",
        "\\boxed{",
    ]


def test_prompts_end_with_the_token_that_opens_thinking(tmp_path):
    from tokenizers import Tokenizer

    save_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    prompts = load_prompts(RunConfig(task=TASK, schedule={"prompts_per_step": 4}), tokenizer)
    assert {p.token_ids[-1] for p in prompts.train} == {tokenizer.token_to_id("<think>")}
    assert [p.id for p in prompts.train] == list(range(500))


@pytest.mark.parametrize(("products", "counts"), [("some", {0, 1}), ("none", {0}), ("one", {1})])
def test_expressions_have_the_products_that_are_asked_for(products, counts):
    task = ArithmeticTask(train_prompts=300, heldout_prompts=60, products=products)
    train, heldout = make_split(task, 3)
    assert {p.operators.count("*") for p in (*train, *heldout)} == counts
    assert {len(p.operands) for p in train} == {2, 3, 4}
    shown = {prompt.count("*") for prompt, _ in demonstrations(task, 3, 200, 1, 28)}
    assert shown == counts
