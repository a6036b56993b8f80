"""Whole blocks as a pair drafted and judged them: what calibration and simulation start from."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm.auto import tqdm

from .bench import check_lengths
from .files import write_json
from .loading import CommandError, Pair, generation_options, left_padded, regime, reporting
from .schedule_options import drafter_schedule


if TYPE_CHECKING:
    import torch

    from .decoding import DSparkGenerateOutput
    from .statistics import SpeculativeStats


@dataclass(frozen=True, eq=False)
class Blocks:
    """
    Blocks that were verified whole, prompt after prompt.

    Attributes:
        confidence_logits (`np.ndarray` of shape `(blocks, block_size)`, float64): The confidence head's output.
        accepted (`np.ndarray` of shape `(blocks,)`, int): Length of each block's accepted prefix, 0 to `block_size`.
        sets (`list[str]`): The prompt set that each block comes from.
        sampling_temperature (`float`): 0 is greedy decoding.
        prompts (`list[int]`, *optional*): The prompt that each block comes from, by a number of its own; files that
            were recorded before these were kept do not say.
    """

    confidence_logits: np.ndarray
    accepted: np.ndarray
    sets: list[str]
    sampling_temperature: float
    prompts: list[int] | None = None

    def __len__(self) -> int:
        return len(self.accepted)

    def __add__(self, other: Blocks) -> Blocks:
        """These and then others, of other prompts, of the same pair and sampling temperature."""
        prompts = None
        if self.prompts is not None and other.prompts is not None:
            behind = max(self.prompts) + 1
            prompts = self.prompts + [behind + number for number in other.prompts]
        return Blocks(
            np.concatenate([self.confidence_logits, other.confidence_logits]),
            np.concatenate([self.accepted, other.accepted]),
            self.sets + other.sets,
            self.sampling_temperature,
            prompts,
        )

    def save(self, path: str | Path) -> None:
        """Write to a JSON file; an old one stays until the new one is complete."""
        write_json(
            path,
            {
                "sampling_temperature": self.sampling_temperature,
                "sets": self.sets,
                "prompts": self.prompts,
                "accepted": self.accepted.tolist(),
                "confidence_logits": self.confidence_logits.tolist(),
            },
        )

    @classmethod
    def load(cls, path: str | Path) -> Blocks:
        """
        Read a JSON file.

        Raises:
            `ValueError`: if it holds no blocks.
        """
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
            logits, accepted = np.array(raw["confidence_logits"], dtype=float), np.array(raw["accepted"], dtype=int)
            prompts = None if raw.get("prompts") is None else [int(number) for number in raw["prompts"]]
            blocks = cls(logits, accepted, list(raw["sets"]), float(raw["sampling_temperature"]), prompts)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} holds no blocks ({error}); record some with `dspark calibrate`.") from error
        sound = logits.ndim == 2 and logits.size > 0 and np.isfinite(logits).all()
        sound = sound and all(isinstance(name, str) for name in blocks.sets)
        sound = sound and 0 <= blocks.sampling_temperature < float("inf")
        sound = sound and accepted.shape == logits.shape[:1] and len(blocks.sets) == len(accepted)
        sound = sound and (prompts is None or len(prompts) == len(accepted) and min(prompts) >= 0)
        if not sound or not ((accepted >= 0) & (accepted <= logits.shape[1])).all():
            raise ValueError(
                f"{path} holds no blocks: each needs a set's name, finite logits and an accepted length of 0 to the "
                "block size, all of them a temperature; record some with `dspark calibrate`."
            )
        return blocks


def record_blocks(
    pair: Pair,
    prompt_sets: dict[str, list[str]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
) -> Blocks:
    """
    Decode prompts with whole blocks and keep what the confidence head said and what the target accepted.

    Blocks at the end of a text, which have no room to be verified whole, are left out: a draft that was not sent says
    nothing about acceptance.

    Args:
        pair ([`Pair`]): Target and drafter; the drafter needs a confidence head.
        prompt_sets (`dict[str, list[str]]`): Prompts by set, encoded as [`Pair.encode`] does.
        max_new_tokens (`int`): Of each text, at least `block_size + 2`.
        temperature (`float`): 0 decodes greedily.
        top_p (`float`, *optional*): With a temperature; by default the target's own.
        top_k (`int`, *optional*): With a temperature, 0 for all; by default the target's own.
        batch_size (`int`): Prompts decoded at a time, left-padded.
        seed (`int`): Seeds torch once, before the first prompt.

    Returns:
        [`Blocks`], at least one.

    Raises:
        `CommandError`: the drafter has no confidence head, the pair does not go together, a sampling option was given
            for greedy decoding, a prompt is too long or empty, or the texts have no room for a whole block.
    """
    block_size = pair.drafter.config.block_size
    _check(pair, max_new_tokens)
    import torch

    options = generation_options(max_new_tokens, temperature, top_p, top_k, threshold=0.0)
    encoded = {name: [pair.encode(prompt) for prompt in prompts] for name, prompts in prompt_sets.items()}
    check_lengths(pair, encoded, max_new_tokens)
    waiting = [(name, inputs) for name, prompts in encoded.items() for inputs in prompts]
    torch.manual_seed(seed)
    records: list[tuple[str, int, list[float], int]] = []
    rounds = accepted = tokens = 0
    start = time.perf_counter()
    bar = tqdm(total=len(waiting), desc=f"Blocks, {regime(temperature)}", unit="prompt")
    about = reporting(f"--target {pair.names[0]!r} with --drafter {pair.names[1]!r}")
    with about, drafter_schedule(pair.drafter, "constant", 0.0), bar as progress:
        for first in range(0, len(waiting), batch_size):
            batch = waiting[first : first + batch_size]
            stats = decode_batch(pair, [inputs for _, inputs in batch], options).speculative_stats
            rows = zip(batch, whole_blocks_by_row(stats, block_size), strict=True)
            for number, ((name, _), row) in enumerate(rows, start=first):
                records += [(name, number, logits, length) for logits, length in row]
            rounds, accepted = rounds + stats.rounds, accepted + stats.accepted
            tokens += len(batch) + stats.rounds + stats.accepted  # the first, and each round's
            progress.update(len(batch))
            progress.set_postfix_str(
                f"{tokens / (time.perf_counter() - start):.1f} tok/s, "
                f"mean_acceptance_length {1 + accepted / max(rounds, 1):.2f}"
            )
    if not records:
        raise CommandError(
            f"--max-new-tokens {max_new_tokens}: all {len(waiting)} texts ended before a block of {block_size} drafts "
            "could be verified whole; give prompts with longer answers, or more tokens"
        )
    return Blocks(
        np.array([logits for _, _, logits, _ in records], dtype=float),
        np.array([length for _, _, _, length in records], dtype=int),
        [name for name, _, _, _ in records],
        float(temperature),
        [number for _, number, _, _ in records],
    )


def _check(pair: Pair, max_new_tokens: int) -> None:
    config = pair.drafter.config
    if not config.enable_confidence_head:
        raise CommandError(
            f"--drafter {pair.names[1]!r}: it has no confidence head, so its blocks say nothing; give another drafter"
        )
    if max_new_tokens < config.block_size + 2:
        least = config.block_size + 2
        raise CommandError(
            f"--max-new-tokens {max_new_tokens}: only from {least} tokens on does a text hold a whole block of "
            f"{config.block_size} drafts; give at least {least}, and several times that for figures of any worth"
        )


def decode_batch(
    pair: Pair, prompts: list[dict[str, torch.Tensor]], options: dict[str, Any], schedule: str = "constant"
) -> DSparkGenerateOutput:
    """
    Generate for several prompts at once, left-padded, and keep each round's decision.

    Args:
        pair ([`Pair`]): Target and drafter, the latter under [`drafter_schedule`] with the same schedule.
        prompts (`list[dict]`): As [`Pair.encode`] gives them.
        options (`dict`): As [`generation_options`] gives them.
        schedule (`str`): One of `SCHEDULES`.
    """
    # Masked, so any token will do where the tokenizer has none to pad with.
    batch = left_padded(prompts, pair.tokenizer.pad_token_id or 0)
    # A schedule in the target's own generation config would count as the call's.
    return pair.target.generate(
        **batch,
        **options,
        assistant_model=pair.drafter,
        num_assistant_tokens_schedule=schedule,
        return_dict_in_generate=True,
    )


def whole_blocks_by_row(stats: SpeculativeStats, block_size: int) -> list[list[tuple[list[float], int]]]:
    """For each row of a call, confidence logits and accepted length of the blocks that were verified whole."""
    rows: list[list[tuple[list[float], int]]] = [[] for _ in stats.rows]
    for decision in stats.decisions:
        if decision.confidence_logits is None:
            continue
        blocks = zip(
            decision.rows, decision.confidence_logits, decision.verify_lengths, decision.accepted, strict=True
        )
        for row, logits, sent, accepted in blocks:
            if sent == block_size:
                rows[row].append((logits, accepted))
    return rows
