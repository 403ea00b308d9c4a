"""When losses count as a divergence, as a function of their sequence alone."""

import json
import math

import pytest

from hybrid_jax import divergence
from hybrid_jax.divergence import Detector
from tests.tiny import tiny_config


def detector(**keys):
    settings = {"window": 8, "spike_steps": 3, "width": 6.0, "max_rollbacks": 1, **keys}
    named = {f"divergence__{name}": value for name, value in settings.items()}
    return Detector(tiny_config("x", train__max_bad_steps=4, **named))


def feed(watch, losses, start=1):
    """The step of the first verdict and the verdict; a loss of None is a step that was not finite."""
    bad = 0
    for step, loss in enumerate(losses, start):
        bad = bad + 1 if loss is None else 0
        if verdict := watch.observe(step, math.nan if loss is None else loss, bad):
            return step, verdict
    return 0, None


NOISY = [3.0, 3.1, 2.9, 3.05, 2.95, 3.0, 3.1, 2.9]


def test_the_band_is_the_median_and_a_multiple_of_the_deviation_from_it():
    # median 3, deviations 0 .1 .1 .05 .05 0 .1 .1: their median is (.05 + .1) / 2
    assert divergence.band(NOISY) == pytest.approx((3.0, 1.4826 * 0.075))
    assert divergence.band([*NOISY[:-1], 1e9])[1] < 0.2  # an odd one does not move it far
    assert divergence.band([2.5] * 8) == pytest.approx((2.5, 0.025))  # a hundredth of the median
    assert divergence.band([0.1] * 8) == pytest.approx((0.1, 0.01))  # and no less than of 1
    watch = detector()
    assert feed(watch, NOISY)[1] is None
    assert watch.limit == pytest.approx(3.0 + 6 * 1.4826 * 0.075)


def test_so_many_in_a_row_above_the_band_are_a_divergence():
    step, verdict = feed(detector(), [*NOISY, 5.0, 5.0, 3.0, 9.0, 8.0, 7.0, 6.0])
    assert (step, verdict.step, verdict.first) == (14, 14, 12)
    assert verdict.where == "config.divergence.spike_steps"
    assert "3 steps in a row had a loss above 3.6" in verdict.reason


def test_before_the_window_is_full_the_band_is_around_knowing_nothing():
    start = math.log(64)  # of the tiny config
    assert feed(detector(), [start, *[1.05 * start] * 7])[1] is None
    assert feed(detector(), [start, *[1.07 * start] * 3])[0] == 4
    assert feed(detector(), [2.0, *[1.05 * start] * 6])[1] is None  # a first one that is low says nothing
    assert feed(detector(), [90.0, *[95.0] * 6])[1] is None  # one that is high is where it began
    assert feed(detector(), [90.0, *[96.0] * 3])[0] == 4


def test_a_loss_that_falls_is_fine_and_one_that_climbs_slowly_is_not():
    assert feed(detector(), [12 * 0.9**n for n in range(60)])[1] is None
    step, _ = feed(detector(window=20), [3.0 * 1.005**n for n in range(200)])
    assert 20 < step < 60


def test_what_is_above_the_band_does_not_move_it():
    watch = detector(spike_steps=10**6)
    feed(watch, NOISY)
    limit = watch.limit
    feed(watch, [4.0] * 50)
    assert watch.limit == limit and watch.off == 50
    feed(watch, [3.0])
    assert watch.off == 0


def test_another_width_or_window_holds_from_the_next_start_on():
    narrow = detector()
    feed(narrow, [*NOISY, 3.3])
    for keys, limit in (({"width": 60.0}, 3.0 + 60 * 1.4826 * 0.075), ({"window": 4}, narrow.limit)):
        other = detector(**keys)
        other.resume(narrow.record)
        assert other.limit == pytest.approx(limit)


def test_steps_that_are_not_finite_count_by_their_own_limit_and_go_on_a_stretch():
    step, verdict = feed(detector(), [None] * 5)
    assert (step, verdict.first, verdict.where) == (4, 1, "config.train.max_bad_steps")
    step, verdict = feed(detector(spike_steps=20), [*NOISY, 9.0, 9.0, *[None] * 4])
    assert (step, verdict.first) == (14, 9)  # what began before them is part of it
    step, verdict = feed(detector(), [*NOISY, 9.0, None, 9.0])
    assert (step, verdict.first, verdict.where) == (11, 9, "config.divergence.spike_steps")
    assert feed(detector(spike_steps=2), [None, None, None, 3.0])[1] is None  # there is no band yet


@pytest.mark.parametrize("keys", [{"max_rollbacks": 0}, {"spike_steps": 0}])
def test_off_means_that_any_finite_loss_is_fine(keys):
    assert feed(detector(**keys), [*NOISY, *[1e9] * 50])[1] is None
    assert feed(detector(**keys), [None] * 4)[0] == 4


def test_without_checkpoints_any_finite_loss_is_fine():
    watch = Detector(tiny_config("x", checkpoint__every_steps=0, divergence__window=8, divergence__spike_steps=1))
    assert feed(watch, [*NOISY, *[1e9] * 50])[1] is None


@pytest.mark.parametrize("cut", range(1, 14))
def test_a_resumed_detector_decides_as_one_that_was_not_stopped(cut):
    losses = [*NOISY, 3.3, 9.0, 8.0, 7.0, 6.0]
    whole = feed(detector(), losses)
    first, second = detector(), detector()
    assert whole[0] == 12
    early, _ = feed(first, losses[:cut])
    second.resume(json.loads(json.dumps(first.record)))
    if cut < 12:
        step, verdict = feed(second, losses[cut:], cut + 1)
        assert not early and (step, verdict.first, verdict.reason) == (12, whole[1].first, whole[1].reason)
    second.resume({})  # of a checkpoint that knows nothing of it
    assert feed(second, [50.0] * 5)[1] is None and feed(second, [54.0] * 3)[1]
