"""`dspark train`: from data to a drafter that decodes, and errors of one line."""

import json
import shutil

import pytest
import torch
from conftest import FIXTURES
from tiny import character_tokenizer, reduced_drafter
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from dspark_hf import DSparkDraftModel, cli
from dspark_hf.initialisation import (
    change_vocabulary,
    choose_mask_token,
    drafter_config,
    frequent_tokens,
    spread_taps,
    start_from_target,
)
from dspark_hf.train_command import parse, read_data


datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_target):
    """A target with its tokenizer, and texts of its own as training data."""
    folder = tmp_path_factory.mktemp("training")
    tiny_target.save_pretrained(folder / "target")
    character_tokenizer().save_pretrained(folder / "target")
    generator = torch.Generator().manual_seed(0)
    rows = []
    with torch.no_grad():
        prompts = torch.randint(1, 95, (24, 6), generator=generator)
        texts = tiny_target.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_length=40, do_sample=False, pad_token_id=0
        )
    for index, text in enumerate(texts.tolist()):
        rows.append({"input_ids": text, "loss_mask": [0] * 6 + [1] * 34, "prompt": str(index)})
    datasets.Dataset.from_list(rows).save_to_disk(folder / "data")
    (folder / "data" / "provenance.json").write_text(json.dumps({"samples": 24, "thinking": "default"}))
    return folder


def argv(folders, output, *more: str) -> list[str]:
    return [
        *("train", "--target", str(folders / "target"), "--data", str(folders / "data")),
        *("--output_dir", str(output), "--use_cpu", "True", "--report_to", "none", "--disable_tqdm", "True"),
        *("--max_steps", "4", "--per_device_train_batch_size", "4", "--num_anchors", "8", "--held_out", "0.2"),
        *("--learning_rate", "1e-3", "--logging_steps", "1", "--decode_tokens", "12", "--mask_token_id", "95"),
        *("--num_hidden_layers", "1", "--markov_rank", "8", "--save_strategy", "no"),
        *more,
    ]


def test_a_new_drafter_is_trained_and_saved(folders, tmp_path):
    pytest.importorskip("matplotlib")
    output, plot = tmp_path / "drafter", tmp_path / "run.png"
    assert cli.main(argv(folders, output, "--plot", str(plot))) == 0
    drafter = DSparkDraftModel.from_pretrained(output)
    assert drafter.config.num_hidden_layers == 1 and drafter.config.markov_rank == 8
    assert drafter.config.target_layer_ids == [1] and drafter.config.mask_token_id == 95
    origin = json.loads((output / "training.json").read_text())
    assert origin["data"] == {"samples": 24, "thinking": "default"} and origin["started_from"] == "random"
    last = origin["evaluations"][-1]
    lengths = last["mean_acceptance_length"]
    assert lengths.keys() == {"greedy", "temperature 1"} and all(1 <= length <= 8 for length in lengths.values())
    assert cli.main(["card", str(output), "--output", str(tmp_path / "card.md")]) == 0
    assert f"greedy {lengths['greedy']:.2f}, temperature 1" in (tmp_path / "card.md").read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_texts_are_counted_where_their_maker_did_not(folders, tmp_path):
    shutil.copytree(folders / "data", tmp_path / "data")
    (tmp_path / "data" / "provenance.json").write_text(json.dumps({"parts": [{"from": "elsewhere"}]}))
    _, data, _ = parse(["--output_dir", "x", "--use_cpu", "True", "--data", str(tmp_path / "data")])
    assert read_data(data, 0)[2] == {
        "samples": 24,
        "tokens": 24 * 40,
        "supervised_tokens": 24 * 34,
        "parts": [{"from": "elsewhere"}],
    }


