"""Checkpoints of other packages: the same drafter in each wrapping, what config fields become, who is refused."""

import copy
import json

import pytest
import torch
from conftest import DEEPSPEC, DFLASH, FIXTURES, SPECULATORS, load_drafter
from repackaging import (
    BORROWED,
    PACKAGINGS,
    as_modelopt,
    as_old_speculators,
    as_specforge,
    assert_same_drafts,
    drafts_of,
    read,
    write,
)

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.modeling.checkpoint_formats import find_reader


pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def lent(tiny_target):
    """What the drafters borrow."""
    return tiny_target.get_input_embeddings(), tiny_target.get_output_embeddings()


def config_of(raw: dict, *names: str) -> DSparkConfig:
    """What a reader makes of a config, with tensors of these names."""
    config = DSparkConfig(**find_reader(raw)(raw, set(names)).fields)
    config.validate_drafter()
    return config


# One drafter in each wrapping


@pytest.mark.parametrize("name", ["deepspec-vanilla", "deepspec-gated", "deepspec-rnn"])
@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_the_same_drafter_in_another_wrapping(packaging, name, tmp_path, lent):
    folder = write(tmp_path / "drafter", *PACKAGINGS[packaging](*read(name)))
    drafter = DSparkDraftModel.from_pretrained(folder)
    assert_same_drafts(drafts_of(drafter, *lent), drafts_of(load_drafter(name), *lent))
    assert drafter.config.owns_lm_head == drafter.config.owns_embedding == (packaging in ("NeMo", "speculators, old"))
    assert drafter.name_or_path == drafter.config.name_or_path == str(folder)


@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_what_was_read_is_saved_as_ours(packaging, tmp_path, lent):
    folder = write(tmp_path / "theirs", *PACKAGINGS[packaging](*read("deepspec-rnn")))
    drafter = DSparkDraftModel.from_pretrained(folder)
    drafter.save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "dspark"
    again = DSparkDraftModel.from_pretrained(tmp_path / "ours")
    assert again.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert_same_drafts(drafts_of(again, *lent), drafts_of(drafter, *lent))


@pytest.mark.parametrize("name", [*DFLASH, *SPECULATORS])
def test_fixtures_of_others_survive_a_round_trip(name, tmp_path, lent):
    drafter = load_drafter(name)
    drafter.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path)
    before, after = drafter.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert again.config.to_diff_dict() == drafter.config.to_diff_dict()
    assert_same_drafts(drafts_of(again, *lent), drafts_of(drafter, *lent))


def test_every_tensor_of_a_foreign_checkpoint_is_used():
    for name in (*DFLASH, *SPECULATORS):
        _, stored = read(name)
        loaded = load_drafter(name).state_dict()
        assert loaded.keys() == stored.keys() - {"t2d"}
        assert all(torch.equal(loaded[key], stored[key]) for key in loaded.keys() - {"d2t"})


def test_old_speculators_that_reserve_slot_0(tmp_path):
    raw, weights = read("deepspec-vanilla")
    folder = write(tmp_path / "drafter", *as_old_speculators(raw | {"block_size": 8}, weights, tokens=7))
    drafter = DSparkDraftModel.from_pretrained(folder)
    assert (drafter.config.block_size, drafter.config.block_slots) == (7, 8)
    assert not drafter.config.sample_from_anchor
    # The same backbone over eight slots, the first of which is then left out.
    plain = load_drafter("deepspec-vanilla", block_size=8)
    found, expected = drafts_of(drafter), drafts_of(plain)
    for turn in (0, 1):
        hidden, anchors = expected[f"hidden {turn}"][:, 1:], torch.tensor([40 + turn, 50 - turn])
        draft = plain.draft(hidden, anchors)
        assert torch.equal(found[f"hidden {turn}"], hidden)
        assert torch.equal(found[f"tokens {turn}"], draft.tokens)
        assert torch.equal(found[f"confidence {turn}"], draft.confidence_logits)


