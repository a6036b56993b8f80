"""`dspark bench` with other ways of decoding beside plain generate, at contexts of given lengths."""

import json

import pytest
import torch
from conftest import FIXTURES, load_drafter, load_golden
from tiny import character_tokenizer

from dspark_hf import DSparkDraftModel, cli
from dspark_hf.bench import working_methods
from dspark_hf.decoding_methods import (
    COMPILED,
    HOST_DFLASH,
    PLAIN,
    Method,
    at_contexts,
    chosen_methods,
    compiled,
    plain_method,
)
from dspark_hf.host_dflash import host_dflash
from dspark_hf.loading import Pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_target):
    made = tmp_path_factory.mktemp("pair")
    tiny_target.save_pretrained(made / "target")
    character_tokenizer().save_pretrained(made / "target")
    (made / "sums.jsonl").write_text('{"prompt": "the box holds 17 "}\n{"prompt": "a baker makes 6 "}\n')
    return made


def bench(folder, *more: str) -> int:
    pair = ["--target", str(folder / "target"), "--drafter", str(FIXTURES / "deepspec-vanilla" / "drafter")]
    prompts = ["--prompts", str(folder / "sums.jsonl"), "--max-new-tokens", "8", "--repetitions", "1"]
    return cli.main(["bench", *pair, *prompts, "--output", str(folder / "out.json"), *more])


def test_chosen_ways_are_measured_at_chosen_contexts(folder, capsys):
    methods = ("--methods", "static", "prompt-lookup", "hardware_aware", "constant")
    assert bench(folder, *methods, "--contexts", "12", "30") == 0
    found = json.loads((folder / "out.json").read_text())
    names = {PLAIN, "static cache", "prompt lookup", "DSpark, hardware_aware", "DSpark, constant"}
    assert {call["method"] for call in found["calls"]} == names
    assert {call["set"] for call in found["calls"]} == {"context 12", "context 30"}
    assert set(found["summary"]) == {"context 12", "context 30", "macro"}
    assert found["settings"]["left_out"] == {}
    # Whole blocks send more than a schedule that falls back to a threshold for want of a profile.
    verified = {
        name: sum(call["stats"]["verified"] for call in found["calls"] if call["method"] == f"DSpark, {name}")
        for name in ("constant", "hardware_aware")
    }
    assert verified["constant"] > verified["hardware_aware"]


def test_options_that_do_not_go_together_are_named(folder, capsys):
    assert bench(folder, "--methods", "static", "--synthetic-acceptance", "0.5") == 2
    assert "--methods static: not with --synthetic-acceptance" in capsys.readouterr().err
    assert bench(folder, "--contexts", "8", "--batch-sizes", "2") == 2
    assert "--contexts 8: not with --batch-sizes" in capsys.readouterr().err


@pytest.fixture
def pair(tiny_target):
    drafter = DSparkDraftModel.from_pretrained(FIXTURES / "deepspec-vanilla" / "drafter")
    return Pair(tiny_target, drafter, character_tokenizer(), ("target", "drafter"))


def test_a_compiled_forward_is_there_for_the_call_alone(pair, monkeypatch):
    asked = []

    def compile_(forward, dynamic):
        asked.append(forward)
        return lambda *args, **kwargs: forward(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", compile_)
    plain = pair.target.forward
    for _ in range(2):
        with compiled(pair.target):
            assert pair.target.forward != plain
        assert pair.target.forward == plain
    assert asked == [plain]


def test_what_does_not_work_here_is_left_out_with_its_reason(pair, monkeypatch):
    inputs = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}

    def broken(target):
        raise RuntimeError("no compiler\nhere")

    methods = [plain_method(), Method(COMPILED, surroundings=lambda: broken(pair.target))]
    working, reasons = working_methods(pair, inputs, methods, {"max_new_tokens": 4, "do_sample": False})
    assert [method.name for method in working] == [PLAIN]
    assert reasons == {COMPILED: "no compiler here"}
    wrong = Method("DSpark", surroundings=lambda: broken(pair.target))
    with pytest.raises(RuntimeError, match="no compiler"):
        working_methods(pair, inputs, [wrong], {"max_new_tokens": 4, "do_sample": False})


