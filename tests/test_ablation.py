"""What is chosen on one half is judged on the other, figures by hand, and domains that need their own temperatures."""

import dataclasses

import numpy as np
import pytest

from dspark_hf.ablation import ALL, RAW, Halves, ablate_schedules, calibration_drift
from dspark_hf.blocks import Blocks
from dspark_hf.calibration import position_metrics
from dspark_hf.intervals import mean_ratio_difference_interval, mirrored_interval, ratio_interval, resamples
from dspark_hf.scheduling import Costs
from dspark_hf.simulation import PLANS


SIZE = 2
# A step takes 10 and one more for each token, a draft takes 1: with one row up to 3 tokens.
LINEAR = Costs(np.array([10.0, 11.0, 12.0, 13.0]), [0.0, 1.0, 1.0])


def logit(probability: float) -> float:
    return float(np.log(probability / (1 - probability)))


def blocks_of(
    accepted: list[int], prompts: list[int], confidence: float = 0.6, sets: list[str] | None = None
) -> Blocks:
    logits = np.full((len(accepted), SIZE), logit(confidence))
    return Blocks(logits, np.array(accepted), sets or ["a"] * len(accepted), 0.0, prompts)


def schedules(blocks: Blocks, costs: Costs = LINEAR, rows: int = 1, rounds: int = 50):
    halves = Halves(blocks)
    points = ablate_schedules(halves, halves.survivals(halves.fits(RAW)), {rows: costs}, rounds, seed=0)
    assert [point.plan for point in points] == list(PLANS)
    return {point.plan: point for point in points}


def test_prompts_of_each_set_belong_to_the_halves_by_turns():
    sets = ["a", "a", "a", "b", "b", "b", "a"]
    halves = Halves(blocks_of([0] * 7, [4, 4, 7, 9, 12, 12, 8], sets=sets))
    assert halves.names == ["a", "b"] and halves.prompt_sets.tolist() == ["a", "a", "a", "b", "b"]
    assert halves.half.tolist() == [0, 0, 1, 0, 1, 1, 0]


def test_blocks_without_prompts_and_sets_of_one_prompt_are_refused():
    with pytest.raises(ValueError, match="which prompt each block comes from"):
        Halves(dataclasses.replace(blocks_of([0, 1], [0, 1]), prompts=None))
    with pytest.raises(ValueError, match="'b' has blocks of only one prompt"):
        Halves(blocks_of([0] * 4, [0, 1, 2, 2], sets=["a", "a", "b", "b"]))


def test_figures_of_blocks_that_are_all_alike():
    """One draft of two is accepted each time: 2 tokens in 1 + 13 seconds whole, in 1 + 12 with one draft sent."""
    points = schedules(blocks_of([1] * 8, [0, 0, 1, 1, 2, 2, 3, 3]))
    assert points["no_drafts"].throughput.value == pytest.approx(1 / 11)
    assert points["constant"].throughput.value == pytest.approx(2 / 14)
    assert points["clairvoyant"].throughput.value == pytest.approx(2 / 13)
    assert points["constant"].over_no_drafts.value == pytest.approx(2 * 11 / 14)
    assert points["clairvoyant"].over_constant.value == pytest.approx(14 / 13)
    assert points["constant"].gap_to_clairvoyant.value == pytest.approx(100 * (1 - 13 / 14))
    assert points["constant"].budget == 3 and points["no_drafts"].budget == 1
    # Survivals are 0.6 and 0.36: thresholds up to 0.35 send both, to 0.6 one; the best sends one.
    assert all(0.36 < threshold <= 0.6 for threshold in points["confidence"].thresholds)
    assert points["confidence"].throughput.value == pytest.approx(2 / 13)
    # By its confidences 1.96 tokens in 14 seconds are better than 1.6 in 13, so that is what it expects and does.
    for plan in ("hardware_aware", "hardware_aware_lagged", "oracle"):
        assert points[plan].throughput.value == pytest.approx(2 / 14)
        assert points[plan].expected_throughput == pytest.approx(1.96 / 14)
        assert points[plan].gap_to_oracle.value == pytest.approx(0)
    assert points["confidence"].gap_to_oracle.value == pytest.approx(100 * (1 - 1.6 / 13 / (1.96 / 14)))
    assert points["clairvoyant"].gap_to_oracle is None and points["clairvoyant"].expected_throughput is None
    for point in points.values():  # nothing differs between prompts
        assert point.over_constant.interval == pytest.approx((point.over_constant.value,) * 2)


