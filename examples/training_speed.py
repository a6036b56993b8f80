"""Blocks a second and peak memory of a training step, against the same step written plainly.

    python examples/training_speed.py --threads 2

Plainly: logits of all slots and of the target's whole texts at once, the paper's formulas over them, and autograd
through everything. Both have the demo target, a new drafter for it that drafts from the whole vocabulary, the same
texts, anchors and dtypes, and each a process of its own, since its peak memory is that of the process.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from dspark_hf import DSparkDraftModel
from dspark_hf.demo_target import load_demo_target
from dspark_hf.initialisation import choose_mask_token, drafter_config, start_from_target
from dspark_hf.losses import LossWeights, block_losses
from dspark_hf.teacher import Teacher
from dspark_hf.training_blocks import PackedContext, TrainingBlocks, cut_blocks, draw_anchors


def plain_loss(drafter, hidden, blocks: TrainingBlocks, logits: torch.Tensor, target) -> torch.Tensor:
    """Eq. 11 to 14 over the logits of all slots, and those of the target's texts."""
    size = drafter.config.block_size
    rows, count = blocks.anchors.shape
    hidden = hidden.view(rows * count, size, -1)
    previous, labels = blocks.previous.flatten(0, 1), blocks.labels.flatten(0, 1)
    head = drafter.markov_head
    draft = drafter.base_logits(hidden, target.get_output_embeddings())
    draft = (draft + head.markov_w2(head.block_features(previous, hidden))).float()
    places = (blocks.anchors[..., None] + torch.arange(size)).clamp(max=logits.shape[1] - 1)
    teacher = logits[torch.arange(rows)[:, None, None], places].flatten(0, 1).float().softmax(-1)
    log_probs = draft.log_softmax(-1)
    distance = (log_probs.exp() - teacher).abs().sum(-1)
    cross_entropy = -log_probs.gather(-1, labels[..., None])[..., 0]
    accept = (1 - distance / 2).detach()
    confidence = drafter.confidence_logits(hidden, previous[:, 0], labels).float()
    entropy = torch.nn.functional.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    weight = LossWeights().by_position(size) * blocks.supervised.flatten(0, 1)
    return ((0.1 * cross_entropy + 0.9 * distance + entropy) * weight).sum() / weight.sum()


def measure(way: str, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step and the process's peak memory, in MB above what the models take."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target, tokenizer = load_demo_target()
    torch.manual_seed(0)
    config = drafter_config(target, choose_mask_token(tokenizer), num_hidden_layers=3, block_size=7, markov_rank=64)
    drafter = DSparkDraftModel(config)
    start_from_target(drafter, target)
    target.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    shape = (args.rows, args.length)
    input_ids = torch.randint(1000, 20000, shape, generator=generator)
    loss_mask = torch.ones(shape)
    loss_mask[:, : args.length // 4] = 0
    teacher = Teacher(target, drafter.config.target_layer_ids)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, losses = [], []
    for step in range(args.steps + 1):
        begin = time.perf_counter()
        anchors, kept = draw_anchors(input_ids, loss_mask, args.anchors, seed=step)
        blocks = cut_blocks(input_ids, loss_mask, anchors, kept, drafter.config.block_size)
        if way == "plain":
            with torch.no_grad():
                outputs = target(input_ids, output_hidden_states=True)
            taps = torch.cat([outputs.hidden_states[tap + 1] for tap in drafter.config.target_layer_ids], dim=-1)

            def objective(hidden, blocks=blocks, outputs=outputs):
                return plain_loss(drafter, hidden, blocks, outputs.logits, target)
        else:
            features = teacher.features(input_ids)
            taps = features.taps

            def objective(hidden, blocks=blocks, features=features):
                return block_losses(drafter, hidden, blocks, teacher, features.last, LossWeights()).loss

        with torch.autocast("cpu", dtype=torch.bfloat16):
            noise = drafter.block_tokens(blocks.tokens[..., 0].flatten()).view(args.rows, -1)
            loss = drafter(
                drafter.embed(noise, target.get_input_embeddings()),
                context_hidden_states=taps.flatten(0, 1),
                context_lengths=[args.length] * args.rows,
                context=PackedContext(drafter.config, anchors, args.length),
                objective=objective,
            )
        loss.backward()
        drafter.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"seconds": statistics.median(seconds[1:]), "peak_mb": peak / 1024, "loss": losses[0]}


def main() -> None:
    """Measure each way in a process of its own, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="texts of a step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text")
    parser.add_argument("--anchors", type=int, default=32, help="blocks of a text")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after one that is not")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--way", choices=("plain", "chunked"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args)))
        return
    found = {}
    for way in ("plain", "chunked"):
        done = subprocess.run([sys.executable, *sys.argv, "--way", way], check=True, capture_output=True, text=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
        blocks = args.rows * args.anchors / found[way]["seconds"]
        print(f"{way}: {blocks:.1f} blocks/s, peak {found[way]['peak_mb']:.0f} MB, loss {found[way]['loss']:.4f}")
    print(f"speed-up: {found['plain']['seconds'] / found['chunked']['seconds']:.2f}")


if __name__ == "__main__":
    main()
