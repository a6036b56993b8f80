"""What the target says of a text: the hidden states a drafter reads, and the distribution it is to draft from."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from .compat import hidden_states_request
from .modeling.borrowing import call_module
from .target_outputs import read_taps, text_config


logger = logging.getLogger(__name__)

# A temporary file this old was left by a process that was killed.
STALE_SECONDS = 3600


@dataclass(frozen=True)
class TargetFeatures:
    """
    All that training keeps of a pass of the target.

    Attributes:
        taps (`torch.Tensor` of shape `(rows, length, taps * hidden_size)`): Tapped hidden states.
        last (`torch.Tensor` of shape `(rows, length, hidden_size)`): The last hidden state, behind the final norm.
    """

    taps: torch.Tensor
    last: torch.Tensor


class Teacher:
    """
    A frozen target. It is called as a module, never taken apart, so it may be quantised, wrapped by PEFT or spread
    over devices.

    Args:
        target (`PreTrainedModel`): Put into evaluation mode; its parameters are left as they are.
        target_layer_ids (`Sequence[int]`): The drafter's taps.

    Raises:
        `ValueError`: if the target's logits are something else than its head, scaled or capped, of its last hidden
            state: a drafter would be trained towards a distribution that is not the target's.
    """

    def __init__(self, target: PreTrainedModel, target_layer_ids: Sequence[int]):
        self.target = target.eval()
        config = text_config(target)
        self.layers = [*target_layer_ids, config.num_hidden_layers - 1]
        self.vocab_size = config.vocab_size
        self.head = target.get_output_embeddings()
        self._softcap = getattr(config, "final_logit_softcapping", None)  # Gemma
        self._scale = getattr(config, "logit_scale", None)  # Cohere
        self._divisor = getattr(config, "logits_scaling", None)  # Granite
        self._check()

    @torch.no_grad()
    def features(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None = None) -> TargetFeatures:
        """
        Run the target over whole texts.

        Args:
            input_ids (`torch.LongTensor` of shape `(rows, length)`): Texts, filled up on the right.
            attention_mask (`torch.Tensor` of shape `(rows, length)`, *optional*): 0 at what fills up.
        """
        # The target computes in its own dtype, whatever the training's autocast says of the drafter.
        # One position by its index: a slice's strides make bfloat16 products on a CPU 20 times as slow, for each row.
        one = torch.zeros(1, dtype=torch.long)
        with torch.autocast(input_ids.device.type, enabled=False):
            states = read_taps(self.target, self._run(input_ids, attention_mask, one), self.layers)
        width = states.shape[-1] // len(self.layers)
        return TargetFeatures(states[..., :-width], states[..., -width:])

    @torch.no_grad()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """
        The target's logits.

        Args:
            last (`torch.Tensor` of shape `(..., hidden_size)`): Last hidden states.

        Returns:
            `torch.Tensor` of shape `(..., vocab_size)`, on the device of the hidden states.
        """
        with torch.autocast(last.device.type, enabled=False):
            logits = call_module(self.head, last).to(last.device)
        if self._scale is not None:
            logits = logits * self._scale
        if self._divisor is not None:
            logits = logits / self._divisor
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        return logits

    def _run(
        self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None, logits_to_keep: int | torch.Tensor
    ):
        # Weights that accelerate has offloaded are on `meta` between passes; its hooks move the inputs.
        device = input_ids.device if self.target.device.type == "meta" else self.target.device
        return self.target(
            input_ids=input_ids.to(device),
            attention_mask=None if attention_mask is None else attention_mask.to(device),
            use_cache=False,
            output_hidden_states=hidden_states_request(self.layers, False),
            logits_to_keep=logits_to_keep,
        )

    @torch.no_grad()
    def _check(self) -> None:
        probe = torch.arange(8).remainder(self.vocab_size)[None]
        outputs = self._run(probe, None, logits_to_keep=0)
        width = text_config(self.target).hidden_size
        found = self.logits(read_taps(self.target, outputs, self.layers)[..., -width:]).float()
        wanted = outputs.logits.to(found.device).float()
        span = (wanted.amax() - wanted.amin()).item()
        if wanted.shape != found.shape or (wanted - found).abs().amax().item() > 2e-2 * span:
            raise ValueError(
                f"The logits of {type(self.target).__name__} are not its head's output for its last hidden state "
                "(scaled or soft-capped as its config says), so its distribution cannot be computed piece by piece "
                "and no drafter can be trained for it."
            )


class FeatureCache:
    """
    Hidden states of texts on disk, up to a bound; texts that come when it is full are computed anew each time, and so
    are those whose file is damaged or gone. Files are whole or not there, so it may be interrupted at any moment and
    used by several processes; each counts what it finds at its start and what it adds.

    Args:
        folder (`str` or `Path`): Made if need be.
        teacher ([`Teacher`]): Computes what is not there.
        identity (`str`): What the hidden states depend on besides the text and the taps: the target and its revision.
        max_bytes (`int`): No file is added beyond it.
    """

    def __init__(self, folder: str | Path, teacher: Teacher, identity: str, max_bytes: int):
        self.teacher, self.max_bytes = teacher, max_bytes
        described = f"{identity} {teacher.target.dtype} {teacher.layers}"
        self.folder = Path(folder).expanduser() / hashlib.sha256(described.encode()).hexdigest()[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob("*.tmp"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink(missing_ok=True)
        self.held_bytes = sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    def features(self, input_ids: torch.LongTensor, attention_mask: torch.Tensor) -> TargetFeatures:
        """As [`Teacher.features`]."""
        lengths = attention_mask.sum(dim=1).tolist()
        texts = [ids[:length] for ids, length in zip(input_ids, lengths, strict=True)]
        files = [self.folder / f"{hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest()}.safetensors" for t in texts]
        pieces = {row: piece for row, file in enumerate(files) if (piece := self._read(file)) is not None}
        missing = [row for row in range(len(files)) if row not in pieces]
        if missing:
            longest = max(lengths[row] for row in missing)
            fresh = self.teacher.features(input_ids[missing, :longest], attention_mask[missing, :longest])
            for at, row in enumerate(missing):
                pieces[row] = TargetFeatures(fresh.taps[at, : lengths[row]], fresh.last[at, : lengths[row]])
                self._add(files[row], pieces[row])
        rows = [pieces[row] for row in range(len(files))]
        return TargetFeatures(
            *(
                torch.nn.utils.rnn.pad_sequence([getattr(row, name) for row in rows], batch_first=True)
                for name in ("taps", "last")
            )
        )

    def _read(self, file: Path) -> TargetFeatures | None:
        device = self.teacher.target.device
        try:
            with safe_open(file, framework="pt", device="cpu" if device.type == "meta" else str(device)) as tensors:
                return TargetFeatures(tensors.get_tensor("taps"), tensors.get_tensor("last"))
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            logger.warning("%s is damaged (%s) and is made anew.", file, error)
            file.unlink(missing_ok=True)
            return None

    def _add(self, file: Path, piece: TargetFeatures) -> None:
        size = sum(part.numel() * part.element_size() for part in (piece.taps, piece.last))
        if self.held_bytes + size > self.max_bytes:
            return
        temporary = self.folder / f"{file.stem}-{os.getpid()}.tmp"
        try:
            save_file({"taps": piece.taps.contiguous().cpu(), "last": piece.last.contiguous().cpu()}, temporary)
            os.replace(temporary, file)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            logger.warning("Hidden states are no longer kept in %s: %s", self.folder, error)
            self.max_bytes = 0
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        else:
            self.held_bytes += size
