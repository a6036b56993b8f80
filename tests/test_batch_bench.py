"""The benchmark over batch sizes and schedules: what it runs, what it counts, what it writes."""

import inspect
import io
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import FIXTURES
from rich.console import Console
from tiny import character_tokenizer, encode
from transformers import GenerationConfig

from dspark_hf import batch_bench, batch_report, cli
from dspark_hf.batch_bench import BatchBench, BatchCall, Setting
from dspark_hf.decoding_methods import DSPARK, PLAIN, PROMPT_LOOKUP
from dspark_hf.loading import CommandError, load_pair
from dspark_hf.profiles import DraftCurve, Profile, StepCurve, profile_key, profile_path, use_profile
from dspark_hf.schedule_options import ScheduleOptions
from dspark_hf.scheduling import SCHEDULES
from dspark_hf.statistics import SpeculativeStats
from dspark_hf.synthetic import SyntheticAcceptance, synthetic_in_force


METHODS = (PLAIN, *SCHEDULES)
DRAFTER = str(FIXTURES / "deepspec-vanilla" / "drafter")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    """The character model with its tokenizer, as a checkpoint folder."""
    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(FIXTURES / "tiny-target", folder, dirs_exist_ok=True)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pair(target_folder):
    return load_pair(target_folder, DRAFTER)


