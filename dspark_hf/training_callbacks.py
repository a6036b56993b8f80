"""What goes on beside the training: real decoding at evaluations, the plot of the run."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .files import image_format
from .loading import left_padded
from .modeling import DSparkDraftModel
from .statistics import SpeculativeStats


class DecodeEvaluation:
    """
    Real decoding of held-out prompts, greedy and at temperature 1, with all heads at work.

    Args:
        target (`PreTrainedModel`), tokenizer (`PreTrainedTokenizerBase`): Of the pair.
        samples: Held-out training data; a prompt is what stands before the first token that the target wrote.
        count (`int`): Prompts, the first ones.
        new_tokens (`int`): Of each.
        batch_size (`int`, *optional*, defaults to 8): Rows of a batch.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        samples: Any,
        count: int,
        new_tokens: int,
        batch_size: int = 8,
    ):
        self.target, self.new_tokens, self.batch_size = target, new_tokens, batch_size
        pad = tokenizer.pad_token_id
        self.pad_token_id = tokenizer.eos_token_id if pad is None else pad
        self.prompts: list[list[int]] = []
        for sample in samples.select(range(min(count, len(samples)))):
            if (begin := sample["loss_mask"].index(1) if 1 in sample["loss_mask"] else 0) > 0:
                self.prompts.append(sample["input_ids"][:begin])

    def __call__(self, drafter: DSparkDraftModel) -> dict[str, float]:
        """Decode; returns the mean_acceptance_length of each way."""
        found = {}
        for name, options in (
            ("greedy", {"do_sample": False}),
            ("temperature_1", {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}),
        ):
            tokens = rounds = 0
            devices = [self.target.device] if self.target.device.type == "cuda" else []
            with torch.random.fork_rng(devices), torch.no_grad():
                torch.manual_seed(0)
                for begin in range(0, len(self.prompts), self.batch_size):
                    stats = self._decode(drafter, self.prompts[begin : begin + self.batch_size], options)
                    rounds += stats.rounds
                    tokens += stats.mean_acceptance_length * stats.rounds
            if rounds:
                found[f"mean_acceptance_length_{name}"] = tokens / rounds
        return found

    def _decode(
        self, drafter: DSparkDraftModel, prompts: list[list[int]], options: dict[str, Any]
    ) -> SpeculativeStats:
        rows = [
            {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)}
            for prompt in prompts
        ]
        batch = {name: value.to(self.target.device) for name, value in left_padded(rows, self.pad_token_id).items()}
        self.target.generate(
            **batch,
            assistant_model=drafter,
            max_new_tokens=self.new_tokens,
            pad_token_id=self.pad_token_id,
            num_assistant_tokens_schedule="constant",
            **options,
        )
        return drafter.speculative_stats


def plot_run(path: Path, log: list[dict[str, Any]], block_size: int) -> None:
    """
    Draw a run: the parts of its loss, and what would be and was accepted, against blocks.

    Args:
        path (`Path`): Image to write.
        log (`list[dict]`): The Trainer's log.
        block_size (`int`): Of the drafter.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, lengths = figure.subplots(1, 2)
    for name, label in (
        ("cross_entropy", "cross-entropy"),
        ("total_variation", "total variation (L1)"),
        ("confidence_loss", "confidence"),
    ):
        _draw(losses, log, name, label, "-")
    for name, label, style in (
        ("expected_acceptance_length", "expected, training", "-"),
        ("eval_expected_acceptance_length", "expected, held out", "o-"),
        ("eval_mean_acceptance_length_greedy", "decoded greedy", "s-"),
        ("eval_mean_acceptance_length_temperature_1", "decoded at temperature 1", "^-"),
    ):
        _draw(lengths, log, name, label, style)
    losses.set(xlabel="blocks", ylabel="loss", title="Loss (Eq. 11 to 13)")
    lengths.set(xlabel="blocks", ylabel="mean_acceptance_length", title=f"Tokens a round (at most {block_size + 1})")
    for axes in (losses, lengths):
        if axes.lines:
            axes.set_xscale("log")
            axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format=image_format(path))


def _draw(axes: Any, log: list[dict[str, Any]], name: str, label: str, style: str) -> None:
    blocks_at = {entry["step"]: entry["blocks"] for entry in log if "blocks" in entry}
    points = []
    for entry in log:
        if name in entry:
            step = max((known for known in blocks_at if known <= entry["step"]), default=None)
            if step is not None and blocks_at[step] > 0:
                points.append((blocks_at[step], entry[name]))
    if points:
        axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