def test_old_speculators_with_a_reduced_vocabulary_and_their_own_embedding(tmp_path, lent):
    raw, weights = read("speculators-reduced-vocab")
    del raw["sample_from_anchor"]
    weights["embed_tokens.weight"] = lent[0].weight.clone()
    drafter = DSparkDraftModel.from_pretrained(write(tmp_path / "drafter", raw, weights))
    assert drafter.config.owns_embedding
    assert_same_drafts(drafts_of(drafter), drafts_of(load_drafter("speculators-reduced-vocab"), *lent))


# Where settings stand, and what they mean


@pytest.mark.parametrize("place", ["dflash_config", "dspark_config", "top level"])
def test_specforges_settings_are_found_in_three_places(place):
    raw, weights = as_specforge(*read("deepspec-rnn"))
    moved = {name: raw["dflash_config"].pop(name) for name in ("markov_rank", "markov_head_type")}
    raw |= {"dspark_config": moved} if place == "dspark_config" else {}
    raw |= moved if place == "top level" else {}
    raw["dflash_config"] |= moved if place == "dflash_config" else {}
    config = config_of(raw, *weights)
    assert (config.markov_rank, config.markov_head_type) == (16, "rnn")


def test_specforge_under_our_own_model_type():
    """An earlier SpecForge wrote `model_type: dspark`, as this library does."""
    raw, weights = as_specforge(*read("deepspec-vanilla"), nested=("target_layer_ids", "mask_token_id"))
    config = config_of(raw | {"model_type": "dspark"}, *weights)
    assert config.enable_confidence_head and config.target_layer_ids == [1, 2, 4]


@pytest.mark.parametrize(("settings", "expected"), [({"confidence_head_alpha": 0.0}, False), ({}, True)])
def test_specforges_confidence_head_by_its_loss(settings, expected):
    raw, weights = as_specforge(*read("deepspec-vanilla"))
    del raw["dflash_config"]["enable_confidence_head"]
    raw["dflash_config"] |= settings
    assert config_of(raw, *weights).enable_confidence_head is expected


def test_specforge_with_a_reduced_vocabulary(tmp_path, lent):
    raw, weights = as_specforge(*read("deepspec-vanilla"))
    kept = torch.tensor([0, *range(4, 60, 3), 77, 95])
    weights["markov_head.markov_w2.weight"] = weights["markov_head.markov_w2.weight"][kept]
    weights["d2t"] = kept - torch.arange(len(kept))
    weights["t2d"] = torch.isin(torch.arange(96), kept)
    drafter = DSparkDraftModel.from_pretrained(
        write(tmp_path / "drafter", raw | {"draft_vocab_size": len(kept)}, weights)
    )
    assert not drafter.config.owns_lm_head and torch.equal(drafter.d2t, kept)
    whole = load_drafter("deepspec-vanilla")
    found, expected = drafts_of(drafter, *lent), drafts_of(whole, *lent)
    torch.testing.assert_close(found["logits 0"], expected["logits 0"][..., kept], atol=1e-5, rtol=0)
    assert torch.isin(found["tokens 0"], kept).all()


def test_yarn_is_read(tmp_path):
    raw, weights = as_specforge(*read("deepspec-vanilla"))
    raw["rope_scaling"]["factor"] = 4.0
    config = config_of(raw, *weights)
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["factor"] == 4.0
    assert config.rope_parameters["rope_theta"] == 10000.0
    drafter = DSparkDraftModel.from_pretrained(write(tmp_path / "drafter", raw, weights))
    inverse, factor = drafter.rotary.frequencies(torch.device("cpu"))
    assert factor > 1 and inverse[-1] < load_drafter("deepspec-vanilla").rotary.frequencies(torch.device("cpu"))[0][-1]