@pytest.fixture
def prompts(tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    for name, lines in (("a", ["Tom has 3 apples.", "One", "Two and two"]), ("b", ["Where is it?", "7"])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    return str(folder)


def profile_of(pair, draft_seconds: float = 1e-4, step_seconds: float = 1e-3) -> Profile:
    """Costs that are the same whatever the number of tokens, or of rows."""
    draft = DraftCurve([1, 64], [draft_seconds] * 2, [draft_seconds] * 2)
    steps = [StepCurve(16, [1, 512], [step_seconds] * 2)]
    return Profile(profile_key(pair.target, pair.drafter), pair.drafter.config.block_size, steps, draft, draft)


@pytest.fixture
def profiled(pair, tmp_path, monkeypatch):
    """A cache folder of the test's own, with a profile under which drafting always pays."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    profile = profile_of(pair)
    profile.save(profile_path(profile.key))
    return profile


def run(capsys, *argv: str) -> tuple[int, str]:
    """Exit code and stderr of a command."""
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


def bench_of(pair, **changes) -> BatchBench:
    options = {"max_new_tokens": 9, "do_sample": False}
    given = {
        "prompt_sets": {"a": ["Tom has 3 apples.", "One", "Two and two"], "b": ["Where is it?"]},
        "options": options,
        "schedules": SCHEDULES,
        "thresholds": (0.25, 0.5, 0.75),
        "seed": 0,
    }
    return BatchBench(pair, **given | changes)


def test_greedy_batches_through_the_command_line(target_folder, profiled, prompts, capsys, tmp_path):
    files = {
        "--output": str(tmp_path / "results.json"),
        "--markdown": str(tmp_path / "table.md"),
        "--plot": str(tmp_path / "speeds.png"),
    }
    argv = ["--target", target_folder, "--drafter", DRAFTER, "--prompts", prompts, "--max-new-tokens", "9"]
    argv += ["--batch-sizes", "1", "3", "--repetitions", "1", *(part for pair in files.items() for part in pair)]
    assert cli.main(["bench", *argv]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results.keys() == {
        *("command", "machine", "versions", "settings", "profile", "summary", "scheduling", "thresholds", "calls")
    }
    assert results["profile"] == profiled.key
    assert results["settings"]["batch_sizes"] == [1, 3] and results["settings"]["do_sample"] is False
    cells = [(cell["batch_size"], cell["method"]) for cell in results["summary"]]
    assert cells == [(size, method) for size in (1, 3) for method in METHODS]
    for cell in results["summary"]:
        assert cell["same_text"] == 1.0, "greedy in float32"
        plain = cell["method"] == PLAIN
        assert (cell["verify_length"] is None) == (cell["outside_share"] is None) == plain
        assert (cell["threshold"] in batch_bench.THRESHOLDS) == (cell["method"] == "confidence")
    numbers = {(call["batch_size"], call["repetition"]) for call in results["calls"]}
    assert numbers == {(1, number) for number in range(8)} | {(3, number) for number in range(3)}
    for call in results["calls"]:
        tokens = call["batch_size"] * 9
        assert call["tokens_per_second"] == pytest.approx(tokens / call["seconds"])
        assert call["decode_tokens_per_second"] == pytest.approx(
            (tokens - call["batch_size"]) / call["decode_seconds"]
        )
        if call["method"] != PLAIN:
            # All that the rounds took lies in the decoding, and the prefill does not.
            stats = call["stats"]
            assert stats["seconds_draft"] + stats["seconds_verify"] < call["decode_seconds"]
            assert call["decode_seconds"] < call["seconds"] - stats["seconds_prefill"]
    whole, cut = ({c["method"]: c for c in results["summary"][5:]}[name] for name in ("constant", "confidence"))
    assert whole["verify_length"] > cut["verify_length"], "the constant block is not cut at the threshold"
    assert [(one["schedule"], one["rows"]) for one in results["scheduling"]] == [
        (schedule, rows) for schedule in SCHEDULES[2:] for rows in (1, 3, 64)
    ]
    assert [set(one["seconds"]) for one in results["thresholds"]] == [{"0.2", "0.4", "0.7"}] * 2
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[-4:]] == ["| batch", "| ---", "| 1", "| 3"]
    output = capsys.readouterr().out
    assert all(name in output for name in SCHEDULES) and all(file in output for file in files.values())
    assert (tmp_path / "speeds.png").read_bytes().startswith(b"\x89PNG")


def test_without_batch_sizes_prompts_run_one_by_one(target_folder, prompts, tmp_path):
    argv = ["--target", target_folder, "--drafter", DRAFTER, "--prompts", prompts, "--limit", "1"]
    argv += ["--max-new-tokens", "6", "--repetitions", "1", "--temperature", "1"]
    assert cli.main(["bench", *argv, "--output", str(tmp_path / "results.json")]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(call["set"], call["method"]) for call in results["calls"]] == [
        (name, method) for name in ("a", "b") for method in (PLAIN, PROMPT_LOOKUP, DSPARK)
    ]
    assert results["calls"][-1]["new_tokens"] == 1 and "stats" not in results["calls"][-1], "the end comes at once"
    assert (results["settings"]["top_p"], results["settings"]["top_k"]) == (1.0, 0)


def test_synthetic_and_sampled(target_folder, profiled, prompts, capsys, tmp_path):
    argv = ["--target", target_folder, "--drafter", DRAFTER, "--prompts", prompts, "--max-new-tokens", "16"]
    argv += ["--batch-sizes", "3", "--repetitions", "1", "--schedules", "constant", "hardware_aware"]
    argv += ["--synthetic-acceptance", "0.1", "0.9", "--synthetic-auc", "0.8", "--temperature", "0.2"]
    assert cli.main(["bench", *argv, "--top-p", "0.9", "--output", str(tmp_path / "results.json")]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    settings = results["settings"]
    assert (settings["temperature"], settings["top_p"], settings["top_k"]) == (0.2, 0.9, 0)
    assert settings["synthetic"] == [0.1, 0.9] and settings["synthetic_auc"] == 0.8
    assert results["thresholds"] == []
    cells = {(cell["accept_prob"], cell["method"]): cell for cell in results["summary"]}
    assert list(cells) == [(prob, name) for prob in (0.1, 0.9) for name in (PLAIN, "constant", "hardware_aware")]
    assert (
        cells[0.1, "constant"]["mean_acceptance_length"] < 1.6 < 3 < cells[0.9, "constant"]["mean_acceptance_length"]
    )
    # Free drafts and verification are all used; at 0.9 that is most of each block.
    assert cells[0.9, "hardware_aware"]["verify_length"] > 4
    output = capsys.readouterr().out
    assert "SYNTHETIC" in output and "same" not in output


def test_a_schedule_stands_in_the_drafters_defaults_for_a_while(pair, monkeypatch):
    own = GenerationConfig(min_verify_length=2)
    own.num_assistant_tokens_schedule, own.assistant_confidence_threshold = "hardware_aware", 0.9
    monkeypatch.setattr(pair.drafter, "generation_config", own)
    of_call = GenerationConfig(num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.4)
    for schedule, threshold in (("constant", None), ("confidence", 0.4), ("hardware_aware_lagged", None)):
        with batch_bench.scheduled(pair.drafter, schedule, threshold, Setting(1)):
            options = ScheduleOptions.of_call(pair.drafter, of_call)
            assert synthetic_in_force() is None
        assert options.schedule == schedule and options.min_verify_length == 2
        assert threshold is None or options.threshold == threshold
        assert pair.drafter.generation_config is own
    with pytest.raises(KeyError), batch_bench.scheduled(pair.drafter, "constant", None, Setting(1, 0.7, 0.8)):
        assert synthetic_in_force() == SyntheticAcceptance(0.7, 0.8)
        raise KeyError
    assert pair.drafter.generation_config is own and synthetic_in_force() is None


def test_batches_take_some_of_each_set_and_begin_anew(pair):
    bench = bench_of(pair)
    in_turn = ["Tom has 3 apples.", "Where is it?", "One", "Two and two"]
    first, second = bench.batch(3, 0), bench.batch(3, 1)
    for batch, texts in ((first, in_turn[:3]), (second, [in_turn[3], *in_turn[:2]])):
        expected = encode(*texts)
        assert torch.equal(batch["attention_mask"], expected["attention_mask"])
        assert torch.equal(
            batch["input_ids"] * batch["attention_mask"], expected["input_ids"] * batch["attention_mask"]
        )


def test_drafted_rounds_are_those_of_the_log(pair):
    """Under costs that make drafting a loss, most rounds are a step without drafts."""
    bench, setting = bench_of(pair, options={"max_new_tokens": 24, "do_sample": False}), Setting(2)
    method = bench.method("hardware_aware", setting)
    with use_profile(profile_of(pair, draft_seconds=1.0)):
        call = bench.call(method, setting, 0)
        with method.surroundings():
            output = pair.target.generate(
                **bench.batch(2, 0), **bench.options, **method.arguments, return_dict_in_generate=True
            )
    decisions = output.speculative_stats.decisions
    drafted = sum(len(decision.rows) for decision in decisions if decision.survivals is not None)
    assert 0 < call.drafted_rounds == drafted < call.stats.rounds / 2
    assert [len(row) for row in call.rows] == [24, 24]


def test_every_way_begins_at_each_setting_in_turn(pair, monkeypatch):
    """Also where there are as many settings as ways, so that turns and settings go round together."""
    order: dict[int, list[list[str]]] = {}

    def call(self, method, setting, number):
        order.setdefault(setting.batch_size, [[] for _ in range(5)])[number].append(method.name)
        stats = None if method.name == PLAIN else round_stats((7, 1))
        return BatchCall([[1, 2]] * setting.batch_size, 1.0, 0.5, stats, 1)

    monkeypatch.setattr(BatchBench, "call", call)
    monkeypatch.setattr(batch_bench, "LEAST_ROWS", 1)
    records = bench_of(pair).measure([Setting(size) for size in range(1, 6)], [0.5] * 5, repetitions=5)
    for turns in order.values():
        assert all(sorted(names) == sorted(METHODS) for names in turns)
        assert sorted(names[0] for names in turns) == sorted(METHODS)
    assert len(records) == 5 * 5 * 5


def test_small_batches_are_decoded_more_often():
    assert [batch_bench.batches_of(Setting(size), 1) for size in (1, 3, 4, 8, 32)] == [8, 3, 2, 1, 1]
    assert [batch_bench.batches_of(Setting(size), 3) for size in (1, 3, 4, 8, 32)] == [8, 3, 3, 3, 3]


def round_stats(*rounds: tuple[int, int], **seconds: float) -> SpeculativeStats:
    """Statistics of rounds given as (verified, accepted), of blocks of 7."""
    result = SpeculativeStats(**{f"seconds_{name}": value for name, value in seconds.items()})
    for verified, accepted in rounds:
        result.record(7, verified, accepted)
    return result


def test_a_cell_by_hand(pair, monkeypatch):
    plain = [BatchCall([[5, 6, 7, 0, 8]] * 2, seconds, seconds - 1) for seconds in (2.0, 5.0, 3.0)]
    first, second = [5, 6, 7, 0, 8], [5, 6, 7, 1, 8]
    constant = [
        BatchCall([first, second], 1.0, 0.5, round_stats((7, 2), (3, 0), draft=1, verify=2, rest=1), 1),
        BatchCall([first, first], 2.0, 1.0, round_stats((4, 4), draft=1, verify=4, rest=1), 1),
        BatchCall([first, first], 6.0, 4.0, round_stats((0, 0), draft=0, verify=9, rest=1), 0),
    ]
    calls = {PLAIN: plain, "constant": constant}
    monkeypatch.setattr(BatchBench, "call", lambda self, method, setting, number: calls[method.name][number])
    monkeypatch.setattr(batch_bench, "LEAST_ROWS", 6)
    bench = bench_of(pair, schedules=("constant",))
    baseline, cell = batch_report.summarise(bench.measure([Setting(2)], [None], repetitions=1))
    assert baseline["tokens_per_second"] == pytest.approx(10 / 3)
    assert baseline["decode_tokens_per_second"] == pytest.approx(8 / 2)
    assert baseline["ratio"] == 1.0 and baseline["constant_ratio"] == 0.5 and baseline["verify_length"] is None
    assert baseline["past_end"] == pytest.approx(1 / 5)
    assert cell["ratio"] == 2.0, "2, 2.5 and 0.5"
    assert cell["decode_ratio"] == 2.0, "2, 4 and 0.5"
    assert cell["same_text"] == pytest.approx(5 / 6)
    assert cell["verify_length"] == 14 / 4
    assert cell["draft_acceptance_rate"] == 6 / 14
    assert cell["mean_acceptance_length"] == 1 + 6 / 4
    assert cell["undrafted_share"] == 1 - 2 / 4
    assert cell["outside_share"] == pytest.approx(3 / 20)


def test_the_threshold_is_chosen_on_batches_of_its_own(pair, monkeypatch):
    # By threshold and turn: 0.5 is the fastest of all once, 0.75 the fastest together.
    seconds = {0.25: [4.0, 4.0], 0.5: [1.0, 6.0], 0.75: [3.0, 3.0]}
    asked = []

    def call(self, method, setting, number):
        with method.surroundings():
            config = pair.drafter.generation_config
            threshold = config.assistant_confidence_threshold
            assert config.num_assistant_tokens_schedule == "confidence"
        asked.append((setting.batch_size, number, threshold))
        return BatchCall([[1, 2]], 9.0, seconds[threshold][number - 7], round_stats((7, 1)), 1)

    monkeypatch.setattr(BatchBench, "call", call)
    monkeypatch.setattr(batch_bench, "TUNING_TURNS", 2)
    tuned = bench_of(pair).tune([Setting(1), Setting(4)], first=7)
    assert [one["chosen"] for one in tuned] == [0.75, 0.75]
    assert tuned[1]["batch_size"] == 4 and tuned[1]["seconds"] == seconds
    assert sorted(asked) == sorted((size, 7 + turn, value) for size in (1, 4) for turn in (0, 1) for value in seconds)
    asked.clear()
    assert [one["chosen"] for one in bench_of(pair, thresholds=(0.3,)).tune([Setting(1)], first=7)] == [0.3]
    assert not asked


@pytest.mark.parametrize(
    ("rows", "ends", "share"),
    [
        ([[1, 2, 3, 4], [2, 1, 1, 1]], 2, (2 + 3) / 8),
        ([[1, 2, 3, 2]], [9, 3], 1 / 4),
        ([[1, 1, 1, 2]], 2, 0.0),
        ([[1, 2]], None, 0.0),
    ],
)
def test_past_end(rows, ends, share):
    assert batch_bench.past_end(rows, ends) == pytest.approx(share)


@pytest.mark.parametrize("schedule", SCHEDULES[2:])
def test_scheduling_is_timed_and_set_against_the_profiles_round(pair, monkeypatch, schedule):
    ticks = iter(range(10**6))
    monkeypatch.setattr(batch_bench, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    profile = profile_of(pair, draft_seconds=2.0, step_seconds=6.0)
    costs = batch_bench.scheduling_costs(schedule, profile, rows=5, block_size=7, do_sample=False)
    # Slots, survivals, choice and outcome: a tick each.
    assert costs == {"schedule": schedule, "rows": 5, "seconds": 4, "share": 4 / (2.0 + 6.0)}


def summary_of(*accept_probs: float | None) -> list[dict]:
    """Two ways at each setting, with numbers that can be told apart."""
    cells = []
    for accept_prob in accept_probs:
        setting = {"batch_size": 16, "accept_prob": accept_prob, "calls": 3, "same_text": 0.5, "past_end": 0.25}
        speed = {"tokens_per_second": 1234.5, "decode_tokens_per_second": 2345.6, "ratio": 1.0, "decode_ratio": 1.0}
        rounds = {"verify_length": None, "draft_acceptance_rate": None, "mean_acceptance_length": None}
        rounds |= {"undrafted_share": None, "outside_share": None}
        none = {"constant_ratio": None, "constant_decode_ratio": None, "threshold": None}
        cells.append({"method": PLAIN} | setting | speed | rounds | none)
        rounds = {"verify_length": 3.25, "draft_acceptance_rate": 0.456, "mean_acceptance_length": 2.5}
        rounds |= {"undrafted_share": 0.125, "outside_share": 0.031}
        other = {"method": "confidence", "threshold": 0.6, "ratio": 1.111, "decode_ratio": 1.222}
        cells.append(cells[-1] | rounds | other)
        cells.append(cells[-1] | {"method": "hardware_aware_lagged", "threshold": None, "draft_acceptance_rate": None})
    return cells


def test_the_markdown_table():
    lines = batch_report.markdown_table(summary_of(None), "Measured so.").splitlines()
    assert lines[0] == "Measured so." and lines[2] == ""
    assert lines[3:] == [
        "| batch | plain tok/s | decoding tok/s | confidence | hardware_aware_lagged |",
        "| --- | --- | --- | --- | --- |",
        "| 16 | 1234.5 | 2345.6 | 1.11 · 1.22 · 3.2 · 46% (0.6) | 1.11 · 1.22 · 3.2 · – |",
    ]
    lines = batch_report.markdown_table(summary_of(0.7, 0.52), "Measured so.").splitlines()
    assert [line.split(" | ")[1] for line in lines[3:]] == ["accept_prob", "---", "0.7", "0.52"]


@pytest.mark.parametrize("accept_probs", [(None,), (0.52, 0.7)])
def test_the_tables_fit_80_columns(accept_probs):
    output = io.StringIO()
    scheduling = [{"schedule": "hardware_aware_lagged", "rows": 64, "seconds": 0.00123, "share": 0.0042}]
    summary = summary_of(*accept_probs)
    batch_report.print_tables(summary, scheduling, Console(file=output, width=80), compare_texts=True)
    text = output.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    for part in ("confidence 0.6", "1234.5", "3.25", "0.46", "12%", "3.1%", "50%", "1.23", "0.42%", "25% of plain"):
        assert part in text, part
    assert text.count("16 ") == 2 * len(accept_probs)


def test_arguments_are_those_of_the_function():
    argv = ["bench", "--batch-sizes", "2", "--schedules", "constant", "--synthetic-auc", "0.8"]
    argv += ["--markdown", "x", "--plot", "y"]
    arguments = set(vars(cli.build_parser().parse_args(argv))) - {"run", "command"}
    assert arguments == set(inspect.signature(batch_bench.run).parameters)


BATCHES = ["--batch-sizes", "2"]
BAD_INPUT = [
    (["--batch-sizes", "0"], ["--batch-sizes", "0", "at least 1"]),
    ([*BATCHES, "--schedules", "best"], ["--schedules", "best", "hardware_aware_lagged"]),
    ([*BATCHES, "--synthetic-auc", "0.5"], ["--synthetic-auc", "0.5", "between 0.5 and 1"]),
    ([*BATCHES, "--synthetic-auc", "0.8"], ["--synthetic-auc 0.8", "--synthetic-acceptance"]),
    (
        [*BATCHES, "--synthetic-auc", "0.8", "--synthetic-acceptance", "0.5", "1"],
        ["--synthetic-acceptance 1", "between 0 and 1"],
    ),
    ([*BATCHES, "--max-new-tokens", "1"], ["--max-new-tokens 1", "at least 2"]),
    ([*BATCHES, "--threshold", "0.5", "--schedules", "constant"], ["--threshold 0.5", "--schedules"]),
    ([*BATCHES, "--top-p", "0.9"], ["--top-p 0.9", "--temperature above 0"]),
    ([*BATCHES, "--markdown", "/no/where/x.md"], ["--markdown", "/no/where", "does not exist"]),
    ([*BATCHES, "--output", "/no/where/x.json"], ["--output", "/no/where", "does not exist"]),
    ([*BATCHES, "--prompt-lookup-tokens", "3"], ["--prompt-lookup-tokens 3", "with --batch-sizes", "leave one"]),
    (["--schedules", "constant", "confidence"], ["--schedules constant confidence", "without --batch-sizes"]),
    (["--synthetic-auc", "0.8"], ["--synthetic-auc 0.8", "without --batch-sizes"]),
    (["--markdown", "x.md"], ["--markdown x.md", "without --batch-sizes"]),
    (["--plot", "x.png"], ["--plot x.png", "without --batch-sizes"]),
    ([*BATCHES, "--plot", "x.txt"], ["--plot 'x.txt'", ".png"]),
]


@pytest.mark.parametrize(("argv", "parts"), BAD_INPUT, ids=lambda value: " ".join(value))
def test_bad_input_is_one_line_naming_argument_value_and_fix(capsys, argv, parts):
    code, message = run(capsys, "bench", *argv)
    assert code == 2 and message.count("\n") == 1
    for part in parts:
        assert part in message


def test_without_a_profile_the_command_to_run_is_named(target_folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    argv = ["bench", "--target", target_folder, "--drafter", DRAFTER, *BATCHES]
    code, message = run(capsys, *argv, "--schedules", "constant", "hardware_aware")
    line = message.splitlines()[-1]
    assert code == 2 and "--schedules hardware_aware:" in line and "run `dspark profile` first" in line


def test_a_profile_of_the_target_alone_does_not_do(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    alone = Profile(profile_key(pair.target), 0, [StepCurve(16, [1, 512], [1e-3] * 2)])
    alone.save(profile_path(alone.key))
    with pytest.raises(CommandError, match="of the target alone; run `dspark profile`"):
        batch_bench._profile_for(pair, ["hardware_aware"])
    assert batch_bench._profile_for(pair, ["constant", "confidence"]) is None


def test_a_drafter_without_confidence_head_has_the_constant_block_only(target_folder, capsys):
    drafter = str(FIXTURES / "deepspec-noconf" / "drafter")
    code, message = run(capsys, "bench", "--target", target_folder, "--drafter", drafter, *BATCHES)
    assert code == 2 and "no confidence head; give constant alone" in message.splitlines()[-1]


def test_prompts_that_leave_no_room(target_folder, capsys, prompts):
    argv = ["bench", "--target", target_folder, "--drafter", DRAFTER, "--prompts", prompts, *BATCHES]
    code, message = run(capsys, *argv, "--schedules", "constant", "--max-new-tokens", "500")
    assert code == 2 and "prompt 1 of a has 17 tokens" in message.splitlines()[-1]
