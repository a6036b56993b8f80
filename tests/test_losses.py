"""The training objective: DeepSpec's own numbers, a plain computation of the same, and what it holds in memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DEEPSPEC, load_drafter, load_golden
from tiny import HEADS, random_drafter, random_target
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

import dspark_hf
from dspark_hf.losses import LossWeights, block_losses
from dspark_hf.teacher import Teacher
from dspark_hf.training_blocks import PackedContext, TrainingBlocks, cut_blocks, draw_anchors


TRAINED = [name for name in DEEPSPEC if "losses" in load_golden(name)[0]]


def run(drafter, target, taps, last, blocks: TrainingBlocks, weights: LossWeights, **options):
    """The losses of blocks through the drafter's one pass."""
    config = drafter.config
    rows = len(blocks.anchors)
    noise = drafter.block_tokens(blocks.tokens[..., 0].flatten()).view(rows, -1)
    return drafter(
        drafter.embed(noise, target.get_input_embeddings()),
        context_hidden_states=taps.flatten(0, 1),
        context_lengths=[taps.shape[1]] * rows,
        context=PackedContext(config, blocks.anchors, taps.shape[1]),
        objective=lambda hidden: block_losses(
            drafter, hidden, blocks, Teacher(target, config.target_layer_ids), last, weights, **options
        ),
    )