BOTH = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["sliding_attention"]),
        ({"is_causal": None}, ["sliding_attention"]),
        ({"is_causal": False}, []),
        ({"is_causal": True}, BOTH),
        ({"dflash_config": {"causal": False}}, []),
        ({"dflash_config": {"causal": True}}, BOTH),
        ({"is_causal": True, "dflash_config": {"causal": False}}, BOTH),
    ],
    ids=str,
)
def test_which_layers_are_causal(changes, expected):
    raw, weights = read("dflash-nested-sliding")
    changes = copy.deepcopy(changes)
    raw["dflash_config"] |= changes.pop("dflash_config", {})
    assert config_of(raw | changes, *weights).causal_layer_types == expected


def test_speculators_sliding_layers():
    raw, weights = read("speculators-sliding")
    config = config_of(raw, *weights)
    assert config.causal_layer_types == ["sliding_attention"] and config.window_from_anchor
    assert config_of(raw | {"sliding_window_non_causal": True}, *weights).causal_layer_types == []


def test_modelopts_windows(tmp_path):
    raw, weights = as_modelopt(*read("deepspec-vanilla"))
    raw["dflash_config"] |= {"use_swa": True, "swa_window_size": 9}
    config = config_of(raw, *weights)
    assert config.layer_types == ["sliding_attention"] * 2 and config.sliding_window == 9
    assert config.causal_layer_types == []


def test_modelopt_without_shifted_labels():
    raw, weights = as_modelopt(*read("deepspec-vanilla"))
    raw["dflash_config"]["shift_label"] = False
    config = config_of(raw, *weights)
    assert (config.block_size, config.sample_from_anchor, config.block_slots) == (6, False, 7)


def test_modelopts_heads_under_either_name(tmp_path, lent):
    """Some of its releases nest them as DeepSpec does; both at once cannot be told apart."""
    raw, weights = as_modelopt(*read("deepspec-vanilla"))
    nested = weights | {f"markov_head.{name}": weights[name] for name in ("markov_w1.weight", "markov_w2.weight")}
    with pytest.raises(ValueError, match="both stand for markov_head.markov_w1.weight"):
        DSparkDraftModel.from_pretrained(write(tmp_path / "both", raw, nested))
    for name in ("markov_w1.weight", "markov_w2.weight"):
        del nested[name]
    drafter = DSparkDraftModel.from_pretrained(write(tmp_path / "nested", raw, nested))
    assert_same_drafts(drafts_of(drafter, *lent), drafts_of(load_drafter("deepspec-vanilla"), *lent))


def test_dflashs_scales():
    raw, weights = read("dflash-top-level")
    raw["dflash_config"] |= {"input_embedding_scale": 2.5, "output_multiplier": 0.5, "final_logit_softcapping": 30}
    config = config_of(raw, *weights)
    assert (config.embedding_scale, config.output_multiplier, config.final_logit_softcapping) == (2.5, 0.5, 30)
    raw["dflash_config"]["final_logit_softcapping"] = 0
    assert config_of(raw, *weights).final_logit_softcapping is None


def test_dflashs_multiplier_comes_before_its_softcap(tmp_path, lent):
    raw, weights = read("dflash-top-level")
    raw["dflash_config"] |= {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    drafter = DSparkDraftModel.from_pretrained(write(tmp_path / "drafter", raw, weights))
    hidden = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0))
    expected = 3.0 * torch.tanh(lent[1](hidden) * 0.5 / 3.0)
    torch.testing.assert_close(drafter.base_logits(hidden, lent[1]), expected)
    block = torch.tensor([[5, 6]])
    torch.testing.assert_close(drafter.embed(block, lent[0]), lent[0](block) * 2.0)


def test_both_places_of_dflashs_block_size():
    raw, weights = read("dflash-top-level")
    nested, nested_weights = read("dflash-nested-sliding")
    assert config_of(raw, *weights).block_size == raw["block_size"] - 1 == 7
    assert config_of(nested, *nested_weights).block_size == nested["dflash_config"]["block_size"] - 1 == 5
    assert not config_of(raw, *weights).sample_from_anchor


