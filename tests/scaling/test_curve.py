"""The three curve families against their printed formulas."""

import numpy as np
import pytest

from megatron_rl.scaling.curve import Shape, log_sigmoid
from megatron_rl.scaling.options import FORMS
from tests.scaling.curves import linear_sigmoid, power_law

C = np.array([500.0, 2542.0, 16000.0])


def test_log_sigmoid_is_equation_1():
    a, b, cmid, r0 = 0.61, 1.92, 2542.0, 0.395
    expected = r0 + (a - r0) / (1 + (cmid / C) ** b)
    np.testing.assert_allclose(log_sigmoid(C, a, b, cmid, r0), expected, rtol=1e-14)
    # Half of the gain at Cmid, R0 at zero compute.
    assert log_sigmoid(cmid, a, b, cmid, r0) == pytest.approx((a + r0) / 2)
    assert log_sigmoid(0, a, b, cmid, r0) == r0


def test_power_law_is_the_limit_of_equation_1_at_high_compute():
    a, b, cmid, r0 = 0.61, 1.92, 2542.0, 0.395
    far = np.array([1e6, 1e7])
    d = (a - r0) * cmid**b
    np.testing.assert_allclose(power_law(far, a, b, d), log_sigmoid(far, a, b, cmid, r0), rtol=1e-7)


def test_linear_sigmoid_is_the_logistic_curve_in_linear_compute():
    expected = 0.6 / (1 + np.exp(-0.001 * (C - 2000)))
    np.testing.assert_allclose(linear_sigmoid(C, 0.6, 0.001, 2000.0, 0.0), expected, rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_derivatives_equal_finite_differences(form):
    shape = Shape(form, 16000.0, 500.0)
    x, u, v, h = shape.x(C), shape.u(2542.0), 0.4, 1e-6
    du, dv = shape.dg(x, u, v)
    np.testing.assert_allclose(
        du, (shape.g(x, u + h, v) - shape.g(x, u - h, v)) / (2 * h), atol=1e-8
    )
    np.testing.assert_allclose(
        dv, (shape.g(x, u, v + h) - shape.g(x, u, v - h)) / (2 * h), atol=1e-8
    )


@pytest.mark.parametrize("form", FORMS)
def test_invert_undoes_the_curve(form):
    shape = Shape(form, 16000.0, 500.0)
    u, v = np.array(shape.u(2542.0)), np.array(0.4)
    share = shape.g(shape.x(C[1:]), u, v)
    np.testing.assert_allclose(shape.invert(share, u, v), C[1:], rtol=1e-9)
    assert shape.invert(np.array(1.0), u, v) == np.inf
    assert shape.invert(np.array(-0.1), u, v) == 0
