"""A drafter's card: what it says of what is known and what is not, that its metadata is the Hub's, its code runs."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import jinja2.meta
import pytest
import yaml
from card_files import (
    TARGET,
    batch_benchmark,
    benchmark,
    evaluation,
    fit,
    training,
    write,
)
from conftest import FIXTURES, load_drafter
from huggingface_hub import ModelCard, ModelCardData
from tiny import character_tokenizer

from dspark_hf import card_inputs, cli, decoding_methods
from dspark_hf.card import CardSources, Known, card_context, hub_id, is_unedited, render_card, template_path
from dspark_hf.card_inputs import read_benchmark, read_evaluation, read_training


ROOT = Path(__file__).parents[1]
MEASUREMENTS = ROOT / "docs" / "measurements"
CARDS = sorted(path.name for path in template_path().parent.glob("*.md") if path != template_path())


@pytest.fixture
def folder(tmp_path) -> Path:
    """A drafter as training leaves it."""
    path = tmp_path / "tiny-drafter"
    load_drafter("deepspec-vanilla").save_pretrained(path)
    write(path / "training.json", training())
    return path


def render(folder: Path, **sources) -> str:
    return render_card(load_drafter("deepspec-vanilla"), folder, CardSources(**sources), sources.pop("repo_id", None))


def section(card: str, title: str) -> str:
    return card.split(f"\n## {title}\n")[1].split("\n## ")[0]


def command_of(name: str) -> list[str]:
    """The arguments with which `make cards` renders a card of hub_cards/."""
    lines = re.findall(r"^\t\S*dspark (card .*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    (found,) = [line for line in lines if f"--output hub_cards/{name}" in line]
    return shlex.split(found)


# The cards of hub_cards/.


@pytest.mark.parametrize("name", CARDS)
def test_the_cards_are_what_the_command_makes_of_what_is_here(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    argv = command_of(name)
    argv[argv.index("--output") + 1] = str(tmp_path / name)
    assert cli.main(argv) == 0
    made, kept = (path.read_text(encoding="utf-8") for path in (tmp_path / name, ROOT / "hub_cards" / name))
    assert made == kept, "`make cards` renders them anew"
    assert is_unedited(kept)


def test_the_bundled_drafter_has_a_card_with_figures_of_the_measurements():
    card = (ROOT / "hub_cards" / "smollm2-135m-instruct-drafter.md").read_text(encoding="utf-8")
    greedy = json.loads((MEASUREMENTS / "bench-greedy.json").read_text())["summary"]["gsm8k"]
    figures = [greedy["plain generate"]["tokens_per_second"], greedy["DSpark"]["ratio"]]
    plain, ratio, length = (*figures, greedy["DSpark"]["mean_acceptance_length"])
    assert f"| math | gsm8k | {plain:.1f} | {ratio:.2f} | {length:.2f} |" in card
    assert "Intel(R) Xeon(R) Processor, 2 cores, 2 threads" in card
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in card


def test_the_template_uses_what_it_is_given():
    source = template_path().read_text(encoding="utf-8")
    used = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(source))
    drafter = load_drafter("deepspec-vanilla")

    given = card_context(Known(drafter, None, [], [], None, None, None), "./x", has_plot=False)
    assert used == given.keys() | {"card_data"}


# Metadata.


def test_the_metadata_is_the_hubs(folder):
    text = render(folder, licence="apache-2.0", datasets=("some/data",))
    block = yaml.safe_load(text.split("---\n")[1])
    expected = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "base_model": TARGET,
        "datasets": ["some/data", "openai/gsm8k"],
        "tags": ["speculative-decoding", "draft-model", "dspark"],
    }
    assert block == expected
    assert ModelCard(text).data.to_dict() == ModelCardData(**expected).to_dict()


def test_metadata_that_is_not_known_is_left_out(folder):
    (folder / "training.json").unlink()
    data = ModelCard(render(folder)).data
    assert data.license is None and data.base_model is None and data.datasets is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [("org/name", "org/name"), ("name", None), ("a/b/c", None), ("./here", None), ("org/na me", None), (None, None)],
)
def test_hub_ids(value, expected):
    assert hub_id(value) == expected


# What is known, and what is not.


def test_provenance_is_told(folder):
    card = render(folder, licence="mit")
    told = section(card, "Training")
    for part in (
        f"`{TARGET}`, `0123abc`, `bfloat16`",
        "openai/gsm8k (7,473), prompts/seeds.jsonl (175)",
        "7,648 samples, 2,000,000 tokens, 1,500,000 supervised tokens, drawn at temperature 0.7, 1.0, thinking off",
        "1,200 steps, 4,000,000 blocks, 28,000,000 supervised tokens",
        "1.5 h",
        "CUDA 12.8 (NVIDIA H200)",
        "torch 2.13.0",
        f"dspark train --target {TARGET} --data 'my data'",
    ):
        assert part in told, part
    assert "not recorded" not in told.lower() and "[!WARNING]" not in card
    limits = section(card, "Limits")
    assert "thinking off" in limits and "2,048 tokens" in limits
    assert "step 1,200: `mean_acceptance_length` greedy 2.50, temperature 1 1.75" in section(card, "Acceptance")


def test_what_is_not_known_is_said(folder):
    (folder / "training.json").unlink()
    card = render(folder)
    warnings = card.split("> [!WARNING]\n")[1].split("\n\n")[0]
    for part in ("not recorded (no `training.json`)", "Hub id of its target is not known", "No licence"):
        assert part in warnings
    assert "Not recorded" in section(card, "Training")
    assert "Not measured" in section(card, "Acceptance") and "Not measured" in section(card, "Speed")
    limits = section(card, "Limits")
    assert limits.count("is not recorded") == 2 and "512 positions" in limits


@pytest.mark.parametrize("part", ["command", "versions", "machine", "target", "data", "arguments", "evaluations"])
def test_parts_of_the_provenance_may_be_missing(folder, part):
    record = training()
    del record[part]
    write(folder / "training.json", record)
    card = render(folder, target="org/other")
    assert ModelCard(card).data.base_model == "org/other"
    missing = {"command": "command", "versions": "versions", "machine": "machine", "target": "target"}
    if part in missing:
        assert f"- not recorded: {missing[part]}\n" in section(card, "Training")


def test_runs_that_a_drafter_went_on_from_are_told_of(folder):
    first = {"command": ["dspark", "train"], "started_from": "random", "steps": 1500, "blocks": 2_000_000}
    second = {"started_from": "first", "steps": 20, "blocks": 30, "supervised_tokens": 40, "seconds": 7200.0}
    write(folder / "training.json", training() | {"started_from": "second", "earlier_runs": [first, second]})
    told = section(render(folder), "Training")
    assert "- started from: `second`\n" in told
    assert (
        "- trained before that, run by run: 1,500 steps, 2,000,000 blocks, from `random`; "
        "20 steps, 30 blocks, 40 supervised tokens, 2.0 h, from `first`\n"
    ) in told


def test_figures_by_domain_and_regime(folder, tmp_path):
    acceptance = section(render(folder, evaluations=[write(tmp_path / "eval.json", evaluation())]), "Acceptance")
    rows = [line for line in acceptance.splitlines() if line.startswith("|")]
    assert rows[:7] == [
        "| domain | prompts | greedy | temperature 1 |",
        "| --- | --- | --- | --- |",
        "| math | gsm8k | 3.00 [2.75, 3.25] | 2.50 [2.25, 2.75] |",
        "| math | math500 | 2.00 [1.75, 2.25] | 1.50 [1.25, 1.75] |",
        "| **math** | mean | **2.50** | **2.00** |",
        "| chat | mt-bench | 1.50 [1.25, 1.75] | 1.25 [1.00, 1.50] |",
        "| **macro** |  | **2.00** | **1.75** |",
    ]
    assert rows[9:] == ["| greedy | 75% | 50% | – |", "| temperature 1 | 75% | 50% | – |"]
    assert "60 prompts, up to 256 new tokens" in acceptance and "NVIDIA H200" in acceptance
    assert "(figures/eval.json)" in acceptance


def test_speeds_by_set_and_by_batch(folder, tmp_path):
    files = [write(tmp_path / "bench.json", benchmark()), write(tmp_path / "batches.json", batch_benchmark())]
    speed = section(render(folder, benchmarks=files), "Speed")
    assert "Greedy, batch size 1, 64 new tokens, float32, Some CPU, 8 cores, 4 threads" in speed
    assert "| math | gsm8k | 40.0 | 1.50 | 2.25 |" in speed
    assert "Greedy, 64 new tokens, bfloat16, CUDA 12.8 (NVIDIA H200)" in speed
    assert "| 1 | `hardware_aware` | 40.0 | 1.50 | 2.50 |" in speed
    assert "| 16 | `hardware_aware` | 400.0 | 1.12 | 2.50 |" in speed


def test_another_target_than_it_was_trained_for_is_named(folder, tmp_path):
    record = evaluation()
    record["target"]["id"] = "org/quantised"
    assert "target `org/quantised`" in render(folder, evaluations=[write(tmp_path / "eval.json", record)])


def test_calibration_is_told(folder):
    drafter = load_drafter("deepspec-vanilla")
    assert "not calibrated" in section(render_card(drafter, folder), "Calibration")
    drafter.config.confidence_temperatures = [fit(0.0)]
    (folder / "calibration.png").touch()
    told = section(render_card(drafter, folder), "Calibration")
    assert f"| greedy | temperature |{' 1.25 |' * 7}" in told
    assert f"| greedy | ECE before, prompts kept out of the fit |{' 20.0% |' * 7}" in told
    assert "](calibration.png)" in told
    bare = load_drafter("deepspec-noconf")
    assert "no confidence head" in section(render_card(bare, folder), "Calibration")


def test_an_evaluation_of_another_drafter_is_refused(folder, tmp_path):
    record = evaluation()
    record["drafter"]["block_size"] = 4
    with pytest.raises(ValueError, match="of another drafter: its `block_size` is 4, and here it is 7"):
        render(folder, evaluations=[write(tmp_path / "eval.json", record)])


def test_acceptance_by_position_is_the_sets_mean_where_there_is_none_of_all(tmp_path):
    record = evaluation()
    for setting in record["settings"]:
        del setting["macro"]["acceptance_by_position"]
    first = record["settings"][0]["tasks"]
    first["gsm8k"]["acceptance_by_position"] = [0.2, None, None]
    macro = read_evaluation(write(tmp_path / "eval.json", record)).settings[0].macro
    assert macro.mean_acceptance_length == 2.0 and macro.by_position == pytest.approx((0.6, 0.5, None))


def test_provenance_as_the_data_command_groups_it(folder):
    record = training()
    record["data"] = {
        "prompts": {"sources": {"openai/gsm8k": 7473, "seeds": 175}, "dropped": {"too long": 3}},
        "sampling": {"temperatures": [0.7, 1.0], "top_p": 1.0},
        "samples": {"planned": 8000, "done": 7648},
        "thinking": "default",
    }
    write(folder / "training.json", record)
    card = render(folder)
    told = section(card, "Training")
    assert "openai/gsm8k (7,473), seeds (175)" in told
    assert "7,648 samples, drawn at temperature 0.7, 1.0, thinking default" in told
    assert ModelCard(card).data.datasets == ["openai/gsm8k"]
    assert "as the chat template has it by default" in section(card, "Limits")


def test_provenance_of_several_data_sets(folder):
    """Also where one of them was put together itself."""
    parts = [
        {"prompts": {"sources": {}}, "thinking": "off"},  # the target wrote them itself
        {"prompts": {"sources": {"maths": 10}}, "sampling": {"temperatures": [0.0, 1.0]}, "thinking": "off"},
        {"prompts": [{"source": "chat", "count": 5}, {"source": "maths", "count": 7}], "thinking": "off"},
    ]
    record = training()
    record["data"] = {"samples": 30, "parts": [{"parts": parts}, parts[1] | {"prompts": [{"source": "x"}]}]}
    write(folder / "training.json", record)
    told = section(render(folder), "Training")
    assert "maths (17), chat (5), x" in told and "30 samples, thinking off" in told and "temperature" not in told
    record["data"]["parts"][1]["thinking"] = "on"
    write(folder / "training.json", record)
    assert "thinking" not in section(render(folder), "Training")


# Code.


@pytest.mark.parametrize(
    ("temperatures", "thinking", "macro", "expected"),
    [
        (None, None, None, ["do_sample=False"]),
        ([0.7], "on", None, ["do_sample=True, temperature=0.7", "enable_thinking=True"]),
        ([0.7], "off", (1.5, 1.75), ["do_sample=True, temperature=1", "enable_thinking=False"]),
        ([0.7], "off", (2.5, 1.75), ["do_sample=False"]),
    ],
)
def test_the_sampling_shown_is_where_most_is_accepted(folder, tmp_path, temperatures, thinking, macro, expected):
    record = training()
    record["data"] |= {"temperatures": temperatures, "thinking": thinking}
    write(folder / "training.json", record)
    files = []
    if macro is not None:
        measured = evaluation()
        for setting, value in zip(measured["settings"], macro, strict=True):
            setting["macro"]["mean_acceptance_length"] = value
        files = [write(tmp_path / "eval.json", measured)]
    use = section(render(folder, evaluations=files), "Use")
    assert all(part in use for part in expected), use


def test_the_code_runs_as_it_stands(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "tiny-target", tmp_path / TARGET)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / TARGET)
    for name in ("config.json", "generation_config.json"):  # its answer would end where it begins
        record = json.loads((tmp_path / TARGET / name).read_text())
        write(tmp_path / TARGET / name, record | {"eos_token_id": None})
    text = render_card(load_drafter("deepspec-vanilla"), folder)
    with_library, alone = re.findall(r"```python\n(.*?)```", section(text, "Use"), flags=re.DOTALL)
    assert "assistant_model=drafter" in with_library and "torch.bfloat16" in with_library
    names: dict = {}
    exec(with_library, names)
    told = float(capsys.readouterr().out.splitlines()[-1])
    assert told == names["drafter"].speculative_stats.mean_acceptance_length >= 1
    exec(alone, names)
    assert names["drafter"].is_dspark_drafter


# The mark.


def test_an_edit_is_noticed(folder):
    text = render(folder)
    assert is_unedited(text) and is_unedited(text.replace("\n", "\r\n"))
    assert not is_unedited(text.replace("Licence", "License"))
    assert not is_unedited(text + "More.\n")
    assert not is_unedited("# By hand\n")


# Files that are something else.


def broken(record: dict, path: str, value: object) -> dict:
    *way, last = path.split(".")
    part = record
    for key in way:
        part = part[int(key)] if isinstance(part, list) else part[key]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return record


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("target", "Qwen", "`target` is 'Qwen'; it has to be of type dict"),
        ("target.id", 7, "`target.id` is 7"),
        ("steps", "many", "`steps` is 'many'; it has to be of type int"),
        ("steps", True, "`steps` is True"),
        ("data.prompts", ["gsm8k"], "an entry of data.prompts is 'gsm8k'"),
        ("data.prompts", [{"count": 3}], "no `data.prompts.source`"),
        ("evaluations", [3], "an entry of evaluations is 3"),
        ("earlier_runs", [3], "an entry of earlier_runs is 3"),
        ("earlier_runs", [{"steps": "many"}], "`earlier_runs.steps` is 'many'"),
    ],
)
def test_wrong_provenance_is_refused(tmp_path, path, value, complaint):
    file = Path(write(tmp_path / "training.json", broken(training(), path, value)))
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        read_training(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("settings", {"a": 1}, "give it as --bench"),
        ("settings", [], "no list of `settings`"),
        ("settings", ["x"], "an entry of settings is 'x'"),
        ("target", None, "no `target`"),
        ("machine", None, "no `machine`"),
        ("settings.0.temperature", None, "no `settings.temperature`"),
        ("settings.0.tasks", {}, "without `tasks`"),
        ("settings.0.tasks.gsm8k.mean_acceptance_length", None, "tasks.gsm8k has no `mean_acceptance_length`"),
        ("settings.0.tasks.gsm8k.mean_acceptance_length", 0.5, "are at least 1"),
        ("settings.0.tasks.gsm8k.mean_acceptance_length", "3", "of type int or float"),
        ("settings.0.tasks.gsm8k.mean_acceptance_length_interval", [1], "not of two numbers"),
        ("settings.0.tasks.gsm8k.acceptance_by_position", ["x"], "of other things than numbers"),
    ],
)
def test_wrong_evaluations_are_refused(tmp_path, path, value, complaint):
    file = write(tmp_path / "eval.json", broken(evaluation(), path, value))
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        read_evaluation(file)
    assert file in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("settings", [1], "give it as --eval"),
        ("summary", None, "no `settings` with a `summary`"),
        ("settings.synthetic", [0.5], "--synthetic-acceptance"),
        ("summary.gsm8k.DSpark", None, "no `summary.gsm8k.DSpark`"),
        ("summary.gsm8k.DSpark.ratio", "fast", "of type int or float"),
        ("settings.temperature", None, "no `settings.temperature`"),
    ],
)
def test_wrong_benchmarks_are_refused(tmp_path, path, value, complaint):
    file = write(tmp_path / "bench.json", broken(benchmark(), path, value))
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        read_benchmark(file)
    assert file in str(caught.value)


def test_a_batch_without_its_baseline_is_refused(tmp_path):
    record = batch_benchmark()
    del record["summary"][0]
    with pytest.raises(ValueError, match="no `plain generate` at batch size 1"):
        read_benchmark(write(tmp_path / "batches.json", record))


def test_the_synthetic_measurements_are_refused():
    with pytest.raises(ValueError, match="--synthetic-acceptance"):
        read_benchmark(MEASUREMENTS / "bench-synthetic.json")


def test_ways_of_decoding_are_called_as_the_benchmark_calls_them():
    ours = (card_inputs.PLAIN, card_inputs.PROMPT_LOOKUP, card_inputs.DSPARK)
    assert ours == (decoding_methods.PLAIN, decoding_methods.PROMPT_LOOKUP, decoding_methods.DSPARK)


# The command.


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(["card", *argv])
    return code, *capsys.readouterr()


def test_the_command_prints_or_writes(folder, tmp_path, capsys):
    code, printed, _ = command(capsys, str(folder), "--repo-id", "me/mine", "--licence", "mit")
    assert code == 0 and '"me/mine"' in printed and ModelCard(printed).data.license == "mit"
    output = tmp_path / "card.md"
    assert command(capsys, str(folder), "--repo-id", "me/mine", "--licence", "mit", "--output", str(output))[0] == 0
    assert output.read_text(encoding="utf-8") == printed
    assert os.stat(output).st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["/no/where"], ["FOLDER '/no/where'", "no such folder"]),
        (["FOLDER", "--eval", "/no/file.json"], ["--eval", "/no/file.json", "cannot be read"]),
        (["FOLDER", "--bench", str(MEASUREMENTS / "bench-synthetic.json")], ["--bench", "--synthetic-acceptance"]),
        (["FOLDER", "--eval", str(MEASUREMENTS / "bench-greedy.json")], ["--eval", "give it as --bench"]),
        (["FOLDER", "--target", "SmolLM2"], ["'SmolLM2'", "NAMESPACE/NAME"]),
        (["FOLDER", "--dataset", "gsm8k"], ["'gsm8k'", "NAMESPACE/NAME"]),
        (["FOLDER", "--repo-id", "mine"], ["--repo-id", "'mine'", "NAMESPACE/NAME"]),
        (["FOLDER", "--output", "/no/where/card.md"], ["--output", "/no/where", "does not exist"]),
        (["EMPTY"], ["no config.json"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_is_one_line(folder, tmp_path, capsys, argv, parts):
    (tmp_path / "empty").mkdir()
    places = {"FOLDER": str(folder), "EMPTY": str(tmp_path / "empty")}
    code, _, message = command(capsys, *(places.get(word, word) for word in argv))
    assert code == 2 and message.count("\n") == 1 and message.startswith("dspark card: error: ")
    for part in parts:
        assert part in message


def test_who_renders_a_card_is_told_what_it_lacks(folder, caplog):
    write(folder / "training.json", training() | {"target": {"id": "demo"}})
    render(folder)
    assert [record.getMessage().partition(";")[2].split("`")[1] for record in caplog.records] == [
        "--target NAMESPACE/NAME",
        "--licence apache-2.0",
    ]
    caplog.clear()
    render(folder, target=TARGET, licence="apache-2.0")
    assert not caplog.records
