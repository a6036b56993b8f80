"""Drafters written in the formats of others: read back the same, bit for bit; what a format cannot say is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import DEEPSPEC, DFLASH, FIXTURES, SPECULATORS, load_drafter
from repackaging import PACKAGINGS, assert_same_drafts, drafts_of, read, write
from safetensors.torch import load_file, save_file
from tiny import random_drafter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dspark_hf import DSparkDraftModel, cli
from dspark_hf.conversion import convert, read_checkpoint, with_target
from dspark_hf.convert_command import serving_lines
from dspark_hf.files import whole_folder
from dspark_hf.foreign_formats import EMBEDDING, HEAD, to_deepspec, to_speculators


TARGET = FIXTURES / "tiny-target"
GEMMA = tuple(name for name in DEEPSPEC if "gemma" in name)
# What each fixture cannot be written as, by the settings that are named.
REFUSED = {
    ("deepspec", "dflash-nested-sliding"): ["`sample_from_anchor` False", "`causal_layer_types`"],
    ("deepspec", "dflash-top-level"): ["`sample_from_anchor` False"],
    ("deepspec", "speculators-sliding"): ["`window_from_anchor` True", "`causal_layer_types` ['sliding_attention']"],
    ("deepspec", "speculators-reduced-vocab"): ["`draft_vocab_size` 70"],
    ("speculators", "dflash-nested-sliding"): ["`window_from_anchor` False"],
} | {("speculators", name): ["`sandwich_norms` True", "`layer_scalar` True"] for name in GEMMA}
EXPRESSED = [
    (to, name)
    for to in ("dspark", "deepspec", "speculators")
    for name in (*DEEPSPEC, *DFLASH, *SPECULATORS)
    if (to, name) not in REFUSED
]


def source_of(name: str) -> Path:
    return FIXTURES / name / "drafter"


def target_of(name: str, tiny_target: PreTrainedModel) -> PreTrainedModel:
    own = FIXTURES / name / "target"
    return AutoModelForCausalLM.from_pretrained(own).eval() if own.is_dir() else tiny_target


def drafts(drafter: DSparkDraftModel, target: PreTrainedModel) -> dict[str, torch.Tensor]:
    return drafts_of(drafter, target.get_input_embeddings(), target.get_output_embeddings())


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Of all that both have; beyond that only embedding and head may be there or not."""
    assert not (found.keys() ^ expected.keys()) - {EMBEDDING, HEAD}
    for name in found.keys() & expected.keys():
        assert found[name].dtype == expected[name].dtype and torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize(("to", "name"), EXPRESSED)
def test_a_converted_drafter_is_the_same(to, name, tiny_target, tmp_path):
    target = target_of(name, tiny_target)
    convert(source_of(name), tmp_path / "new", to, target, str(TARGET))
    again = DSparkDraftModel.from_pretrained(tmp_path / "new")
    assert_same_drafts(drafts(again, target), drafts(load_drafter(name), target))
    assert_same_weights(read_checkpoint(tmp_path / "new").weights, read_checkpoint(source_of(name)).weights)
    assert again.config.num_target_layers == 6


@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_drafters_of_others_in_every_format(packaging, tiny_target, tmp_path):
    config, weights = read("deepspec-vanilla")
    source = write(tmp_path / "source", *PACKAGINGS[packaging](config, weights))
    expected = drafts(load_drafter("deepspec-vanilla"), tiny_target)
    for to in ("dspark", "deepspec", "speculators"):
        convert(source, tmp_path / to, to, tiny_target, str(TARGET))
        assert_same_drafts(drafts(DSparkDraftModel.from_pretrained(tmp_path / to), tiny_target), expected)
        assert_same_weights(read_checkpoint(tmp_path / to).weights, weights)


@pytest.mark.parametrize(("to", "name"), list(REFUSED))
def test_what_a_format_cannot_express_is_refused_by_name(to, name, tiny_target, tmp_path):
    with pytest.raises(ValueError) as refusal:
        convert(source_of(name), tmp_path / "new", to, target_of(name, tiny_target), str(TARGET))
    for part in REFUSED[to, name]:
        assert part in str(refusal.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["deepspec", "speculators"])