def test_dflash_with_all_settings_on_top():
    raw, weights = read("dflash-top-level")
    raw |= raw.pop("dflash_config")
    assert config_of(raw, *weights).target_layer_ids == [1, 2, 4]


def test_layer_types_that_only_the_host_would_fill_in():
    raw, weights = read("dflash-nested-sliding")
    del raw["layer_types"]
    raw["max_window_layers"] = 1
    assert config_of(raw, *weights).layer_types == ["full_attention", "sliding_attention", "sliding_attention"]


def test_a_dflash_drafter_of_speculators():
    raw, weights = read("speculators-vanilla")
    raw |= {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "sample_from_anchor": False}
    config = config_of(raw, *weights)
    assert (config.block_size, config.sample_from_anchor, config.markov_rank) == (6, False, 0)
    assert not config.enable_confidence_head


@pytest.mark.parametrize(("tokens", "expected"), [(7, True), (6, False)])
def test_whether_slot_0_is_a_draft_is_inferred(tokens, expected):
    raw, weights = read("speculators-vanilla")
    del raw["sample_from_anchor"]
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    config = config_of(raw, *weights)
    assert config.sample_from_anchor is expected and config.block_size == tokens


@pytest.mark.parametrize(
    "methods", [None, [], [{}], [{"speculative_tokens": 3}], [{"speculative_tokens": "7"}], {}, [5]]
)
def test_slot_0_is_not_guessed(methods):
    raw, weights = read("speculators-vanilla")
    del raw["sample_from_anchor"]
    raw["speculators_config"]["proposal_methods"] = methods
    with pytest.raises(ValueError, match="whether slot 0 is a draft cannot be told"):
        config_of(raw, *weights)


def test_the_embeddings_output_may_be_tapped_by_speculators():
    raw, weights = read("speculators-vanilla")
    assert config_of(raw | {"aux_hidden_state_layer_ids": [0, 3]}, *weights).target_layer_ids == [-1, 2]


def test_taps_are_compared_with_the_target_where_the_checkpoint_does_not_tell(tiny_target, tmp_path):
    raw, weights = read("speculators-vanilla")
    drafter = DSparkDraftModel.from_pretrained(
        write(tmp_path / "drafter", raw | {"aux_hidden_state_layer_ids": [2, 3, 6]}, weights)
    )
    assert drafter.config.num_target_layers is None
    with pytest.raises(ValueError, match="reads layer 5 .* has only 6 layers"):
        tiny_target.generate(torch.tensor([[5, 6]]), assistant_model=drafter, max_new_tokens=3)


@pytest.mark.parametrize("packaging", PACKAGINGS)
def test_what_calibrate_writes_is_read_from_any_format(packaging):
    raw, weights = PACKAGINGS[packaging](*read("deepspec-vanilla"))
    entry = {"sampling_temperature": 0.0, "temperatures": [1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.5]}
    assert config_of(raw | {"confidence_temperatures": [entry]}, *weights).temperatures_for(0.0)[1] == 2.0


@pytest.mark.parametrize("name", [*DEEPSPEC, *DFLASH, *SPECULATORS])
def test_no_reader_touches_its_argument(name):
    raw, weights = read(name)
    before = copy.deepcopy(raw)
    find_reader(raw)(raw, set(weights))
    assert raw == before


