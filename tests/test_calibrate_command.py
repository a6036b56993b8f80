"""Recording blocks, `dspark calibrate` and its check: what is written, what is left alone, and that it is used."""

import inspect
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FIXTURES
from rich.console import Console
from tiny import character_tokenizer
from transformers import GenerationConfig

from dspark_hf import DSparkDraftModel, calibrate, calibration, cli, loading
from dspark_hf.blocks import Blocks, record_blocks
from dspark_hf.files import write_json
from dspark_hf.loading import CommandError, Pair


PROMPTS = {
    "sums": ["Tom has 5 apples and buys 3 more. How many", "12 - 7 = ", "What is 3 times 4?"],
    "tales": ["Once upon a time", "A baker makes 72 rolls and sells 50. How many are left?", "Hello"],
}
SIZE = 7


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A target with a tokenizer, a DeepSpec drafter for it, and prompts, as a user would have them."""
    root = tmp_path_factory.mktemp("calibrate")
    shutil.copytree(FIXTURES / "tiny-target", root / "target")
    character_tokenizer().save_pretrained(root / "target")
    shutil.copytree(FIXTURES / "deepspec-vanilla" / "drafter", root / "drafter")
    (root / "prompts").mkdir()
    for name, prompts in PROMPTS.items():
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (root / "prompts" / f"{name}.jsonl").write_text(lines)
    return root


@pytest.fixture
def drafter_folder(folders, tmp_path) -> Path:
    """A drafter's folder of one's own."""
    return Path(shutil.copytree(folders / "drafter", tmp_path / "drafter"))


@pytest.fixture
def pair(tiny_target, load_drafter) -> Pair:
    return Pair(tiny_target, load_drafter("deepspec-vanilla"), character_tokenizer(), ("target", "drafter"))


def command(folders: Path, drafter: Path, *argv: str) -> int:
    return cli.main(
        ["calibrate", "--target", str(folders / "target"), "--drafter", str(drafter)]
        + ["--prompts", str(folders / "prompts"), "--max-new-tokens", "16", *argv]
    )


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def entry(sampling_temperature: float, *temperatures: float, **made_with) -> dict:
    values = list(temperatures) if len(temperatures) == SIZE else [temperatures[0]] * SIZE
    return {"sampling_temperature": sampling_temperature, "temperatures": values, "made_with": made_with}


# Recording blocks.


def test_a_batch_records_what_each_prompt_alone_does(pair):
    recorded = record_blocks(pair, PROMPTS, max_new_tokens=24, batch_size=4)
    logits, accepted, sets = [], [], []
    for name, prompts in PROMPTS.items():
        for prompt in prompts:
            out = pair.target.generate(
                **pair.encode(prompt),
                assistant_model=pair.drafter,
                do_sample=False,
                max_new_tokens=24,
                return_dict_in_generate=True,
            )
            for decision in out.speculative_stats.decisions:
                if decision.verify_lengths == [SIZE]:
                    logits += decision.confidence_logits
                    accepted += decision.accepted
                    sets.append(name)
    assert len(recorded) == len(accepted) > 20 and set(accepted) > {0, 1}
    np.testing.assert_allclose(recorded.confidence_logits, logits, atol=1e-4)
    assert recorded.accepted.tolist() == accepted and recorded.sets == sets
    assert recorded.sampling_temperature == 0.0 and recorded.confidence_logits.dtype == np.float64


@pytest.mark.parametrize("fails", [False, True])
def test_whole_blocks_whatever_the_configs_say_and_they_are_put_back(pair, monkeypatch, fails):
    expected = record_blocks(pair, PROMPTS, max_new_tokens=16)
    own = pair.drafter.generation_config = GenerationConfig(assistant_confidence_threshold=0.9)
    monkeypatch.setattr(pair.target.generation_config, "assistant_confidence_threshold", 0.8)
    monkeypatch.setattr(pair.target.generation_config, "num_assistant_tokens_schedule", "hardware_aware")
    if fails:
        monkeypatch.setattr(pair.target, "generate", lambda **arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            record_blocks(pair, PROMPTS, max_new_tokens=16)
    else:
        again = record_blocks(pair, PROMPTS, max_new_tokens=16)
        np.testing.assert_array_equal(again.confidence_logits, expected.confidence_logits)
    assert pair.drafter.generation_config is own and own.assistant_confidence_threshold == 0.9


def test_sampled_blocks_follow_the_seed(pair):
    first, second, other = (
        record_blocks(pair, {"tales": ["Once"]}, 16, temperature=1.0, top_p=0.9, top_k=20, seed=seed)
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first.confidence_logits, second.confidence_logits)
    assert first.confidence_logits.shape != other.confidence_logits.shape or not np.array_equal(
        first.confidence_logits, other.confidence_logits
    )
    assert first.sampling_temperature == 1.0


def test_blocks_need_room_and_a_confidence_head(pair, tiny_target, load_drafter):
    with pytest.raises(CommandError, match="--max-new-tokens 8.*give at least 9"):
        record_blocks(pair, PROMPTS, max_new_tokens=8)
    assert len(record_blocks(pair, {"sums": ["1 + 1"]}, max_new_tokens=9)) == 1
    mute = Pair(tiny_target, load_drafter("deepspec-noconf"), pair.tokenizer, ("target", "mute"))
    with pytest.raises(CommandError, match="--drafter 'mute': it has no confidence head"):
        record_blocks(mute, PROMPTS, max_new_tokens=24)
    with pytest.raises(CommandError, match="--max-new-tokens 500.*more than the target's 512"):
        record_blocks(pair, PROMPTS, max_new_tokens=500)


def test_blocks_survive_a_file(tmp_path):
    blocks = Blocks(np.array([[0.1, -2.5], [1e-17, 3.0]]), np.array([2, 0]), ["a", "b"], 0.7)
    blocks.save(tmp_path / "blocks.json")
    loaded = Blocks.load(tmp_path / "blocks.json")
    np.testing.assert_array_equal(loaded.confidence_logits, blocks.confidence_logits)
    assert loaded.accepted.tolist() == [2, 0] and loaded.accepted.dtype.kind == "i"
    assert loaded.sets == ["a", "b"] and loaded.sampling_temperature == 0.7
    twice = loaded + blocks
    assert len(twice) == 4 and twice.sets == ["a", "b", "a", "b"] and twice.accepted.tolist() == [2, 0, 2, 0]


GOOD = {"sampling_temperature": 0, "sets": ["a"], "accepted": [1], "confidence_logits": [[0.0, 1.0]]}


@pytest.mark.parametrize(
    "change",
    [{"sets": []}, {"accepted": [3]}, {"accepted": [1, 1]}, {"confidence_logits": [[float("nan"), 0.0]]}]
    + [{"confidence_logits": []}, {"confidence_logits": [[0.0], [0.0, 1.0]]}, {"accepted": None}]
    + [{"sets": [1]}, {"sets": [["a"]]}, {"accepted": [float("inf")]}, {"prompts": [float("inf")]}]
    + [{"sampling_temperature": value} for value in (-1, float("nan"), float("inf"))]
    + [{"accepted": [0], "confidence_logits": [[]]}],
)
def test_a_file_without_blocks_is_refused(tmp_path, change):
    path = tmp_path / "blocks.json"
    path.write_text(json.dumps(GOOD))
    assert len(Blocks.load(path)) == 1
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError, match=r"blocks\.json holds no blocks.*dspark calibrate"):
        Blocks.load(path)
    for text in ("{", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ValueError, match="holds no blocks"):
            Blocks.load(path)


@pytest.mark.parametrize("failure", ["not JSON", "no room", "no rename"])
def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch, failure):
    path = tmp_path / "config.json"
    path.write_text("old")
    path.chmod(0o640)

    def refuse(*arguments: object) -> None:
        raise OSError("No space left on device")

    if failure != "not JSON":
        monkeypatch.setattr(os, "fsync" if failure == "no room" else "replace", refuse)
    with pytest.raises((TypeError, OSError)):
        write_json(path, {"value": object() if failure == "not JSON" else 1})
    assert snapshot(tmp_path) == {"config.json": b"old"}
    monkeypatch.undo()
    write_json(path, {"value": 1})
    assert json.loads(path.read_text()) == {"value": 1} and path.stat().st_mode & 0o777 == 0o640


# Fitting.


@pytest.fixture(scope="module")
def calibrated(folders, tmp_path_factory) -> Path:
    """What one whole command leaves: the drafter calibrated in place, the blocks, the diagram if there can be one."""
    root = tmp_path_factory.mktemp("calibrated")
    shutil.copytree(folders / "drafter", root / "drafter")
    try:
        import matplotlib  # noqa: F401

        plot = ["--plot", str(root / "reliability.png")]
    except ImportError:
        plot = []
    assert command(folders, root / "drafter", "--blocks", str(root / "blocks.json"), "--top-k", "30", *plot) == 0
    return root


def test_only_the_temperatures_of_the_config_change(folders, calibrated):
    before, after = snapshot(folders / "drafter"), snapshot(calibrated / "drafter")
    assert before.keys() == after.keys() and before["model.safetensors"] == after["model.safetensors"]
    config = json.loads(after["config.json"])
    fits = config.pop("confidence_temperatures")
    assert config == json.loads(before["config.json"])
    assert [fit["sampling_temperature"] for fit in fits] == [0.0, 1.0]


def test_what_is_written_is_the_fit_and_its_errors_on_both_parts(calibrated):
    config = json.loads((calibrated / "drafter" / "config.json").read_text())
    for fit, top in zip(config["confidence_temperatures"], ((None, None), (1.0, 30)), strict=True):
        made = fit["made_with"]
        assert made["prompts"]["fit"].keys() <= PROMPTS.keys()
        counts = {part: sum(made["prompts"][part].values()) for part in ("fit", "held_out")}
        assert counts == {"fit": 4, "held_out": 2}  # 0.3 of 6
        assert (made["top_p"], made["top_k"]) == top
        assert made["max_new_tokens"] == 16 and made["dtype"] == "float32"
        assert set(made["versions"]) == {"dspark-hf", "torch", "transformers"} and made["date"].count("-") == 2

        blocks = Blocks.load(calibrated / f"blocks-t{fit['sampling_temperature']:g}.json")
        fitted = made["blocks"]["fit"]
        assert len(blocks) == fitted + made["blocks"]["held_out"] and made["blocks"]["held_out"] > 0
        logits, accepted = blocks.confidence_logits, blocks.accepted
        assert calibration.fit_temperatures(logits[:fitted], accepted[:fitted]).tolist() == fit["temperatures"]
        for part, place in (("fit", slice(0, fitted)), ("held_out", slice(fitted, None))):
            for when, temperatures in (("before", [1.0] * SIZE), ("after", fit["temperatures"])):
                confidence = 1 / (1 + np.exp(-logits[place] / temperatures))
                errors = [
                    calibration.expected_calibration_error(survival, (accepted[place] > position).astype(float))
                    for position, survival in enumerate(np.cumprod(confidence, axis=1).T)
                ]
                np.testing.assert_allclose(made["ece"][part][when], errors, atol=6e-6)


def test_the_diagram_is_a_png(calibrated):
    pytest.importorskip("matplotlib")
    data = (calibrated / "reliability.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[place : place + 4], "big") for place in (16, 20))
    assert width > 2 * height  # seven positions by two sampling temperatures


def test_the_table_shows_both_sides(folders, drafter_folder, capsys):
    assert command(folders, drafter_folder, "--temperature", "0", "--holdout", "0") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("Survival, greedy", "of the fit", "ROC-AUC", "ECE", "Brier", "in sample", "nothing is known"):
        assert part in shown
    made = json.loads((drafter_folder / "config.json").read_text())["confidence_temperatures"][0]["made_with"]
    assert made["ece"]["held_out"] is None and made["blocks"]["held_out"] == 0 and made["prompts"]["held_out"] == {}


def test_other_sampling_temperatures_stay_and_the_same_is_replaced(drafter_folder):
    old = [entry(1.0, 2.0), entry(0.0, 3.0)]
    calibrate.write_temperatures(drafter_folder, old)
    calibrate.write_temperatures(drafter_folder, [entry(0.0, 4.0), entry(0.5, 5.0)])
    fits = json.loads((drafter_folder / "config.json").read_text())["confidence_temperatures"]
    assert fits == [entry(0.0, 4.0), entry(0.5, 5.0), entry(1.0, 2.0)]


@pytest.mark.parametrize("form", ["deepspec", "own"])
def test_both_formats_load_with_their_temperatures(drafter_folder, tmp_path, form):
    folder = drafter_folder
    if form == "own":
        folder = tmp_path / "own"
        DSparkDraftModel.from_pretrained(drafter_folder).save_pretrained(folder)
    calibrate.write_temperatures(folder, [entry(0.0, 3.0)])
    loaded = DSparkDraftModel.from_pretrained(folder)
    assert loaded.config.temperatures_for(0.0) == [3.0] * SIZE
    loaded.save_pretrained(tmp_path / "again")
    assert DSparkDraftModel.from_pretrained(tmp_path / "again").config.confidence_temperatures == [entry(0.0, 3.0)]


def test_a_copy_is_the_drafter_file_by_file(drafter_folder, tmp_path):
    (drafter_folder / "README.md").write_text("hello")
    before = snapshot(drafter_folder)
    copy = tmp_path / "copy"
    calibrate.copy_with_temperatures(drafter_folder, copy, [entry(0.0, 3.0)])
    assert snapshot(drafter_folder) == before
    after = snapshot(copy)
    assert json.loads(after.pop("config.json"))["confidence_temperatures"] == [entry(0.0, 3.0)]
    assert after == {name: data for name, data in before.items() if name != "config.json"}
    assert copy.stat().st_mode == drafter_folder.stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "drafter"]


def test_a_copy_that_fails_leaves_nothing(drafter_folder, tmp_path):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(TypeError):
        calibrate.copy_with_temperatures(
            drafter_folder, tmp_path / "copy", [entry(0.0, 3.0) | {"made_with": object()}]
        )
    assert sorted(tmp_path.iterdir()) == before


def test_the_command_with_an_output_folder(folders, drafter_folder, tmp_path):
    before = snapshot(drafter_folder)
    (tmp_path / "new").mkdir()
    assert command(folders, drafter_folder, "--temperature", "0", "--output", str(tmp_path / "new")) == 0
    assert snapshot(drafter_folder) == before
    assert snapshot(tmp_path / "new")["model.safetensors"] == before["model.safetensors"]
    assert DSparkDraftModel.from_pretrained(tmp_path / "new").config.confidence_temperatures is not None


def test_a_command_that_cannot_write_says_so_and_leaves_the_drafter(folders, drafter_folder, monkeypatch, capsys):
    before = snapshot(drafter_folder)

    def refuse(*arguments: object) -> None:
        raise OSError("Read-only file system")

    monkeypatch.setattr(calibrate, "write_json", refuse)
    assert command(folders, drafter_folder, "--temperature", "0") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("dspark calibrate: error: --output") and "Read-only" in message
    assert snapshot(drafter_folder) == before


def test_where_the_temperatures_go(drafter_folder, tmp_path):
    other = tmp_path / "other"
    assert calibrate.output_folder(str(drafter_folder), None) == (drafter_folder, True)
    assert calibrate.output_folder(str(drafter_folder), f"{drafter_folder}/../drafter")[1]
    assert calibrate.output_folder(str(drafter_folder), str(other)) == (other, False)
    assert calibrate.output_folder("org/drafter", str(other)) == (other, False)
    for drafter in ("org/drafter", "demo", None):
        with pytest.raises(CommandError, match="--output is missing.*new folder"):
            calibrate.output_folder(drafter, None)
    other.mkdir()
    assert calibrate.output_folder(None, str(other)) == (other, False)
    (other / "file").write_text("")
    with pytest.raises(CommandError, match="--output .*other.*not empty"):
        calibrate.output_folder(str(drafter_folder), str(other))


def test_a_drafter_of_the_hub_is_fetched_whole(drafter_folder, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: f"/hub/{name}")
    assert calibrate.drafter_folder("org/drafter") == Path("/hub/org/drafter")
    assert calibrate.drafter_folder(str(drafter_folder)) == drafter_folder
    assert (calibrate.drafter_folder("demo") / "config.json").is_file()


def test_prompts_are_divided_once_and_wholly():
    fitted, held_out = calibrate.split_prompts(PROMPTS, 0.5, seed=3)
    for name, prompts in PROMPTS.items():
        assert sorted(fitted.get(name, []) + held_out.get(name, [])) == sorted(prompts)
    assert sum(map(len, held_out.values())) == 3
    assert calibrate.split_prompts(PROMPTS, 0.5, seed=3) == (fitted, held_out)
    assert calibrate.split_prompts(PROMPTS, 0.0, seed=3) == (PROMPTS, {})
    for share in (0.05, 0.99):
        with pytest.raises(CommandError, match=f"--holdout {share:g}.*6 prompts.*more prompts"):
            calibrate.split_prompts(PROMPTS, share, seed=0)


def test_sampling_options_in_force(tiny_target, monkeypatch, pair):
    assert loading.sampling_in_force(pair.target, 0.0, None, None) == {}
    assert loading.sampling_in_force(pair.target, 1.0, None, 7) == {"top_p": 1.0, "top_k": 7}
    monkeypatch.setattr(tiny_target.generation_config, "top_p", 0.8)
    assert loading.sampling_in_force(pair.target, 1.0, None, None) == {"top_p": 0.8, "top_k": 50}


# What was written is used.


GREEDY, SAMPLED = [0.5, 0.8, 1.0, 2.0, 3.0, 4.0, 5.0], [3.0, 0.4, 2.0, 0.3, 1.5, 0.9, 0.7]


def test_each_regime_uses_its_own_temperatures(drafter_folder, pair):
    calibrate.write_temperatures(drafter_folder, [entry(0.0, *GREEDY), entry(1.0, *SAMPLED)])
    drafter = DSparkDraftModel.from_pretrained(drafter_folder)
    torch.manual_seed(0)
    for do_sample, temperatures in ((False, GREEDY), (True, SAMPLED)):
        out = pair.target.generate(
            **pair.encode(PROMPTS["sums"][0]),
            assistant_model=drafter,
            do_sample=do_sample,
            max_new_tokens=16,
            return_dict_in_generate=True,
        )
        drafted = [decision for decision in out.speculative_stats.decisions if decision.confidence_logits]
        assert len(drafted) > 2
        for decision in drafted:
            logits = np.array(decision.confidence_logits)
            used = np.array(temperatures[: logits.shape[1]])
            expected = np.cumprod(1 / (1 + np.exp(-logits / used)), axis=1)
            np.testing.assert_allclose(decision.survivals, expected, rtol=1e-6)


def test_a_threshold_cuts_by_the_calibrated_survival_and_the_text_is_the_same(drafter_folder, pair):
    inputs = pair.encode(PROMPTS["sums"][0])
    plain = pair.target.generate(**inputs, do_sample=False, max_new_tokens=40)
    sent = {}
    for name, temperatures in (("raw", [1.0] * SIZE), ("fitted", GREEDY)):
        calibrate.write_temperatures(drafter_folder, [entry(0.0, *temperatures)])
        drafter = DSparkDraftModel.from_pretrained(drafter_folder)
        out = pair.target.generate(
            **inputs,
            assistant_model=drafter,
            do_sample=False,
            max_new_tokens=40,
            assistant_confidence_threshold=0.2,
            return_dict_in_generate=True,
        )
        assert torch.equal(out.sequences, plain)
        for decision in out.speculative_stats.decisions:
            for survivals, length in zip(decision.survivals, decision.verify_lengths, strict=True):
                assert length <= sum(survival >= 0.2 for survival in survivals)
        sent[name] = out.speculative_stats.verified
    assert sent["raw"] != sent["fitted"]


# The check.


def drifting(true_temperature: float, blocks: int = 4000):
    """Records blocks whose confidence is right at one temperature of all positions."""

    def record(prompt_sets, temperature, **sampling):
        generator = np.random.default_rng(4)
        right = generator.normal(1.0, 1.5, (blocks, SIZE))
        accept = generator.random(right.shape) < 1 / (1 + np.exp(-right))
        record.sampling = sampling
        return Blocks(right * true_temperature, np.cumprod(accept, axis=1).sum(axis=1), ["x"] * blocks, temperature)

    return record


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=200, file=open(os.devnull, "w"))


@pytest.mark.parametrize(
    ("true_temperature", "stored", "refit"), [(2.0, 0.004, False), (2.5, 0.004, True), (1.0, 0.5, True)]
)
def test_a_refit_is_advised_once_the_error_has_grown(pair, console, true_temperature, stored, refit):
    """Fitted at a temperature of 2: still right, drifted beyond what was stored, and worse than no temperatures."""
    fitted = entry(0.7, 2.0, ece={"fit": {"after": [0.0] * SIZE}, "held_out": {"after": [stored] * SIZE}}, top_k=9)
    record = drifting(true_temperature)
    assert calibrate.check_fit(pair, PROMPTS, record, fitted, 0.5, None, console) is refit
    assert record.sampling == {"top_p": 0.5, "top_k": 9}  # as given, and as it was fitted
    shown = console.export_text()
    assert ("Refit:" in shown) == refit and f"{stored:.2%}" in shown and "temperature 0.7" in shown


def test_a_fit_without_a_record_is_judged_by_raw_confidences(pair, console):
    fit = {"sampling_temperature": 0.0, "temperatures": [2.0] * SIZE}
    assert not calibrate.check_fit(pair, PROMPTS, drifting(2.5), fit, None, None, console)
    assert calibrate.check_fit(pair, PROMPTS, drifting(1.0), fit, None, None, console)
    assert "not known" in console.export_text()


@pytest.mark.parametrize(
    ("now", "raw", "stored", "says"),
    [
        (0.050, 0.100, 0.040, None),
        (0.051, 0.100, 0.040, "5.10% is more than the 4.00% after the fit"),
        (0.051, 0.100, None, None),
        (0.051, 0.040, 0.050, "5.10% is more than the 4.00% without temperatures"),
        (0.050, 0.040, None, None),
    ],
)
def test_the_rule(now, raw, stored, says):
    reason = calibrate.refit_reason(now, raw, stored, chance=0.0100001)
    assert reason is None if says is None else reason.startswith(says)


def test_which_fits_are_checked():
    config = SimpleNamespace(confidence_temperatures=[entry(0.0, 1.0), entry(0.7, 2.0)])
    pair = SimpleNamespace(drafter=SimpleNamespace(config=config), names=("target", "drafter"))
    assert calibrate.stored_entries(pair, None) == config.confidence_temperatures
    assert calibrate.stored_entries(pair, [0.7, 0.7]) == [entry(0.7, 2.0)]
    with pytest.raises(
        CommandError, match="--check: --drafter 'drafter' has fits for greedy, temperature 0.7 but .* 0 1;"
    ):
        calibrate.stored_entries(pair, [0.0, 1.0])
    config.confidence_temperatures = None
    with pytest.raises(CommandError, match="has fits for nothing; fit first"):
        calibrate.stored_entries(pair, None)


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_check_writes_nothing_and_its_exit_code_tells(folders, calibrated, tmp_path, spoilt, capsys):
    drafter = tmp_path / "drafter"
    shutil.copytree(calibrated / "drafter", drafter)
    if spoilt:  # confidences at either end, and a record that claims them perfect
        ece = {"fit": {"after": [0.0] * SIZE}, "held_out": None}
        calibrate.write_temperatures(drafter, [entry(0.0, 0.01, ece=ece)])
    before = snapshot(tmp_path)
    assert command(folders, drafter, "--check", "--temperature", "0", "--seed", "9") == int(spoilt)
    assert snapshot(tmp_path) == before
    assert ("Refit:" if spoilt else "No refit needed") in capsys.readouterr().out


# The command line.


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--holdout", "1"], ["--holdout", "1", "below 1"]),
        (["--temperature", "0", "-1"], ["--temperature", "-1", "at least 0"]),
        (["--temperature", "0", "--top-p", "0.9"], ["--top-p", "0.9", "--temperature above 0"]),
        (["--check", "--output", "x"], ["--output", "'x'", "--check writes nothing"]),
        (["--check", "--plot", "x.png"], ["--plot", "'x.png'", "--check writes nothing"]),
        (["--plot", "/no/where/x.png"], ["--plot", "/no/where", "does not exist"]),
        (["--blocks", "/no/where/x.json"], ["--blocks", "/no/where", "does not exist"]),
        (["--output", "/no/where/at/all"], ["--output", "/no/where", "does not exist"]),
        (["--prompts", "/no/where"], ["--prompts", "/no/where", "no such file"]),
        ([], ["--output is missing", "new folder"]),
        (["--drafter", "org/drafter"], ["--output is missing", "org/drafter"]),
        (["--holdout", "0.01", "--output", "x"], ["--holdout 0.01", "more prompts"]),
    ],
)
def test_bad_input_is_one_line(capsys, argv, parts):
    try:
        code = cli.main(["calibrate", *argv])
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err
    assert code == 2 and message.count("\n") == 1
    for part in parts:
        assert part in message


def test_a_plot_without_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert cli.main(["calibrate", "--output", str(tmp_path / "x"), "--plot", str(tmp_path / "x.png")]) == 2
    message = capsys.readouterr().err
    assert "--plot" in message and "dspark-hf[plots]" in message


def test_a_drafter_without_confidence_head(folders, tmp_path, capsys):
    drafter = shutil.copytree(FIXTURES / "deepspec-noconf" / "drafter", tmp_path / "drafter")
    assert command(folders, Path(drafter)) == 2
    assert "no confidence head" in capsys.readouterr().err.splitlines()[-1]


def test_arguments_are_those_of_the_function():
    parser = cli.build_parser()
    arguments = vars(parser.parse_args(["calibrate", "--temperature", "0", "0.5", "--temperature", "1"]))
    assert set(arguments) - {"run", "command"} == set(inspect.signature(calibrate.run).parameters)
    assert arguments["temperatures"] == [0.0, 0.5, 1.0]
    assert parser.parse_args(["calibrate"]).temperatures is None
