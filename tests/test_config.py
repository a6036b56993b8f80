"""The drafter's configuration: each mistake is named, each format's fields arrive where they belong."""

import copy
import json
import math

import pytest
from conftest import DEEPSPEC, FIXTURES, load_drafter
from transformers import AutoConfig

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.modeling.checkpoint_formats import find_reader


RIGHT = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "block_size": 3,
    "mask_token_id": 1,
    "markov_rank": 4,
}
# What is wrong, and what the message must say: the field, its value, what is allowed or to be done.
MISTAKES = [
    ({"target_layer_ids": None}, ["`target_layer_ids` is None", "trained on"]),
    ({"target_layer_ids": []}, ["`target_layer_ids` is []", "trained on"]),
    ({"target_layer_ids": 3}, ["`target_layer_ids` is 3", "trained on"]),
    ({"target_layer_ids": [0, 3]}, ["`target_layer_ids` is [0, 3]", "from -1", "to 2", "4 layers"]),
    ({"target_layer_ids": [-2, 0]}, ["`target_layer_ids` is [-2, 0]", "from -1", "to 2"]),
    ({"target_layer_ids": ["1"]}, ["`target_layer_ids` is ['1']", "integer"]),
    ({"target_layer_ids": [2, 0]}, ["`target_layer_ids` is [2, 0]", "increasing"]),
    ({"target_layer_ids": [1, 1]}, ["`target_layer_ids` is [1, 1]", "increasing"]),
    ({"num_target_layers": 0}, ["`num_target_layers` is 0", "at least 1"]),
    ({"num_target_layers": None, "target_layer_ids": [-2]}, ["`target_layer_ids` is [-2]", "the last layer but one"]),
    ({"draft_vocab_size": 0}, ["`draft_vocab_size` is 0", "at least 1 and at most 32"]),
    ({"draft_vocab_size": 33}, ["`draft_vocab_size` is 33", "at least 1 and at most 32"]),
    ({"num_hidden_layers": 10**9}, ["`num_hidden_layers` is 1000000000", "at most 1024"]),
    ({"vocab_size": 10**12}, ["`vocab_size` is 1000000000000", "at most"]),
    (
        {"causal_layer_types": ["chunked_attention"]},
        ["`causal_layer_types`", "chunked_attention", "none, one or both"],
    ),
    ({"output_multiplier": float("nan")}, ["`output_multiplier` is nan", "finite"]),
    ({"embedding_scale": 0.0}, ["`embedding_scale` is 0.0", "above 0"]),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["factor None", "'yarn' needs it"]),
    ({"block_size": 0}, ["`block_size` is 0", "at least 1"]),
    ({"block_size": "7"}, ["`block_size` is '7'", "integer"]),
    ({"block_size": 3.0}, ["`block_size` is 3.0", "integer"]),
    ({"block_size": True}, ["`block_size` is True", "integer"]),
    ({"vocab_size": 0}, ["`vocab_size` is 0", "at least 1"]),
    ({"markov_rank": -1}, ["`markov_rank` is -1", "at least 0"]),
    ({"markov_rank": None}, ["`markov_rank` is None", "at least 0"]),
    ({"mask_token_id": None}, ["`mask_token_id` is None", "0 to 31"]),
    ({"mask_token_id": 32}, ["`mask_token_id` is 32", "0 to 31"]),
    ({"mask_token_id": -1}, ["`mask_token_id` is -1", "0 to 31"]),
    ({"markov_head_type": "bilinear"}, ["`markov_head_type` is 'bilinear'", "vanilla, gated, rnn"]),
    ({"markov_rank": 0}, ["`confidence_head_with_markov` is true", "`markov_rank` is 0", "to false"]),
    ({"final_logit_softcapping": 0.0}, ["`final_logit_softcapping` is 0.0", "above 0"]),
    ({"num_attention_heads": 3, "head_dim": 4}, ["`num_attention_heads` (3)", "multiple", "(2)"]),
    ({"hidden_act": "silly"}, ["`hidden_act` is 'silly'", "silu"]),
    ({"head_dim": 5}, ["`head_dim` is 5", "even"]),
    ({"target_hidden_size": 24}, ["`hidden_size` is 16", "`target_hidden_size` is 24", "`owns_embedding`"]),
    ({"layer_types": ["full_attention"]}, ["`layer_types` is ['full_attention']", "2 layers"]),
    ({"layer_types": ["full_attention", "chunked_attention"]}, ["chunked_attention", "sliding_attention"]),
    ({"layer_types": ["sliding_attention"] * 2}, ["`sliding_window` is None", "at least 1"]),
    ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, ["'dynamic'", "yarn"]),
    ({"rope_parameters": {"rope_type": "default"}}, ["`rope_parameters`", "`rope_theta`"]),
    (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ["partial_rotary_factor 0.5", "must be 1"],
    ),
]


def set_directly(fields: dict) -> DSparkConfig:
    """A config with fields as they stand: transformers fills in or refuses some on the way through the constructor."""
    config = DSparkConfig(**RIGHT)
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def test_the_right_config_is_right():
    DSparkConfig(**RIGHT).validate_drafter()
    DSparkConfig(**RIGHT, target_hidden_size=24, owns_embedding=True, owns_lm_head=True).validate_drafter()