def test_training_goes_on_from_a_drafter(folders, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli.main(argv(folders, first)) == 0
    calibrated = DSparkDraftModel.from_pretrained(first)
    calibrated.config.confidence_temperatures = [{"sampling_temperature": 0.0, "temperatures": [1.5] * 7}]
    calibrated.save_pretrained(first)
    again = ("--drafter", str(first), "--freeze", "confidence_head", "--data", *[str(folders / "data")] * 2)
    assert cli.main(argv(folders, second, *again, "--block_size", "5")) == 0
    first_run, second_run = (json.loads((folder / "training.json").read_text()) for folder in (first, second))
    assert "earlier_runs" not in first_run and second_run["started_from"] == str(first)
    (before,) = second_run["earlier_runs"]
    assert before == {name: first_run[name] for name in before} and before["blocks"] == first_run["blocks"] > 0
    third = tmp_path / "third"
    assert cli.main(argv(folders, third, "--drafter", str(second))) == 0
    assert len(json.loads((third / "training.json").read_text())["earlier_runs"]) == 2
    data = second_run["data"]
    assert data["samples"] == 48 and data["supervised_tokens"] == 48 * 34 and len(data["parts"]) == 2
    one, two = (DSparkDraftModel.from_pretrained(folder) for folder in (first, second))
    assert torch.equal(one.confidence_head.proj.weight, two.confidence_head.proj.weight)
    assert not torch.equal(one.fc.weight, two.fc.weight)
    assert (one.config.block_size, two.config.block_size) == (7, 5)
    # Other weights want other temperatures.
    assert one.config.confidence_temperatures and two.config.confidence_temperatures is None


@pytest.mark.parametrize(
    ("option", "value", "own"),
    [("num_hidden_layers", 7, 1), ("markov_head_type", "rnn", "vanilla"), ("mask_token_id", 3, 95)],
)
def test_a_drafter_to_go_on_from_keeps_its_shape(folders, tmp_path, capsys, option, value, own):
    first = tmp_path / "first"
    target = AutoModelForCausalLM.from_pretrained(folders / "target")
    config = drafter_config(target, mask_token_id=95, num_hidden_layers=1, markov_rank=8)
    DSparkDraftModel(config).save_pretrained(first)
    capsys.readouterr()
    wrong = argv(folders, tmp_path / "second", "--drafter", str(first), f"--{option}", str(value))
    assert cli.main(wrong) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"its `{option}` is {own}; training does not change that: leave out --{option} {value}" in message


def test_a_folder_must_be_given(capsys):
    assert cli.main(["train", "--data", "x"]) == 2
    assert "required: --output_dir" in capsys.readouterr().err


@pytest.mark.parametrize("length", [("--max_steps", "4"), ("--max_steps", "-1", "--num_train_epochs", "1")])
def test_a_run_that_is_done_stays_as_it_is(folders, tmp_path, capsys, length):
    output = tmp_path / "drafter"
    saving = (*length, "--save_strategy", "steps", "--save_steps", "4")
    assert cli.main(argv(folders, output, *saving)) == 0
    assert f"Written: {output}" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert cli.main(argv(folders, output, *saving)) == 0
    assert f"{output} holds a run that is done: nothing is left to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before


def test_the_run_of_another_drafter_is_not_gone_on_with(folders, tmp_path, capsys):
    output = tmp_path / "drafter"
    saving = ("--save_strategy", "steps", "--save_steps", "4")
    assert cli.main(argv(folders, output, *saving)) == 0
    assert cli.main(argv(folders, output, *saving, "--markov_rank", "4", "--block_size", "3")) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        "holds the run of another drafter (block_size 7 there and 3 here; markov_rank 8 there and 4 here)" in message
    )


def test_everything_may_be_trained_on(folders, tmp_path):
    output = tmp_path / "drafter"
    assert cli.main(argv(folders, output, "--held_out", "0")) == 0
    assert json.loads((output / "training.json").read_text())["evaluations"] == []


@pytest.mark.filterwarnings("default:.*is_gradient_checkpointing:FutureWarning")  # asked for by peft 0.21
def test_lora_goes_on_from_a_drafter_in_another_format(folders, tmp_path):
    pytest.importorskip("peft")
    output = tmp_path / "drafter"
    saving = ("--save_strategy", "steps", "--save_steps", "2")
    source = ("--drafter", str(FIXTURES / "deepspec-vanilla" / "drafter"), "--lora_rank", "2")
    source += ("--num_hidden_layers", "2", "--markov_rank", "16")  # as it is
    assert cli.main(argv(folders, output, *source, *saving)) == 0
    assert (output / "checkpoint-2" / "adapter_model.safetensors").is_file()
    DSparkDraftModel.from_pretrained(output)


def test_a_run_that_was_broken_off_goes_on(folders, tmp_path, capsys):
    output = tmp_path / "drafter"
    saving = ("--save_strategy", "steps", "--save_steps", "2")
    assert cli.main(argv(folders, output, *saving)) == 0
    (output / "checkpoint-4" / "trainer_state.json").write_text("{")
    capsys.readouterr()
    assert cli.main(argv(folders, output, *saving)) == 0
    assert "checkpoint-4 was not saved whole; going on from" in capsys.readouterr().err
    assert json.loads((output / "training.json").read_text())["steps"] == 4


