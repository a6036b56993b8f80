"""
Folders that nobody meant well with: each is refused, with an error that says what is wrong, before anything of its
size is allocated and before any of its code runs.
"""

import json
import pickle
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES, load_drafter
from repackaging import as_specforge, read, write
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel

from dspark_hf import DSparkConfig, DSparkDraftModel


NAMES = ("deepspec-vanilla", "dflash-nested-sliding", "speculators-reduced-vocab")


def refused(folder: Path, *said: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error) as caught:
        DSparkDraftModel.from_pretrained(folder)
    assert all(part in str(caught.value) for part in said), str(caught.value)


@pytest.fixture
def ours(tmp_path) -> Path:
    """A folder of this library's own, with a reduced vocabulary."""
    load_drafter("speculators-reduced-vocab").save_pretrained(tmp_path / "ours")
    return tmp_path / "ours"


@pytest.fixture(autouse=True)
def little_memory():
    """An allocation of any size that the folders name fails instead of bringing the machine down."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    held = int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# config.json


@pytest.mark.parametrize("content", [[], [1, 2], "dspark", 5, None, True])
def test_a_config_that_is_no_object(content, tmp_path):
    _, weights = read("dflash-top-level")
    refused(write(tmp_path / "drafter", content, weights), "where an object of settings belongs")


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "\xff", '{"a": 1' + "0" * 5000 + "}"])
def test_a_config_that_is_no_json(content, tmp_path):
    folder = write(tmp_path / "drafter", {}, read("dflash-top-level")[1])
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    refused(folder, "config.json of the drafter", "could not be read", error=OSError)


def put(raw: dict[str, Any], place: str, value: Any) -> None:
    *path, name = place.split(".")
    for step in path:
        raw = raw[step]
    raw[name] = value


WRONG_KINDS = [
    ("deepspec-vanilla", "architectures", "Qwen3DSparkModel"),
    ("deepspec-vanilla", "architectures", [5]),
    ("deepspec-vanilla", "hidden_size", "64"),
    ("deepspec-vanilla", "hidden_size", 64.0),
    ("deepspec-vanilla", "hidden_size", [64]),
    ("deepspec-vanilla", "num_attention_heads", 0),
    ("deepspec-vanilla", "head_dim", -16),
    ("deepspec-vanilla", "layer_types", "full_attention"),
    ("deepspec-vanilla", "layer_types", {"0": "full_attention"}),
    ("deepspec-vanilla", "layer_types", [["full_attention"]] * 2),
    ("deepspec-vanilla", "target_layer_ids", {"1": 1}),
    ("deepspec-vanilla", "target_layer_ids", ["1", "2", "4"]),
    ("deepspec-vanilla", "mask_token_id", "95"),
    ("deepspec-vanilla", "markov_head_type", ["vanilla"]),
    ("deepspec-vanilla", "enable_confidence_head", "yes"),
    ("deepspec-vanilla", "attention_bias", "false"),
    ("deepspec-vanilla", "hidden_act", ["silu"]),
    ("deepspec-vanilla", "rms_norm_eps", float("nan")),
    ("deepspec-vanilla", "rms_norm_eps", float("inf")),
    ("deepspec-vanilla", "rms_norm_eps", "1e-6"),
    ("deepspec-vanilla", "dtype", "load"),
    ("deepspec-vanilla", "dtype", ["float32"]),
    ("deepspec-vanilla", "confidence_temperatures", {"a": 1}),
    ("deepspec-vanilla", "rope_parameters", [1]),
    ("deepspec-vanilla", "rope_parameters.rope_type", ["default"]),
    ("deepspec-vanilla", "rope_parameters.rope_theta", "1e4"),
    ("deepspec-vanilla", "rope_parameters.rope_theta", float("nan")),
    ("deepspec-vanilla", "rope_parameters.rope_theta", {"a": 1}),
    ("deepspec-vanilla", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
    ("deepspec-vanilla", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 0}),
    ("deepspec-gemma4", "rope_parameters", {"full_attention": "default"}),
    ("deepspec-gemma4", "hidden_size", "64"),
    ("dflash-nested-sliding", "dflash_config", ["target_layer_ids"]),
    ("dflash-nested-sliding", "dflash_config.block_size", "6"),
    ("dflash-nested-sliding", "dflash_config.block_size", True),
    ("dflash-nested-sliding", "dflash_config.block_size", 1),
    ("dflash-nested-sliding", "dflash_config.output_multiplier", "1"),
    ("dflash-nested-sliding", "dflash_config.input_embedding_scale", float("nan")),
    ("dflash-nested-sliding", "is_causal", "no"),
    ("dflash-nested-sliding", "sliding_window", "12"),
    ("speculators-reduced-vocab", "transformer_layer_config", "qwen3"),
    ("speculators-reduced-vocab", "aux_hidden_state_layer_ids", "235"),
    ("speculators-reduced-vocab", "aux_hidden_state_layer_ids", [2.0, 3]),
    ("speculators-reduced-vocab", "draft_vocab_size", "70"),
    ("speculators-reduced-vocab", "draft_vocab_size", 97),
    ("speculators-reduced-vocab", "draft_vocab_size", 0),
    ("speculators-reduced-vocab", "markov_rank", "16"),
    ("speculators-reduced-vocab", "sample_from_anchor", 1),
    ("speculators-reduced-vocab", "speculators_config", [1]),
    ("speculators-reduced-vocab", "sliding_window_non_causal", "true"),
    ("speculators-reduced-vocab", "speculators_model_type", ["dspark"]),
]


@pytest.mark.parametrize(("name", "place", "value"), WRONG_KINDS, ids=str)
def test_a_value_of_the_wrong_kind(name, place, value, tmp_path):
    raw, weights = read(name)
    put(raw, place, value)
    # Whatever it is called in our config: what is wrong is shown.
    refused(write(tmp_path / "drafter", raw, weights))


SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"


@pytest.mark.parametrize("value", [10**9, 10**12, 2**62, 2**63 - 1, 2**64, 10**400])
@pytest.mark.parametrize("field", SIZES.split())
@pytest.mark.parametrize("name", NAMES)
def test_a_size_that_is_meant_to_exhaust_the_memory(name, field, value, tmp_path):
    raw, weights = read(name)
    (raw["transformer_layer_config"] if "transformer_layer_config" in raw else raw)[field] = value
    raw.pop("layer_types", None)
    refused(write(tmp_path / "drafter", raw, weights))


@pytest.mark.parametrize("value", [10**6, 10**12])
@pytest.mark.parametrize("field", ["block_size", "markov_rank", "draft_vocab_size"])
def test_other_sizes(field, value, tmp_path):
    raw, weights = read("speculators-reduced-vocab")
    refused(write(tmp_path / "drafter", raw | {field: value}, weights))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**9, "layer_types": None},
        {"vocab_size": 10**12},
        {"hidden_size": "64"},
        {"layer_types": 7},
        {"draft_vocab_size": 10**9},
        {"num_attention_heads": 0, "head_dim": None},
        {"block_size": 10**9},
    ],
    ids=str,
)
def test_our_own_format_is_trusted_no_more(changes, ours):
    raw = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(raw | changes))
    refused(ours)
    with pytest.raises(ValueError):
        AutoModel.from_pretrained(ours)


def test_many_taps_and_a_target_without_end(tmp_path):
    raw, weights = read("deepspec-vanilla")
    raw |= {"num_target_layers": 10**7, "target_layer_ids": list(range(100_000))}
    refused(write(tmp_path / "drafter", raw, weights), "at most 1024 can be tapped")


# Weights


def test_pickles_are_never_opened(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "canary",)

    raw, _ = read("dflash-top-level")
    folder = write(tmp_path / "drafter", raw, {})
    (folder / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "model.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": {"fc.weight": "pytorch_model.bin"}})
    )
    refused(folder, "has neither model.safetensors nor", error=OSError)
    # Nor under a safetensors name, nor beside good weights.
    shutil.copy(folder / "pytorch_model.bin", folder / "model.safetensors")
    refused(folder, "is not a whole safetensors file")
    shutil.copy(FIXTURES / "dflash-top-level" / "drafter" / "model.safetensors", folder)
    DSparkDraftModel.from_pretrained(folder)
    assert not (tmp_path / "canary").exists()


def header(folder: Path, change) -> None:
    """Rewrite the header of a folder's weights."""
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    content = json.loads(data[8 : 8 + length])
    change(content)
    raw = json.dumps(content).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