@pytest.mark.parametrize("name", TRAINED)
def test_losses_are_those_of_deepspec(name, tiny_target):
    facts, golden = load_golden(name)
    drafter = load_drafter(name)
    blocks = cut_blocks(
        golden["train.input_ids"],
        golden["train.loss_mask"],
        golden["train.anchor_positions"],
        golden["train.block_keep_mask"].bool(),
        drafter.config.block_size,
    )
    found = run(
        drafter,
        tiny_target,
        golden["train.context"],
        golden["train.last_hidden_state"],
        blocks,
        LossWeights(decay=facts["loss_decay_gamma"]),
        chunk_slots=50,
    )
    wanted = facts["losses"]
    assert found.loss.item() == pytest.approx(wanted["total"], abs=1e-5)
    assert found.cross_entropy.item() == pytest.approx(wanted["ce"], abs=1e-5)
    assert found.total_variation.item() == pytest.approx(wanted["tv"], abs=1e-5)
    draft, target = (golden[f"train.{kind}"].softmax(-1) for kind in ("draft_logits", "aligned_target_logits"))
    accept = (1 - (draft - target).abs().sum(-1) / 2)[blocks.supervised]
    torch.testing.assert_close(found.accept_prob[~found.accept_prob.isnan()], accept, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_features_and_teacher_are_those_of_deepspec(name, tiny_target):
    _, golden = load_golden(name)
    teacher = Teacher(tiny_target, load_drafter(name).config.target_layer_ids)
    features = teacher.features(golden["train.input_ids"], torch.ones_like(golden["train.input_ids"]))
    torch.testing.assert_close(features.taps, golden["train.context"], rtol=0, atol=1e-4)
    torch.testing.assert_close(features.last, golden["train.last_hidden_state"], rtol=0, atol=1e-4)
    logits = tiny_target(golden["train.input_ids"]).logits
    torch.testing.assert_close(teacher.logits(features.last).softmax(-1), logits.softmax(-1), rtol=0, atol=1e-6)


def reference(drafter, target, taps, last, blocks: TrainingBlocks, weights: LossWeights) -> torch.Tensor:
    """Eq. 11 to 14 as they stand, over whole logits."""
    config, size = drafter.config, drafter.config.block_size
    rows, count = blocks.anchors.shape
    noise = drafter.block_tokens(blocks.tokens[..., 0].flatten()).view(rows, -1)
    hidden = drafter(
        drafter.embed(noise, target.get_input_embeddings()),
        context_hidden_states=taps.flatten(0, 1),
        context_lengths=[taps.shape[1]] * rows,
        context=PackedContext(config, blocks.anchors, taps.shape[1]),
    ).view(rows * count, size, -1)
    logits = drafter.base_logits(hidden, target.get_output_embeddings())
    previous, labels = blocks.previous.flatten(0, 1), blocks.labels.flatten(0, 1)
    if drafter.markov_head is not None:
        logits = logits + drafter.markov_head.markov_w2(drafter.markov_head.block_features(previous, hidden))
    if drafter.d2t is not None:  # no probability for tokens that cannot be drafted
        logits = logits.new_full((*logits.shape[:-1], 13), -1e30).index_copy(-1, drafter.d2t, logits)
    places = blocks.anchors[..., None] + torch.arange(size)
    places = places.clamp(max=last.shape[1] - 1)
    teacher = target.lm_head(last)[torch.arange(rows)[:, None, None], places].flatten(0, 1)
    draft_probs, target_probs = logits.softmax(-1), teacher.detach().softmax(-1)
    weight = weights.by_position(size) * blocks.supervised.flatten(0, 1)
    cross_entropy = -logits.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
    cross_entropy = torch.where(cross_entropy < 1e20, cross_entropy, 0)
    distance = (draft_probs - target_probs).abs().sum(-1)
    accept = (1 - distance / 2).detach()
    confidence = torch.sigmoid(drafter.confidence_logits(hidden, previous[:, 0], labels))
    entropy = -(accept * confidence.log() + (1 - accept) * (1 - confidence).log())
    alphas = (weights.cross_entropy, weights.total_variation, weights.confidence)
    each = sum(alpha * part for alpha, part in zip(alphas, (cross_entropy, distance, entropy), strict=True))
    return (each * weight).sum() / weight.sum()


def setup(head: str, **changes):
    target = random_target(vocab_size=13).requires_grad_(False)
    drafter = random_drafter(head, vocab_size=13, block_size=4, **changes)
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(13, (3, 12), generator=generator)
    loss_mask = torch.ones(3, 12)
    loss_mask[:, :3] = 0
    loss_mask[1, 8:] = 0
    features = Teacher(target, drafter.config.target_layer_ids).features(input_ids)
    anchors, kept = draw_anchors(input_ids, loss_mask, num_anchors=5, seed=0)
    blocks = cut_blocks(input_ids, loss_mask, anchors, kept, 4)
    assert not blocks.supervised.all() and blocks.supervised.any()
    return drafter, target, features.taps, features.last, blocks


@pytest.mark.parametrize("chunk_slots", [1, 7, 1000])
@pytest.mark.parametrize("head", HEADS)
def test_pieces_give_the_loss_and_gradients_of_the_whole(head, chunk_slots):
    drafter, *rest = setup(head)
    weights = LossWeights(0.3, 0.8, 0.5, decay=2.0)
    wanted = reference(drafter, *rest, weights)
    wanted.backward()
    gradients = {name: value.grad.clone() for name, value in drafter.named_parameters()}
    drafter.zero_grad()
    found = run(drafter, *rest, weights, chunk_slots=chunk_slots)
    (2 * found.loss).backward()
    assert found.loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    for name, value in drafter.named_parameters():
        torch.testing.assert_close(value.grad / 2, gradients[name], rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("head", HEADS)
def test_a_reduced_vocabulary_is_the_whole_one_without_the_other_tokens(head):
    drafter, *rest = setup(head, draft_vocab_size=6)
    drafter.set_draft_vocabulary(torch.tensor([0, 2, 3, 7, 8, 12]))
    wanted = reference(drafter, *rest, LossWeights())
    wanted.backward()
    gradients = {name: value.grad.clone() for name, value in drafter.named_parameters()}
    drafter.zero_grad()
    found = run(drafter, *rest, LossWeights(), chunk_slots=9)
    found.loss.backward()
    assert found.loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    for name, value in drafter.named_parameters():
        torch.testing.assert_close(value.grad, gradients[name], rtol=1e-4, atol=1e-7, msg=name)


def test_where_slot_0_is_no_draft_the_others_are_trained():
    drafter, *rest = setup("vanilla", sample_from_anchor=False)
    assert drafter.config.block_slots == 5
    wanted = reference(drafter, *rest, LossWeights())
    assert run(drafter, *rest, LossWeights()).loss.item() == pytest.approx(wanted.item(), abs=1e-6)


def test_a_head_of_its_own_and_a_softcap_get_gradients_too():
    changes = {"owns_embedding": True, "owns_lm_head": True, "final_logit_softcapping": 3.0}
    drafter, *rest = setup("vanilla", **changes)
    wanted = reference(drafter, *rest, LossWeights())
    wanted.backward()
    gradients = {name: value.grad.clone() for name, value in drafter.named_parameters() if value.grad is not None}
    assert gradients["lm_head.weight"].abs().sum() > 0
    drafter.zero_grad()
    run(drafter, *rest, LossWeights(), chunk_slots=5).loss.backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(dict(drafter.named_parameters())[name].grad, gradient, rtol=1e-4, atol=1e-7)


def test_without_gradients_the_loss_is_the_same():
    drafter, *rest = setup("gated")
    with_gradients = run(drafter, *rest, LossWeights())
    with torch.no_grad():
        without = run(drafter, *rest, LossWeights())
    assert not without.loss.requires_grad
    assert without.loss.item() == pytest.approx(with_gradients.loss.item(), abs=1e-9)


def test_nothing_supervised_is_a_loss_of_zero_that_can_be_differentiated():
    drafter, target, taps, last, blocks = setup("vanilla")
    blocks = TrainingBlocks(blocks.anchors, blocks.tokens, torch.zeros_like(blocks.supervised))
    found = run(drafter, target, taps, last, blocks, LossWeights())
    found.loss.backward()
    assert found.loss.item() == 0 and found.weight == 0
    assert all(value.grad is not None and not value.grad.any() for value in drafter.parameters())


def test_a_total_weight_divides_the_sums():
    drafter, *rest = setup("vanilla")
    own = run(drafter, *rest, LossWeights())
    shared = run(drafter, *rest, LossWeights(), total_weight=2 * own.weight)
    assert shared.loss.item() == pytest.approx(own.loss.item() / 2)


class _Widths(TorchDispatchMode):
    """The most rows of any tensor as wide as the vocabulary."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == self.width:
                self.rows = max(self.rows, tensor.numel() // self.width)
        return out


def test_no_more_than_a_chunk_is_ever_as_wide_as_the_vocabulary():
    drafter, *rest = setup("vanilla")
    with _Widths(13) as widths:
        run(drafter, *rest, LossWeights(), chunk_slots=6).loss.backward()
    weights = max(8, 3)  # the transposed weights of the heads are as wide, and always there
    assert 0 < widths.rows <= max(6, weights)
    with _Widths(13) as widths:
        reference(drafter, *rest, LossWeights())
    assert widths.rows > weights


def test_autocast_leaves_the_teacher_alone():
    _, target, taps, last, _ = setup("vanilla")
    teacher = Teacher(target.float(), [-1, 0])
    input_ids = torch.randint(13, (2, 7))
    wanted = teacher.features(input_ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = teacher.features(input_ids)
        logits = teacher.logits(found.last)
    assert torch.equal(found.last, wanted.last) and torch.equal(found.taps, wanted.taps)
    assert torch.equal(logits, teacher.logits(wanted.last)) and logits.dtype == torch.float32


def test_weights_fall_with_the_position():
    weights = LossWeights(decay=4.0).by_position(3)
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.7788008, 0.6065307]))


def check_own_code(folder: Path):
    """That what a saved drafter's config names is its own class, which FSDP puts one of its own in place of."""
    assert (folder / "modeling_dspark.py").exists() and not list(folder.glob("_fsdp*"))
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModel"] == "modeling_dspark.DSparkDraftModel"


SHARDED = """
import sys
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
from test_losses import LossWeights, run, setup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
drafter, *rest = setup("rnn", num_hidden_layers=2)
whole = run(drafter, *rest, LossWeights())
whole.loss.backward()
gradients = {{name: value.grad.clone() for name, value in drafter.named_parameters()}}
drafter.zero_grad()
mesh = init_device_mesh("cpu", (2,))
for layer in drafter.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(drafter, mesh=mesh)
sharded = run(drafter, *rest, LossWeights())
sharded.loss.backward()
assert drafter.markov_head.markov_w1.weight.to_local().shape[0] < 13
torch.testing.assert_close(sharded.loss, whole.loss)
for name, value in drafter.named_parameters():
    torch.testing.assert_close(value.grad.full_tensor(), gradients[name], rtol=1e-6, atol=1e-9)
print("sharded gradients agree")
state = {{name: value.full_tensor() for name, value in drafter.state_dict().items()}}
if dist.get_rank() == 0:
    drafter.save_pretrained({saved!r}, state_dict=state)
"""


@pytest.mark.slow
def test_a_sharded_drafter_has_the_gradients_of_a_whole_one(tmp_path):
    """FSDP on two processes: the heads are at work inside `forward`, where their weights are gathered."""
    script, saved = tmp_path / "sharded.py", tmp_path / "saved"
    script.write_text(SHARDED.format(tests=str(Path(__file__).parent), saved=str(saved)))
    environment = os.environ | {"PYTHONPATH": str(Path(dspark_hf.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("sharded gradients agree") == 2
    assert (saved / "modeling_dspark.py").exists()  # FSDP makes a class of its own
    assert (
        json.loads((saved / "config.json").read_text())["auto_map"]["AutoModel"] == "modeling_dspark.DSparkDraftModel"
    )


def test_the_class_that_sharding_makes_is_saved_as_its_base(tmp_path):
    module = "torch.distributed.fsdp._fully_shard._fsdp_init"
    drafter = random_drafter()
    drafter.__class__ = type("FSDPDSparkDraftModel", (FSDPModule, type(drafter)), {"__module__": module})
    drafter.save_pretrained(tmp_path)
    assert (tmp_path / "modeling_dspark.py").exists() and not (tmp_path / "_fsdp_init.py").exists()
    assert (
        json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoModel"]
        == "modeling_dspark.DSparkDraftModel"
    )