# Who is refused


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"selector_rank": 8}}, "DFlash2"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}, "Domino"),
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorr"),
        ({"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}, "EAGLE"),
        ({"model_type": "eagle", "architectures": ["EAGLEModel"]}, "EAGLE"),
        ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, "EAGLE"),
        ({"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": "x"}, "Medusa"),
        ({"architectures": ["MedusaModel"]}, "Medusa"),
        ({"architectures": ["DeepSeekMTPModel"], "model_type": "deepseek_mtp"}, "an MTP head"),
        ({"architectures": ["Qwen3NextNForCausalLM"]}, "an MTP head"),
        ({"speculators_config": {"algorithm": "mtp"}}, "an MTP head"),
    ],
    ids=str,
)
def test_other_kinds_of_drafters_are_refused_by_name(raw, said):
    with pytest.raises(ValueError) as error:
        find_reader(raw)
    assert f"of another kind, {said}, which cannot be run" in str(error.value)
    assert "Readable are checkpoints saved by dspark_hf" in str(error.value)


@pytest.mark.parametrize(
    "raw",
    [
        {},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
        {"speculators_model_type": "dsv4_dspark", "architectures": ["DSV4DSparkDraftModel"]},
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "something_new"}},
        {"architectures": ["DSparkDraftModel"], "model_type": "deepseek_v4"},
    ],
    ids=str,
)
def test_unknown_formats_are_refused_with_what_was_found(raw):
    with pytest.raises(ValueError) as error:
        find_reader(raw)
    assert "This is not a drafter that can be read. Its config has model_type" in str(error.value)
    for found in (raw.get("speculators_model_type"), (raw.get("dflash_config") or {}).get("projector_type")):
        assert found is None or repr(found) in str(error.value)


@pytest.mark.parametrize("family", ["DeepseekV4", "Glm5_2", "KimiK3", "MiniMaxM3", "Qwen3_5"])
def test_families_of_nemo_that_cannot_be_run(family):
    raw, _ = read("deepspec-vanilla")
    with pytest.raises(
        ValueError, match=f"'{family}DSparkModel'.*readable are Qwen3DSparkModel and Gemma4DSparkModel"
    ):
        config_of(raw | {"architectures": [f"{family}DSparkModel"]})


def test_what_changes_a_backbone_beyond_recognition_is_refused():
    raw, weights = as_specforge(*read("deepspec-vanilla"))
    raw["dflash_config"]["attention_mode"] = "mla"
    with pytest.raises(ValueError, match="`attention_mode` .*'mla'.* only gqa and mha"):
        config_of(raw, *weights)
    raw, weights = as_modelopt(*read("deepspec-vanilla"))
    raw["dflash_config"]["attention_sink_bias"] = True
    with pytest.raises(ValueError, match="attention sinks"):
        config_of(raw, *weights)
    raw, weights = read("speculators-vanilla")
    raw["transformer_layer_config"]["model_type"] = "llama"
    with pytest.raises(ValueError, match="model_type 'llama'"):
        config_of(raw, *weights)
    with pytest.raises(ValueError, match="quantised weights"):
        config_of(read("deepspec-vanilla")[0] | {"quantization_config": {"bits": 4}})


def test_weights_of_another_kind_in_a_known_wrapping_are_left_over(tmp_path):
    raw, weights = read("dflash-top-level")
    weights["layers.0.attention_conv.base_kernel"] = torch.zeros(2, 3, 64)
    with pytest.raises(ValueError, match="left over layers.0.attention_conv.base_kernel"):
        DSparkDraftModel.from_pretrained(write(tmp_path / "drafter", raw, weights))


def test_a_head_that_the_checkpoint_owns_is_not_overwritten_by_the_targets(tmp_path, lent):
    raw, weights = as_old_speculators(*read("deepspec-vanilla"))
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0)
    drafter = DSparkDraftModel.from_pretrained(write(tmp_path / "drafter", raw, weights))
    assert torch.equal(drafts_of(drafter, *lent)["logits 0"], drafts_of(drafter)["logits 0"])
    assert set(BORROWED) <= drafter.state_dict().keys()


def test_dflash2_is_refused_from_its_own_folder():
    with pytest.raises(ValueError, match="of another kind, DFlash2"):
        DSparkDraftModel.from_pretrained(FIXTURES / "dflash2" / "drafter")
