"""Sequential Temperature Scaling on plain arrays: known answers, naive counterparts, temperatures recovered."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf import calibration


def synthetic_blocks(true_temperatures, blocks: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of a drafter whose conditional confidences are right after division by the given temperatures."""
    generator = np.random.default_rng(seed)
    right = generator.normal(1.0, 1.5, (blocks, len(true_temperatures)))  # logits of what really happens
    accept = generator.random(right.shape) < 1.0 / (1.0 + np.exp(-right))
    return right * np.asarray(true_temperatures), np.cumprod(accept, axis=1).sum(axis=1)


def naive_error(predicted, happened, bins: int) -> float:
    """ECE as it is defined, sample by sample."""
    total = 0.0
    for index in range(bins):
        last = index == bins - 1
        members = [i for i, p in enumerate(predicted) if index / bins <= p and (p < (index + 1) / bins or last)]
        if members:
            confidence = sum(predicted[i] for i in members) / len(members)
            frequency = sum(happened[i] for i in members) / len(members)
            total += len(members) / len(predicted) * abs(confidence - frequency)
    return total


def test_calibration_error_by_hand():
    predicted = np.array([0.1, 0.3, 0.9, 1.0])
    happened = np.array([0.0, 1.0, 1.0, 1.0])
    # Two bins: half the samples predict 0.2 and see 0.5, half predict 0.95 and see 1.
    assert calibration.expected_calibration_error(predicted, happened, bins=2) == pytest.approx(0.175)
    assert calibration.expected_calibration_error(predicted, happened, bins=1) == pytest.approx(0.175)
    # What one bin cancels out, two do not.
    crossed = np.array([1.0, 0.0, 0.0, 1.0])
    assert calibration.expected_calibration_error(predicted, crossed, bins=1) == pytest.approx(0.075)
    assert calibration.expected_calibration_error(predicted, crossed, bins=2) == pytest.approx((0.3 + 0.45) / 2)


# Predictions away from the bins' edges, where rounding would decide.
SAMPLES = st.lists(st.tuples(st.integers(0, 999), st.booleans()), min_size=1, max_size=40)


@given(SAMPLES, st.integers(1, 15))
def test_calibration_error_is_the_naive_one(samples, bins):
    predicted = np.array([place / 1000 + 0.0003 for place, _ in samples])
    happened = np.array([float(did) for _, did in samples])
    error = calibration.expected_calibration_error(predicted, happened, bins)
    assert error == pytest.approx(naive_error(predicted.tolist(), happened.tolist(), bins), abs=1e-12)
    means, frequencies, counts = calibration.reliability_points(predicted, happened, bins)
    assert counts.sum() == len(samples) and counts.min() > 0
    assert np.abs(means - frequencies) @ counts / len(samples) == pytest.approx(error, abs=1e-12)


@pytest.mark.parametrize("predicted", [[], [1.2], [-0.1], [np.nan]])
def test_what_is_no_probability_is_refused(predicted):
    with pytest.raises(ValueError, match="0 to 1"):
        calibration.expected_calibration_error(np.array(predicted), np.zeros(len(predicted)))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_roc_auc_counts_pairs(samples):
    scores, happened = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    pairs = [
        1.0 if yes > no else 0.5 if yes == no else 0.0
        for yes, did in samples
        if did
        for no, other in samples
        if not other
    ]
    expected = sum(pairs) / len(pairs) if pairs else None
    assert calibration.roc_auc(scores, happened) == (None if expected is None else pytest.approx(expected))


def test_survivals_by_hand():
    logits = np.log([[3.0, 1.0], [0.25, 9.0]])  # confidences 3/4, 1/2 and 1/5, 9/10
    raw = calibration.scaled_survivals(logits, [1.0, 1.0])
    np.testing.assert_allclose(raw, [[0.75, 0.375], [0.2, 0.18]])
    # A temperature of 2 takes the root of the odds: 9 to 3.
    scaled = calibration.scaled_survivals(logits, [1.0, 2.0])
    np.testing.assert_allclose(scaled, [[0.75, 0.375], [0.2, 0.15]])


def test_survivals_of_huge_logits_are_finite():
    survivals = calibration.scaled_survivals(np.array([[1e4, -1e4]]), [0.1, 0.1])
    np.testing.assert_array_equal(survivals, [[1.0, 0.0]])


@pytest.mark.parametrize(
    ("logits", "temperatures", "message"),
    [
        ([[0.0, 0.0]], [1.0], "temperatures"),
        ([[0.0]], [0.0], "above 0"),
        ([[0.0]], [np.nan], "above 0"),
        ([[np.inf]], [1.0], "not finite"),
        ([0.0], [1.0], "block_size"),
    ],
)
def test_survivals_refuse_what_cannot_be(logits, temperatures, message):
    with pytest.raises(ValueError, match=message):
        calibration.scaled_survivals(np.array(logits), temperatures)


@given(
    st.lists(st.lists(st.floats(-20, 20), min_size=3, max_size=3), min_size=2, max_size=10),
    st.lists(st.sampled_from(calibration.GRID.tolist()), min_size=3, max_size=3),
)
def test_order_per_position_is_preserved(logits, temperatures):
    """Scaling changes no ranking among the confidences of a position, and survivals never rise along a block."""
    logits = np.array(logits)
    survivals = calibration.scaled_survivals(logits, temperatures)
    assert ((survivals >= 0) & (survivals <= 1)).all() and (np.diff(survivals, axis=1) <= 0).all()
    for position in range(3):
        confidence = calibration.scaled_survivals(logits[:, [position]], [temperatures[position]])[:, 0]
        in_order = confidence[np.argsort(logits[:, position], kind="stable")]
        assert (np.diff(in_order) >= 0).all()