def test_the_threshold_is_judged_where_it_was_not_chosen():
    """Whole blocks are right in one half and wrong in the other, so what is best for either is bad for the other."""
    points = schedules(blocks_of([2] * 5 + [0] * 5, [0] * 5 + [1] * 5))
    sends_none, sends_all = points["confidence"].thresholds  # of the first half, chosen on the second
    assert sends_none > 0.6 and sends_all <= 0.36
    # The first half, all right, gets no drafts: 1 token in 1 + 11. The second, all wrong, whole blocks: 1 in 1 + 13.
    assert points["confidence"].throughput.value == pytest.approx(2 / (12 + 14))
    assert points["constant"].throughput.value == pytest.approx((3 + 1) / (14 + 14))


def test_several_rows_share_the_seconds_of_their_rounds():
    costs = Costs(np.array([10.0 + tokens for tokens in range(7)]), [0.0, 1.0, 1.0])
    points = schedules(blocks_of([1] * 8, [0, 0, 1, 1, 2, 2, 3, 3]), costs, rows=2)
    assert points["no_drafts"].throughput.value == pytest.approx(2 / 12)
    assert points["constant"].throughput.value == pytest.approx(4 / 17)
    assert points["clairvoyant"].throughput.value == pytest.approx(4 / 15)
    assert points["clairvoyant"].budget == pytest.approx(2)


def test_intervals_are_wide_where_prompts_differ_and_hold_paired_figures():
    easy = [2 if prompt % 4 < 2 else 0 for prompt in range(16) for _ in range(20)]
    points = schedules(blocks_of(easy, [prompt for prompt in range(16) for _ in range(20)]), rounds=200)
    low, high = points["constant"].throughput.interval
    assert low < points["constant"].throughput.value < high and high - low > 0.03
    assert points["constant"].over_constant.interval == (1.0, 1.0)
    assert points["clairvoyant"].gap_to_clairvoyant.interval == (0.0, 0.0)
    # No schedule is faster than the clairvoyant in any resample.
    for plan in PLANS[1:]:
        assert points[plan].gap_to_clairvoyant.interval[0] >= -1e-9


def test_intervals_are_as_wide_as_simulating_resampled_prompts_makes_them():
    """Whose drafts cost a round its seconds counts: shared equally, the clairvoyant's gain would seem certain."""
    generator = np.random.default_rng(3)
    ease = np.repeat(generator.uniform(0.2, 0.9, size=24), 20)[:, None]
    logits = np.log(ease / (1 - ease)) + generator.normal(0, 1, size=(480, 4))
    accepted = np.cumprod(generator.random(logits.shape) < 1 / (1 + np.exp(-logits)), axis=1).sum(axis=1)
    costs = Costs(10.0 + np.arange(1 + 8 * 5), [0.0, 1.0, 1.0, 1.0, 1.0])

    def simulated(drawn: np.ndarray):
        places = np.concatenate([np.arange(20 * prompt, 20 * prompt + 20) for prompt in drawn])
        prompts = np.repeat(np.arange(24), 20).tolist()
        blocks = Blocks(logits[places], accepted[places], ["a"] * 480, 0.0, prompts)
        return schedules(blocks, costs, rows=8, rounds=40)

    points = simulated(np.arange(24))
    again = [simulated(generator.choice(24, size=24)) for _ in range(40)]
    for plan in ("hardware_aware_lagged", "clairvoyant"):
        low, high = points[plan].over_constant.interval
        spread = np.std([other[plan].over_constant.value for other in again])
        assert 0.65 < (high - low) / 3.92 / spread < 1.5


