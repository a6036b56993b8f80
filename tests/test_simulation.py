"""The threshold sweep and the load simulation: by hand, by brute force, and as a command."""

import dataclasses
import inspect
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from tiny import character_tokenizer, random_drafter

from dspark_hf import cli, command_files, simulate
from dspark_hf.blocks import Blocks
from dspark_hf.loading import CommandError, Pair
from dspark_hf.profiles import DraftCurve, Profile, StepCurve, profile_key, profile_path
from dspark_hf.scheduling import Costs, best_capacity
from dspark_hf.simulation import (
    LAG,
    PLANS,
    THRESHOLDS,
    LoadPoint,
    Outcomes,
    gpu_like_profile,
    simulate_load,
    simulate_rows,
    threshold_sweep,
    walk_blocks,
)


SCHEDULED = ("constant", "confidence", "hardware_aware", "hardware_aware_lagged")


def random_outcomes(seed: int, blocks: int = 40, block_size: int = 3) -> Outcomes:
    """Blocks of two sets, whose confidences tell what is accepted."""
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.1, 1.0, (blocks, block_size))
    accepted = np.cumprod(rng.random((blocks, block_size)) < confidences, axis=1).sum(axis=1)
    return Outcomes(np.cumprod(confidences, axis=1), accepted, ["b"] * (blocks // 2) + ["a"] * (blocks - blocks // 2))


def random_costs(seed: int, rows: int, block_size: int = 3) -> Costs:
    """Steps that get dearer by jumps, some of them large."""
    rng = np.random.default_rng(seed)
    most = rows * (1 + block_size)
    jumps = rng.exponential(0.2, most + 1) * (rng.random(most + 1) < 0.4)
    return Costs(1.0 + np.cumsum(jumps), [0.0, *rng.uniform(0.05, 0.3, block_size)])


def by_plan(points: list[LoadPoint]) -> dict[str, LoadPoint]:
    assert [point.plan for point in points] == list(PLANS)
    return {point.plan: point for point in points}


def costs_of(steps_per_second: dict[int, float], draft: float = 0.0, block_size: int = 2) -> Costs:
    seconds = [1 / steps_per_second.get(tokens, 1.0) for tokens in range(max(steps_per_second) + 1)]
    return Costs(np.array(seconds), [0.0] + [draft] * block_size)


# The sweep.


def test_the_sweep_by_hand():
    survivals = np.array([[0.9, 0.5, 0.3], [0.6, 0.6, 0.1], [0.2, 0.1, 0.05]])
    outcomes = Outcomes(survivals, np.array([1, 3, 0]), ["maths", "maths", "chat"])
    points = {(point.set, point.threshold): point for point in threshold_sweep(outcomes)}
    assert list(points) == [(name, threshold) for name in (None, "maths", "chat") for threshold in THRESHOLDS]
    whole = points[None, 0.0]
    assert (whole.blocks, whole.pruned, whole.accepted_kept, whole.verify_length) == (3, 0.0, 1.0, 3.0)
    assert whole.draft_acceptance_rate == pytest.approx(4 / 9)
    assert whole.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    # At 0.5 two, two and no drafts are sent, of which one, two and none are accepted.
    cut = points[None, 0.5]
    assert cut.draft_acceptance_rate == pytest.approx(3 / 4)
    assert cut.pruned == pytest.approx(5 / 9)
    assert cut.accepted_kept == pytest.approx(3 / 4)
    assert cut.verify_length == pytest.approx(4 / 3)
    assert cut.mean_acceptance_length == pytest.approx(2.0)
    chat = points["chat", 0.5]
    assert (chat.blocks, chat.draft_acceptance_rate, chat.accepted_kept, chat.pruned) == (1, None, None, 1.0)
    assert points["maths", 0.95].draft_acceptance_rate is None and points["maths", 0.95].accepted_kept == 0.0


def test_the_sweep_is_that_of_the_paper():
    assert THRESHOLDS[0] == 0.0 and THRESHOLDS[-1] == 0.95 and len(THRESHOLDS) == 20


def test_the_sweep_against_a_loop():
    outcomes = random_outcomes(3)
    for point in threshold_sweep(outcomes):
        blocks = sent = kept = whole = 0
        for survivals, accepted, name in zip(outcomes.survivals, outcomes.accepted, outcomes.sets, strict=True):
            if point.set not in (None, name):
                continue
            length = 0
            while length < 3 and survivals[length] >= point.threshold:
                length += 1
            blocks, sent, kept, whole = blocks + 1, sent + length, kept + min(length, accepted), whole + accepted
        assert point.blocks == blocks
        assert point.verify_length == pytest.approx(sent / blocks)
        assert point.pruned == pytest.approx(1 - sent / (3 * blocks))
        assert point.draft_acceptance_rate == (pytest.approx(kept / sent) if sent else None)
        assert point.accepted_kept == pytest.approx(kept / whole)
        assert point.mean_acceptance_length == pytest.approx(1 + kept / blocks)


# Which blocks rows have.


def test_rows_walk_through_their_set_in_order():
    sets = ["b", "b", "a", "a", "a", "b"]
    following = {0: 1, 1: 5, 5: 0, 2: 3, 3: 4, 4: 2}
    walk = walk_blocks(sets, rows=100, rounds=8, seed=0)
    assert walk.shape == (8, 100)
    assert set(walk[0]) == set(range(6))  # from anywhere
    for before, now in itertools.pairwise(walk.tolist()):
        assert now == [following[block] for block in before]


def test_seeds_repeat():
    sets = ["a"] * 50
    first = walk_blocks(sets, 8, 3, seed=1)
    assert (first == walk_blocks(sets, 8, 3, seed=1)).all()
    assert (first != walk_blocks(sets, 8, 3, seed=2)).any()
    outcomes = random_outcomes(0)
    costs = {rows: random_costs(0, rows) for rows in (1, 4)}
    points = simulate_load(outcomes, costs, rounds=5, seed=7)
    assert points == simulate_load(outcomes, costs, rounds=5, seed=7)
    assert points != simulate_load(outcomes, costs, rounds=5, seed=8)
    assert [(point.rows, point.plan) for point in points] == list(itertools.product((1, 4), PLANS))
    # What a number of rows comes to does not depend on which others are asked for.
    assert points[len(PLANS) :] == simulate_load(outcomes, {4: costs[4]}, rounds=5, seed=7)


# Plans against each other.


def test_the_worked_trace_of_two_requests():
    """The review's first trace: lengths 1 and 0 at 2.32; then what came of it, which is made up here."""
    outcomes = Outcomes(np.array([[0.9, 0.45], [0.6, 0.36]]), np.array([2, 0]), ["x", "x"])
    costs = costs_of({2: 1.0, 3: 0.8, 4: 0.55, 5: 0.5, 6: 0.3})
    plans = by_plan(simulate_rows(outcomes, costs, np.array([[0, 1]] * (LAG + 4))))
    for name in ("hardware_aware", "hardware_aware_lagged", "oracle"):
        assert plans[name].budget == 1.5
        assert plans[name].expected_throughput == pytest.approx(2.32)
        assert plans[name].throughput == pytest.approx(3 * 0.8)
        assert plans[name].gap_to_oracle == pytest.approx(0.0)
        assert plans[name].gap_to_clairvoyant == pytest.approx(0.0)
    assert (plans["no_drafts"].budget, plans["no_drafts"].throughput) == (1.0, 2.0)
    assert plans["no_drafts"].gap_to_oracle == pytest.approx(100 * (1 - 2 / 2.32))
    constant = plans["constant"]
    assert (constant.budget, constant.threshold) == (3.0, None)
    assert constant.throughput == pytest.approx(4 * 0.3)
    assert constant.expected_throughput == pytest.approx(4.31 * 0.3)
    assert constant.gap_to_oracle == pytest.approx(100 * (1 - 4.31 * 0.3 / 2.32))
    assert constant.gap_to_clairvoyant == pytest.approx(50.0)
    # Between 0.6 and 0.9 a threshold sends the same one draft.
    assert plans["confidence"].threshold == pytest.approx(0.65) and plans["confidence"].budget == 1.5
    clairvoyant = plans["clairvoyant"]
    assert (clairvoyant.budget, clairvoyant.expected_throughput, clairvoyant.gap_to_oracle) == (1.5, None, None)
    assert clairvoyant.throughput == pytest.approx(2.4)


def test_all_plans_but_one_pay_for_the_draft():
    outcomes = Outcomes(np.array([[0.9, 0.45]]), np.array([1]), ["x"])
    costs = costs_of({1: 1.0, 2: 0.8, 3: 0.5}, draft=0.25)
    plans = by_plan(simulate_rows(outcomes, costs, np.zeros((LAG + 2, 1), dtype=int)))
    assert plans["no_drafts"].throughput == pytest.approx(1.0)
    assert plans["constant"].throughput == pytest.approx(2 / 2.25)
    assert plans["oracle"].expected_throughput == pytest.approx(1.9 / 1.5)
    assert plans["clairvoyant"].throughput == pytest.approx(2 / 1.5)


def test_algorithm_1_stops_before_a_jump_that_pays():
    """Three tokens cost half a second more than two, four no more than three."""
    outcomes = Outcomes(np.array([[0.9, 0.9, 0.9]]), np.array([3]), ["x"])
    costs = Costs(np.array([1.0, 1.0, 1.0, 1.5, 1.5]), [0.0] * 4)
    plans = by_plan(simulate_rows(outcomes, costs, np.zeros((LAG + 3, 1), dtype=int)))
    assert (plans["hardware_aware"].budget, plans["hardware_aware_lagged"].budget) == (2.0, 4.0)
    assert plans["hardware_aware"].expected_throughput == pytest.approx(1.9)
    assert plans["oracle"].expected_throughput == pytest.approx(3.7 / 1.5)
    assert plans["hardware_aware"].gap_to_oracle == pytest.approx(100 * (1 - 1.9 * 1.5 / 3.7))
    assert plans["hardware_aware"].gap_to_clairvoyant == pytest.approx(25.0)
    assert plans["hardware_aware_lagged"].gap_to_oracle == pytest.approx(0.0)


def test_a_capacity_is_two_rounds_old():
    """Likely and unlikely blocks take turns by two: each round gets the number of drafts that the other kind wants."""
    outcomes = Outcomes(np.array([[0.9, 0.9]] * 2 + [[0.1, 0.1]] * 2), np.array([2, 2, 0, 0]), ["x"] * 4)
    costs = Costs(np.array([1.0, 1.0, 1.3, 1.3]), [0.0] * 3)
    walk = np.arange(LAG + 8)[:, None] % 4
    plans = by_plan(simulate_rows(outcomes, costs, walk))
    assert plans["oracle"].throughput == pytest.approx((3 + 1) / (1.3 + 1.0))
    assert plans["hardware_aware_lagged"].throughput == pytest.approx((1 + 1) / (1.0 + 1.3))
    assert plans["hardware_aware_lagged"].budget == plans["oracle"].budget == 2.0
    # Blocks that repeat every two rounds, or every round, leave nothing to be missed.
    for period in ([0, 2], [0], [2]):
        steady = by_plan(simulate_rows(outcomes, costs, np.resize(period, (LAG + 8, 1))))
        assert steady["hardware_aware_lagged"].gap_to_oracle == pytest.approx(0.0)
        assert steady["hardware_aware_lagged"].throughput == steady["oracle"].throughput


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_is_expected_to_beat_the_oracle(seed):
    rows = 1 + seed % 6
    outcomes, costs = random_outcomes(seed), random_costs(seed, rows)
    walk = walk_blocks(outcomes.sets, rows, LAG + 12, seed)
    plans = by_plan(simulate_rows(outcomes, costs, walk))
    rate = costs.steps_per_second(3)
    best = [best_capacity(outcomes.survivals[blocks].tolist(), rate)[1] for blocks in walk[LAG:]]
    for name in SCHEDULED:
        assert plans[name].gap_to_oracle >= -1e-9
        assert plans[name].gap_to_clairvoyant >= -1e-9
        # One round by itself: the oracle's expected throughput is the best there is.
        for step in range(3):
            alone = by_plan(simulate_rows(outcomes, costs, walk[step : step + LAG + 1]))
            assert alone["oracle"].expected_throughput == pytest.approx(best[step])
            assert alone[name].expected_throughput <= best[step] + 1e-9
    assert plans["oracle"].gap_to_oracle == pytest.approx(0.0) and plans["oracle"].gap_to_clairvoyant >= -1e-9
    assert plans["clairvoyant"].gap_to_clairvoyant == 0.0


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_nothing_beats_the_clairvoyant(seed, noisy):
    """All lengths of all rows in two rounds, tried one by one; a noisy profile has quicker steps over more tokens."""
    outcomes, costs = random_outcomes(seed, block_size=2), random_costs(seed, rows=2, block_size=2)
    if noisy:
        costs = Costs(np.random.default_rng(seed).permutation(costs.verify_seconds), costs.draft_seconds)
    walk = walk_blocks(outcomes.sets, 2, LAG + 2, seed)
    accepted = outcomes.accepted[walk[LAG:]]
    best = 0.0
    for lengths in itertools.product(range(3), repeat=4):
        lengths = np.array(lengths).reshape(2, 2)
        tokens = 4 + np.minimum(lengths, accepted).sum()
        seconds = sum(costs.draft_seconds[2] + costs.verify_seconds[2 + drafts] for drafts in lengths.sum(axis=1))
        best = max(best, tokens / seconds)
    plans = by_plan(simulate_rows(outcomes, costs, walk))
    assert plans["clairvoyant"].throughput == pytest.approx(best)


def test_the_best_threshold_against_a_loop():
    outcomes, costs = random_outcomes(5), random_costs(5, rows=4)
    walk = walk_blocks(outcomes.sets, 4, LAG + 30, seed=5)
    found = {}
    for threshold in THRESHOLDS:
        tokens = seconds = sent = 0
        for blocks in walk[LAG:]:
            lengths = [int((outcomes.survivals[block] >= threshold).sum()) for block in blocks]
            tokens += sum(1 + min(n, outcomes.accepted[b]) for n, b in zip(lengths, blocks, strict=True))
            seconds += costs.draft_seconds[3] + costs.verify_seconds[4 + sum(lengths)]
            sent += sum(lengths)
        found[threshold] = (tokens / seconds, 1 + sent / (4 * 30))
    point = by_plan(simulate_rows(outcomes, costs, walk))["confidence"]
    assert point.throughput == pytest.approx(max(throughput for throughput, _ in found.values()))
    assert (point.throughput, point.budget) == pytest.approx(found[point.threshold])


# The made-up profile.


def test_the_gpu_like_profile_is_its_formula():
    profile = gpu_like_profile(7, 32)
    profile.check("it")
    costs = profile.costs(32, context=256, block_size=7, do_sample=True)
    step = costs.verify_seconds
    assert len(step) == 257
    assert step[1] == pytest.approx(math.hypot(6e-3, 64 * 2e-5))
    assert step[200] == pytest.approx(math.hypot(6e-3, 256 * 2e-5))
    jumps = np.flatnonzero(np.diff(step[1:]) > 1e-9) + 1
    assert jumps.tolist() == [64, 128, 192]  # the last token of a tile
    backbone = 0.1 * step[256 - 32]
    assert costs.draft_seconds[0] == 0.0
    assert costs.draft_seconds[1:] == pytest.approx([backbone + slots * 5e-5 for slots in range(1, 8)])
    assert profile.costs(32, 256, 7, do_sample=False).draft_seconds == costs.draft_seconds
    # Far out, where the floor is forgotten, a token costs what it is said to cost.
    far = gpu_like_profile(7, 512).costs(512, 256, 7, True).verify_seconds
    assert (far[4096] - far[2048]) / 2048 == pytest.approx(2e-5, rel=0.05)


def test_the_gpu_like_profile_says_that_it_is_made_up():
    profile = gpu_like_profile(2, 1, tile=8)
    assert "made up" in profile.key["device"] and "not a measurement" in profile.made["by"]
    assert profile.made["tile"] == 8
    assert "MADE-UP" in inspect.getdoc(gpu_like_profile)


# The command.


def machine_profile(block_size: int = 3) -> Profile:
    draft = DraftCurve([1, 4], [0.01, 0.02], [0.02, 0.05])
    return Profile({}, block_size, [StepCurve(64, [1, 4, 16], [0.1, 0.13, 0.4])], draft, draft)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with blocks of two sets and a profile, and no model to be had."""
    rng = np.random.default_rng(0)
    logits = rng.normal(1.0, 1.5, (60, 3))
    accepted = np.cumprod(rng.random((60, 3)) < 1 / (1 + np.exp(-logits)), axis=1).sum(axis=1)
    Blocks(logits, accepted, ["maths"] * 40 + ["chat"] * 20, 0.8).save(tmp_path / "blocks.json")
    machine_profile().save(tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulate, "load_pair", None)
    return tmp_path


SMALL = ["--rows", "1", "4", "--rounds", "6"]


def test_the_command_with_blocks_and_costs_needs_no_model(files, capsys):
    argv = ["simulate", "--blocks", "blocks.json", "--profile", "profile.json", "--gpu-like", "--seed", "3", *SMALL]
    assert cli.main([*argv, "--output", "first.json"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("Threshold sweep (60 blocks)", "maths", "profile.json: tokens a second", "below the clairvoyant"):
        assert words in shown
    assert "GPU-like, made up: the costs come from a formula" in shown
    assert "measured up to" not in shown  # nothing lies beyond
    assert "as the head gave them" in shown

    result = json.loads((files / "first.json").read_text())
    blocks = Blocks.load("blocks.json")
    survivals = np.cumprod(1 / (1 + np.exp(-blocks.confidence_logits)), axis=1)
    sent = (survivals >= 0.5).sum(axis=1)
    (row,) = [row for row in result["threshold_sweep"] if row["set"] is None and row["threshold"] == 0.5]
    assert row["verify_length"] == pytest.approx(sent.mean())
    assert row["draft_acceptance_rate"] == pytest.approx(np.minimum(sent, blocks.accepted).sum() / sent.sum())
    assert {row["set"] for row in result["threshold_sweep"]} == {None, "maths", "chat"}
    assert list(result["load"]) == ["profile.json", "GPU-like, made up"]
    for points in result["load"].values():
        assert [(point["rows"], point["plan"]) for point in points] == list(itertools.product((1, 4), PLANS))
    # One row without drafts takes the first place of the curve; the floor is that of the formula.
    speeds = [points[0]["throughput"] for points in result["load"].values()]
    assert speeds == pytest.approx([1 / 0.1, 1 / math.hypot(6e-3, 64 * 2e-5)])
    assert result["settings"]["confidence_temperatures"] == [1.0] * 3
    assert result["settings"]["sampling_temperature"] == 0.8

    assert cli.main([*argv, "--output", "second.json"]) == 0
    again = json.loads((files / "second.json").read_text())
    assert (again["load"], again["threshold_sweep"]) == (result["load"], result["threshold_sweep"])


def test_what_was_not_measured_is_said(files, capsys):
    Profile({}, 0, [StepCurve(64, [1, 4], [0.1, 0.13])]).save("bare.json")
    argv = ["simulate", "--blocks", "blocks.json", "--rounds", "2"]
    assert cli.main([*argv, "--profile", "bare.json", "--rows", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no draft was measured, so drafting counts as free" in shown
    assert "bare.json: measured up to steps of 4 tokens; beyond that, straight lines" in shown
    several = [StepCurve(64, [2, 4, 16], [0.12, 0.14, 0.5], rows=2)]
    dataclasses.replace(machine_profile(), row_steps=several).save("rows.json")
    assert cli.main([*argv, "--profile", "rows.json", "--rows", "1", "3"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "measured up to steps of 16 tokens, 2 rows a step, drafts for 4 rows; beyond" in shown
    assert cli.main([*argv, "--profile", "rows.json", "--rows", "1", "2"]) == 0
    assert "measured up to" not in capsys.readouterr().out


def test_temperatures_are_those_of_the_drafter_that_is_named(files, capsys):
    folder = files / "drafter"
    folder.mkdir()
    fits = [
        {"sampling_temperature": 0.0, "temperatures": [3.0, 3.0, 3.0]},
        {"sampling_temperature": 1.0, "temperatures": [2.0, 1.5, 0.5]},
    ]
    config = write_drafter_config(folder, confidence_temperatures=fits)
    argv = ["simulate", "--blocks", "blocks.json", "--gpu-like", "--drafter", "drafter", *SMALL]
    assert cli.main([*argv, "--output", "out.json"]) == 0
    assert "as the head gave them" not in " ".join(capsys.readouterr().out.split())
    result = json.loads((files / "out.json").read_text())
    assert result["settings"]["confidence_temperatures"] == [2.0, 1.5, 0.5]
    logits = Blocks.load("blocks.json").confidence_logits
    survivals = np.cumprod(1 / (1 + np.exp(-logits / np.array([2.0, 1.5, 0.5]))), axis=1)
    (row,) = [row for row in result["threshold_sweep"] if row["set"] is None and row["threshold"] == 0.3]
    assert row["verify_length"] == pytest.approx((survivals >= 0.3).sum(axis=1).mean())

    write_drafter_config(folder, **config | {"block_size": 7, "confidence_temperatures": None})
    assert cli.main(argv) == 2
    message = capsys.readouterr().err
    assert "--drafter 'drafter'" in message and "block_size is 7" in message and "blocks 3" in message


def write_drafter_config(folder: Path, **changes: object) -> dict[str, object]:
    config = random_drafter(block_size=3).config.to_dict() | changes
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--blocks", "none.json"], ["--blocks 'none.json'"]),
        (["--blocks", "profile.json"], ["--blocks 'profile.json'", "holds no blocks"]),
        (["--blocks", "blocks.json", "--profile", "none.json"], ["--profile 'none.json'"]),
        (["--blocks", "blocks.json", "--profile", "blocks.json"], ["--profile 'blocks.json'", "is no profile"]),
        (["--blocks", "blocks.json", "--prompts", "x.jsonl"], ["--blocks 'blocks.json'", "--prompts has no effect"]),
        (["--blocks", "blocks.json", "--limit", "2"], ["--blocks 'blocks.json'", "--limit has no effect"]),
        (["--blocks", "blocks.json", "--profile", "other.json"], ["other.json", "block_size is 7", "blocks is 3"]),
        (["--prompts", "none.jsonl"], ["--prompts 'none.jsonl'", "no such file"]),
        (["--output", "/no/where/x.json"], ["--output '/no/where/x.json'", "does not exist"]),
        (["--plot", "/no/where/x"], ["--plot '/no/where/x'", "does not exist"]),
        (["--plot", "blocks.json"], ["--plot 'blocks.json'", "give a folder"]),
        (["--rows", "0"], ["--rows", "at least 1"]),
        (["--rounds", "0"], ["--rounds", "at least 1"]),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_bad_input_is_one_line(files, capsys, argv, parts):
    machine_profile(block_size=7).save("other.json")
    try:
        code = cli.main(["simulate", *argv])
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err
    assert code == 2 and message.count("\n") == 1 and "Traceback" not in message
    for part in parts:
        assert part in message


def test_without_matplotlib_plots_are_refused_before_anything_is_done(files, monkeypatch):
    monkeypatch.setattr(command_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"--plot .*needs matplotlib.*dspark-hf\[plots\]"):
        command_files.check_plot_folder("plots")


def test_the_plots_are_written(files):
    pytest.importorskip("matplotlib")
    argv = ["simulate", "--blocks", "blocks.json", "--profile", "profile.json", "--gpu-like", "--plot", "plots"]
    assert cli.main([*argv, *SMALL]) == 0
    images = {path.name: path.read_bytes() for path in (files / "plots").iterdir()}
    assert set(images) == {"threshold_sweep.png", "budget.png", "throughput.png"}
    assert all(image.startswith(b"\x89PNG") for image in images.values())


@pytest.fixture
def pair(tiny_target, load_drafter, monkeypatch, tmp_path) -> Pair:
    """The tiny pair, whatever pair is asked for, and an empty cache."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    drafter = load_drafter("deepspec-vanilla")
    drafter.config.confidence_temperatures = [
        {"sampling_temperature": 0.0, "temperatures": [2.0] * drafter.config.block_size}
    ]
    pair = Pair(tiny_target, drafter, character_tokenizer(), ("tiny", "vanilla"))
    monkeypatch.setattr(simulate, "load_pair", lambda *arguments: pair)
    (tmp_path / "set.jsonl").write_text('{"prompt": "Once upon"}\n{"prompt": "a time"}\n')
    monkeypatch.chdir(tmp_path)
    return pair


RECORD = ["simulate", "--prompts", "set.jsonl", "--max-new-tokens", "40", "--rows", "2", "--rounds", "3"]


def test_without_blocks_some_are_recorded(pair, tmp_path):
    path = profile_path(profile_key(pair.target, pair.drafter))
    machine_profile(pair.drafter.config.block_size).save(path)
    assert cli.main([*RECORD, "--output", "out.json"]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert {row["set"] for row in result["threshold_sweep"]} == {None, "set"}
    assert result["threshold_sweep"][0]["blocks"] > 2
    assert set(result["settings"]["confidence_temperatures"]) == {2.0}  # the drafter's own
    assert list(result["load"]) == ["this machine"]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--max-new-tokens", "3"], ["--max-new-tokens 3", "block of 7 drafts", "give at least 9"]),
        (["--max-new-tokens", "9"], ["--max-new-tokens 9", "all 2 texts ended", "longer answers"]),
    ],
    ids=lambda value: value[1] if value[0].startswith("--max") and len(value) == 2 else "",
)
def test_texts_too_short_for_a_block_are_refused_by_argument_value_and_fix(pair, capsys, monkeypatch, argv, parts):
    monkeypatch.setattr("dspark_hf.blocks.whole_blocks_by_row", lambda stats, block_size: [[] for _ in stats.rows])
    assert cli.main([*RECORD, "--gpu-like", *argv]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    for part in ("dspark simulate: error: ", *parts):
        assert part in message


def test_a_machine_without_a_profile_is_said_before_anything_is_recorded(pair, capsys, monkeypatch):
    monkeypatch.setattr("dspark_hf.blocks.record_blocks", None)
    assert cli.main(RECORD) == 2
    message = capsys.readouterr().err
    assert "no profile" in message and "dspark profile" in message and "--gpu-like" in message


def test_arguments_are_those_of_the_function():
    arguments = set(vars(cli.build_parser().parse_args(["simulate"]))) - {"run", "command"}
    assert arguments == set(inspect.signature(simulate.run).parameters)
    assert cli.build_parser().parse_args(["simulate"]).rows == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