@pytest.mark.parametrize("shape", [[10**12, 64], [2**62, 2**62], [64, 64], [-1], [], [4096]])
def test_shapes_that_lie(shape, tmp_path):
    raw, weights = read("dflash-top-level")
    folder = write(tmp_path / "drafter", raw, weights)
    header(folder, lambda content: content["norm.weight"].update(shape=shape))
    refused(folder)


def test_a_header_without_end(tmp_path):
    raw, weights = read("dflash-top-level")
    folder = write(tmp_path / "drafter", raw, weights)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + data[8:])
    refused(folder, "is not a whole safetensors file")
    (folder / "model.safetensors").write_bytes(data[:1000])
    refused(folder, "is not a whole safetensors file")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_not_finite(name, value, tmp_path):
    raw, weights = read(name)
    weights["fc.weight"][0, 0] = value
    refused(write(tmp_path / "drafter", raw, weights), "not finite in fc.weight")


@pytest.mark.parametrize(
    "weight_map",
    [
        {"fc.weight": "../elsewhere.safetensors"},
        {"fc.weight": "/etc/hosts"},
        {"fc.weight": "sub/model.safetensors"},
        {"fc.weight": ".."},
        {"fc.weight": ""},
        {"fc.weight": "pytorch_model.bin"},
        {"fc.weight": 5},
        {"fc.weight": ["model.safetensors"]},
        {},
        [],
        "model.safetensors",
        None,
    ],
    ids=str,
)
def test_an_index_that_points_elsewhere(weight_map, tmp_path):
    raw, weights = read("dflash-top-level")
    folder = write(tmp_path / "drafter", raw, weights)
    shutil.move(folder / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "model.safetensors.index.json")


