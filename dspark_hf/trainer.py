"""Train a drafter with the Trainer: the target runs once a text, frozen, and many blocks learn from each pass."""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import SAFE_WEIGHTS_NAME

from .candidate_generator import check_fits
from .card import CardSources
from .card_inputs import TRAINING_NAME
from .environment import machine, package_versions
from .files import write_json
from .hub import push_drafter
from .losses import BlockLosses, LossWeights, block_losses
from .modeling import DSparkDraftModel
from .target_limits import position_limit
from .target_outputs import text_config
from .teacher import FeatureCache, Teacher
from .training_arguments import DSparkTrainingArguments
from .training_blocks import PackedContext, cut_blocks, draw_anchors


STATE_NAME = "trainer_state.json"
ADAPTER_NAME = "adapter_model.safetensors"
# What a decoding at an evaluation calls its results, before the way it decoded.
LENGTH = "mean_acceptance_length"
# Anchors of evaluations are drawn by a seed that no epoch has.
_EVALUATION_SEED = 2**31 - 1


class BlockCollator:
    """
    A batch of texts of the training data.

    Args:
        max_length (`int`): What is longer is cut.
    """

    def __init__(self, max_length: int):
        self.max_length = max_length

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """
        Fill up on the right.

        Args:
            samples (`Sequence[dict]`): Each with `input_ids` and `loss_mask`, lists of one length.

        Returns:
            `dict`: `input_ids`, `attention_mask` and `loss_mask`, each of shape `(rows, length)`.
        """
        for sample in samples:
            if len(sample["input_ids"]) != len(sample["loss_mask"]):
                raise ValueError(
                    f"A sample has {len(sample['input_ids'])} `input_ids` and {len(sample['loss_mask'])} entries in "
                    "its `loss_mask`; they must be of one length. Make the data with `dspark prepare-data`."
                )
        # An empty text stands as one token that nothing is learnt from.
        texts = [torch.tensor(sample["input_ids"][: self.max_length] or [0]) for sample in samples]
        masks = [torch.tensor(sample["loss_mask"][: self.max_length] or [0]) for sample in samples]
        pad = torch.nn.utils.rnn.pad_sequence
        return {
            "input_ids": pad(texts, batch_first=True),
            "attention_mask": pad([torch.ones_like(text) for text in texts], batch_first=True),
            "loss_mask": pad(masks, batch_first=True),
        }


