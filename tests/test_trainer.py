"""The Trainer: a drafter learns, resumes, saves whole files, and leaves its target alone."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import random_drafter, random_target
from torch.utils.data import Dataset

import dspark_hf
from dspark_hf import DSparkDraftModel, trainer
from dspark_hf import teacher as teacher_module
from dspark_hf.teacher import FeatureCache, Teacher
from dspark_hf.trainer import (
    BlockCollator,
    DSparkTrainer,
    freeze,
    is_whole,
    last_whole_checkpoint,
    weights_fingerprint,
)
from dspark_hf.training_arguments import DSparkTrainingArguments


VOCAB = 13


class Samples(Dataset):
    """Texts that the target wrote itself, greedily, behind random prompts."""

    def __init__(self, target, count: int = 12, length: int = 20, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for index in range(count):
            prompt = torch.randint(VOCAB, (1, 3 + index % 3), generator=generator)
            text = target.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_length=length, do_sample=False, pad_token_id=0
            )[0]
            mask = [0] * prompt.shape[1] + [1] * (len(text) - prompt.shape[1])
            self.rows.append({"input_ids": text.tolist(), "loss_mask": mask})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return self.rows[index]


@pytest.fixture(scope="module")
def target():
    return random_target(vocab_size=VOCAB, dtype=torch.float32)


@pytest.fixture(scope="module")
def samples(target):
    with torch.no_grad():
        return Samples(target)


def new_drafter(**changes):
    drafter = random_drafter("vanilla", vocab_size=VOCAB, block_size=3, dtype=torch.float32, **changes)
    for name, weight in drafter.named_parameters():
        weight.data.fill_(1) if "norm" in name else weight.data.mul_(0.3)
    return drafter


def arguments(folder: Path, **changes) -> DSparkTrainingArguments:
    fields = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "num_anchors": 6,
        "logging_steps": 2,
        "max_steps": 6,
        "save_strategy": "no",
        "seed": 1,
    }
    return DSparkTrainingArguments(**fields | changes)


def test_a_drafter_learns_what_its_target_says(target, samples, tmp_path):
    """A short trajectory: expected acceptance on the training's own texts rises well above what it began with."""
    before = {name: value.clone() for name, value in target.state_dict().items()}
    run = DSparkTrainer(new_drafter(), arguments(tmp_path, max_steps=60), target, samples, samples)
    first = run.evaluate()
    run.train()
    last = run.evaluate()
    assert last["eval_loss"] < 0.8 * first["eval_loss"]
    assert last["eval_expected_acceptance_length"] > first["eval_expected_acceptance_length"] + 0.3
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    names = {"cross_entropy", "total_variation", "confidence_loss", "expected_acceptance_length", "accept_prob_1"}
    assert all(names | {"blocks"} <= entry.keys() for entry in logged)
    assert [entry["blocks"] for entry in logged] == sorted(entry["blocks"] for entry in logged)
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name])


def test_what_is_logged_is_the_loss_that_is_trained_on(target, samples, tmp_path):
    run = DSparkTrainer(new_drafter(), arguments(tmp_path, max_steps=2, logging_steps=1), target, samples)
    run.train()
    for entry in run.state.log_history[:2]:
        parts = 0.1 * entry["cross_entropy"] + 0.9 * entry["total_variation"] + entry["confidence_loss"]
        assert entry["loss"] == pytest.approx(parts, rel=1e-4)


