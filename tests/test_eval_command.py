"""`dspark eval`: what it reads and writes, and that a run that was broken off ends as any other."""

import inspect
import json
import shutil
from pathlib import Path

import pytest
from conftest import FIXTURES
from tiny import character_tokenizer

from dspark_hf import cli, command_files, data, eval_command, evaluation, tasks
from dspark_hf.loading import CommandError
from dspark_hf.work_file import WorkFile


PROMPTS = {
    "sums": ["Tom has 5 apples and buys 3 more. How many", "12 - 7 = ", "What is 3 times 4?"],
    "tales": ["Once upon a time", "A baker makes 72 rolls and sells 50. How many are left?", "Hello"],
}
SIZE = 7
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %} think hard:{% endif %}"
)
TASK_KEYS = {
    "prompts", "rounds", "tokens", "mean_acceptance_length", "mean_acceptance_length_interval",
    "draft_acceptance_rate", "draft_acceptance_rate_interval", "acceptance_by_position", "reached_by_position",
    "drafted_per_round", "verified_per_round", "calibration", "tokens_per_second",
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A target with a tokenizer that has a chat template, a calibrated drafter for it, and prompts."""
    root = tmp_path_factory.mktemp("eval")
    shutil.copytree(FIXTURES / "tiny-target", root / "target")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "target")
    shutil.copytree(FIXTURES / "deepspec-vanilla" / "drafter", root / "drafter")
    config = json.loads((root / "drafter" / "config.json").read_text())
    config["confidence_temperatures"] = [{"sampling_temperature": 0.0, "temperatures": [1.5] * SIZE}]
    (root / "drafter" / "config.json").write_text(json.dumps(config))
    (root / "prompts").mkdir()
    for name, prompts in PROMPTS.items():
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (root / "prompts" / f"{name}.jsonl").write_text(lines)
    return root


def command(folders: Path, *argv: str) -> int:
    pair = ["--target", str(folders / "target"), "--drafter", str(folders / "drafter")]
    small = ["--max-new-tokens", "16", "--batch-size", "2"]
    return cli.main(["eval", *pair, "--prompts", str(folders / "prompts"), *small, *argv])


def comparable(path: Path) -> dict:
    """What two runs of the same have in common."""

    def strip(value: object) -> object:
        if isinstance(value, dict):
            return {name: strip(inner) for name, inner in value.items() if name != "tokens_per_second"}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    results = json.loads(path.read_text())
    return strip({name: value for name, value in results.items() if name not in ("command", "machine")})


@pytest.fixture(scope="module")
def evaluated(folders, tmp_path_factory) -> Path:
    """What one whole command leaves."""
    pytest.importorskip("matplotlib")
    root = tmp_path_factory.mktemp("evaluated")
    files = [
        "--output",
        str(root / "results.json"),
        "--markdown",
        str(root / "card.md"),
        "--plot",
        str(root / "plots"),
    ]
    assert command(folders, *files) == 0
    return root


def test_the_file_holds_what_it_promises(folders, evaluated):
    results = json.loads((evaluated / "results.json").read_text())
    assert {"command", "machine", "versions", "target", "drafter", "settings"} <= results.keys()
    assert results["target"]["id"] == str(folders / "target") and results["target"]["dtype"] == "float32"
    assert results["drafter"]["id"] == str(folders / "drafter") and results["drafter"]["parameters"] > 1000
    assert results["drafter"]["block_size"] == SIZE and results["drafter"]["calibrated_at"] == [0.0]
    greedy, sampled = results["settings"]
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"], greedy["thinking"]) == (0.0, None, None, None)
    assert (sampled["temperature"], sampled["top_p"], sampled["top_k"]) == (1.0, 1.0, 50)
    for entry in (greedy, sampled):
        assert entry["max_new_tokens"] == 16 and list(entry["tasks"]) == list(PROMPTS)
        assert "mean_acceptance_length_interval" in entry["macro"]
        for values in entry["tasks"].values():
            assert values.keys() == TASK_KEYS and values["prompts"] == 3
            assert len(values["acceptance_by_position"]) == len(values["reached_by_position"]) == SIZE
            assert values["calibration"]["before"].keys() == {"ece", "brier", "roc_auc"}
            assert (values["calibration"]["after"] is None) == (entry is sampled)
    assert not list(evaluated.glob("*.work*")) and not list(evaluated.glob("*.tmp"))


def test_the_card_has_a_row_a_task_with_the_numbers_of_the_file(evaluated):
    greedy = json.loads((evaluated / "results.json").read_text())["settings"][0]
    lines = (evaluated / "card.md").read_text().splitlines()
    assert "**Greedy**, 16 new tokens at most" in lines
    assert "**Temperature 1, top_p 1, top_k 50**, 16 new tokens at most" in lines
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    assert [row[0] for row in rows[:5]] == ["task", "---", "sums", "tales", "macro"] and len(rows) == 10
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    for row in rows[2:4]:
        values = greedy["tasks"][row[0]]
        low, high = values["mean_acceptance_length_interval"]
        assert row[1:3] == ["3", f"{values['mean_acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"]
        assert row[3].startswith(f"{values['draft_acceptance_rate']:.1%} [") and row[3].endswith("%]")
        first = values["acceptance_by_position"][0]
        assert row[4] == f"{first:.2f}" and len(row) == 4 + SIZE + 1 and "→" in row[-1]
    assert "95% intervals" in lines[-1]


def test_the_plots_are_drawn(evaluated):
    images = {path.name: path.read_bytes() for path in (evaluated / "plots").iterdir()}
    assert set(images) == {
        "acceptance_by_position.png",
        "temperature_sweep.png",
        "reliability-t0.png",
        "reliability-t1.png",
    }
    assert all(image.startswith(b"\x89PNG") for image in images.values())


def test_the_tables_fit_a_terminal(folders, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert command(folders, "--temperature", "0") == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    for part in ("Acceptance, greedy", "tokens a round", "macro", "Accepted by position, and mean ECE", "→"):
        assert any(part in line for line in shown)
    assert "…" not in "".join(shown)


def test_the_numbers_are_those_of_the_library(folders, evaluated):
    pair = evaluation_pair(folders)
    found = evaluation.measure_acceptance(pair, PROMPTS, max_new_tokens=16, batch_size=2)
    kept = comparable(evaluated / "results.json")["settings"][0]
    for task in PROMPTS:
        assert found["tasks"][task]["mean_acceptance_length"] == kept["tasks"][task]["mean_acceptance_length"]
        assert found["tasks"][task]["calibration"] == kept["tasks"][task]["calibration"]


def evaluation_pair(folders: Path):
    from dspark_hf.loading import load_pair

    return load_pair(str(folders / "target"), str(folders / "drafter"))


# Broken off and taken up.


@pytest.mark.parametrize("torn", [False, True])
def test_an_interrupted_run_ends_as_any_other(folders, evaluated, tmp_path, monkeypatch, capsys, torn):
    output = tmp_path / "results.json"
    calls, decode = [], evaluation.decode_texts

    def interrupted(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return decode(*arguments, **keywords)

    monkeypatch.setattr(evaluation, "decode_texts", interrupted)
    assert command(folders, "--output", str(output)) == 130
    work = tmp_path / "results.json.work.jsonl"
    lines = work.read_text().splitlines()
    assert len(lines) == 1 + 3 and not output.exists()
    if torn:  # as if the machine had stopped while it wrote
        work.write_text("\n".join([*lines[:-1], lines[-1][:40]]))
    assert command(folders, "--output", str(output)) == 0
    assert len(calls) == 4 + 8 - (2 if torn else 3)
    assert f"{3 if torn else 5} prompts are done" in " ".join(capsys.readouterr().out.split())
    assert comparable(output) == comparable(evaluated / "results.json")
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_time_limit_stops_and_the_same_command_goes_on(folders, evaluated, tmp_path, capsys):
    output, codes = tmp_path / "results.json", []
    while not codes or codes[-1] == 1:
        codes.append(command(folders, "--output", str(output), "--time-limit", "1e-9"))
    assert codes == [1] * 7 + [0]
    assert "after 7 of 8 batches" in " ".join(capsys.readouterr().out.split())
    assert comparable(output) == comparable(evaluated / "results.json")


@pytest.mark.parametrize(
    ("argv", "named"),
    [(["--seed", "3"], "seed"), (["--temperature", "0"], "temperature"), (["--limit", "2"], "tasks")]
    + [(["--max-new-tokens", "17", "--top-k", "5"], "top-k, max-new-tokens")],
)
def test_other_arguments_do_not_go_on(folders, tmp_path, capsys, argv, named):
    output = tmp_path / "results.json"
    assert command(folders, "--output", str(output), "--time-limit", "1e-9") == 1
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    assert command(folders, "--output", str(output), *argv) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"unfinished run with other {named};" in message and "results.json.work.jsonl" in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_another_drafter_in_the_same_folder_does_not_go_on(folders):
    pair = evaluation_pair(folders)
    settings = [evaluation.Setting()]
    before = eval_command._asked_for(pair, PROMPTS, settings, 8, 0)
    assert eval_command._asked_for(pair, PROMPTS, settings, 8, 0) == before
    pair.drafter.fc.weight.data[0, 0] += 1e-3
    after = eval_command._asked_for(pair, PROMPTS, settings, 8, 0)
    assert [name for name in before if before[name] != after[name]] == ["drafter"]


def test_a_work_file_keeps_whole_records(tmp_path):
    path = tmp_path / "work.jsonl"
    work = WorkFile(path, {"seed": 1})
    work.append({"a": 1.5})
    work.append({"b": [1, 2]})
    with path.open("a") as file:
        file.write('{"c": ')
    work = WorkFile(path, {"seed": 1})
    assert work.records == [{"a": 1.5}, {"b": [1, 2]}]
    work.append({"c": None})
    assert WorkFile(path, {"seed": 1}).records == [*work.records, {"c": None}]
    with pytest.raises(CommandError, match="other seed, tasks; run it with the same arguments"):
        WorkFile(path, {"seed": 2, "tasks": "a"})
    work.remove()
    assert not list(tmp_path.iterdir())


# Thinking and schedules.


def test_thinking_is_a_setting_like_the_temperature(folders, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "results.json"
    argv = ["--tasks", "tales", "--temperature", "0", "--thinking", "on", "off", "--plot", str(tmp_path / "plots")]
    assert command(folders, *argv, "--output", str(output)) == 0
    on, off = json.loads(output.read_text())["settings"]
    assert (on["thinking"], off["thinking"]) == ("on", "off")
    assert on["tasks"]["tales"]["acceptance_by_position"] != off["tasks"]["tales"]["acceptance_by_position"]
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        "acceptance_by_position.png", "reliability-t0-thinking-on.png", "reliability-t0-thinking-off.png",
    }  # fmt: skip


def test_a_schedule_is_measured_as_it_cuts(folders, evaluated, tmp_path):
    output = tmp_path / "results.json"
    argv = ["--temperature", "0", "--schedule", "confidence", "--threshold", "0.6", "--output", str(output)]
    assert command(folders, *argv) == 0
    cut, whole = (json.loads(path.read_text()) for path in (output, evaluated / "results.json"))
    assert (cut["schedule"], cut["threshold"], whole["schedule"], whole["threshold"]) == (
        "confidence", 0.6, "constant", None,
    )  # fmt: skip
    for task in PROMPTS:
        shorter, all_sent = (results["settings"][0]["tasks"][task] for results in (cut, whole))
        assert shorter["verified_per_round"] < all_sent["verified_per_round"] and shorter["calibration"] is None
        assert shorter["tokens"] == all_sent["tokens"]


def test_the_thresholds_default_is_the_drafters_and_then_transformers(folders):
    pair = evaluation_pair(folders)
    assert eval_command._threshold(pair, "confidence", None) == 0.4
    pair.drafter.generation_config.assistant_confidence_threshold = 0.25
    assert eval_command._threshold(pair, "confidence", None) == 0.25
    assert eval_command._threshold(pair, "confidence", 0.7) == 0.7
    assert eval_command._threshold(pair, "constant", None) == 0.0
    with pytest.raises(CommandError, match="--schedule hardware_aware.*dspark profile"):
        eval_command._threshold(pair, "hardware_aware", None)


# Tasks.


def test_the_bundled_sets_are_small_and_their_licences_are_told():
    sets = tasks.read_tasks(None, None, None)
    assert set(sets) == {"gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "arena-hard-v2"}
    assert all(8 <= len(prompts) <= 12 for prompts in sets.values())
    files = list(tasks.BUNDLED.iterdir())
    assert sum(file.stat().st_size for file in files) < 60_000
    told = (tasks.BUNDLED / "README.md").read_text()
    for name in sets:
        (line,) = [line for line in told.splitlines() if line.startswith(f"| {name}.jsonl")]
        assert any(licence in line for licence in ("MIT", "CC BY 4.0", "Apache-2.0"))
    assert list(command_files.read_prompts(None)) == ["school-maths"]  # what demo and bench take


def test_tasks_are_names_files_and_datasets(folders, tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
    assert tasks.read_tasks(f"tales, {file}", str(folders / "prompts"), 1) == {
        "tales": ["Once upon a time"],
        "own": ["One"],
    }
    assert list(tasks.read_tasks("gsm8k,mbpp", None, None)) == ["gsm8k", "mbpp"]


def test_a_column_of_a_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "riddles"
    folder.mkdir()
    (folder / "test.jsonl").write_text('{"question": "One", "n": 1}\n{"question": "Two", "n": 2}\n')
    assert tasks.read_tasks(f"{folder}:test:question", None, None) == {"riddles": ["One", "Two"]}
    assert tasks.read_tasks(f"{folder}:default:test:question", None, 1) == {"riddles": ["One"]}
    with pytest.raises(CommandError, match="no column 'prompt' but question, n"):
        tasks.read_tasks(f"{folder}:test:prompt", None, None)
    with pytest.raises(CommandError, match="row 0 has no text in 'n'"):
        tasks.read_tasks(f"{folder}:test:n", None, None)
    with pytest.raises(CommandError, match="--tasks.*train"):
        tasks.read_tasks(f"{folder}:train:question", None, None)
    with pytest.raises(CommandError, match="two of them are called 'riddles'"):
        tasks.read_tasks(f"{folder}:test:question,{folder}:test:question", None, None)
    (folder / "test.jsonl").write_text("nonsense")
    with pytest.raises(CommandError, match="--tasks"):
        tasks.read_tasks(f"{folder}:test:question", None, None)


def test_a_dataset_without_the_package(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"the package datasets is needed.*dspark-hf\[train\]"):
        tasks.read_tasks("gsm8k:test:question", None, None)


# The command line.


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--tasks", "livecodebench"], ["--tasks 'livecodebench'", "gsm8k", "NAME:SPLIT:COLUMN"]),
        (["--tasks", "/no/where.jsonl"], ["--tasks '/no/where.jsonl'", "no such file"]),
        (["--tasks", "a:b"], ["--tasks 'a:b'", "NAME:SPLIT:COLUMN"]),
        (["--tasks", "gsm8k,,mbpp"], ["--tasks ''", "no such set"]),
        (["--tasks", "gsm8k,gsm8k"], ["--tasks", "two of them are called 'gsm8k'"]),
        (["--prompts", "/no/where"], ["--prompts", "/no/where", "no such folder"]),
        (["--temperature", "0", "-1"], ["--temperature", "-1", "at least 0"]),
        (["--temperature", "0", "--top-p", "0.9"], ["--top-p", "0.9", "--temperature above 0"]),
        (["--thinking", "maybe"], ["--thinking", "maybe", "on"]),
        (["--schedule", "hopeful"], ["--schedule", "hopeful", "hardware_aware"]),
        (["--threshold", "0.5"], ["--threshold 0.5", "--schedule confidence"]),
        (["--max-new-tokens", "1"], ["--max-new-tokens 1", "at least 2"]),
        (["--time-limit", "0"], ["--time-limit", "0", "above 0"]),
        (["--time-limit", "5"], ["--time-limit 5", "--output"]),
        (["--output", "/no/where/x.json"], ["--output", "/no/where", "does not exist"]),
        (["--markdown", "/no/where/x.md"], ["--markdown", "/no/where", "does not exist"]),
        (["--plot", "/no/where/plots"], ["--plot", "/no/where", "does not exist"]),
        (["--target", "org/model"], ["--drafter is missing", "org/model"]),
    ],
)
def test_bad_input_is_one_line(capsys, argv, parts):
    try:
        code = cli.main(["eval", *argv])
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err
    assert code == 2 and message.count("\n") == 1
    for part in parts:
        assert part in message


def test_thinking_that_the_template_does_not_know(folders, tmp_path, capsys):
    shutil.copytree(folders / "target", tmp_path / "target")
    character_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").unlink()
    assert command(folders, "--target", str(tmp_path / "target"), "--thinking", "on") == 2
    assert "has no `enable_thinking`; leave --thinking out" in capsys.readouterr().err.splitlines()[-1]


def test_arguments_are_those_of_the_function():
    parser = cli.build_parser()
    arguments = vars(parser.parse_args(["eval", "--temperature", "0", "0.5", "--temperature", "1"]))
    assert set(arguments) - {"run", "command"} == set(inspect.signature(eval_command.run).parameters)
    assert arguments["temperatures"] == [0.0, 0.5, 1.0]
