"""Arguments of training: those of the Trainer, and what a drafter's objective adds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments


# So many that the time is up before.
EPOCHS_WITHOUT_END = 10_000
FREEZABLE = ("backbone", "markov_head", "confidence_head")


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """
    `TrainingArguments` and what a drafter's training adds.

    Args:
        cross_entropy_weight, total_variation_weight, confidence_weight (`float`): Of Eq. 14.
        loss_decay (`float`, *optional*): gamma of the position weights.
        num_anchors (`int`): Blocks drawn from a text at each visit.
        max_length (`int`): Tokens of a text that are read.
        chunk_slots (`int`): Slots whose distributions over the vocabulary exist at a time.
        feature_cache (`str`, *optional*), feature_cache_gb (`float`): Where the target's hidden states are kept.
        freeze (`list[str]`): Parts that stay as they are.
        time_limit (`float`, *optional*): Minutes of training, in place of epochs or steps.
        decode_samples, decode_tokens (`int`): Of each evaluation's real decoding.

    Source: DSpark (arXiv 2607.05147), training objective and Eq. 11 to 14.
    """

    # The paper: "default weights alpha_ce = 0.1, alpha_tv = 0.9, alpha_conf = 1.0" (Eq. 14).
    cross_entropy_weight: float = field(default=0.1, metadata={"help": "alpha_ce of Eq. 14, on Eq. 11."})
    total_variation_weight: float = field(default=0.9, metadata={"help": "alpha_tv of Eq. 14, on Eq. 12."})
    confidence_weight: float = field(default=1.0, metadata={"help": "alpha_conf of Eq. 14, on Eq. 13."})
    # The paper: "each position-weighted by w_k = exp(-(k-1)/gamma)", gamma being the block size; DeepSpec's released
    # recipe sets 4.0 for its blocks of 7.
    loss_decay: float | None = field(
        default=None,
        metadata={"help": "gamma of the position weights exp(-(k-1)/gamma); by default the block size, as printed."},
    )
    num_anchors: int = field(default=64, metadata={"help": "Blocks drawn from each text at each visit."})
    max_length: int = field(default=2048, metadata={"help": "Tokens of a text that are read; the rest is cut."})
    chunk_slots: int = field(
        default=128, metadata={"help": "Slots whose distributions over the vocabulary exist at a time."}
    )
    feature_cache: str | None = field(
        default=None, metadata={"help": "Folder that keeps the target's hidden states between epochs."}
    )
    feature_cache_gb: float = field(default=20.0, metadata={"help": "The most that the folder may hold, in 10^9 B."})
    freeze: list[str] = field(
        default_factory=list, metadata={"help": f"Parts that stay as they are: {', '.join(FREEZABLE)}."}
    )
    time_limit: float | None = field(
        default=None,
        metadata={
            "help": "Minutes, of all runs that resume each other: training goes over the data until they are up, and "
            "the learning rate falls to 0 over the last third of them."
        },
    )
    decode_samples: int = field(
        default=16, metadata={"help": "Held-out prompts that each evaluation decodes for real; 0 for none."}
    )
    decode_tokens: int = field(default=64, metadata={"help": "New tokens of each of them."})
    # The Trainer's 5e-5 is for models that are trained already.
    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate."})
    # What the Trainer must know of this objective.
    remove_unused_columns: bool = field(default=False, metadata={"help": "Has to stay false: all columns are read."})
    train_sampling_strategy: str = field(
        default="group_by_length", metadata={"help": "Texts of a batch are of about one length by default."}
    )
    hub_strategy: str = field(
        default="end", metadata={"help": "When `push_to_hub` sends: at the end, with code, provenance and card."}
    )
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradient clipping."})

    def __post_init__(self) -> None:
        if not torch.accelerator.is_available():
            self.use_cpu, self.dataloader_pin_memory = True, False
        super().__post_init__()
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` is True; the columns of the data are all read: leave it False.")
        whole = ("num_anchors", 1), ("max_length", 2), ("chunk_slots", 1), ("decode_tokens", 1), ("decode_samples", 0)
        batches = ("per_device_train_batch_size", 1), ("per_device_eval_batch_size", 1)
        for name, least in (*whole, *batches, ("gradient_accumulation_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be at least {least}.")
        # NaN is neither: hence the `not`.
        for name in ("cross_entropy_weight", "total_variation_weight", "confidence_weight", "learning_rate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must be a number of at least 0.")
        if self.loss_decay is not None and not self.loss_decay > 0:
            raise ValueError(f"`loss_decay` is {self.loss_decay}; it must be above 0, or left out for the block size.")
        if self.time_limit is not None:
            if not self.time_limit > 0:
                raise ValueError(f"`time_limit` is {self.time_limit}; it must be above 0 minutes.")
            if self.max_steps > 0:
                raise ValueError(f"`time_limit` and `max_steps` ({self.max_steps}) are both given; leave one out.")
            self.num_train_epochs = EPOCHS_WITHOUT_END
        if not self.feature_cache_gb > 0:
            raise ValueError(f"`feature_cache_gb` is {self.feature_cache_gb}; it must be above 0.")
        unknown = sorted(set(self.freeze) - set(FREEZABLE))
        if unknown:
            raise ValueError(f"`freeze` names {unknown}; it may hold {', '.join(FREEZABLE)}.")