@pytest.mark.filterwarnings("default:.*is_gradient_checkpointing:FutureWarning")  # asked for by peft 0.21
def test_lora_is_merged_into_what_is_saved(folders, tmp_path):
    pytest.importorskip("peft")
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli.main(argv(folders, first)) == 0
    assert cli.main(argv(folders, second, "--drafter", str(first), "--lora_rank", "2")) == 0
    one, two = (DSparkDraftModel.from_pretrained(folder) for folder in (first, second))
    assert not torch.equal(one.layers[0].mlp.up_proj.weight, two.layers[0].mlp.up_proj.weight)


def test_a_time_limit_ends_the_training(folders, tmp_path):
    output = tmp_path / "drafter"
    given = argv(folders, output, "--time_limit", "0.1")
    given[given.index("--max_steps") + 1] = "-1"
    assert cli.main(given) == 0
    origin = json.loads((output / "training.json").read_text())
    assert origin["steps"] > 0 and 5 < origin["seconds"] < 60
    rates = [entry["learning_rate"] for entry in origin["log"] if "learning_rate" in entry]
    assert rates[0] == pytest.approx(1e-3) and rates[-1] < 5e-4


def test_options_come_from_a_file_and_the_command_line_goes_before_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "target: somewhere\noutput_dir: out\nlearning_rate: 6e-4\nnum_anchors: 32\ndata: [a, b]\n"
        "target_layer_ids: [1, 3]\n"
    )
    model, data, training = parse(["--config", str(file), "--num_anchors", "16", "--use_cpu", "True"])
    assert model.target == "somewhere" and data.data == ["a", "b"] and model.target_layer_ids == [1, 3]
    assert training.learning_rate == pytest.approx(6e-4) and training.num_anchors == 16


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--data", "nowhere"], ["--data 'nowhere'", "holds no data set"]),
        (["--drafter", "./nowhere"], ["--drafter './nowhere'", "no such folder"]),
        (["--block_size", "0"], ["`block_size` is 0"]),
        (["--target_layer_ids", "3", "2"], ["`target_layer_ids` is [3, 2]"]),
        (["--config", "none.yaml"], ["--config 'none.yaml'", "no such file"]),
        (["--held_out", "1.5"], ["--held_out 1.5"]),
        (["--num_anchors", "0"], ["`num_anchors` is 0"]),
        (["--plot", "/no/where/run.png"], ["--plot '/no/where/run.png'", "does not exist"]),
        (["--plot", "run.foo"], ["--plot 'run.foo'", ".png"]),
        (["--plot", "/"], ["--plot '/'", "is a folder"]),
        (["--max_samples", "0"], ["--max_samples 0", "at least 1"]),
        (["--lora_rank", "-1"], ["--lora_rank -1"]),
        (["--seed", "-1"], ["--seed -1"]),
        (["--report_to", "foo"], ["foo"]),
        (["--drafter", "demo"], ["--drafter 'demo'", "its `num_hidden_layers` is 3", "leave out"]),
        (["--drafter", "demo", *"--num_hidden_layers 3 --markov_rank 64 --mask_token_id 7".split()], ["vocab_size"]),
        (["--resume_from_checkpoint", "/nope"], ["--resume_from_checkpoint '/nope'", "no checkpoint"]),
        (["--freeze", "backbone", "markov_head", "confidence_head"], ["`freeze`", "nothing of this drafter"]),
        (["--initialise_from", "Target"], ["--initialise_from", "invalid choice"]),
    ],
)
def test_bad_input_is_one_line(folders, tmp_path, capsys, more, parts):
    assert cli.main(argv(folders, tmp_path / "drafter", *more)) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("dspark train: error:")
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([{"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}] * 2, ["--data", "nothing to learn"]),
        ([{"input_ids": [1, 200, 3], "loss_mask": [0, 1, 1]}] * 2, ["--data: sample 1", "0 to 95"]),
        ([{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}] * 2, ["--data: sample 1", "3 `input_ids` and 2"]),
        ([{"input_ids": ["a", "b"], "loss_mask": [0, 1]}] * 2, ["--data", "other kinds than whole numbers"]),
        ([{"input_ids": [1, 2, 3], "loss_mask": [0.0, 0.5, 1.0]}] * 2, ["--data", "other kinds than whole numbers"]),
        ([{"input_ids": 1, "loss_mask": 1}] * 2, ["--data", "other kinds than whole numbers"]),
        (
            [{"input_ids": [1, 2], "loss_mask": [1, 1]}, {"input_ids": None, "loss_mask": [1]}],
            ["`input_ids`", "holes"],
        ),
        (
            [{"input_ids": [1, 2], "loss_mask": [1, 1]}, {"input_ids": [1], "loss_mask": [None]}],
            ["`loss_mask`", "holes"],
        ),
    ],
)
def test_data_that_cannot_be_trained_on_is_one_line(folders, tmp_path, capsys, rows, parts):
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "data")
    given = argv(folders, tmp_path / "drafter", "--held_out", "0", "--data", str(tmp_path / "data"))
    assert cli.main(given) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    for part in parts:
        assert part in message