@pytest.mark.parametrize("name", ["deepspec-vanilla", "deepspec-gated", "deepspec-rnn", "deepspec-nomarkov"])
def test_there_and_back(way, name, tiny_target, tmp_path):
    """A calibrated drafter of ours that borrows: the config and the weights come back as they were."""
    first = load_drafter(name)
    first.config.owns_embedding = first.config.owns_lm_head = False
    first.embed_tokens = first.lm_head = None
    size = first.config.block_size
    first.config.confidence_temperatures = [{"sampling_temperature": 0.0, "temperatures": [1.5] * size}]
    first.generation_config.assistant_confidence_threshold = 0.25
    first.save_pretrained(tmp_path / "first")
    (tmp_path / "first" / "training.json").write_text('{"steps": 3}')
    convert(tmp_path / "first", tmp_path / "there", way, tiny_target, str(TARGET))
    convert(tmp_path / "there", tmp_path / "back", "dspark")
    back = DSparkDraftModel.from_pretrained(tmp_path / "back")
    weights = load_file(tmp_path / "back" / "model.safetensors")
    assert_same_weights(weights, load_file(tmp_path / "first" / "model.safetensors"))
    lent = {"deepspec": {EMBEDDING, HEAD}, "speculators": set()}[way]
    assert weights.keys() - load_file(tmp_path / "first" / "model.safetensors").keys() == lent
    changed = {"owns_embedding": bool(lent), "owns_lm_head": bool(lent)}
    if way == "speculators":
        # Of no effect, since no layer slides.
        changed |= {"window_from_anchor": True, "causal_layer_types": ["sliding_attention"]}
    config = json.loads((tmp_path / "first" / "config.json").read_text()) | changed
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config
    assert back.generation_config.assistant_confidence_threshold == 0.25
    assert (tmp_path / "back" / "training.json").read_text() == '{"steps": 3}'
    assert_same_drafts(drafts(back, tiny_target), drafts(first, tiny_target))


def test_there_and_back_with_a_reduced_vocabulary(tiny_target, tmp_path):
    name = "speculators-reduced-vocab"
    convert(source_of(name), tmp_path / "ours", "dspark", tiny_target)
    convert(tmp_path / "ours", tmp_path / "theirs", "speculators", tiny_target, str(TARGET))
    weights, expected = (
        load_file(tmp_path / "theirs/model.safetensors"),
        load_file(source_of(name) / "model.safetensors"),
    )
    assert weights.keys() == expected.keys() and weights["t2d"].dtype == torch.bool
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_a_borrowed_head_of_a_reduced_vocabulary(tiny_target, tmp_path):
    drafter = load_drafter("speculators-reduced-vocab")
    drafter.config.owns_lm_head, drafter.lm_head = False, None
    drafter.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "speculators", tiny_target, str(TARGET))
    weights = load_file(tmp_path / "theirs" / "model.safetensors")
    assert torch.equal(weights[HEAD], tiny_target.lm_head.weight[drafter.d2t])
    again = DSparkDraftModel.from_pretrained(tmp_path / "theirs")
    assert_same_drafts(drafts(again, tiny_target), drafts(drafter, tiny_target))


@pytest.mark.parametrize("name", DEEPSPEC)
def test_what_deepspec_writes_is_written(name, tiny_target):
    """Every field that DeepSpec has and that a reader could go by, but for those of Gemma's other layers."""
    checkpoint = read_checkpoint(source_of(name))
    raw, _ = to_deepspec(checkpoint.config, checkpoint.weights)
    expected = json.loads((source_of(name) / "config.json").read_text())
    of_other_layers = {"rope_parameters", "head_dim", "num_key_value_heads", "num_global_key_value_heads"}
    unused = {"transformers_version", "max_window_layers", "moe_intermediate_size", "num_experts", "top_k_experts"}
    unused |= {"use_bidirectional_attention"} | (of_other_layers if name in GEMMA else set())
    assert expected.keys() - raw.keys() <= unused
    assert {key: raw[key] for key in expected.keys() - unused} == {
        key: expected[key] for key in expected.keys() - unused
    }
    assert raw.keys() - expected.keys() <= {"sliding_window"}


