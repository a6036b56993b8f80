"""Measuring costs: a made-up clock comes back exactly, the engine's own steps are timed; and `dspark profile`."""

import logging
import math
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from conftest import FIXTURES
from families import decoder, drafter_for, image_reader
from sklearn.isotonic import IsotonicRegression
from tiny import character_tokenizer, random_drafter, random_target

from dspark_hf import Profile, cli, command_files, measure_profile, profile_command, profiling
from dspark_hf.profiles import DraftCurve, StepCurve, find_profile, profile_key, profile_path
from dspark_hf.profiling import token_grid, typical_seconds


class Clock:
    """
    A clock that only the parts of a round move, each by a whole number of its own, whatever they really take.

    Attributes:
        log (`list`): What was timed, in order: `(context, rows, tokens)`, `(rows, slots, do_sample)` or `do_sample`.
        slow (`Callable`): Multiplies what the n-th entry of the log takes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow=lambda number: 1):
        self.now, self.log, self.slow, self.running = 0, [], slow, False
        clock = self

        class Stream(profiling.FlattenedStream):
            def verify(self, tokens, counts):
                assert len(set(counts)) == 1 and sum(counts) == len(tokens)
                (context,) = set(self.cache.lengths)
                what = (context, len(counts), len(tokens))
                return None if clock.takes(what, step_cost(*what)) else super().verify(tokens, counts)

        class Generator(profiling.DSparkCandidateGenerator):
            def get_candidates(self, sequences, rows, room, slots):
                what = (len(rows), slots, self.do_sample)
                assert clock.takes(what, draft_cost(*what))

        class Judge(profiling.Verification):
            def greedy(self, scores):
                clock.takes(False, 2 * len(scores))
                return super().greedy(scores)

            def sampled(self, target_probs, draft_probs):
                clock.takes(True, 5 * len(target_probs))
                return super().sampled(target_probs, draft_probs)

        monkeypatch.setattr(profiling, "FlattenedStream", Stream)
        monkeypatch.setattr(profiling, "DSparkCandidateGenerator", Generator)
        monkeypatch.setattr(profiling, "Verification", Judge)
        monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=self.read, monotonic=lambda: self.now))

    def read(self) -> int:
        """The time; every other reading begins a measurement."""
        self.running = not self.running
        return self.now

    def takes(self, what, cost: int) -> bool:
        """Whether this is being timed; then nothing need really be done."""
        if self.running:
            self.now += cost * self.slow(len(self.log))
            self.log.append(what)
        return self.running


def step_cost(context: int, rows: int, tokens: int) -> int:
    """Jagged: a stair every 4 tokens, a dip at multiples of 3."""
    return 1000 + 300 * -(-tokens // 4) - 170 * (tokens % 3 == 0) + context * rows


def draft_cost(rows: int, slots: int, do_sample: bool) -> int:
    return 50 + 7 * rows * slots + 1000 * do_sample


@pytest.fixture
def pair():
    return random_target(max_position_embeddings=128), random_drafter(block_size=3)


# A clock that is known


def test_a_jagged_clock_comes_back_exactly(monkeypatch, pair):
    Clock(monkeypatch)
    profile = measure_profile(*pair, contexts=(40, 8), most_tokens=40, budget=1e9)
    tokens = [*range(1, 17), *range(18, 33, 2), 36, 40]
    assert profile.steps == [
        StepCurve(context, tokens, [step_cost(context, 1, count) for count in tokens]) for context in (8, 40)
    ]
    assert profile.row_steps == [
        StepCurve(context, [rows, 4 * rows], [step_cost(context, rows, count) for count in (rows, 4 * rows)], rows)
        for context in (8, 40)
        for rows in (2, 4, 8)  # 16 rows of 4 tokens are more than 40
    ]
    for do_sample, curve in ((False, profile.draft_greedy), (True, profile.draft_sampled)):
        rows = [1, 2, 4, 8]
        one, whole = ([draft_cost(count, slots, do_sample) for count in rows] for slots in (1, 3))
        assert curve == DraftCurve(rows, one, whole)
    assert (profile.judge_greedy, profile.judge_sampled) == (2.0, 0.0), "a CPU takes time for what comes alone"
    assert profile.block_size == 3


@pytest.mark.parametrize("by_step", [True, False])
def test_the_scheduler_gets_what_the_clock_said(by_step, monkeypatch, pair):
    Clock(monkeypatch)
    monkeypatch.setattr(profiling, "pays_by_step", lambda device: by_step)
    profile = measure_profile(*pair, contexts=(8,), most_tokens=32, budget=1e9)
    costs = profile.costs(rows=4, context=8, block_size=3, do_sample=True)
    # Rows cost the same however many tokens they have; where the clock went back, both sides count as their mean.
    said = [step_cost(8, 4, tokens) for tokens in range(4, 17)]
    rising = IsotonicRegression().fit_transform(range(4, 17), said)
    assert costs.verify_seconds[4:] == pytest.approx(rising + (not by_step) * 5 * np.arange(4, 17))
    assert costs.draft_seconds == pytest.approx([0, *(draft_cost(4, slots, True) for slots in (1, 2, 3))])


@pytest.mark.parametrize("most", [1, 2, 13, 16, 100, 256, 300])
def test_the_grid_is_dense_where_it_matters(most):
    grid = token_grid(most, 8)
    assert grid == sorted(set(grid)) and grid[0] == 1 and grid[-1] == most
    wanted = [*range(1, 17), *range(18, 33, 2), *range(36, 65, 4), *range(72, 129, 8), *range(144, 257, 16)]
    assert [count for count in grid[:-1]] == [count for count in [*wanted, 288] if count < most]


def test_the_thinnest_grid():
    assert token_grid(100, 1) == [1, 2, 4, 8, 16, 32, 64, 100]


# Up to 16 tokens and 4 rows: steps of several rows, judgements, drafts; and steps of one row on both grids.
OTHERS, THIN, DENSE = 4 + 1 + 12, 5, 16


def test_slow_moments_show_no_more_than_fast_ones(monkeypatch, pair):
    """Every few points the machine's speed changes; what one thing takes beside another comes back all the same."""
    clock = Clock(monkeypatch, lambda number: (10, 13, 7, 11, 20, 10)[number // 16 % 6])
    profile = measure_profile(*pair, contexts=(8,), most_tokens=16, budget=1e9)
    assert len(clock.log) == 2 * (OTHERS + THIN) + 9 * (OTHERS + DENSE) and profile.made["sweeps"] == 9
    wanted = np.array([step_cost(8, 1, count) for count in range(1, 17)])
    ratios = np.array(profile.steps[0].seconds) / wanted
    assert 9 < ratios.min() and ratios.max() / ratios.min() < 1.02
    drafts = np.array(profile.draft_greedy.one_slot) / [draft_cost(rows, 1, False) for rows in (1, 2, 4)]
    assert drafts == pytest.approx(np.median(ratios), rel=0.02)


def test_a_wandering_speed_is_told_apart_from_what_things_take():
    """The error of the median is more than twice, and of the fastest time more than thrice, what is left here."""
    rng = np.random.default_rng(0)
    true = dict(enumerate(np.exp(rng.normal(size=60))))
    measured, slow = [], 0.0
    for _ in range(6):
        for thing in rng.permutation(60).tolist():
            slow = 0.95 * slow + 0.03 * rng.normal()
            measured.append((thing, true[thing] * math.exp(slow + 0.01 * rng.normal())))
    times = {thing: [seconds for other, seconds in measured if other == thing] for thing in true}

    def error(found: dict[int, float]) -> float:
        return float(np.std([math.log(found[thing] / true[thing]) for thing in true]))

    left = error(typical_seconds(measured))
    assert left < 0.02
    assert error({thing: float(np.median(values)) for thing, values in times.items()}) > 2 * left
    assert error({thing: min(values) for thing, values in times.items()}) > 3 * left


def test_every_sweep_has_all_points_in_an_order_of_its_own(monkeypatch, pair):
    clock = Clock(monkeypatch)
    measure_profile(*pair, contexts=(8,), most_tokens=16, budget=1e9)
    measured = clock.log[2 * (OTHERS + THIN) :]
    size = OTHERS + DENSE
    sweeps = [measured[start : start + size] for start in range(0, len(measured), size)]
    assert len(sweeps) == 9
    assert all(Counter(sweep) == Counter(sweeps[0]) for sweep in sweeps)
    assert max(Counter(sweeps[0]).values()) == 1
    assert len({tuple(sweep) for sweep in sweeps}) == 9


def test_the_budget_sets_the_grid_and_the_sweeps(monkeypatch, pair):
    grids = []
    for budget in (1, 100_000, 350_000, 450_000, 1_000_000, 10_000_000):
        with monkeypatch.context() as patch:
            clock = Clock(patch)
            profile = measure_profile(*pair, contexts=(8,), most_tokens=32, budget=budget)
        grids.append((len(profile.steps[0].tokens), profile.made["sweeps"]))
        assert clock.now <= 1.05 * budget or grids[-1] == (6, 3)
    assert grids[0] == (6, 3)  # the least that is done
    assert grids[-1] == (24, 9)  # the most
    assert grids == sorted(grids, key=lambda grid: grid[0])
    assert {points for points, _ in grids} == {6, 16, 24} or {points for points, _ in grids} == {6, 11, 16, 24}


def test_what_is_done_between_the_points_counts_against_the_budget(monkeypatch, pair):
    clock, prepare = Clock(monkeypatch), profiling._Bench._step

    def slowly(bench, point):
        clock.now += 3 * step_cost(point.context, point.rows, point.tokens)
        return prepare(bench, point)

    monkeypatch.setattr(profiling._Bench, "_step", slowly)
    profile = measure_profile(*pair, contexts=(8,), most_tokens=32, budget=1_000_000)
    assert clock.now <= 1_000_000 and profile.made["sweeps"] > 3


def test_a_machine_that_slows_down_gets_fewer_sweeps(monkeypatch, pair):
    warm_up = 2 * (OTHERS + THIN)
    clock = Clock(monkeypatch, lambda number: 1 if number < warm_up else 2)
    profile = measure_profile(*pair, contexts=(8,), most_tokens=16, budget=450_000)
    assert clock.now <= 450_000 and 3 < profile.made["sweeps"] < 9


# What is timed


def record_steps(monkeypatch, target) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """Tokens, positions and numbers of keys of each of the target's passes."""
    passes = []

    def hook(module, args, kwargs) -> None:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        lengths = list(getattr(cache, "lengths", []))
        passes.append((kwargs["input_ids"], kwargs["position_ids"], lengths))

    target.register_forward_pre_hook(hook, with_kwargs=True)
    return passes


def test_steps_are_those_of_the_engine_at_their_context(monkeypatch, pair):
    target, drafter = pair
    passes = record_steps(monkeypatch, target)
    measure_profile(target, drafter, contexts=(5, 60), most_tokens=8, budget=1e-9)
    (prompt, _, _), *steps = passes
    assert prompt.shape == (2, 2)
    seen = set()
    for tokens, positions, lengths in steps:
        assert tokens.shape[0] == 1 and len(set(lengths)) == 1
        rows, (context,) = len(lengths), set(lengths)
        each = tokens.shape[1] // rows
        assert positions[0].tolist() == [*range(context, context + each)] * rows
        assert tokens.min() >= 0 and tokens.max() < target.config.vocab_size
        seen.add((context, rows, tokens.shape[1]))
    one_row = {(context, 1, count) for context in (5, 60) for count in (1, 2, 4, 8)}
    assert seen == one_row | {(context, 2, count) for context in (5, 60) for count in (2, 8)}


def test_what_a_step_says_does_not_depend_on_the_memory_it_is_lent(pair):
    """A lent row of a context that was really run says what the target says."""
    target, _ = pair
    text = torch.randint(0, 4, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = target(text).logits[0, 7:]
        _, stream = profiling._open_stream(target, [1], rows=2)
        lender = profiling._Lender(stream)
        lender.reserve(2 * 12)
        lender.lend(stream, rows=1, context=0, slots=24).verify(text[0, :7], [7])
        again = lender.lend(stream, rows=1, context=7, slots=24)
        torch.testing.assert_close(again.verify(text[0, 7:], [5]).logits, expected)
        # Two rows with the same text.
        two = lender.lend(stream, rows=2, context=0, slots=12)
        two.verify(torch.cat([text[0, :7]] * 2), [7, 7])
        two.advance([7, 7])
        torch.testing.assert_close(
            two.verify(torch.cat([text[0, 7:]] * 2), [5, 5]).logits, torch.cat([expected, expected])
        )


def test_a_real_measurement(pair):
    target, drafter = pair
    torch.manual_seed(7)
    before = torch.get_rng_state()
    profile = measure_profile(target, drafter, contexts=(4, 16), most_tokens=8, budget=1e-9)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers go on as if nothing had been"
    assert [(curve.context, curve.tokens) for curve in profile.steps] == [(4, [1, 2, 4, 8]), (16, [1, 2, 4, 8])]
    assert [(curve.context, curve.rows, curve.tokens) for curve in profile.row_steps] == [
        (4, 2, [2, 8]),
        (16, 2, [2, 8]),
    ]
    assert profile.draft_greedy.rows == profile.draft_sampled.rows == [1, 2]
    profile.check("measured")  # everything above 0
    assert 0 < profile.judge_greedy < 1 and profile.judge_sampled == 0
    assert profile.made["sweeps"] == 3 and profile.made["machine"]["torch_threads"] == torch.get_num_threads()
    assert profile.key == profile_key(target, drafter)
    assert find_profile(target, drafter) == profile == Profile.load(profile_path(profile.key))


def test_the_target_alone(pair):
    profile = measure_profile(pair[0], contexts=(4,), most_tokens=16, budget=1e-9)
    assert (profile.block_size, profile.draft_greedy, profile.draft_sampled) == (0, None, None)
    assert [(curve.rows, curve.tokens) for curve in profile.row_steps] == [(2, [2, 16])]  # blocks of 7
    assert find_profile(*pair) == profile


def test_nothing_is_stored_unless_wanted(pair):
    measure_profile(*pair, contexts=(4,), most_tokens=2, budget=1e-9, save=False)
    assert find_profile(*pair) is None


def test_a_measured_profile_serves_a_call(pair, caplog):
    target, drafter = pair
    prompt = torch.tensor([[1, 2, 3], [3, 2, 1]])
    plain = target.generate(prompt, max_new_tokens=12, do_sample=False)
    measure_profile(target, drafter, contexts=(4,), most_tokens=8, budget=1e-9)
    for schedule in ("hardware_aware", "hardware_aware_lagged"):
        drafter.generation_config.num_assistant_tokens_schedule = schedule
        with caplog.at_level(logging.WARNING, "dspark_hf"):
            text = target.generate(prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
        assert torch.equal(text, plain)
    assert not caplog.records


@pytest.mark.parametrize("name", ["gemma3_text", "gemma4_text", "gpt_oss", "deepseek_v2", "gpt2"])
def test_targets_of_many_kinds(name):
    target = decoder(name)
    profile = measure_profile(target, drafter_for(target), contexts=(20,), most_tokens=12, budget=1e-9)
    assert profile.steps[0].tokens == [1, 2, 4, 8, 12] and profile.row_steps


def test_a_target_that_reads_images():
    target, _ = image_reader("qwen2_vl")
    profile = measure_profile(target, contexts=(8,), most_tokens=8, budget=1e-9)
    assert find_profile(target, None) == profile


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_a_wrapped_target_is_found_by_what_generate_hands_on(pair):
    target, drafter = pair
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(target, config)
    profile = measure_profile(wrapped, drafter, contexts=(4,), most_tokens=4, budget=1e-9)
    assert find_profile(wrapped.get_base_model(), drafter) == profile


def test_progress_is_shown(pair, capsys):
    measure_profile(*pair, contexts=(4,), most_tokens=8, budget=1e-9)
    shown = capsys.readouterr().err
    assert "Profiling: 100%" in shown and "sweep 3 of 3" in shown and "warm-up 1 of 2" in shown


# Limits


def test_positions_cap_contexts_and_tokens():
    target = random_target(max_position_embeddings=48)
    profile = measure_profile(target, contexts=(8, 512, 2048), most_tokens=256, budget=1e-9)
    assert [(curve.context, curve.tokens[-1]) for curve in profile.steps] == [(8, 24), (24, 24)]


# Two layers with one key head of 4 in float64: 128 bytes a slot.
@pytest.mark.parametrize(
    ("slots", "kept"),
    [
        (10_000, {8: [1, 2, 4], 100: [1, 2, 4]}),
        (2 * 116, {8: [1, 2, 4], 100: [1, 2]}),  # 4 rows of 100 + 4 do not fit
        (100 + 16, {8: [1, 2, 4], 100: [1]}),
        (100, {8: [1, 2, 4]}),
        (24, {8: [1, 2]}),
    ],
)
def test_memory_limits_rows_and_contexts(monkeypatch, pair, caplog, slots, kept):
    monkeypatch.setattr(profiling, "_free_bytes", lambda device: 2 * 128 * slots)  # half of it may be used
    with caplog.at_level(logging.INFO, "dspark_hf"):
        profile = measure_profile(*pair, contexts=(8, 100), most_tokens=16, budget=1e-9)
    found = {curve.context: [1] for curve in profile.steps}
    for curve in profile.row_steps:
        found[curve.context].append(curve.rows)
    assert found == kept
    assert profile.draft_greedy.rows == [1, 2, 4][: len(kept[8])]
    assert bool(caplog.records) == (slots < 10_000)


def test_no_memory_at_all(monkeypatch, pair):
    monkeypatch.setattr(profiling, "_free_bytes", lambda device: 1000)
    with pytest.raises(ValueError, match=r"`contexts` is \[8\], and the memory that is free holds no row"):
        measure_profile(*pair, contexts=(8,), most_tokens=16)


def test_free_memory_is_known():
    assert profiling._free_bytes(torch.device("cpu")) > 1e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"contexts": ()}, r"`contexts` is \(\)"),
        ({"contexts": (128, 0)}, r"`contexts` is \(128, 0\)"),
        ({"contexts": (1.5,)}, r"`contexts` is \(1.5,\)"),
        ({"most_tokens": 0}, "`most_tokens` is 0"),
        ({"budget": 0}, "`budget` is 0"),
        ({"budget": float("inf")}, "`budget` is inf"),
    ],
)
def test_arguments_out_of_range(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        measure_profile(*pair, **arguments)


@pytest.mark.parametrize("name", ["gpt_neo", "llama4_text"])
def test_a_target_that_is_not_flattened(name):
    """The second in batches only, which is noticed in the first pass of one."""
    with pytest.raises(
        ValueError, match=r"flattened stream \(it has .*Leave `num_assistant_tokens_schedule` at 'constant'"
    ):
        measure_profile(decoder(name), contexts=(8,), most_tokens=16, budget=1e-9)
    assert not profile_path({}).parent.exists()


def test_a_target_that_is_refused():
    with pytest.raises(ValueError, match="cannot forget rejected drafts"):
        measure_profile(decoder("mamba"), contexts=(8,), most_tokens=16)


def test_a_drafter_of_another_target(pair):
    with pytest.raises(ValueError, match="The drafter was made for a target with"):
        measure_profile(pair[0], random_drafter(vocab_size=9), contexts=(8,))


# The command


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("target") / "tiny"
    shutil.copytree(FIXTURES / "tiny-target", folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


DRAFTER = str(FIXTURES / "deepspec-vanilla" / "drafter")
QUICK = ["--contexts", "8", "30", "--most-tokens", "16", "--budget", "0.001"]


@pytest.fixture
def no_measuring(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("measured, although there is a stored profile")

    return lambda: monkeypatch.setattr(profiling, "measure_profile", fail)


def test_the_command_measures_once(target_folder, tmp_path, capsys, no_measuring):
    pytest.importorskip("matplotlib")
    plot, copy = tmp_path / "profile.png", tmp_path / "copy.json"
    argv = ["profile", "--target", target_folder, "--drafter", DRAFTER, *QUICK]
    assert cli.main([*argv, "--plot", str(plot), "--output", str(copy)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    for part in ("float32 on cpu", "CPU thread(s)", "Stored: ", "steps/s", "tokens/s", "one slot", "Choosing: "):
        assert part in output
    (stored,) = profile_path({}).parent.iterdir()
    assert Profile.load(stored) == Profile.load(copy)
    assert Profile.load(copy).block_size == 7
    assert plot.read_bytes().startswith(b"\x89PNG")
    no_measuring()
    assert cli.main(argv) == 0
    again = " ".join(capsys.readouterr().out.split())
    assert "--force measures anew" in again and Profile.load(copy).made["date"] in again
    # The same tables.
    assert output[output.index("Steps of B") : output.index("Choosing")] in again


def test_the_command_measures_again_by_force_or_if_the_file_is_damaged(target_folder, capsys, monkeypatch):
    argv = ["profile", "--target", target_folder, "--drafter", DRAFTER, *QUICK]
    calls = []

    def measure(target, drafter, **options):
        calls.append(options)
        profile = Profile(profile_key(target, drafter), 7, [StepCurve(8, [1], [float(len(calls))])])
        profile.save(profile_path(profile.key))
        return profile

    monkeypatch.setattr(profiling, "measure_profile", measure)
    assert cli.main(argv) == 0 and cli.main(argv) == 0
    assert calls == [{"contexts": [8, 30], "most_tokens": 16, "budget": 0.001}]
    assert cli.main(["profile", "--target", target_folder, "--drafter", DRAFTER, "--force"]) == 0
    assert calls[1:] == [{}], "what is not given is left to measure_profile"
    (stored,) = profile_path({}).parent.iterdir()
    stored.write_text("{")
    assert cli.main(argv) == 0
    assert len(calls) == 3 and Profile.load(stored).steps[0].seconds == [3.0]


def test_the_command_profiles_a_target_alone(target_folder, tmp_path, capsys):
    argv = ["profile", "--target", target_folder, "--drafter", "none", *QUICK]
    assert cli.main([*argv, "--dtype", "bfloat16", "--output", str(tmp_path / "copy.json")]) == 0
    profile = Profile.load(tmp_path / "copy.json")
    assert profile.key["dtype"] == "bfloat16" and profile.key["drafter"] == "" and profile.draft_greedy is None
    output = " ".join(capsys.readouterr().out.split())
    assert "bfloat16 on cpu" in output and "Drafts: ms" not in output


def error_of(capsys, *argv: str) -> str:
    try:
        code = cli.main(["profile", *argv])
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and message.startswith("dspark profile: error: ")
    return message


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--contexts", "0"], ["--contexts", "0", "at least 1"]),
        (["--most-tokens", "many"], ["--most-tokens", "'many'", "whole number"]),
        (["--budget", "0"], ["--budget", "0", "seconds above 0"]),
        (["--budget", "inf"], ["--budget", "inf", "seconds above 0"]),
        (["--plot", "/no/where.png"], ["--plot", "/no/where.png", "does not exist"]),
        (["--output", "/no/where.json"], ["--output", "/no/where.json", "does not exist"]),
        (["--target", "./nowhere", "--drafter", "none"], ["--target", "./nowhere", "no such folder"]),
        (["--target", "org/model"], ["--drafter is missing", "org/model"]),
    ],
)
def test_bad_input_to_the_command(capsys, argv, parts):
    message = error_of(capsys, *argv)
    for part in parts:
        assert part in message


def test_a_plot_without_matplotlib_names_the_extra(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(command_files.importlib.util, "find_spec", lambda name: None)
    assert "dspark-hf[plots]" in error_of(capsys, "--plot", str(tmp_path / "plot.png"))


def test_a_target_that_the_command_cannot_measure(capsys, tmp_path):
    decoder("gpt_neo").save_pretrained(tmp_path / "neo")
    message = error_of(capsys, "--target", str(tmp_path / "neo"), "--drafter", "none", *QUICK)
    assert str(tmp_path / "neo") in message and "flattened" in message


def test_arguments_are_those_of_the_function():
    import inspect

    arguments = set(vars(cli.build_parser().parse_args(["profile"]))) - {"run", "command"}
    assert arguments == set(inspect.signature(profile_command.run).parameters)


def test_the_table_has_a_line_for_every_number_of_tokens(capsys):
    from rich.console import Console

    steps = [StepCurve(128, [1, 2, 3], [0.010, 0.020, 0.025]), StepCurve(512, [1, 2, 3], [0.5, 0.4, 0.3])]
    drafts = DraftCurve([1, 2], [0.001, 0.002], [0.003, 0.004])
    rows = [StepCurve(512, [2, 8], [0.6, 0.7], 2)]
    profile = Profile({}, 3, steps, drafts, drafts, 0.0001, 0.0002, row_steps=rows)
    profile_command.print_profile(profile, Console(width=80))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "20.00", "400.00", "2.5", "5"] in lines  # steps and tokens a second at 512
    assert ["3", "25.00", "300.00", "3.3", "10"] in lines
    assert ["2", "–", "–", "600.00", "700.00"] in lines
    assert ["2", "2.00", "4.00", "2.00", "4.00"] in lines


def test_a_plot_of_a_target_alone(tmp_path):
    pytest.importorskip("matplotlib")
    profile = Profile({}, 0, [StepCurve(8, [1, 2], [1.0, 2.0])])
    profile_command.draw_profile(profile, tmp_path / "plot")
    assert (tmp_path / "plot").read_bytes().startswith(b"\x89PNG")