def test_answers_that_max_length_cuts_are_told_of(folders, tmp_path, capsys):
    rows = [{"input_ids": [1, 2, 3, 4], "loss_mask": mask} for mask in ([0, 1, 1, 1], [0, 0, 1, 1])]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "data")
    more = ["--held_out", "0", "--data", str(tmp_path / "data"), "--max_length"]
    assert cli.main(argv(folders, tmp_path / "none", *more, "2")) == 2
    assert "--max_length 2: no sample has two tokens of the target's own" in capsys.readouterr().err
    assert cli.main(argv(folders, tmp_path / "drafter", *more, "3")) == 0
    assert "1 of 2 samples teach nothing: --max_length 3" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["{", "[]", "null", b"\xff"])
def test_a_provenance_that_cannot_be_read_is_one_line(folders, tmp_path, capsys, content):
    shutil.copytree(folders / "data", tmp_path / "data")
    file = tmp_path / "data" / "provenance.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cli.main(argv(folders, tmp_path / "drafter", "--data", str(tmp_path / "data"))) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"--data {str(tmp_path / 'data')!r}: its provenance.json cannot be read; remove it" in message


def test_data_of_different_number_types_go_together_and_their_folders_stay_as_they_are(folders, tmp_path):
    rows = datasets.load_from_disk(str(folders / "data")).to_list()
    kinds = {"input_ids": datasets.Sequence(datasets.Value("int16")), "prompt": datasets.Value("int64")}
    kinds |= {"loss_mask": datasets.Sequence(datasets.Value("bool"))}
    rows = [row | {"prompt": int(row["prompt"]) + 100} for row in rows]
    datasets.Dataset.from_list(rows, features=datasets.Features(kinds)).save_to_disk(tmp_path / "other")
    shutil.copytree(folders / "data", tmp_path / "data", ignore=shutil.ignore_patterns("cache-*"))
    names = [str(tmp_path / name) for name in ("data", "other")]
    _, data, _ = parse(["--output_dir", "x", "--use_cpu", "True", "--max_samples", "9", "--data", *names])
    before = sorted(tmp_path.rglob("*"))
    training, held_out, origin = read_data(data, 0)
    assert len(training) == 9 and len(held_out) and origin["samples"] == 48
    assert origin["supervised_tokens"] == 48 * 34
    data.data = data.data[:1]
    assert len(read_data(data, 0)[0]) == 9
    assert sorted(tmp_path.rglob("*")) == before


def test_values_of_the_file_are_checked_like_those_of_the_command_line(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("initialise_from: Target\n")
    assert cli.main(["train", "--config", str(file)]) == 2
    assert "invalid choice: 'Target'" in capsys.readouterr().err
    file.write_text("save_strategy: no\nfreeze: backbone\ndata: folder\nplot: null\nbf16: true\n")
    _, data, training = parse(["--config", str(file), "--output_dir", "out"])
    assert training.save_strategy == "no" and training.freeze == ["backbone"] and data.data == ["folder"]
    assert training.bf16 and data.plot is None


def test_other_data_is_not_gone_on_with(folders, tmp_path, capsys):
    output = tmp_path / "drafter"
    saving = ("--save_strategy", "steps", "--save_steps", "4")
    assert cli.main(argv(folders, output, *saving)) == 0
    assert cli.main(argv(folders, output, *saving, "--initialise_from", "target")) == 2
    assert "another start" in capsys.readouterr().err


def test_a_drafter_for_a_family_with_other_names():
    target = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=4, n_head=4, n_positions=32, vocab_size=96))
    config = drafter_config(target, mask_token_id=95)
    assert config.intermediate_size == 256 and config.num_target_layers == 4