@pytest.mark.parametrize("name", ["vanilla", "rnn", "sliding", "reduced-vocab"])
def test_what_speculators_writes_is_written(name, tiny_target):
    name = f"speculators-{name}"
    checkpoint = with_target(read_checkpoint(source_of(name)), tiny_target)
    raw, _ = to_speculators(checkpoint.config, checkpoint.weights, "tiny-target", ["Qwen3ForCausalLM"])
    expected = json.loads((source_of(name) / "config.json").read_text())
    layers, expected_layers = raw.pop("transformer_layer_config"), expected.pop("transformer_layer_config")
    del expected["auto_map"], expected["transformers_version"]  # neither means anything
    assert raw.pop("num_target_layers") == 6 and raw == expected
    assert layers.pop("dtype") == "float32"
    assert layers | {"max_window_layers": 0} == expected_layers | {"max_window_layers": 0}


def test_a_dflash_drafter_for_speculators(tiny_target, tmp_path):
    convert(source_of("dflash-top-level"), tmp_path / "new", "speculators", tiny_target, str(TARGET))
    raw = json.loads((tmp_path / "new" / "config.json").read_text())
    assert raw["speculators_model_type"] == "dflash" and raw["architectures"] == ["DFlashDraftModel"]
    assert raw["block_size"] == 8 and raw["sample_from_anchor"] is False
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7


def test_tensors_of_several_dtypes_keep_them(tiny_target, tmp_path):
    shutil.copytree(source_of("deepspec-vanilla"), tmp_path / "mixed")
    weights = load_file(tmp_path / "mixed" / "model.safetensors")
    weights = {name: value.bfloat16() if "layers" in name else value for name, value in weights.items()}
    save_file(weights, tmp_path / "mixed" / "model.safetensors")
    for to in ("dspark", "deepspec", "speculators"):
        convert(tmp_path / "mixed", tmp_path / to, to, tiny_target, str(TARGET))
        assert_same_weights(load_file(tmp_path / to / "model.safetensors"), weights)


# What is refused before anything is written