@pytest.fixture(scope="module")
def domains() -> Blocks:
    """Of "calm" the confidences are right; of "bold" the logits are thrice what they should be."""
    generator = np.random.default_rng(0)
    logits, accepted, sets, prompts = [], [], [], []
    for number, (name, factor) in enumerate([("calm", 1.0), ("bold", 3.0)]):
        right = generator.normal(0.5, 1.2, size=(4000, SIZE))
        kept = np.cumprod(generator.random(right.shape) < 1 / (1 + np.exp(-right)), axis=1).sum(axis=1)
        logits.append(factor * right)
        accepted.append(kept)
        sets += [name] * 4000
        prompts += [40 * number + block // 100 for block in range(4000)]
    return Blocks(np.concatenate(logits), np.concatenate(accepted), sets, 0.0, prompts)


@pytest.fixture(scope="module")
def drift(domains):
    costs = Costs(np.array([10.0, 10.0, 11.0, 14.0]), [0.0, 0.5, 0.5])
    return calibration_drift(Halves(domains), {1: costs}, rounds=500, seed=0)


def test_temperatures_are_fitted_apart(drift):
    assert drift.temperatures[RAW] == [[1.0] * SIZE] * 2
    assert np.allclose(drift.temperatures["calm"], 1.0, atol=0.5)
    assert np.allclose(drift.temperatures["bold"], 3.0, atol=1.2)
    assert [cell.fitted_on for cell in drift.cells[::2]] == [RAW, "calm", "bold", ALL]


def test_temperatures_of_another_domain_are_worse_than_its_own(drift):
    cells = {(cell.fitted_on, cell.used_on): cell for cell in drift.cells}
    for name, other in (("calm", "bold"), ("bold", "calm")):
        own, foreign = cells[name, name], cells[other, name]
        assert own.ece.value < drift.chance[name] * 1.5 < foreign.ece.value
        assert own.ece_excess.value == 0 and own.lost[1].value == 0 and own.lost[1].interval == (0.0, 0.0)
        assert foreign.ece_excess.value == pytest.approx(foreign.ece.value - own.ece.value)
        assert foreign.ece_excess.interval[0] > 0
        assert foreign.lost[1].value > 0.2
        expected = 100 * (1 - foreign.throughput[1].value / own.throughput[1].value)
        assert foreign.lost[1].value == pytest.approx(expected)
    assert cells[RAW, "calm"].ece.value < drift.chance["calm"] * 1.5
    assert cells[RAW, "bold"].ece_excess.interval[0] > 0


def test_errors_are_those_of_temperatures_from_the_other_half(domains, drift):
    (cell,) = [cell for cell in drift.cells if (cell.fitted_on, cell.used_on) == (RAW, "bold")]
    members = np.array(domains.sets) == "bold"
    metrics = position_metrics(domains.confidence_logits[members], domains.accepted[members], [1.0] * SIZE)
    assert cell.ece.value == pytest.approx(np.mean([each.ece for each in metrics]))
    assert cell.ece.interval[0] < cell.ece.value < cell.ece.interval[1]
    halves = Halves(domains)
    changed = dataclasses.replace(domains, accepted=np.where(halves.half == 0, 0, domains.accepted))
    # What happened in the first half is nothing to the temperatures that are used on it.
    assert np.array_equal(Halves(changed).fits("calm")[0], halves.fits("calm")[0])
    assert not np.array_equal(Halves(changed).fits("calm")[1], halves.fits("calm")[1])


def test_resamples_stay_within_their_strata():
    counts = resamples(["a", "b", "a", "a", "b"])
    assert (counts[:, [0, 2, 3]].sum(axis=1) == 3).all() and (counts[:, [1, 4]].sum(axis=1) == 2).all()
    assert counts.max() > 1 and counts.min() == 0


def test_a_paired_difference_leaves_out_what_prompts_have_in_common():
    generator = np.random.default_rng(0)
    rounds = np.full(40, 20)
    ease = generator.uniform(1.5, 3.5, size=40)
    ours, theirs = (ease + 0.1) * rounds, ease * rounds
    low, high = mean_ratio_difference_interval([(ours, rounds)], [(theirs, rounds)])
    assert (low, high) == pytest.approx((0.1, 0.1))
    alone = ratio_interval(ours, rounds)
    assert alone[1] - alone[0] > 0.2
    assert mean_ratio_difference_interval([([1], [1])], [([1], [1])]) is None


def test_a_mirrored_interval():
    drawn = np.linspace(1.0, 2.0, 1001)
    assert mirrored_interval(1.2, drawn) == pytest.approx((2.4 - 1.975, 2.4 - 1.025))