@pytest.mark.parametrize(("fields", "said"), MISTAKES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_a_mistake_is_named_before_a_model_is_made(fields, said):
    with pytest.raises(ValueError) as error:
        DSparkDraftModel(set_directly(fields))
    assert all(part in str(error.value) for part in said), str(error.value)


@pytest.mark.parametrize(("wrong", "right"), [("block_sise", "block_size"), ("target_layer_id", "target_layer_ids")])
def test_a_misspelt_argument_is_refused(wrong, right):
    with pytest.raises(ValueError, match=f"no argument `{wrong}`; did you mean `{right}`"):
        DSparkConfig(**{wrong: 3})


def test_defaults_that_follow_from_others():
    config = DSparkConfig(hidden_size=24, num_attention_heads=6, num_hidden_layers=3)
    assert config.head_dim == 4
    assert config.num_key_value_heads == 6
    assert config.target_hidden_size == 24
    assert config.layer_types == ["full_attention"] * 3


def test_a_config_survives_its_json(tmp_path):
    config = DSparkConfig(
        **RIGHT, sliding_window=8, layer_types=["full_attention", "sliding_attention"], eos_token_id=[3]
    )
    config.save_pretrained(tmp_path)
    for again in (DSparkConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(again) is DSparkConfig
        assert again.to_diff_dict() == config.to_diff_dict()


def test_generate_finds_what_it_asks_an_assistants_config():
    config = DSparkConfig(**RIGHT, bos_token_id=1, eos_token_id=2, pad_token_id=3).get_text_config()
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id) == (32, 1, 2, 3)


# DeepSpec


def raw_config(name: str) -> dict:
    return json.loads((FIXTURES / name / "drafter" / "config.json").read_text())


def read(raw: dict, *names: str) -> DSparkConfig:
    return DSparkConfig(**find_reader(raw)(raw, set(names)).fields)


@pytest.mark.parametrize("name", DEEPSPEC)
def test_deepspecs_fields_arrive(name):
    raw, config = raw_config(name), load_drafter(name).config
    for field in ("vocab_size", "hidden_size", "block_size", "mask_token_id", "target_layer_ids", "num_target_layers"):
        assert getattr(config, field) == raw[field]
    assert config.eos_token_id == raw["eos_token_id"]
    assert config.markov_rank == raw["markov_rank"]
    assert config.enable_confidence_head == raw["enable_confidence_head"]
    assert config.owns_embedding and config.owns_lm_head


def test_what_makes_a_gemma4_drafter():
    config = load_drafter("deepspec-gemma4-keqv").config
    assert (config.head_dim, config.num_key_value_heads) == (32, 1)
    assert config.attention_scaling == 1.0 and config.embedding_scale == math.sqrt(64)
    assert config.final_logit_softcapping == 30.0
    assert config.rope_parameters["rope_type"] == "proportional"
    assert config.sandwich_norms and config.value_norm and config.layer_scalar and config.attention_k_eq_v
    assert load_drafter("deepspec-gemma4").config.num_key_value_heads == 2


def test_owned_tensors_are_told_by_the_weight_files():
    raw = raw_config("deepspec-vanilla")
    assert not read(raw).owns_embedding
    assert read(raw, "embed_tokens.weight").owns_embedding
    assert read(raw, "lm_head.weight").owns_lm_head


@pytest.mark.parametrize(
    ("old", "expected"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
    ],
)
def test_rope_is_read_from_its_old_place(old, expected):
    raw = raw_config("deepspec-vanilla")
    del raw["rope_parameters"]
    assert read(raw | old).rope_parameters == expected


def test_no_rope_base_is_an_error():
    raw = raw_config("deepspec-vanilla")
    del raw["rope_parameters"]
    with pytest.raises(ValueError, match="neither `rope_parameters` nor `rope_theta`"):
        read(raw)


@pytest.mark.parametrize(
    "field", ["target_layer_ids", "block_size", "mask_token_id", "num_target_layers", "markov_rank"]
)
def test_what_cannot_be_guessed_must_be_there(field):
    raw = raw_config("deepspec-vanilla")
    del raw[field]
    with pytest.raises(ValueError, match=f"lacks {field}; it cannot be guessed"):
        read(raw)


def test_a_gemma4_config_that_transformers_has_written_again():
    raw = raw_config("deepspec-gemma4")
    del raw["global_head_dim"], raw["num_global_key_value_heads"]
    with pytest.raises(ValueError, match="lacks global_head_dim, num_global_key_value_heads"):
        read(raw)


def test_heads_deepspec_does_not_mention_are_absent():
    raw = raw_config("deepspec-nomarkov")
    del raw["enable_confidence_head"], raw["confidence_head_with_markov"]
    config = read(raw)
    assert not config.enable_confidence_head and config.markov_rank == 0


def test_a_deepspec_family_that_cannot_be_run_is_refused():
    raw = raw_config("deepspec-vanilla") | {"architectures": ["KimiK3DSparkModel"]}
    with pytest.raises(ValueError, match="'KimiK3DSparkModel'.*readable are Qwen3DSparkModel and Gemma4DSparkModel"):
        read(raw)


def test_a_target_is_not_a_drafter():
    with pytest.raises(ValueError, match="model_type 'qwen3', architectures: Qwen3ForCausalLM"):
        DSparkDraftModel.from_pretrained(FIXTURES / "tiny-target")


def test_all_fields_are_documented():
    documented = DSparkConfig.__doc__
    # Fields every transformers config has, which mean here what they mean there.
    usual = set(
        "intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps "
        "max_position_embeddings initializer_range tie_word_embeddings pad_token_id bos_token_id eos_token_id".split()
    )
    missing = {name for name in DSparkConfig.__annotations__ if name not in documented} - usual
    assert not missing, missing


def test_no_format_reader_touches_its_argument():
    for name in DEEPSPEC:
        raw = raw_config(name)
        del (raw["rope_parameters"].get("full_attention") or raw["rope_parameters"])["rope_type"]
        before = copy.deepcopy(raw)
        read(raw)
        assert raw == before