class _Tally:
    """Sums of what batches lost and would have accepted, to be averaged at the next log."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        # weight, ce, tv, confidence | whole blocks, their expected length | accepted, counted by position
        self.sums = torch.zeros(6 + 2 * block_size, dtype=torch.float64)

    def add(self, found: BlockLosses, total_weight: float) -> None:
        accept = found.accept_prob.double().cpu()
        known = ~accept.isnan()
        whole = accept[known.all(dim=1)]
        parts = [float(part) * total_weight for part in (found.cross_entropy, found.total_variation, found.confidence)]
        lengths = 1 + whole.cumprod(dim=1).sum(dim=1)
        self.sums += torch.cat(
            [
                torch.tensor([found.weight, *parts, len(whole), lengths.sum().item()], dtype=torch.float64),
                accept.nan_to_num().sum(dim=0),
                known.double().sum(dim=0),
            ]
        )

    def averages(self, sums: torch.Tensor) -> dict[str, float]:
        """Averages by name from the sums, of all processes together."""
        weight, *parts, blocks, length = sums[:6].tolist()
        names = ("cross_entropy", "total_variation", "confidence_loss")
        found = {name: part / weight for name, part in zip(names, parts, strict=True)} if weight else {}
        if blocks:
            found["expected_acceptance_length"] = length / blocks
        accepted, counted = sums[6:].view(2, -1).tolist()
        for position, (total, count) in enumerate(zip(accepted, counted, strict=True), start=1):
            if count:
                found[f"accept_prob_{position}"] = total / count
        return found


class _TimeLimit(TrainerCallback):
    """Ends a training when its time is up, with a checkpoint to go on from if there are any."""

    def __init__(self, trainer: DSparkTrainer):
        self.trainer = trainer

    def on_step_end(
        self, args: DSparkTrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        # All processes have to agree on the end.
        seconds = torch.tensor([self.trainer.seconds], device=args.device)
        seconds = self.trainer.accelerator.gather(seconds).max().item()
        self.trainer._spent = seconds / (60 * args.time_limit)
        if self.trainer._spent >= 1:
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"
        return control


class DSparkTrainer(Trainer):
    """
    A Trainer for drafters.

    The target stays outside the trained module: frozen, called as a whole, wherever and however it was loaded
    (quantised, PEFT-wrapped, spread over devices). The logs hold the parts of the loss, the acceptance probability of
    each position and the mean_acceptance_length that these would give; with `decode`, evaluations also hold the one
    that real decoding gives.

    Args:
        model ([`DSparkDraftModel`] or a PEFT model of one): The drafter.
        args ([`DSparkTrainingArguments`]): Of the training.
        target (`PreTrainedModel`): The model to draft for.
        train_dataset, eval_dataset: Samples with `input_ids` and `loss_mask`, as `dspark prepare-data` writes them.
        decode (`Callable`, *optional*): Called at each evaluation with the drafter, in evaluation mode; returns
            figures by name, which join the evaluation's.
        provenance (`dict`, *optional*): Joins what is written beside the model: the data's origin, the target's id.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The target's tokenizer.
        callbacks (`list[TrainerCallback]`, *optional*): As the Trainer's.
        optimizers: As the Trainer's.

    Raises:
        `ValueError`: if the drafter was not made for the target.

    Source: DSpark (arXiv 2607.05147), training objective.
    """

    def __init__(
        self,
        model: DSparkDraftModel | nn.Module,
        args: DSparkTrainingArguments,
        target: PreTrainedModel,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        decode: Callable[[DSparkDraftModel], dict[str, float]] | None = None,
        provenance: dict[str, Any] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
    ):
        if args.n_gpu > 1:
            raise ValueError(
                f"{args.n_gpu} GPUs are visible to one process; start one process a GPU with `accelerate launch`, or "
                "set CUDA_VISIBLE_DEVICES to one of them."
            )
        drafter = inner_drafter(model)
        check_fits(drafter, target)
        freeze(model, args.freeze)
        super().__init__(
            model=model,
            args=args,
            data_collator=BlockCollator(min(args.max_length, position_limit(text_config(target)) or args.max_length)),
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
        )
        self.drafter, self.target = drafter, target
        for parameter in target.parameters():
            parameter.requires_grad_(False)
        self.teacher = Teacher(target, drafter.config.target_layer_ids)
        self.provenance = {"started_from": None, **(provenance or {})}
        self.decode = decode
        self.features = self.teacher.features
        if args.feature_cache is not None:
            known = self.provenance.get("target", {})
            identity = f"{known.get('id')} {known.get('revision')} {weights_fingerprint(target)}"
            limit = int(args.feature_cache_gb * 1e9)
            self.features = FeatureCache(args.feature_cache, self.teacher, identity, limit).features
        self.weights = LossWeights(
            args.cross_entropy_weight,
            args.total_variation_weight,
            args.confidence_weight,
            args.loss_decay or drafter.config.block_size,
        )
        self._tallies = {True: _Tally(drafter.config.block_size), False: _Tally(drafter.config.block_size)}
        self._blocks = self._tokens = 0
        self._evaluations: list[dict[str, Any]] = []
        self._began: float | None = None
        self._resumed_origin: dict[str, Any] = {}
        if args.time_limit is not None:
            self.add_callback(_TimeLimit(self))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, BlockLosses]:
        """The loss of a batch of texts (Eq. 14), as the mean over the batches of all processes."""
        input_ids, loss_mask = inputs["input_ids"], inputs["loss_mask"]
        config = self.drafter.config
        features = self.features(input_ids, inputs["attention_mask"])
        training = model.training
        seed = self.args.seed + int(self.state.epoch or 0) if training else _EVALUATION_SEED
        anchors, kept = draw_anchors(input_ids, loss_mask, self.args.num_anchors, seed)
        blocks = cut_blocks(input_ids, loss_mask, anchors, kept, config.block_size)
        weight = (self.weights.by_position(config.block_size) * blocks.supervised.cpu()).sum()
        counts = torch.stack([weight, kept.sum().cpu(), loss_mask.sum().cpu()]).float()
        if training:
            counts = self.accelerator.reduce(counts.to(self.args.device), reduction="sum")
        weight, seen_blocks, seen_tokens = counts.tolist()
        total = weight / self.args.world_size if training else weight
        rows = len(anchors)
        noise = self.drafter.block_tokens(blocks.tokens[..., 0].flatten())
        embedding = None if config.owns_embedding else self.target.get_input_embeddings()
        length = features.last.shape[1]
        found = model(
            self.drafter.embed(noise.view(rows, -1), embedding),
            context_hidden_states=features.taps.flatten(0, 1).to(self.drafter.device),
            context_lengths=[length] * rows,
            context=PackedContext(config, anchors, length),
            objective=lambda hidden_states: block_losses(
                self.drafter,
                hidden_states,
                blocks,
                self.teacher,
                features.last,
                self.weights,
                total_weight=total or None,
                chunk_slots=self.args.chunk_slots,
            ),
        )
        self._tallies[training].add(found, total)
        if training:
            self._blocks += int(seen_blocks)
            self._tokens += int(seen_tokens)
        return (found.loss, found) if return_outputs else found.loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, None, None]:
        """The loss of a batch of held-out texts."""
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach(), None, None

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """As the Trainer's, and the figures of a real decoding where there is a `decode`."""
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        more = {f"{metric_key_prefix}_{name}": value for name, value in self._averages(training=False).items()}
        if self.decode is not None:
            self.drafter.eval()
            more |= {f"{metric_key_prefix}_{name}": value for name, value in self.decode(self.drafter).items()}
        if more:
            self.log(more)
        metrics |= more
        entry = {"step": self.state.global_step, "blocks": self.seen_blocks, "tokens": self.seen_tokens}
        decoded, start = {}, f"{metric_key_prefix}_{LENGTH}_"
        for name, value in metrics.items():
            if name.startswith(start):
                decoded[name.removeprefix(start).replace("_", " ")] = value
            elif isinstance(value, float) and math.isfinite(value):
                entry[name] = value
        self._evaluations.append(entry | {LENGTH: decoded})
        return metrics

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer's, and the averages since the last log."""
        if "loss" in logs:
            logs |= self._averages(training=True) | {"blocks": self.seen_blocks}
        super().log(logs, start_time)

    @property
    def seen_blocks(self) -> int:
        """Blocks trained on so far, of all processes, this run and those it resumed."""
        return self._resumed("blocks") + self._blocks

    @property
    def seen_tokens(self) -> int:
        """Tokens of the target's own in the texts trained on so far, each counted at every visit."""
        return self._resumed("tokens") + self._tokens

    @property
    def seconds(self) -> float:
        """Time spent in training so far, this run and those it resumed."""
        own = 0.0 if self._began is None else time.monotonic() - self._began
        return self._resumed("seconds") + own

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """As the Trainer's; under a time limit the rate is constant, then falls to 0 over the last third."""
        if self.args.time_limit is None:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup = max(1, int(self.args.warmup_steps))
        self._spent = self.seconds / (60 * self.args.time_limit)

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / warmup) * min(1.0, 3 * max(0.0, 1 - self._spent))

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's, but each file is whole or the old one, and `training.json` stands beside them."""
        folder = Path(output_dir or self.args.output_dir)
        staging = folder / ".saving"
        super().save_model(str(staging), _internal_call=True)
        if self.args.should_save:
            write_json(staging / TRAINING_NAME, self.origin())
            for file in sorted(staging.rglob("*")):
                if file.is_file():
                    place = folder / file.relative_to(staging)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, place)
            _remove_empty(staging)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> CommitInfo | None:
        """
        Save, then send weights, code, provenance and card to `hub_model_id`, as `dspark push` does.

        Args:
            commit_message (`str`, *optional*): Of the commit.
            blocking (`bool`, *optional*, defaults to `True`): Has to stay true.
            token (`str`, *optional*): By default that of the arguments, or the stored one.
            revision (`str`, *optional*): Branch; by default that of the arguments.
            kwargs: Fields of [`CardSources`]: figures, plot, licence, data sets.

        Returns:
            `CommitInfo`: The commit; `None` on all processes but the first.

        Raises:
            `ValueError`: if something given cannot be used; see [`push_drafter`].
        """
        if not blocking:
            raise ValueError("`blocking` is False; a drafter is sent in one commit that is waited for: leave it True.")
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        return push_drafter(
            self.args.output_dir,
            self.hub_model_id,
            CardSources(**kwargs),
            private=self.args.hub_private_repo,
            revision=revision or self.args.hub_revision,
            commit_message=commit_message,
            token=token or self.args.hub_token,
        )

    def origin(self) -> dict[str, Any]:
        """What `training.json` holds: how this drafter was made."""
        return {
            "command": ["dspark", *sys.argv[1:]] if Path(sys.argv[0]).stem in ("dspark", "__main__") else sys.argv,
            "versions": package_versions(),
            "machine": machine(),
            **self.provenance,
            "arguments": {name: value for name, value in self.args.to_sanitized_dict().items() if value is not None},
            "steps": self.state.global_step,
            "blocks": self.seen_blocks,
            "supervised_tokens": self.seen_tokens,
            "seconds": self.seconds,
            "log": self.state.log_history,
            "evaluations": self._resumed_origin.get("evaluations", []) + self._evaluations,
        }

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """
        As the Trainer's; `resume_from_checkpoint=True` goes on from the last checkpoint that was saved whole.

        Raises:
            `ValueError`: if a checkpoint that is named is not whole.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_dir)
        elif isinstance(resume_from_checkpoint, str) and not is_whole(Path(resume_from_checkpoint)):
            raise ValueError(
                f"`resume_from_checkpoint` is {resume_from_checkpoint!r}, which is not a checkpoint that was saved "
                "whole; name another one, or pass True for the last one that was."
            )
        self._resumed_origin = {}
        if resume_from_checkpoint and (found := Path(resume_from_checkpoint) / TRAINING_NAME).exists():
            self._resumed_origin = json.loads(found.read_text(encoding="utf-8"))
        self._began = time.monotonic()
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _resumed(self, name: str) -> Any:
        return self._resumed_origin.get({"tokens": "supervised_tokens"}.get(name, name), 0)

    def _averages(self, training: bool) -> dict[str, float]:
        tally = self._tallies[training]
        sums = self.accelerator.reduce(tally.sums.float().to(self.args.device), reduction="sum").double().cpu()
        self._tallies[training] = _Tally(tally.block_size)
        return tally.averages(sums)


def inner_drafter(model: nn.Module) -> DSparkDraftModel:
    """
    The drafter inside a model that PEFT may have wrapped.

    Raises:
        `ValueError`: if there is none.
    """
    if isinstance(model, DSparkDraftModel):
        return model
    inner = model.get_base_model() if hasattr(model, "get_base_model") else None
    if isinstance(inner, DSparkDraftModel):
        return inner
    raise ValueError(f"`model` is a {type(model).__name__}; a DSparkDraftModel, or a PEFT model of one, is trained.")


def freeze(model: nn.Module, parts: Sequence[str]) -> None:
    """
    Freeze parts of a drafter: those named, and embedding and head of its own, which are the target's.

    Args:
        model (`nn.Module`): The drafter, or a PEFT model of one (whose base is frozen already).
        parts (`Sequence[str]`): Of `FREEZABLE`.

    Raises:
        `ValueError`: if nothing is left to train.
    """
    drafter = inner_drafter(model)
    frozen = {
        "backbone": [drafter.fc, drafter.hidden_norm, drafter.layers, drafter.norm],
        "markov_head": [drafter.markov_head],
        "confidence_head": [drafter.confidence_head],
    }
    modules = [drafter.embed_tokens, drafter.lm_head] + [module for part in parts for module in frozen[part]]
    for module in modules:
        for parameter in () if module is None else module.parameters():
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"`freeze` is {list(parts)}, which leaves nothing of this drafter to train; name fewer parts."
        )


def weights_fingerprint(model: PreTrainedModel) -> str:
    """A hash of some values of each of a model's weights, which tells one set of them from another."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        if tensor.device.type != "meta":  # where accelerate has offloaded it
            values = tensor.detach().flatten()
            values = values[:: max(1, len(values) // 64)].cpu().contiguous()
            found.update(values.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint was saved to its end; the Trainer writes its own state last."""
    try:
        TrainerState.load_from_json(str(checkpoint / STATE_NAME))
        weights = [checkpoint / name for name in (SAFE_WEIGHTS_NAME, ADAPTER_NAME) if (checkpoint / name).exists()]
        for file in weights:
            with safe_open(file, framework="pt") as tensors:
                tensors.keys()
        for file in checkpoint.glob("*.json"):
            json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, SafetensorError):
        return False
    states = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]
    sharded = any(checkpoint.glob("*.index.json")) or any(path.is_dir() for path in checkpoint.iterdir())
    return bool(weights or sharded) and all(zipfile.is_zipfile(file) for file in states)


def last_whole_checkpoint(output_dir: str | Path) -> str | None:
    """The last checkpoint of a run that was saved to its end, or `None`; one cut short by a kill is passed over."""
    folder = Path(output_dir)
    found = [path for path in folder.glob("checkpoint-*") if path.name.split("-")[-1].isdigit() and is_whole(path)]
    if not found:
        return None
    last = max(found, key=lambda path: int(path.name.split("-")[-1]))
    newest = get_last_checkpoint(str(folder))
    if newest is not None and Path(newest) != last:
        print(f"{newest} was not saved whole; going on from {last}", file=sys.stderr)
    return str(last)


def _remove_empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir()
    folder.rmdir()
