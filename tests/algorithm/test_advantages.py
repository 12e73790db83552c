import numpy as np
import pytest

from megatron_rl.algorithm.advantages import advantages


def test_batch_normalization_divides_all_centred_rewards_by_one_std():
    # [1, -1] -> [1, -1]; [1, 1, 1, -1] -> [.5, .5, .5, -1.5]; mean square (1+1+.75+2.25)/6 = 5/6
    out = advantages([np.array([1.0, -1.0]), np.array([1.0, 1.0, 1.0, -1.0])], "batch")
    std = np.sqrt(5 / 6)
    assert out[0] == pytest.approx(np.array([1, -1]) / std, abs=1e-5)
    assert out[1] == pytest.approx(np.array([0.5, 0.5, 0.5, -1.5]) / std, abs=1e-5)


def test_prompt_normalization_divides_each_group_by_its_own_std():
    out = advantages([np.array([1.0, -1.0]), np.array([1.0, 1.0, 1.0, -1.0])], "prompt")
    # std of [.5, .5, .5, -1.5] is sqrt(.75)
    assert out[0] == pytest.approx([1, -1], abs=1e-5)
    assert out[1] == pytest.approx(np.array([0.5, 0.5, 0.5, -1.5]) / np.sqrt(0.75), abs=1e-5)


def test_no_normalization_only_centres():
    assert advantages([np.array([3.0, 1.0])], "none")[0].tolist() == [1.0, -1.0]


def test_a_group_without_variance_has_advantage_zero_and_not_nan():
    for normalization in ("batch", "prompt", "none"):
        assert advantages([np.ones(4)], normalization)[0].tolist() == [0.0] * 4


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # rewards 1, 1, -2: means of the others are -.5, -.5, 1
    (out,) = advantages([np.array([1.0, 1.0, -2.0])], "none", baseline="leave_one_out")
    assert out == pytest.approx([1.5, 1.5, -3.0])


def test_the_batch_std_may_count_prompts_that_are_filtered():
    # trained [1, -1], filtered [1, 1]: mean square 2/2 = 1 over the first, 2/4 over both
    trained, filtered = [np.array([1.0, -1.0])], [np.array([1.0, 1.0])]
    assert advantages(trained, "batch")[0] == pytest.approx([1, -1], abs=1e-5)
    root = np.sqrt(2)
    both = advantages(trained, "batch", others=filtered)
    assert both[0] == pytest.approx([root, -root], abs=1e-5)
