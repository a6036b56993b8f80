"""`dspark ablate`: each part from the command line to its files, and bad input in one line."""

import inspect
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FIXTURES
from tiny import character_tokenizer, random_drafter

from dspark_hf import ablate, ablate_cost, ablate_drafters, cli
from dspark_hf.ablate_cost import peak_bytes, weights_by_part
from dspark_hf.ablate_drafters import labels_of, mixture
from dspark_hf.ablation import ALL, RAW
from dspark_hf.blocks import Blocks
from dspark_hf.profiles import DraftCurve, Profile, StepCurve
from dspark_hf.simulation import PLANS


SIZE = 7
SETS = {"sums": ["12 - 7 = ", "What is 3 times 4?", "Tom has 5"], "tales": ["Once upon a time", "Hello", "A baker"]}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A target, drafters for it, prompts, blocks and a profile."""
    root = tmp_path_factory.mktemp("ablate")
    shutil.copytree(FIXTURES / "tiny-target", root / "target")
    character_tokenizer().save_pretrained(root / "target")
    for name in ("vanilla", "rnn", "nomarkov"):
        shutil.copytree(FIXTURES / f"deepspec-{name}" / "drafter", root / name)
    for name, counts in (("vanilla", {"maths.jsonl": 30, "chat.jsonl": 10}), ("rnn", {"chat.jsonl": 40})):
        prompts = [{"source": source, "count": count} for source, count in counts.items()]
        (root / name / "training.json").write_text(json.dumps({"data": {"prompts": prompts}, "steps": 5}))
    (root / "prompts").mkdir()
    for name, prompts in SETS.items():
        lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (root / "prompts" / f"{name}.jsonl").write_text(lines)
    draft = DraftCurve([1, 4], [2e-3, 4e-3], [3e-3, 6e-3])
    steps = [StepCurve(64, [1, 8, 32], [1e-2, 1.2e-2, 2e-2])]
    Profile({"device": "given"}, SIZE, steps, draft, draft).save(root / "profile.json")
    generator = np.random.default_rng(2)
    logits = generator.normal(1.0, 1.5, (240, SIZE))
    accepted = np.cumprod(generator.random(logits.shape) < 1 / (1 + np.exp(-logits)), axis=1).sum(axis=1)
    sets = ["sums"] * 120 + ["tales"] * 120
    Blocks(logits, accepted, sets, 0.0, [block // 20 for block in range(240)]).save(root / "blocks.json")
    Blocks(logits, accepted, sets, 0.0).save(root / "old.json")
    return root


@pytest.fixture(autouse=True)
def _there(root, monkeypatch):
    monkeypatch.chdir(root)


SMALL = ["--rows", "4", "1", "--rounds", "10"]
FILES = ["--output", "out.json", "--markdown", "out.md", "--plot", "plots"]


def images() -> set[str]:
    found = {path.name: path.read_bytes() for path in Path("plots").iterdir()}
    shutil.rmtree("plots")
    assert all(image.startswith(b"\x89PNG") for image in found.values())
    return set(found)


def test_schedules_of_recorded_blocks_need_no_model(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(ablate, "load_pair", None)
    argv = ["ablate", "schedule", "--blocks", "blocks.json", "--profile", "profile.json", "--gpu-like", *SMALL]
    assert cli.main([*argv, *FILES]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "profile.json: 4 rows" in shown and "GPU-like, made up: 1 row" in shown
    assert "clairvoyant*" in shown and "Yardsticks, not schedules" in shown
    assert "fitted on the half of the prompts that they are not used on" in shown
    results = json.loads(Path("out.json").read_text())
    assert results["sizes"] == {"blocks": {"sums": 120, "tales": 120}, "prompts": {"sums": 6, "tales": 6}}
    assert list(results["load"]) == ["profile.json", "GPU-like, made up"]
    for points in results["load"].values():
        assert [(point["rows"], point["plan"]) for point in points] == [(rows, p) for rows in (1, 4) for p in PLANS]
    alone = results["load"]["profile.json"][0]
    assert alone["throughput"]["value"] == pytest.approx(1 / 1e-2) and len(alone["throughput"]["interval"]) == 2
    text = Path("out.md").read_text()
    assert "**profile.json: 4 rows**" in text and "| clairvoyant\\* |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| whole blocks")}) == 1
    assert images() == {"schedules.png"}


def test_a_named_drafters_temperatures_are_used(capsys):
    config = json.loads(Path("vanilla/config.json").read_text())
    Path("calibrated").mkdir(exist_ok=True)
    config["confidence_temperatures"] = [{"sampling_temperature": 0.0, "temperatures": [2.0] * SIZE}]
    Path("calibrated/config.json").write_text(json.dumps(config))
    argv = ["ablate", "schedule", "--blocks", "blocks.json", "--profile", "profile.json", *SMALL]
    assert cli.main([*argv, "--drafter", "calibrated", "--output", "out.json"]) == 0
    assert "Temperatures of the confidences: the drafter's." in capsys.readouterr().out
    assert json.loads(Path("out.json").read_text())["confidence_temperatures"]["halves"] == [[2.0] * SIZE] * 2


def test_calibration_from_set_to_set(capsys):
    pytest.importorskip("matplotlib")
    argv = ["ablate", "calibration", "--blocks", "blocks.json", "--profile", "profile.json", *SMALL]
    assert cli.main([*argv, *FILES]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "% of tokens a second lost at 4 rows" in shown and "chance, up to" in shown
    assert "keep 1, the last ones of all sets" in shown
    (drift,) = json.loads(Path("out.json").read_text())["drift"].values()
    places = [(cell["fitted_on"], cell["used_on"]) for cell in drift["cells"]]
    assert places == [(origin, used) for origin in (RAW, "sums", "tales", ALL) for used in ("sums", "tales")]
    for cell in drift["cells"]:
        assert cell["lost"].keys() == {"1", "4"}
        if cell["fitted_on"] == cell["used_on"]:
            assert cell["lost"]["4"]["value"] == 0 and cell["ece_excess"]["value"] == 0
    assert "| sums | " in Path("out.md").read_text()
    assert images() == {"calibration_drift.png"}


def test_blocks_are_recorded_with_their_prompts_and_kept():
    argv = ["ablate", "schedule", "--target", "target", "--drafter", "vanilla", "--prompts", "prompts", *SMALL]
    decoding = ["--max-new-tokens", "40", "--batch-size", "4", "--gpu-like", "--save-blocks", "kept.json"]
    assert cli.main([*argv, *decoding, "--output", "first.json"]) == 0
    kept = Blocks.load("kept.json")
    assert set(kept.sets) == set(SETS)
    by_prompt = {(name, prompt) for name, prompt in zip(kept.sets, kept.prompts, strict=True)}
    assert by_prompt <= {(name, 3 * index + place) for index, name in enumerate(SETS) for place in range(3)}
    again = ["ablate", "schedule", "--blocks", "kept.json", "--gpu-like", *SMALL, "--output", "second.json"]
    assert cli.main(again) == 0
    first, second = (json.loads(Path(name).read_text()) for name in ("first.json", "second.json"))
    assert first["load"] == second["load"] and first["sizes"] == second["sizes"]


def test_blocks_of_two_recordings_keep_their_prompts_apart():
    blocks = Blocks(np.zeros((2, 1)), np.array([0, 1]), ["a", "a"], 0.0, [0, 3])
    assert (blocks + blocks).prompts == [0, 3, 4, 7]
    assert (blocks + Blocks(np.zeros((1, 1)), np.array([0]), ["a"], 0.0)).prompts is None


@pytest.fixture(scope="module")
def compared(root) -> dict:
    """What one comparison leaves in its file."""
    argv = ["ablate", "drafters", "--target", str(root / "target"), "--prompts", str(root / "prompts")]
    argv += ["--drafters", *(str(root / name) for name in ("vanilla", "rnn", "nomarkov")), "--max-new-tokens", "24"]
    plots = ["--plot", str(root / "compared")] if pytest.importorskip("matplotlib") else []
    assert cli.main([*argv, "--output", str(root / "c.json"), "--markdown", str(root / "c.md"), *plots]) == 0
    return json.loads((root / "c.json").read_text())


def test_drafters_are_set_against_the_first(compared, root):
    vanilla, rnn, bare = compared["drafters"]
    assert [entry["label"] for entry in compared["drafters"]] == ["vanilla", "rnn", "nomarkov"]
    assert vanilla["difference"]["macro"] == {"value": 0.0, "interval": [0.0, 0.0]}
    for entry in (rnn, bare):
        own, first = (each["macro"]["mean_acceptance_length"] for each in (entry, vanilla))
        assert entry["difference"]["macro"]["value"] == pytest.approx(own - first)
        for task in SETS:
            own, first = (each["tasks"][task]["mean_acceptance_length"] for each in (entry, vanilla))
            assert entry["difference"]["tasks"][task]["value"] == pytest.approx(own - first)
    # Greedy texts are the target's own, whoever drafts.
    assert all(
        entry["tasks"][task]["tokens"] == vanilla["tasks"][task]["tokens"] for entry in (rnn, bare) for task in SETS
    )
    assert {path.name for path in (root / "compared").iterdir()} == {"drafters.png", "block_size.png"}


def test_what_drafters_differ_in_is_shown_and_nothing_else(compared, root):
    lines = (root / "c.md").read_text().splitlines()
    facts = {cells[0]: cells[1:] for cells in (line.strip("| ").split(" | ") for line in lines if "|" in line)}
    assert facts["block size"] == ["7", "7", "4"]
    assert facts["head"] == ["vanilla, rank 16", "rnn, rank 16", "none"]
    assert facts["layers"] == ["2", "2", "1"]
    assert facts["data"] == ["maths 75%, chat 25%", "chat 100%", "–"]
    assert "parameters" in facts and "draft vocab size" not in facts
    assert compared["drafters"][0]["facts"]["data"] == {"maths.jsonl": 30, "chat.jsonl": 10}


def test_labels_and_mixtures():
    assert labels_of(["a/x", "b/x", "c/y/"]) == ["a/x", "b/x", "y"]
    assert mixture({"a.jsonl": None, "org/b": 3}) == "a, b" and mixture({}) is None


def test_costs_by_a_profile(capsys):
    pytest.importorskip("matplotlib")
    argv = ["ablate", "cost", "--target", "target", "--drafter", "vanilla", "--profile", "profile.json"]
    assert cli.main([*argv, "--rows", "1", "4", "--max-new-tokens", "12", *FILES]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Times: the profile profile.json" in shown
    results = json.loads(Path("out.json").read_text())
    one, four = results["times"]["rows"]
    # Of the curves: 8 tokens of one row take 12 ms, 4 tokens 10 + 3 * 2 / 7, 32 tokens 20.
    assert one == pytest.approx({"rows": 1, "step": 1e-2, "draft": 3e-3, "verify": 1.2e-2})
    assert four == pytest.approx({"rows": 4, "step": 1e-2 + 3 * 2e-3 / 7, "draft": 6e-3, "verify": 2e-2})
    assert results["shares"]["draft over step, 1 row"] == pytest.approx(0.3)
    parts, own = results["parts"], results["drafter"]
    assert {"backbone", "sequential head", "confidence head"} <= parts.keys()
    assert sum(part["parameters"] for part in parts.values()) == own["parameters"]
    assert results["shares"]["parameters"] == pytest.approx(own["parameters"] / results["target"]["parameters"])
    memory = results["memory"]["rows"]
    assert [each["rows"] for each in memory] == [1, 4]
    for each in memory:
        if each["extra"] is not None:  # not every system tells
            assert each["extra"] == each["speculative"] - each["plain"] and each["plain"] > 2**20
    assert images() == {"cost.png"}


def test_costs_without_a_profile_are_measured(capsys):
    argv = ["ablate", "cost", "--target", "target", "--drafter", "vanilla", "--rows", "2", "--max-new-tokens", "12"]
    assert cli.main([*argv, "--output", "out.json"]) == 0
    assert "measured now, for one row" in " ".join(capsys.readouterr().out.split())
    (time,) = json.loads(Path("out.json").read_text())["times"]["rows"]
    assert time["rows"] == 1 and min(time["step"], time["draft"], time["verify"]) > 0


def test_weights_by_part_count_each_once():
    drafter = random_drafter(draft_vocab_size=3, owns_embedding=True, owns_lm_head=True)
    parts = weights_by_part(drafter)
    assert list(parts) == [
        "backbone", "sequential head", "confidence head", "embedding of its own", "output head of its own",
        "reduced vocabulary",
    ]  # fmt: skip
    assert parts["embedding of its own"].parameters == 4 * 8 and parts["embedding of its own"].bytes == 4 * 8 * 8
    assert parts["output head of its own"].parameters == 3 * 8
    assert (parts["reduced vocabulary"].parameters, parts["reduced vocabulary"].bytes) == (0, 3 * 8)
    assert sum(part.parameters for part in parts.values()) == sum(each.numel() for each in drafter.parameters())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not tell")
def test_the_peak_of_a_call_is_seen_although_as_much_was_freed_before():
    def hold(pieces: int) -> torch.Tensor:
        """The last of many, too small to be mapped one by one; it stands above what is freed."""
        return [torch.ones(2**16, dtype=torch.uint8) for _ in range(pieces)][-1]

    kept = hold(2000)
    small, large = (peak_bytes(lambda count=count: hold(count), torch.device("cpu")) for count in (1, 1000))
    if small is None:
        pytest.skip("this system does not tell")
    assert 45 * 2**20 < large - small < 80 * 2**20 and kept.all()


BAD = [
    (["schedule", "--blocks", "none.json"], ["--blocks 'none.json'"]),
    (["schedule", "--blocks", "old.json", "--gpu-like"], ["--blocks 'old.json'", "which prompt", "record it anew"]),
    (["calibration", "--blocks", "blocks.json", "--tasks", "sums", "--limit", "2"], ["--tasks --limit", "no effect"]),
    (["schedule", "--blocks", "blocks.json", "--save-blocks", "x.json"], ["--save-blocks", "no effect"]),
    (["schedule", "--blocks", "blocks.json", "--gpu-like", "--drafter", "nomarkov"], ["block_size is 4", "blocks 7"]),
    (["schedule", "--blocks", "blocks.json", "--profile", "blocks.json"], ["--profile 'blocks.json'", "no profile"]),
    (["schedule", "--top-p", "0.9"], ["--top-p 0.9", "--temperature above 0"]),
    (["schedule", "--plot", "old.json"], ["--plot 'old.json'", "give a folder"]),
    (["schedule", "--save-blocks", "/no/where/x.json"], ["--save-blocks '/no/where/x.json'", "does not exist"]),
    (["calibration", "--tasks", "nothing"], ["--tasks 'nothing'", "no such set"]),
    (
        [
            "calibration",
            "--target",
            "target",
            "--drafter",
            "vanilla",
            "--prompts",
            "prompts",
            "--limit",
            "1",
            "--gpu-like",
        ],
        ["--tasks: 'sums' has 1 prompt", "at least 2"],
    ),
    (["drafters"], ["--drafters", "required"]),
    (["drafters", "--drafters", "vanilla"], ["--drafters vanilla", "at least two", "dspark eval"]),
    (["drafters", "--drafters", "vanilla", "rnn", "vanilla"], ["--drafters vanilla rnn vanilla", "given once"]),
    (["drafters", "--drafters", "vanilla", "./none"], ["--drafters './none'", "no such folder"]),
    (["drafters", "--drafters", "vanilla", "rnn", "--max-new-tokens", "1"], ["--max-new-tokens 1", "at least 2"]),
    (["cost", "--rows", "0"], ["--rows", "at least 1"]),
    (["cost", "--profile", "none.json"], ["--profile 'none.json'"]),
    (["cost", "--markdown", "/no/where/x.md"], ["--markdown '/no/where/x.md'", "does not exist"]),
    (["cost", "--target", "target", "--drafter", "vanilla", "--profile", "bare.json"], ["no draft was measured"]),
    (["cost", "--target", "target", "--drafter", "nomarkov", "--profile", "profile.json"], ["block_size is 7"]),
    ([], ["PART"]),
    (["nonsense"], ["nonsense", "schedule"]),
]


@pytest.mark.parametrize(("argv", "parts"), BAD, ids=lambda value: " ".join(value) or "nothing")
def test_bad_input_is_one_line(capsys, argv, parts):
    Profile({}, SIZE, [StepCurve(64, [1, 8], [0.1, 0.2])]).save("bare.json")
    try:
        code = cli.main(["ablate", *argv])
    except SystemExit as stop:
        code = stop.code
    message = capsys.readouterr().err.splitlines()[-1]  # bars of what was loaded stand before it
    assert code == 2 and message.startswith("dspark ablate") and "error: " in message
    for part in parts:
        assert part in message


def test_a_bad_training_file_is_named(capsys):
    shutil.copytree("rnn", "broken", dirs_exist_ok=True)
    Path("broken/training.json").write_text('{"data": []}')
    assert cli.main(["ablate", "drafters", "--target", "target", "--drafters", "vanilla", "broken"]) == 2
    assert "--drafters 'broken'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "function"),
    [
        ("schedule", ablate.run),
        ("calibration", ablate.run),
        ("drafters", ablate_drafters.run),
        ("cost", ablate_cost.run),
    ],
)
def test_arguments_are_those_of_the_function(part, function):
    needed = ["--drafters", "a", "b"] if part == "drafters" else []
    arguments = vars(cli.build_parser().parse_args(["ablate", part, *needed]))
    wanted = set(inspect.signature(function).parameters) | {"part"}
    assert set(arguments) - {"run", "command"} == wanted


def test_what_a_single_number_cannot_say_is_a_dash():
    assert ablate_drafters.difference(["a"], [([1], [0])], [([1], [1])])["macro"]["value"] is None