def test_survived():
    expected = [[0, 0, 0], [1, 0, 0], [1, 1, 1]]
    np.testing.assert_array_equal(calibration.survived(np.array([0, 1, 3]), 3), expected)
    with pytest.raises(ValueError, match="0 to the block size of 3"):
        calibration.survived(np.array([4]), 3)


TRUE = [1.8, 0.6, 2.5, 1.0]


def test_true_temperatures_are_recovered():
    logits, accepted = synthetic_blocks(TRUE, blocks=30000)
    fitted = calibration.fit_temperatures(logits, accepted)
    np.testing.assert_allclose(fitted, TRUE, rtol=0.12)
    fresh = synthetic_blocks(TRUE, blocks=30000, seed=1)
    before = calibration.position_metrics(*fresh, np.ones(4))
    after = calibration.position_metrics(*fresh, fitted)
    for raw, scaled in zip(before, after, strict=True):
        assert scaled.ece < min(0.015, raw.ece)
        assert scaled.brier < raw.brier


def test_the_product_is_fitted_and_not_each_confidence():
    """Two positions that are always accepted or rejected together: the second's own confidence has nothing to add."""
    generator = np.random.default_rng(0)
    first = generator.normal(0.0, 2.0, 20000)
    accepted = 2 * (generator.random(20000) < 1.0 / (1.0 + np.exp(-first))).astype(int)
    logits = np.stack([first, np.full_like(first, 0.5)], axis=1)
    fitted = calibration.fit_temperatures(logits, accepted)
    # Of what reached it the second position accepts everything, so its confidence is driven as high as the grid goes.
    assert fitted[0] == pytest.approx(1.0, rel=0.1) and fitted[1] == calibration.GRID[0]


def test_ties_go_to_the_temperature_nearest_to_one():
    # A logit of 0 is a confidence of 1/2 at every temperature.
    fitted = calibration.fit_temperatures(np.zeros((4, 3)), np.array([0, 1, 2, 3]))
    np.testing.assert_array_equal(fitted, [1.0, 1.0, 1.0])


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 12))
def test_a_fit_takes_the_best_of_the_grid_left_to_right(seed, blocks):
    generator = np.random.default_rng(seed)
    logits, accepted = generator.normal(0, 2, (blocks, 3)), generator.integers(0, 4, blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "FEWEST_REACHED", 0)
        fitted = calibration.fit_temperatures(logits, accepted)
    for position in range(3):
        happened = (accepted > position).astype(float)

        def error(temperature: float, position=position, happened=happened) -> float:
            confidences = 1 / (1 + np.exp(-logits[:, : position + 1] / [*fitted[:position], temperature]))
            return naive_error(confidences.prod(axis=1).tolist(), happened.tolist(), calibration.BINS)

        assert error(fitted[position]) <= min(map(error, calibration.GRID[::6])) + 1e-9


def test_no_blocks_are_refused():
    with pytest.raises(ValueError, match="at least one"):
        calibration.fit_temperatures(np.zeros((0, 3)), np.zeros(0, dtype=int))
    with pytest.raises(ValueError, match="as many"):
        calibration.fit_temperatures(np.zeros((2, 3)), np.zeros(1, dtype=int))


def test_position_metrics_by_hand():
    logits = np.log([[3.0, 1.0], [1.0, 1.0], [1.0, 3.0]])
    first, second = calibration.position_metrics(logits, np.array([2, 0, 1]), [1.0, 1.0])
    # Survivals 3/4, 1/2, 1/2 with outcomes 1, 0, 1; then 3/8, 1/4, 3/8 with outcomes 1, 0, 0.
    assert (first.reached, second.reached) == (3, 2)
    assert first.roc_auc == pytest.approx(0.75) and second.roc_auc == pytest.approx(0.75)
    assert first.brier == pytest.approx((1 / 16 + 1 / 4 + 1 / 4) / 3)
    assert second.brier == pytest.approx((25 / 64 + 1 / 16 + 9 / 64) / 3)
    assert first.ece == pytest.approx((1 / 4 + 0) / 3)  # at 1/2 one of two happened
    assert second.ece == pytest.approx((1 / 4 + 1 / 4) / 3)
    nothing = calibration.position_metrics(logits, np.array([0, 0, 0]), [1.0, 1.0])
    assert [metrics.reached for metrics in nothing] == [3, 0]
    assert nothing[0].roc_auc is None


def test_chance_is_what_calibrated_blocks_show():
    """Drawn from the survivals themselves, one set of blocks in twenty lies above; fewer blocks, more chance."""
    logits, _ = synthetic_blocks(np.ones(3), blocks=300)
    survivals = calibration.scaled_survivals(logits, np.ones(3))
    limit = calibration.calibration_error_by_chance(survivals)
    errors = []
    generator = np.random.default_rng(5)
    for _ in range(200):
        accepted = np.cumprod(generator.random(logits.shape) < 1 / (1 + np.exp(-logits)), axis=1).sum(axis=1)
        errors.append(np.mean([m.ece for m in calibration.position_metrics(logits, accepted, np.ones(3))]))
    assert 0.01 < np.mean(np.array(errors) > limit) < 0.12
    assert calibration.calibration_error_by_chance(survivals[:30]) > 2 * limit
    assert calibration.calibration_error_by_chance(survivals, quantile=0.5) < limit


def test_a_position_that_few_blocks_reached_keeps_its_confidence():
    rng = np.random.default_rng(0)
    logits, accepted = rng.normal(3.0, 1.0, (400, 3)), np.array([0] * 250 + [1] * 100 + [2] * 50)
    fitted = calibration.fit_temperatures(logits, accepted)
    assert fitted[0] != 1.0 and fitted[1] != 1.0 and fitted[2] == 1.0  # reached by 400, 150 and 50 blocks
