from megatron_rl.algorithm.curriculum import Curriculum


def curriculum(prompts=20, threshold=0.9, statistic="last", at_least=2):
    return Curriculum(prompts, 7, threshold=threshold, statistic=statistic, at_least=at_least)


def test_an_epoch_draws_every_prompt_once():
    c = curriculum()
    assert sorted(c.next() for _ in range(20)) == list(range(20))


def test_a_solved_prompt_is_not_drawn_in_later_epochs():
    c = curriculum()
    for _ in range(20):
        p = c.next()
        c.record(p, 1.0 if p < 15 else 0.5)
    assert sorted(c.next() for _ in range(5)) == [15, 16, 17, 18, 19]
    assert c.excluded == 15


def test_the_threshold_itself_excludes_and_just_below_does_not():
    c = curriculum(prompts=4)
    for p in [c.next() for _ in range(4)]:
        c.record(p, [0.9, 0.89, 0.0, 0.0][p])
    assert 0 not in [c.next() for _ in range(3)]


def test_without_no_positive_resampling_everything_comes_again():
    c = curriculum(threshold=None)
    for p in [c.next() for _ in range(20)]:
        c.record(p, 1.0)
    assert sorted(c.next() for _ in range(20)) == list(range(20))


def test_the_mean_statistic_forgets_nothing():
    # visits 1.0 and 0.6: last is 0.6, mean is 0.8
    last, mean = curriculum(threshold=0.7), curriculum(threshold=0.7, statistic="mean")
    for c in (last, mean):
        for rate in (1.0, 0.6):
            c.record(3, rate)
    assert 3 in [last.next() for _ in range(20)]
    assert 3 not in [mean.next() for _ in range(19)]


def test_when_too_few_are_unsolved_all_come_again():
    c = curriculum(prompts=6, at_least=4)
    for p in [c.next() for _ in range(6)]:
        c.record(p, 1.0)
    assert sorted(c.next() for _ in range(6)) == list(range(6))


def test_a_restored_curriculum_draws_what_the_saved_one_would():
    a = curriculum()
    for _ in range(13):
        a.record(a.next(), 0.95)
    b = curriculum()
    b.restore(a.state())
    assert [a.next() for _ in range(30)] == [b.next() for _ in range(30)]


def test_order_differs_between_epochs():
    c = curriculum(threshold=None)
    assert [c.next() for _ in range(20)] != [c.next() for _ in range(20)]