def test_an_unknown_name_in_the_file_is_named(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("learning_rat: 1\n")
    assert cli.main(["train", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "learning_rat" in capsys.readouterr().err


def test_taps_are_spread_as_the_released_drafters_are():
    assert spread_taps(36, 5) == [1, 9, 17, 25, 33]
    assert spread_taps(40, 5) == [1, 10, 19, 28, 37]
    assert spread_taps(2, 5) == [0]


def test_a_new_drafter_has_the_shape_of_its_target(tiny_target):
    config = drafter_config(tiny_target, mask_token_id=95, num_hidden_layers=2)
    assert (config.vocab_size, config.hidden_size, config.num_target_layers) == (96, 64, 6)
    assert config.target_layer_ids == [1, 3] and not config.owns_embedding and not config.owns_lm_head
    DSparkDraftModel(config)


def test_a_drafter_starts_as_the_end_of_its_target(tiny_target):
    drafter = DSparkDraftModel(drafter_config(tiny_target, mask_token_id=95, num_hidden_layers=2))
    done = start_from_target(drafter, tiny_target)
    layer = tiny_target.model.layers[-1]
    assert torch.equal(drafter.layers[1].self_attn.q_proj.weight, layer.self_attn.q_proj.weight)
    assert torch.equal(drafter.layers[1].mlp.down_proj.weight, layer.mlp.down_proj.weight)
    assert "layers.0.self_attn.o_proj.weight" in done and "fc.weight" in done and "norm.weight" in done
    assert torch.equal(drafter.fc.weight[:, -64:], torch.eye(64)) and not drafter.fc.weight[:, :-64].any()
    deep = DSparkDraftModel(drafter_config(tiny_target, mask_token_id=95, num_hidden_layers=7))
    with pytest.raises(ValueError, match="The drafter has 7 layers"):
        start_from_target(deep, tiny_target)


def test_the_mask_token_is_one_that_no_text_holds():
    tokenizer = character_tokenizer()
    with pytest.raises(ValueError, match="`mask_token_id`"):
        choose_mask_token(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<used>", "<free>"]})
    tokenizer.chat_template = "<used>{{ messages[0].content }}"
    assert choose_mask_token(tokenizer) == tokenizer.convert_tokens_to_ids("<free>")
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    assert choose_mask_token(tokenizer) == tokenizer.convert_tokens_to_ids("<mask>")


def test_the_most_frequent_tokens_of_the_target_are_drafted():
    texts = [([5, 5, 5, 9, 9, 3], [0, 0, 1, 1, 1, 1]), ([3, 9, 0], [1, 1, 0])]
    assert frequent_tokens(texts, 2, vocab_size=12).tolist() == [3, 9]
    assert frequent_tokens(texts, 4, vocab_size=12, always=[11]).tolist() == [3, 5, 9, 11]
    with pytest.raises(ValueError, match="`draft_vocab_size` is 13"):
        frequent_tokens(texts, 13, vocab_size=12)


def test_a_reduced_drafter_has_the_logits_of_the_whole_one(tiny_target):
    whole = DSparkDraftModel(drafter_config(tiny_target, mask_token_id=95, num_hidden_layers=2))
    ids = torch.tensor([1, 4, 50])
    reduced = change_vocabulary(whole, ids)
    hidden = torch.randn(2, 7, 64)
    head = tiny_target.get_output_embeddings()
    torch.testing.assert_close(reduced.base_logits(hidden, head), whole.base_logits(hidden, head)[..., ids])
    features = torch.randn(2, whole.config.markov_rank)
    wanted = whole.markov_head.markov_w2(features)[..., ids]
    torch.testing.assert_close(reduced.markov_head.markov_w2(features), wanted)
    other = torch.tensor([0, 4, 9, 50, 95])
    again = change_vocabulary(reduced, other)
    torch.testing.assert_close(again.base_logits(hidden, head), whole.base_logits(hidden, head)[..., other])
    wanted = whole.markov_head.markov_w2(features)[..., other]
    wanted[:, [0, 2, 4]] = 0  # tokens that it could not draft have no correction yet
    torch.testing.assert_close(again.markov_head.markov_w2(features), wanted)


def test_a_head_of_its_own_has_rows_for_its_tokens_only():
    drafter = reduced_drafter("vanilla", (1, 4, 7), vocab_size=9, owns_embedding=True, owns_lm_head=True)
    fewer = change_vocabulary(drafter, torch.tensor([4, 7]))
    hidden = torch.randn(1, 2, 8, dtype=torch.float64)
    torch.testing.assert_close(fewer.base_logits(hidden), drafter.base_logits(hidden)[..., 1:])
    with pytest.raises(ValueError, match="no rows for 2 of the 3 tokens; leave `draft_vocab_size` out"):
        change_vocabulary(drafter, torch.tensor([0, 4, 8]))


def test_a_drafter_of_few_tokens_is_trained(folders, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert cli.main(argv(folders, first)) == 0
    assert cli.main(argv(folders, second, "--drafter", str(first), "--draft_vocab_size", "40")) == 0
    assert cli.main(argv(folders, tmp_path / "third", "--draft_vocab_size", "40")) == 0
    for folder in (second, tmp_path / "third"):
        drafter = DSparkDraftModel.from_pretrained(folder)
        assert drafter.config.draft_vocab_size == 40 and len(drafter.d2t) == 40