def test_accumulated_batches_give_the_gradient_of_one(target, samples, tmp_path):
    weights = []
    for batch, steps in ((8, 1), (4, 2)):
        run = DSparkTrainer(
            new_drafter(),
            arguments(
                tmp_path / str(steps),
                max_steps=1,
                per_device_train_batch_size=batch,
                gradient_accumulation_steps=steps,
                optim="sgd",
                learning_rate=0.1,
                train_sampling_strategy="sequential",
                max_grad_norm=0.0,
                num_anchors=100,
            ),
            target,
            equal_samples(target),
        )
        run.train()
        weights.append(torch.cat([value.flatten() for value in run.drafter.parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def equal_samples(target) -> Samples:
    """Texts of which every anchor is drawn, with equally many slots: their mean is that of their batches' means."""
    found = Samples(target, count=16)
    for row in found.rows:
        row["loss_mask"] = [0] * 5 + [1] * (len(row["loss_mask"]) - 5)
    return found


def unequal_samples(target) -> Samples:
    """Half of the texts have next to nothing to learn from, the first four nothing at all."""
    found = Samples(target, count=16)
    for number, row in enumerate(found.rows[:8]):
        row["loss_mask"] = [0] * len(row["loss_mask"]) if number < 4 else [0] * 5 + [1] * 2 + row["loss_mask"][7:8]
        row["input_ids"] = row["input_ids"][: len(row["loss_mask"])]
    return found


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(target, samples, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 4, "max_steps": -1}
    whole = DSparkTrainer(new_drafter(), arguments(tmp_path / "whole", **options), target, samples)
    whole.train()
    broken = DSparkTrainer(new_drafter(), arguments(tmp_path / "broken", **options), target, samples)
    broken.train()
    for later in ("checkpoint-9", "checkpoint-12"):
        assert (tmp_path / "broken" / later).is_dir()
        (tmp_path / "broken" / later / "trainer_state.json").unlink()
    assert last_whole_checkpoint(tmp_path / "broken").endswith("checkpoint-6")
    resumed = DSparkTrainer(new_drafter(), arguments(tmp_path / "broken", **options), target, samples)
    resumed.train(resume_from_checkpoint=True)
    for mine, theirs in zip(resumed.drafter.parameters(), whole.drafter.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert resumed.seen_blocks == whole.seen_blocks and resumed.seen_tokens == whole.seen_tokens


def test_a_checkpoint_that_is_not_whole_is_refused_by_name(target, samples, tmp_path):
    (tmp_path / "checkpoint-3").mkdir()
    run = DSparkTrainer(new_drafter(), arguments(tmp_path), target, samples)
    assert not is_whole(tmp_path / "checkpoint-3") and last_whole_checkpoint(tmp_path) is None
    with pytest.raises(ValueError, match=r"`resume_from_checkpoint` .*checkpoint-3.*not a checkpoint"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_saved_drafter_loads_and_says_how_it_was_made(target, samples, tmp_path):
    provenance = {"target": {"id": "tiny", "revision": None, "dtype": "float32"}, "data": {"samples": 12}}
    run = DSparkTrainer(new_drafter(), arguments(tmp_path), target, samples, samples, provenance=provenance)
    run.train()
    run.evaluate()
    run.save_model()
    loaded = DSparkDraftModel.from_pretrained(tmp_path)
    for mine, theirs in zip(loaded.parameters(), run.drafter.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not any("embed_tokens" in name or "lm_head" in name for name in load_file(tmp_path / "model.safetensors"))
    found = json.loads((tmp_path / "training.json").read_text())
    assert found["target"] == provenance["target"] and found["data"] == {"samples": 12}
    assert found["steps"] == 6 and found["blocks"] == run.seen_blocks > 0 and found["supervised_tokens"] > 0
    assert found["evaluations"][0]["blocks"] == run.seen_blocks and found["arguments"]["num_anchors"] == 6
    assert not (tmp_path / ".saving").exists()


def test_a_failed_save_leaves_the_old_files(target, samples, tmp_path, monkeypatch):
    run = DSparkTrainer(new_drafter(), arguments(tmp_path), target, samples)
    run.save_model()
    old = (tmp_path / "model.safetensors").read_bytes()
    run.drafter.fc.weight.data.add_(1)

    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(trainer, "write_json", full)
    with pytest.raises(OSError, match="no space"):
        run.save_model()
    assert (tmp_path / "model.safetensors").read_bytes() == old
    assert DSparkDraftModel.from_pretrained(tmp_path) is not None
    monkeypatch.undo()
    run.save_model()
    assert (tmp_path / "model.safetensors").read_bytes() != old


def test_the_best_model_by_real_decoding_is_kept(target, samples, tmp_path):
    lengths = iter([1.5, 2.5, 1.0])
    run = DSparkTrainer(
        new_drafter(),
        arguments(
            tmp_path,
            max_steps=6,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="mean_acceptance_length_greedy",
            greater_is_better=True,
        ),
        target,
        samples,
        samples,
        decode=lambda drafter: {"mean_acceptance_length_greedy": next(lengths)},
    )
    run.train()
    assert Path(run.state.best_model_checkpoint).name == "checkpoint-4"
    best = DSparkDraftModel.from_pretrained(tmp_path / "checkpoint-4")
    for mine, theirs in zip(run.drafter.parameters(), best.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert any(entry.get("eval_mean_acceptance_length_greedy") == 2.5 for entry in run.state.log_history)


def test_frozen_parts_stay(target, samples, tmp_path):
    drafter = new_drafter()
    backbone = [value.clone() for value in drafter.layers.parameters()]
    head = drafter.markov_head.markov_w1.weight.clone()
    run = DSparkTrainer(drafter, arguments(tmp_path, freeze=["backbone"]), target, samples)
    run.train()
    assert all(torch.equal(*pair) for pair in zip(backbone, drafter.layers.parameters(), strict=True))
    assert not torch.equal(head, drafter.markov_head.markov_w1.weight)
    with pytest.raises(ValueError, match=r"`freeze` .*nothing of this drafter"):
        freeze(new_drafter(), ["backbone", "markov_head", "confidence_head"])


def test_cached_features_are_those_of_the_target(target, samples, tmp_path):
    teacher = Teacher(target, [-1, 0])
    cache = FeatureCache(tmp_path, teacher, "tiny", max_bytes=10**6)
    batch = BlockCollator(50)([samples[0], samples[1], samples[2]])
    batch["attention_mask"][1, 15:] = 0
    wanted = teacher.features(batch["input_ids"], batch["attention_mask"])
    for _ in range(2):
        found = cache.features(batch["input_ids"], batch["attention_mask"])
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(found.taps[real], wanted.taps[real], rtol=0, atol=1e-6)
        torch.testing.assert_close(found.last[real], wanted.last[real], rtol=0, atol=1e-6)
        assert len(list(cache.folder.glob("*.safetensors"))) == 3
    full = FeatureCache(tmp_path / "small", teacher, "tiny", max_bytes=10)
    full.features(batch["input_ids"], batch["attention_mask"])
    assert not list(full.folder.iterdir())
    assert FeatureCache(tmp_path, teacher, "another", max_bytes=10**6).folder != cache.folder


def test_a_damaged_file_of_the_cache_is_made_anew(target, samples, tmp_path, caplog):
    teacher = Teacher(target, [-1, 0])
    cache = FeatureCache(tmp_path, teacher, "tiny", max_bytes=10**6)
    batch = BlockCollator(50)([samples[0], samples[1]])
    wanted = cache.features(batch["input_ids"], batch["attention_mask"])
    files = sorted(cache.folder.glob("*.safetensors"))
    files[0].write_bytes(b"damaged")
    files[1].unlink()
    for _ in range(2):
        found = cache.features(batch["input_ids"], batch["attention_mask"])
        torch.testing.assert_close(found.last, wanted.last)
    assert caplog.text.count("is damaged") == 1 and sorted(cache.folder.glob("*.safetensors")) == files


def test_a_full_disk_ends_the_cache_and_not_the_training(target, samples, tmp_path, monkeypatch, caplog):
    cache = FeatureCache(tmp_path, Teacher(target, [-1, 0]), "tiny", max_bytes=10**6)
    batch = BlockCollator(50)([samples[0], samples[1]])

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(teacher_module, "save_file", full)
    assert cache.features(batch["input_ids"], batch["attention_mask"]).last.shape[0] == 2
    assert caplog.text.count("no longer kept") == 1 and not list(cache.folder.iterdir())


def test_any_changed_weight_changes_the_fingerprint(target):
    before = weights_fingerprint(target)
    other = random_target(vocab_size=VOCAB, dtype=torch.float32)
    assert weights_fingerprint(other) == before
    for weight in other.parameters():
        weight.data.mul_(1.5)
        assert weights_fingerprint(other) != before
        weight.data.div_(1.5)


def test_training_from_cached_features_is_the_same(target, samples, tmp_path):
    weights = []
    for name, cache in (("plain", None), ("cached", str(tmp_path / "features"))):
        run = DSparkTrainer(
            new_drafter(), arguments(tmp_path / name, max_steps=8, feature_cache=cache), target, samples
        )
        run.train()
        weights.append(torch.cat([value.flatten() for value in run.drafter.parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


def test_the_teacher_caps_and_scales_as_its_target_does():
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
    )

    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }
    granite = {"logits_scaling": 3.0}
    for config, model, changes in (
        (Gemma2Config, Gemma2ForCausalLM, {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 4}),
        (CohereConfig, CohereForCausalLM, {"logit_scale": 0.3}),
        (GraniteConfig, GraniteForCausalLM, granite),
    ):
        target = model(config(**sizes | changes)).eval()
        for weight in target.parameters():
            weight.data.add_(0.3 * torch.randn_like(weight))
        teacher = Teacher(target, [0])
        input_ids = torch.randint(VOCAB, (2, 7))
        with torch.no_grad():
            wanted = target(input_ids).logits.softmax(-1)
        found = teacher.logits(teacher.features(input_ids).last).softmax(-1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_a_target_with_other_logits_is_refused(target, monkeypatch):
    other = random_target(vocab_size=VOCAB, dtype=torch.float32)
    plain = type(other).forward

    def forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(type(other), "forward", forward)
    with pytest.raises(ValueError, match="logits of LlamaForCausalLM are not its head's output"):
        Teacher(other, [0])


def test_samples_are_filled_up_on_the_right_and_cut():
    batch = BlockCollator(4)(
        [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 0, 1, 1, 1]}]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 0, 0], [1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["loss_mask"].tolist() == [[0, 1, 0, 0], [0, 0, 1, 1]]
    empty = BlockCollator(4)([{"input_ids": [], "loss_mask": []}])
    assert empty["input_ids"].tolist() == [[0]] and empty["loss_mask"].tolist() == [[0]]
    with pytest.raises(ValueError, match="2 `input_ids` and 1 entries"):
        BlockCollator(4)([{"input_ids": [5, 6], "loss_mask": [0]}])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_anchors": 0}, "`num_anchors` is 0"),
        ({"cross_entropy_weight": -1}, "`cross_entropy_weight` is -1"),
        ({"loss_decay": 0.0}, "`loss_decay` is 0"),
        ({"loss_decay": math.nan}, "`loss_decay` is nan"),
        ({"cross_entropy_weight": math.nan}, "`cross_entropy_weight` is nan"),
        ({"learning_rate": -1.0}, "`learning_rate` is -1"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size` is 0"),
        ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` is 0"),
        ({"freeze": ["head"]}, r"`freeze` names \['head'\]"),
        ({"remove_unused_columns": True}, "`remove_unused_columns` is True"),
        ({"feature_cache_gb": 0.0}, "`feature_cache_gb` is 0"),
    ],
)
def test_arguments_that_cannot_be_are_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        arguments(tmp_path, **changes)


def test_a_machine_without_an_accelerator_trains_on_its_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    given = DSparkTrainingArguments(output_dir=str(tmp_path), bf16=True, report_to="none")
    assert given.use_cpu and not given.dataloader_pin_memory and given.learning_rate == 6e-4


def test_a_drafter_for_another_target_is_refused(samples, tmp_path):
    other = random_target(vocab_size=VOCAB + 1, dtype=torch.float32)
    with pytest.raises(ValueError, match="vocab_size 13"):
        DSparkTrainer(new_drafter(), arguments(tmp_path), other, samples)


@pytest.mark.filterwarnings("default:.*is_gradient_checkpointing:FutureWarning")  # asked for by peft 0.21
def test_lora_trains_adapters_and_heads_and_merges(target, samples, tmp_path):
    peft = pytest.importorskip("peft")
    from dspark_hf.train_command import with_lora

    drafter = new_drafter()
    before = {name: value.clone() for name, value in drafter.named_parameters()}
    frozen = {name: value.clone() for name, value in target.state_dict().items()}
    model = with_lora(drafter, rank=2)
    run = DSparkTrainer(model, arguments(tmp_path, max_steps=8), target, samples, samples)
    first = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < first
    run.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(new_drafter(), str(tmp_path / "adapter"))
    merged, reloaded = model.merge_and_unload(), again.merge_and_unload()
    for (name, mine), theirs in zip(merged.named_parameters(), reloaded.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6, msg=name)
    changed = {name for name, value in merged.named_parameters() if not torch.equal(value, before[name])}
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "markov_head.markov_w1.weight"} <= changed
    assert "confidence_head.proj.weight" in changed and "layers.0.input_layernorm.weight" not in changed
    assert all(torch.equal(value, frozen[name]) for name, value in target.state_dict().items())
    merged.save_pretrained(tmp_path / "merged")
    DSparkDraftModel.from_pretrained(tmp_path / "merged")


TWO = """
import sys
import torch
sys.path.insert(0, {tests!r})
from test_trainer import arguments, new_drafter, unequal_samples
from tiny import random_target
from pathlib import Path
from dspark_hf.trainer import DSparkTrainer

target = random_target(vocab_size=13, dtype=torch.float32)
run = DSparkTrainer(
    new_drafter(),
    arguments(
        Path({folder!r}), max_steps=2, logging_steps=1, optim="sgd", learning_rate=0.1,
        train_sampling_strategy="sequential", max_grad_norm=0.0, per_device_train_batch_size={batch},
    ),
    target,
    unequal_samples(target),
)
run.train()
run.save_model()
print("processes:", run.args.world_size)
"""


@pytest.mark.slow
def test_two_processes_give_the_loss_of_one(tmp_path):
    """The same batches, split over two processes, lead to the same weights and losses."""
    found = []
    environment = os.environ | {"PYTHONPATH": str(Path(dspark_hf.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    environment["ACCELERATE_USE_CPU"] = "true"
    for processes in (1, 2):
        folder, script = tmp_path / str(processes), tmp_path / f"train_{processes}.py"
        script.write_text(TWO.format(tests=str(Path(__file__).parent), folder=str(folder), batch=8 // processes))
        # `accelerate launch --cpu --num_processes 2` starts one process where there is no MPI.
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), str(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"processes: {processes}" in done.stdout
        origin = json.loads((folder / "training.json").read_text())
        found.append((load_file(folder / "model.safetensors"), origin))
    (one, first), (two, second) = found
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-6)
    logs = [[entry for entry in origin["log"] if "loss" in entry] for origin in (first, second)]
    assert len(logs[0]) == len(logs[1]) == 2 and logs[0][0]["blocks"] > 0
    for mine, theirs in zip(*logs, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5) and not any(map(math.isnan, mine.values()))
    assert first["blocks"] == second["blocks"]