def test_an_embedding_that_is_not_the_targets(tiny_target, tmp_path):
    drafter = load_drafter("deepspec-vanilla")
    with torch.no_grad():
        drafter.embed_tokens.weight[5] += 1
    drafter.save_pretrained(tmp_path / "own")
    with pytest.raises(ValueError, match=r"embed_tokens\.weight of this drafter is another than the target's"):
        convert(tmp_path / "own", tmp_path / "new", "speculators", tiny_target, str(TARGET))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"embedding_scale": 2.0}, "`embedding_scale` 2.0"),
        ({"output_multiplier": 0.5}, "`output_multiplier` 0.5"),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping` 30.0"),
        ({"attention_bias": True}, "`attention_output_bias` False"),
        ({"mlp_bias": True}, "`mlp_bias` True"),
        ({"query_key_norm": False}, "`query_key_norm` False"),
        ({"attention_k_eq_v": True}, "`attention_k_eq_v` True"),
        ({"attention_scaling": 1.0}, "`attention_scaling` 1.0"),
    ],
)
def test_settings_that_neither_has(change, setting):
    drafter = random_drafter(**change)
    weights = drafter.state_dict() | {EMBEDDING: torch.zeros(4, 8), HEAD: torch.zeros(4, 8)}
    for writer in (to_deepspec, lambda *drafter: to_speculators(*drafter, "target", ["LlamaForCausalLM"])):
        with pytest.raises(ValueError, match="cannot express") as refusal:
            writer(drafter.config, weights)
        assert setting in str(refusal.value)


def test_speculators_is_named_only_where_it_helps():
    for change, helps in (({}, True), ({"query_key_norm": False}, False)):
        drafter = random_drafter(draft_vocab_size=3, **change)
        with pytest.raises(ValueError, match="`draft_vocab_size` 3") as refusal:
            to_deepspec(drafter.config, drafter.state_dict())
        assert ("speculators" in str(refusal.value)) is helps


def test_what_a_target_must_lend(tmp_path, tiny_target):
    convert(source_of("speculators-vanilla"), tmp_path / "ours", "dspark")
    with pytest.raises(ValueError, match="`num_target_layers` of this drafter is not known"):
        convert(tmp_path / "ours", tmp_path / "new", "deepspec")
    convert(source_of("speculators-vanilla"), tmp_path / "known", "dspark", tiny_target)
    with pytest.raises(ValueError, match="which this drafter borrows"):
        convert(tmp_path / "known", tmp_path / "new", "deepspec")
    smaller = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(TARGET, num_hidden_layers=4, layer_types=["full_attention"] * 4)
    )
    with pytest.raises(ValueError, match="num_hidden_layers 6, and this one has 4"):
        convert(tmp_path / "known", tmp_path / "new", "deepspec", smaller)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["known", "ours"]


# The folder


def test_a_folder_is_whole_or_not_there(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with whole_folder(tmp_path / "new") as folder:
            (folder / "config.json").write_text("{}")
            raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_overwriting(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "precious").write_text("")
    for overwrite, message in ((False, "exists already"), (True, "is no checkpoint folder")):
        with pytest.raises(ValueError, match=message), whole_folder(tmp_path / "new", overwrite):
            pass
    (tmp_path / "new" / "config.json").write_text("old")
    with whole_folder(tmp_path / "new", overwrite=True) as folder:
        (folder / "config.json").write_text("new")
    assert [path.read_text() for path in (tmp_path / "new").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_folder_in_place_of_itself(tmp_path, tiny_target):
    shutil.copytree(source_of("deepspec-vanilla"), tmp_path / "drafter")
    convert(tmp_path / "drafter", tmp_path / "drafter", "dspark", overwrite=True)
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["model_type"] == "dspark"
    assert_same_drafts(
        drafts_of(DSparkDraftModel.from_pretrained(tmp_path / "drafter")), drafts_of(load_drafter("deepspec-vanilla"))
    )


# The command


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    try:
        code = cli.main([str(word) for word in argv])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command(capsys, tmp_path):
    arguments = ("convert", source_of("deepspec-vanilla"), tmp_path / "new", "--to", "speculators", "--target", TARGET)
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert f'"model": "{tmp_path / "new"}", "num_speculative_tokens": 7' in out and f"vllm serve {TARGET}" in out
    assert "convert to deepspec" in out
    raw = json.loads((tmp_path / "new" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"] == {
        "name_or_path": str(TARGET),
        "architectures": ["Qwen3ForCausalLM"],
    }
    code, _, error = run(capsys, *arguments)
    assert code == 2 and "exists already" in error and "--overwrite" in error and error.count("\n") == 1
    assert run(capsys, *arguments, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--to", "gguf"], ["--to", "gguf", "deepspec"]),
        (["--to", "speculators"], ["--target is missing"]),
        (["--to", "deepspec", "--target", "./nowhere"], ["--target", "./nowhere"]),
        ([], ["--to"]),
    ],
)
def test_bad_arguments(capsys, tmp_path, arguments, parts):
    code, _, error = run(capsys, "convert", source_of("deepspec-vanilla"), tmp_path / "new", *arguments)
    assert code == 2 and error.count("\n") == 1
    for part in parts:
        assert part in error


def test_a_refusal_of_the_command(capsys, tmp_path):
    code, _, error = run(capsys, "convert", source_of("dflash-top-level"), tmp_path / "new", "--to", "deepspec")
    assert code == 2 and "`sample_from_anchor` False" in error and "SRC" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "to", "vllm", "sglang"),
    [
        ("deepspec-vanilla", "deepspec", True, True),
        ("deepspec-rnn", "deepspec", False, True),
        ("deepspec-nomarkov", "deepspec", False, False),
        ("deepspec-gemma4", "deepspec", False, False),
        ("deepspec-vanilla", "speculators", True, False),
        ("dflash-top-level", "speculators", True, False),
    ],
)
def test_who_runs_it(name, to, vllm, sglang):
    lines = "\n".join(serving_lines(load_drafter(name).config, to, "org/target", "folder"))
    assert ("vllm serve org/target" in lines) == vllm
    assert ("sglang.launch_server --model-path org/target" in lines) == sglang