def test_contexts_end_like_the_prompts_and_have_their_length():
    encoded = {"a": [{"input_ids": torch.tensor([[1, 2, 3]])}], "b": [{"input_ids": torch.tensor([[7, 8]])}]}
    found = at_contexts(encoded, [2, 4])
    assert [inputs["input_ids"].tolist() for inputs in found["context 2"]] == [[[2, 3]], [[7, 8]]]
    assert [inputs["input_ids"].tolist() for inputs in found["context 4"]] == [[[8, 1, 2, 3]], [[2, 3, 7, 8]]]
    assert found["context 4"][0]["attention_mask"].tolist() == [[1, 1, 1, 1]]


def test_every_name_of_the_command_line_is_a_method(pair):
    names = (
        "static",
        "compiled",
        "prompt-lookup",
        "dflash",
        "compiled-drafter",
        "constant",
        "confidence",
        "hardware_aware",
        "hardware_aware_lagged",
    )
    methods = chosen_methods(pair, names, 10)
    assert len({method.name for method in methods}) == len(names)
    assert [method.speculative for method in methods] == [False] * 4 + [True] * 5


def test_transformers_dflash_is_measured_where_the_drafter_is_one(folder, capsys):
    drafter = ("--drafter", str(FIXTURES / "dflash-top-level" / "drafter"))
    assert bench(folder, *drafter, "--methods", "dflash", "constant") == 0
    found = json.loads((folder / "out.json").read_text())
    calls = {name: [c for c in found["calls"] if c["method"] == name] for name in (HOST_DFLASH, "DSpark, constant")}
    assert all(len(made) == 2 and all(call["same_text"] for call in made) for made in calls.values())
    assert found["settings"]["left_out"] == {}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepspec-vanilla", "`markov_rank` is 16; Transformers' DFlash runs 0 only"),
        ("deepspec-nomarkov", "`sample_from_anchor` is True; Transformers' DFlash runs False only"),
        ("dflash-nested-sliding", "`layer_types` is ['sliding_attention'"),
    ],
)
def test_transformers_dflash_is_left_out_with_its_reason(folder, capsys, name, reason):
    assert bench(folder, "--drafter", str(FIXTURES / name / "drafter"), "--methods", "dflash", "constant") == 0
    left_out = json.loads((folder / "out.json").read_text())["settings"]["left_out"]
    assert list(left_out) == [HOST_DFLASH] and reason in left_out[HOST_DFLASH]
    assert f"Left out: {HOST_DFLASH}" in capsys.readouterr().out


def test_transformers_drafts_with_the_same_weights_what_z_lab_does(tiny_target, monkeypatch):
    drafter = load_drafter("dflash-top-level")
    assistant = host_dflash(drafter, tiny_target)
    own, theirs = drafter.layers[0].mlp.up_proj.weight, assistant.layers[0].mlp.up_proj.weight
    assert own.data_ptr() == theirs.data_ptr()
    decode = load_golden("dflash-top-level")[0]["decodes"][0]
    prompt = torch.tensor([decode["prompt_ids"]])
    forwards = []
    count = tiny_target.register_forward_hook(lambda *_: forwards.append(1))
    new = len(decode["output_ids"]) - prompt.shape[1]
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
    try:
        text = tiny_target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            assistant_model=assistant,
            speculation_type="dflash",
            **options,
        )
    finally:
        count.remove()
    assert text[0].tolist() == decode["output_ids"]
    # As many rounds as there, after the prompt's own pass: the drafts are the same. The last one may be cut.
    assert abs(len(forwards) - 1 - len(decode["acceptance_lengths"])) <= 1
