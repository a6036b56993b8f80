"""Loading is strict, saving writes what was owned and nothing else, and the round trip changes no bit."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEEPSPEC, FIXTURES, load_drafter
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
)

from dspark_hf import DSparkConfig, DSparkDraftModel
from dspark_hf.modeling.draft_context import DraftContext


BORROWED = ("embed_tokens.weight", "lm_head.weight")
MODELING = Path(__file__).parents[1] / "modeling"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A DeepSpec checkpoint to spoil."""
    return Path(shutil.copytree(FIXTURES / "deepspec-vanilla" / "drafter", tmp_path / "drafter"))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **fields: Any) -> None:
    raw = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(raw))


def split(folder: Path) -> dict[str, str]:
    """Cut the weights into two shards and return the index's weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        shard = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@torch.no_grad()
def drafted(drafter: DSparkDraftModel, *lent: nn.Module) -> torch.Tensor:
    """Hidden states, tokens and confidences of two rounds, flattened into one tensor to compare."""
    config = drafter.config
    generator = torch.Generator().manual_seed(3)
    context, found = DraftContext(config, [0]), []
    for new in (5, 2):
        slots = torch.full((1, config.block_size), config.mask_token_id)
        slots[0, 0] = 40 + new
        taps = torch.randn(new, drafter.fc.in_features, generator=generator).to(drafter.dtype)
        hidden = drafter(drafter.embed(slots, *lent[:1]), taps, [new], context)
        draft = drafter.draft(hidden, slots[:, 0], *lent[1:])
        found += [hidden.flatten(), draft.tokens.flatten()]
        if draft.confidence_logits is not None:
            found.append(draft.confidence_logits.flatten())
    return torch.cat([part.double() for part in found])


# Strictness


def test_a_missing_tensor_is_named(folder):
    change_tensors(folder, lambda tensors: tensors.pop("markov_head.markov_w1.weight"))
    with pytest.raises(ValueError, match=r"do not fit its config: missing markov_head\.markov_w1\.weight\."):
        DSparkDraftModel.from_pretrained(folder)


def test_a_tensor_left_over_is_named(folder):
    change_tensors(folder, lambda tensors: tensors.update(extra=torch.zeros(3)))
    with pytest.raises(ValueError, match="do not fit its config: left over extra"):
        DSparkDraftModel.from_pretrained(folder)


def test_heads_the_config_denies_are_left_over(folder):
    # What AutoModel would do in silence: build less than the checkpoint holds.
    change_config(folder, enable_confidence_head=False, markov_rank=0)
    with pytest.raises(ValueError) as error:
        DSparkDraftModel.from_pretrained(folder)
    for name in ("confidence_head.proj.weight", "confidence_head.proj.bias", "markov_head.markov_w2.weight"):
        assert f"left over {name}" in str(error.value)


def test_a_wrong_shape_is_named(folder):
    change_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(63)}))
    with pytest.raises(ValueError, match=r"norm\.weight is \[63\], the config says \[64\]"):
        DSparkDraftModel.from_pretrained(folder)


def test_ignoring_mismatched_sizes_does_not_help(folder):
    change_tensors(folder, lambda tensors: tensors.update({"norm.weight": torch.ones(63)}))
    with pytest.raises(ValueError, match=r"norm\.weight is \[63\]"):
        DSparkDraftModel.from_pretrained(folder, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("name", DEEPSPEC)
@pytest.mark.parametrize("prefix", ["model.", "drafter."])
def test_a_prefix_does_not_hide_tensors(name, prefix, tmp_path):
    folder = Path(shutil.copytree(FIXTURES / name / "drafter", tmp_path / "drafter"))
    change_tensors(folder, lambda tensors: [tensors.update({prefix + key: tensors.pop(key)}) for key in list(tensors)])
    with pytest.raises(ValueError, match=f"missing fc.weight.*left over {prefix}"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(folder, value):
    change_tensors(folder, lambda tensors: tensors["layers.1.mlp.up_proj.weight"][3, 4].fill_(value))
    with pytest.raises(ValueError, match=r"not finite in layers\.1\.mlp\.up_proj\.weight"):
        DSparkDraftModel.from_pretrained(folder)


def test_every_tensor_of_a_checkpoint_is_used():
    for name in DEEPSPEC:
        stored = load_file(FIXTURES / name / "drafter" / "model.safetensors")
        loaded = load_drafter(name).state_dict()
        assert loaded.keys() == stored.keys()
        assert all(torch.equal(loaded[key], value) for key, value in stored.items())


# Files


def test_pickled_weights_are_not_read(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="has neither model.safetensors nor model.safetensors.index.json"):
        DSparkDraftModel.from_pretrained(folder)
    with pytest.raises(ValueError, match="`use_safetensors` is False"):
        DSparkDraftModel.from_pretrained(folder, use_safetensors=False)


def test_a_sharded_checkpoint_loads(folder):
    expected = drafted(DSparkDraftModel.from_pretrained(folder))
    split(folder)
    assert torch.equal(drafted(DSparkDraftModel.from_pretrained(folder)), expected)


def test_a_missing_shard_is_an_error(folder):
    split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(OSError, match="model-00002-of-00002.safetensors"):
        DSparkDraftModel.from_pretrained(folder)


@pytest.mark.parametrize("part", ["../elsewhere.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "weights.bin"])
def test_an_index_that_points_elsewhere_is_refused(folder, part):
    shutil.copy(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    weight_map = split(folder)
    write_index(folder, weight_map | {"fc.weight": part})
    with pytest.raises(ValueError, match=r"index.json of .* names .* only safetensors files beside it"):
        DSparkDraftModel.from_pretrained(folder)


def test_a_broken_file_is_an_error(folder):
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 361364\n"
    )
    with pytest.raises(ValueError, match="model.safetensors is not a whole safetensors file"):
        DSparkDraftModel.from_pretrained(folder)


def test_a_variant_is_read_by_its_name(folder):
    drafter = DSparkDraftModel.from_pretrained(folder)
    drafter.save_pretrained(folder, variant="fp32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="has neither"):
        DSparkDraftModel.from_pretrained(folder)
    assert torch.equal(drafted(DSparkDraftModel.from_pretrained(folder, variant="fp32")), drafted(drafter))


def test_a_subfolder_is_read(folder):
    assert torch.equal(
        drafted(DSparkDraftModel.from_pretrained(folder.parent, subfolder="drafter")),
        drafted(DSparkDraftModel.from_pretrained(folder)),
    )


@pytest.mark.parametrize("sharded", [False, True])
def test_a_hub_id_in_the_cache_loads_offline(folder, tmp_path, sharded):
    expected = drafted(DSparkDraftModel.from_pretrained(folder))
    if sharded:
        split(folder)
    repository, commit = tmp_path / "cache" / "models--somebody--drafter", "0123456789" * 4
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for revision in ("main", commit):
        drafter = DSparkDraftModel.from_pretrained(
            "somebody/drafter", cache_dir=tmp_path / "cache", local_files_only=True, revision=revision
        )
        assert torch.equal(drafted(drafter), expected)


def test_a_hub_id_that_is_not_here_is_named():
    with pytest.raises(OSError, match="'nobody/no-such-drafter'.*no folder on this machine, so taken for a Hub id"):
        DSparkDraftModel.from_pretrained("nobody/no-such-drafter", local_files_only=True)


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(OSError, match="config.json"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_a_broken_config_is_named(folder):
    (folder / "config.json").write_text('{"architectures": [')
    with pytest.raises(OSError, match="config.json of the drafter .* could not be read"):
        DSparkDraftModel.from_pretrained(folder)


# Arguments


def test_fields_given_override_the_folders(folder):
    drafter = DSparkDraftModel.from_pretrained(folder, block_size=3, sliding_window=9)
    assert (drafter.config.block_size, drafter.config.sliding_window) == (3, 9)
    with pytest.raises(ValueError, match="`block_size` is 0"):
        DSparkDraftModel.from_pretrained(folder, block_size=0)
    with pytest.raises(TypeError, match="block_sise"):
        DSparkDraftModel.from_pretrained(folder, block_sise=3)


def test_a_config_given_is_used_and_left_alone(folder):
    config = DSparkDraftModel.from_pretrained(folder).config
    before = config.to_dict()
    drafter = DSparkDraftModel.from_pretrained(folder, config=config, block_size=2)
    assert drafter.config.block_size == 2
    assert config.to_dict() == before
    with pytest.raises(ValueError, match="`config` is a Qwen3Config; pass a DSparkConfig"):
        DSparkDraftModel.from_pretrained(folder, config=Qwen3Config())


def test_loading_info_is_returned_when_asked_for(folder):
    drafter, info = DSparkDraftModel.from_pretrained(folder, output_loading_info=True)
    assert isinstance(drafter, DSparkDraftModel)
    assert not any(info.values())


def test_a_device_map_is_understood(folder):
    drafter = DSparkDraftModel.from_pretrained(folder, device_map="cpu")
    assert torch.equal(drafted(drafter), drafted(DSparkDraftModel.from_pretrained(folder)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_loading_in_half_precision_keeps_rotary_frequencies(folder, dtype):
    drafter, exact = DSparkDraftModel.from_pretrained(folder, dtype=dtype), DSparkDraftModel.from_pretrained(folder)
    assert {value.dtype for value in drafter.state_dict().values()} == {dtype}
    frequencies, _ = drafter.rotary.frequencies(torch.device("cpu"))
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, exact.rotary.frequencies(torch.device("cpu"))[0])
    assert torch.equal(drafted(drafter), drafted(exact.to(dtype)))


def test_a_drafter_is_loaded_in_its_own_dtype(folder):
    DSparkDraftModel.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    assert DSparkDraftModel.from_pretrained(folder).dtype == torch.bfloat16


# What is owned and what is borrowed


def test_a_borrower_saves_nothing_of_its_target(folder, tmp_path, tiny_target):
    embedding, head = tiny_target.get_input_embeddings(), tiny_target.get_output_embeddings()
    own = DSparkDraftModel.from_pretrained(folder)
    change_tensors(folder, lambda tensors: [tensors.pop(name) for name in BORROWED])
    drafter = DSparkDraftModel.from_pretrained(folder)
    assert drafter.embed_tokens is None and drafter.lm_head is None
    first = drafted(drafter, embedding, head)
    # DeepSpec copied them from this very target.
    assert torch.equal(first, drafted(own))
    drafter.to(torch.bfloat16).to(torch.float32)
    assert tiny_target.dtype == torch.float32

    DSparkDraftModel.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert not load_file(tmp_path / "saved" / "model.safetensors").keys() & set(BORROWED)
    again = DSparkDraftModel.from_pretrained(tmp_path / "saved")
    assert not again.config.owns_embedding and not again.config.owns_lm_head
    assert torch.equal(drafted(again, embedding, head), first)


@pytest.mark.parametrize("lacking", BORROWED)
def test_one_may_be_owned_and_the_other_borrowed(folder, tmp_path, lacking, tiny_target):
    change_tensors(folder, lambda tensors: tensors.pop(lacking))
    drafter = DSparkDraftModel.from_pretrained(folder)
    drafter.save_pretrained(tmp_path / "saved")
    assert set(BORROWED) - load_file(tmp_path / "saved" / "model.safetensors").keys() == {lacking}
    lent = tiny_target.get_input_embeddings(), tiny_target.get_output_embeddings()
    assert torch.equal(drafted(DSparkDraftModel.from_pretrained(tmp_path / "saved"), *lent), drafted(drafter, *lent))


# Saving


@pytest.mark.parametrize("name", DEEPSPEC)
def test_a_round_trip_changes_no_bit(name, tmp_path):
    drafter = load_drafter(name)
    drafter.save_pretrained(tmp_path)
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert again.config.to_diff_dict() == drafter.config.to_diff_dict()
    before, after = drafter.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(drafted(again), drafted(drafter))
    # A second trip writes the very same files.
    again.save_pretrained(tmp_path / "second")
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        assert (tmp_path / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_a_saved_drafter_can_be_sharded(tmp_path):
    drafter = load_drafter("deepspec-rnn")
    drafter.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(drafted(DSparkDraftModel.from_pretrained(tmp_path)), drafted(drafter))


def test_generation_defaults_are_saved_and_read(tmp_path):
    drafter = load_drafter("deepspec-vanilla")
    assert drafter.generation_config.to_diff_dict().keys() <= {"transformers_version"}
    drafter.generation_config.assistant_confidence_threshold = 0.25
    drafter.save_pretrained(tmp_path)
    assert DSparkDraftModel.from_pretrained(tmp_path).generation_config.assistant_confidence_threshold == 0.25
    given = GenerationConfig(assistant_confidence_threshold=0.5)
    assert DSparkDraftModel.from_pretrained(tmp_path, generation_config=given).generation_config is given
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(OSError, match="generation_config.json"):
        DSparkDraftModel.from_pretrained(tmp_path)


def test_only_the_main_process_saves(tmp_path):
    load_drafter("deepspec-vanilla").save_pretrained(tmp_path, is_main_process=False)
    assert os.listdir(tmp_path) == []


def test_saving_and_pushing_are_transformers_own(tmp_path):
    # What `save_pretrained(push_to_hub=True)` uploads is then all that it writes.
    for name in ("save_pretrained", "push_to_hub"):
        assert getattr(DSparkDraftModel, name) is getattr(PreTrainedModel, name)
    load_drafter("deepspec-vanilla").save_pretrained(tmp_path)
    code = {file.stem for file in MODELING.glob("*.py")} - {"__init__"}
    assert {file.name for file in tmp_path.iterdir()} == {f"{name}.py" for name in code} | {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }


# Auto classes, with this library installed


def test_auto_classes_find_the_installed_code(tmp_path):
    drafter = load_drafter("deepspec-gated")
    drafter.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is DSparkConfig
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is DSparkDraftModel
    assert torch.equal(drafted(again), drafted(drafter))
    half = AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16, block_size=2)
    assert half.dtype == torch.bfloat16 and half.config.block_size == 2
    assert type(AutoModel.from_config(drafter.config)) is DSparkDraftModel


def test_auto_model_for_causal_lm_refuses_a_drafter(tmp_path):
    load_drafter("deepspec-gated").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="DSparkConfig"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