@pytest.mark.parametrize("content", ["[]", "{", "[" * 100_000])
def test_an_index_that_is_none(content, tmp_path):
    raw, weights = read("dflash-top-level")
    folder = write(tmp_path / "drafter", raw, weights)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    refused(folder, "model.safetensors.index.json")


# Code


@pytest.mark.parametrize("name", ["speculators-vanilla", "SpecForge", "ours"])
def test_code_in_the_folder_does_not_run(name, tmp_path, ours):
    canary = tmp_path / "canary"
    if name == "ours":
        folder = ours
    elif name == "SpecForge":
        folder = write(tmp_path / "drafter", *as_specforge(*read("deepspec-vanilla")))
    else:
        folder = write(tmp_path / "drafter", *read(name))
    for file in ("config.py", "dspark.py", "modeling_dspark.py", "configuration_dspark.py"):
        (folder / file).write_text(f"open({str(canary)!r}, 'w').close()\n")
    auto_map = {"": "config.DSparkSpeculatorConfig", "AutoConfig": "config.C", "AutoModel": "dspark.DSparkDraftModel"}
    raw = json.loads((folder / "config.json").read_text()) | {"auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(raw))
    DSparkDraftModel.from_pretrained(folder)
    for auto in (AutoConfig, AutoModel):
        # Ours is found where the library is installed; the others are no names that transformers knows.
        if name == "ours":
            auto.from_pretrained(folder, trust_remote_code=False)
    assert not canary.exists()


# Reduced vocabularies


def draft_ids(change) -> torch.Tensor:
    _, weights = read("speculators-reduced-vocab")
    ids = weights["d2t"] + torch.arange(70)
    change(ids)
    return ids


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (draft_ids(lambda ids: ids.__setitem__(-1, 96)), "names token 96; the target's are 0 to 95"),
        (draft_ids(lambda ids: ids.__setitem__(0, -1)), "names token -1"),
        (draft_ids(lambda ids: ids.__setitem__(-1, 2**63 - 1)), "the target's are 0 to 95"),
        (draft_ids(lambda ids: ids.__setitem__(5, int(ids[4]))), "the ids must be increasing, each once"),
        (draft_ids(lambda ids: ids.copy_(ids.flip(0))), "the ids must be increasing"),
        (draft_ids(lambda ids: None).float(), "torch.float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("format", ["speculators", "ours"])
def test_draft_ids_that_cannot_be(format, ids, said, tmp_path, ours):
    if format == "ours":
        weights = {name: value for name, value in load_drafter("speculators-reduced-vocab").state_dict().items()}
        save_file(weights | {"d2t": ids}, ours / "model.safetensors", metadata={"format": "pt"})
        refused(ours, said, "`d2t`")
        return
    raw, weights = read("speculators-reduced-vocab")
    weights["d2t"] = ids - torch.arange(70)
    weights.pop("t2d")
    refused(write(tmp_path / "drafter", raw, weights), said, "`d2t`")


def test_masks_that_disagree(tmp_path):
    raw, weights = read("speculators-reduced-vocab")
    weights["t2d"] = weights["t2d"].clone()
    weights["t2d"][int(weights["t2d"].nonzero()[3])] = False
    refused(write(tmp_path / "drafter", raw, weights), "`t2d`", "marks other tokens than `d2t` names")
    weights["t2d"] = torch.zeros(95, dtype=torch.bool)
    refused(write(tmp_path / "short", raw, weights), "t2d is [95], the config says [96]")


def test_a_reduced_vocabulary_without_its_tokens(tmp_path):
    raw, weights = read("speculators-reduced-vocab")
    del weights["d2t"]
    refused(write(tmp_path / "drafter", raw, weights), "missing d2t")
    raw, weights = read("speculators-reduced-vocab")
    weights["d2t"] = weights["d2t"][:-1]
    refused(write(tmp_path / "short", raw, weights), "d2t is [69], the config says [70]")


def test_a_shape_that_only_the_checkpoint_believes_in(tmp_path):
    raw, weights = read("speculators-reduced-vocab")
    weights["markov_head.markov_w2.weight"] = torch.zeros(96, 16)
    refused(
        write(tmp_path / "drafter", raw, weights), "markov_head.markov_w2.weight is [96, 16], the config says [70, 16]"
    )


def test_kinds_are_checked_by_the_constructor_too():
    with pytest.raises(
        ValueError, match="`target_layer_ids` is 3; it must be a list of which each is an integer or null"
    ):
        DSparkConfig(target_layer_ids=3)
    with pytest.raises(ValueError, match="`enable_confidence_head` is 1; it must be true or false"):
        DSparkConfig(enable_confidence_head=1)
    with pytest.raises(ValueError, match="`dtype` is 'load'"):
        DSparkConfig(dtype="load")
