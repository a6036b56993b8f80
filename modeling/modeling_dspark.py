"""
The DSpark drafter: a parallel backbone over an anchor and mask tokens, fed by the target's hidden states, then a
sequential head that ties the block's tokens together and a confidence head that says how far the block will survive.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from .backbone import DSparkLayer, DSparkRMSNorm, DSparkRotaryEmbedding
from .borrowing import HeadRows, call_module, embedding_scale
from .checkpoint_formats import find_reader
from .checkpoint_loading import (
    HUB_ARGUMENTS,
    check_draft_ids,
    check_loaded,
    check_tensors,
    converted_weights,
    find_file,
    make_config,
    read_raw_config,
    tensor_shapes,
    weight_files,
)
from .configuration_dspark import DSparkConfig
from .draft_context import BackbonePass, DraftContext
from .format_fields import Reading
from .heads import DSparkConfidenceHead, DSparkMarkovHead
from .static_pass import StaticPass


# What the Hub is told a drafter is.
TAGS = ("speculative-decoding", "draft-model", "dspark")


@dataclass
class DraftOutput:
    """
    One drafted block a row.

    Attributes:
        tokens (`torch.LongTensor` of shape `(rows, block_size)`): Draft tokens.
        confidence_logits (`torch.Tensor` of shape `(rows, block_size)`, *optional*): The confidence head's output.
    """

    tokens: torch.LongTensor
    confidence_logits: torch.Tensor | None


def tokens_at(ids: torch.LongTensor | None, places: torch.LongTensor) -> torch.LongTensor:
    """The tokens at `places`, `(rows,)`, among those that a slot's logits are of, as [`DSparkDraftModel.draft`] hands
    them out."""
    if ids is None:
        return places
    return ids[places] if ids.dim() == 1 else ids.gather(1, places[:, None]).squeeze(1)


class LastCall(threading.local):
    """Statistics of each thread's last call; they go with the thread, and a copy of the drafter starts without."""

    stats: Any | None = None

    def __deepcopy__(self, memo: dict) -> "LastCall":
        return LastCall()

    def __reduce__(self) -> tuple:
        return LastCall, ()


class DSparkDraftModel(PreTrainedModel):
    """
    A DSpark drafter. Hand it to a target's `generate` as `assistant_model`.

    The target is never part of the module tree: embedding and head, where the checkpoint has none of its own, are
    passed in by whoever drafts.

    Source: DSpark (arXiv 2607.05147) Section 3.1; parameter names as in DeepSpec, and `d2t` with ids, not offsets.
    """

    config_class = DSparkConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DSparkLayer"]
    _supports_sdpa = True
    # What `dspark_hf` looks for on an assistant, wrapped, compiled or loaded as remote code as it may be.
    is_dspark_drafter = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """The class that FSDP gives to what it shards goes by its base's name: `save_pretrained` copies its file."""
        super().__init_subclass__(**kwargs)
        if cls.__module__.startswith("torch.distributed."):
            base = cls.__bases__[-1]
            cls.__module__, cls.__name__, cls.__qualname__ = base.__module__, base.__name__, base.__qualname__

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        config.validate_drafter()
        drafted = config.draft_vocab_size or config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.owns_embedding else None
        self.lm_head = nn.Linear(config.hidden_size, drafted, bias=False) if config.owns_lm_head else None
        # The target ids of a reduced vocabulary, (draft_vocab_size,); the first ones until they are set.
        self.d2t = nn.Buffer(torch.arange(drafted)) if config.draft_vocab_size is not None else None
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkLayer(config, layer_type) for layer_type in config.layer_types])
        self.norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = DSparkMarkovHead(config) if config.markov_rank > 0 else None
        self.confidence_head = DSparkConfidenceHead(config) if config.enable_confidence_head else None
        self.rotary = DSparkRotaryEmbedding(config)
        self.head_rows = HeadRows()
        self.static_pass = StaticPass()
        # Defaults for drafting only: nothing of the model's config belongs in it.
        self.generation_config = GenerationConfig()
        self.last_call = LastCall()
        self.model_tags = list(TAGS)  # `push_to_hub` adds to it, so each has its own
        self.post_init()

    def get_input_embeddings(self) -> nn.Module | None:
        """The drafter's own embedding, or `None` where it borrows the target's."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the drafter's own embedding."""
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        """The drafter's own head, or `None` where it borrows the target's."""
        return self.lm_head

    def set_draft_vocabulary(self, token_ids: torch.Tensor) -> None:
        """
        Say which tokens a new drafter with a reduced vocabulary drafts, before it is trained.

        Args:
            token_ids (`torch.Tensor` of shape `(draft_vocab_size,)`): Target ids, increasing.

        Raises:
            `ValueError`: if they are not, or the drafter has the target's whole vocabulary.
        """
        if self.d2t is None:
            raise ValueError(
                "`draft_vocab_size` is null: this drafter drafts every token. Set it in the config first."
            )
        ids = check_draft_ids(torch.as_tensor(token_ids), self.config.vocab_size, "`token_ids`")
        if len(ids) != len(self.d2t):
            raise ValueError(f"`token_ids` has {len(ids)} tokens; `draft_vocab_size` is {len(self.d2t)}.")
        self.d2t.copy_(ids)

    # Drafting

    def block_tokens(self, anchors: torch.LongTensor) -> torch.LongTensor:
        """
        What the slots of a block hold: the anchor, then mask tokens.

        Args:
            anchors (`torch.LongTensor` of shape `(rows,)`): The token each block starts from.

        Returns:
            `torch.LongTensor` of shape `(rows, block_slots)`.
        """
        block = anchors.new_full((len(anchors), self.config.block_slots), self.config.mask_token_id)
        block[:, 0] = anchors
        return block

    def embed(self, token_ids: torch.LongTensor, target_embedding: nn.Module | None = None) -> torch.Tensor:
        """
        Embed tokens with the drafter's own embedding or the target's.

        Args:
            token_ids (`torch.LongTensor` of any shape): Tokens.
            target_embedding (`nn.Module`, *optional*): The target's input embedding, called as a module (a quantised
                or sharded one has no usable weight). Needed if the checkpoint has no embedding.

        Returns:
            `torch.Tensor`: `noise_embeds`, in the drafter's dtype and on its device.

        Raises:
            `ValueError`: if neither has an embedding.
        """
        if self.embed_tokens is None and target_embedding is None:
            raise ValueError("This drafter has no embedding of its own; pass `target_embedding`, the target's.")
        embedding = self.embed_tokens if self.embed_tokens is not None else target_embedding
        embeds = call_module(embedding, token_ids)
        # A wrapper such as Gemma's has multiplied by a scale already, which the drafter's replaces. Both are rounded
        # to the embeddings' dtype, as Gemma does, so equal scales leave the wrapper's output untouched.
        wanted, applied = (
            torch.tensor(float(scale), dtype=embeds.dtype, device="cpu").item()
            for scale in (self.config.embedding_scale, embedding_scale(embedding))
        )
        if wanted != applied:
            embeds = embeds * (wanted / applied)
        return embeds.to(self.fc.weight.device, self.fc.weight.dtype)

    def base_logits(self, hidden_states: torch.Tensor, target_lm_head: nn.Module | None = None) -> torch.Tensor:
        """
        Logits U_k of the parallel backbone, before the sequential correction.

        Args:
            hidden_states (`torch.Tensor` of shape `(..., hidden_size)`): The backbone's output.
            target_lm_head (`nn.Module`, *optional*): The target's head; needed if the checkpoint has none.

        Returns:
            `torch.Tensor` of shape `(..., vocab_size)`, or `(..., draft_vocab_size)` if the vocabulary is reduced.

        Raises:
            `ValueError`: if neither has a head.
        """
        if self.lm_head is None and target_lm_head is None:
            raise ValueError("This drafter has no head of its own; pass `target_lm_head`, the target's.")
        if self.lm_head is not None:
            logits = call_module(self.lm_head, hidden_states)
        elif self.d2t is not None:
            logits = self.head_rows.logits(target_lm_head, hidden_states, self.d2t)
        else:
            logits = call_module(target_lm_head, hidden_states)
        logits = logits.to(hidden_states.device)
        if (multiplier := self.config.output_multiplier) != 1.0:
            logits = logits * multiplier
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        return logits

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        context_lengths: Sequence[int],
        context: DraftContext,
        objective: Callable[[torch.Tensor], Any] | None = None,
    ) -> Any:
        """
        One pass of the parallel backbone: append the new context's keys and values, then run the blocks over it.

        Args:
            noise_embeds (`torch.Tensor` of shape `(rows, block_slots, hidden_size)`):
                Embeddings of each row's anchor followed by mask tokens.
            context_hidden_states (`torch.Tensor` of shape `(sum(context_lengths), taps * target_hidden_size)`):
                The target's tapped hidden states at positions accepted since the last pass, row after row.
            context_lengths (`Sequence[int]`): How many of them belong to each row.
            context ([`DraftContext`]): The rows' remembered context. Afterwards it holds every position strictly
                before the rows' anchors, or the last ones if it has a window.
            objective (`Callable`, *optional*): Called with the output; what it returns is returned instead. Training
                computes its loss in here, so that wrappers (DDP, FSDP) see the heads at work inside `forward`.

        Returns:
            `torch.Tensor` of shape `(rows, block_size, hidden_size)`: normed output h_k of each draft's slot.

        Source: DSpark Eq. 2 and 3.
        """
        assert sum(context_lengths) == len(context_hidden_states)
        context_hidden_states, context_lengths = context.narrow(context_hidden_states, context_lengths)
        if context.compile_config is not None and context.is_steady(context_lengths):
            block = self.static_pass(self, noise_embeds, context_hidden_states, context_lengths, context)
        else:
            step = context.plan(context_lengths, noise_embeds.shape[1], noise_embeds.device)
            block = self.backbone(noise_embeds, context_hidden_states, step, context.layers)
        context.advance(context_lengths)
        hidden_states = self.norm(context.drafts(block))
        return hidden_states if objective is None else objective(hidden_states)

    def backbone(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        step: BackbonePass,
        buffers: Sequence[Any],
    ) -> torch.Tensor:
        """
        The layers of one pass, planned.

        Args:
            noise_embeds, context_hidden_states: As for [`forward`].
            step ([`BackbonePass`]): Where their tokens go.
            buffers (`Sequence[SlotBuffer]`): Each layer's keys and values.

        Returns:
            `torch.Tensor` of shape `(rows, block_slots, hidden_size)`: the block behind the last layer.
        """
        features = self.hidden_norm(self.fc(context_hidden_states.to(noise_embeds)))
        rotary = self.rotary(step.positions, noise_embeds.dtype)
        block = noise_embeds
        for layer, buffer in zip(self.layers, buffers, strict=True):
            block = layer(block, context=features, rotary=rotary, buffer=buffer, step=step)
        return block

    def draft(
        self,
        hidden_states: torch.Tensor,
        anchors: torch.LongTensor,
        target_lm_head: nn.Module | None = None,
        select: Callable[[int, torch.Tensor, torch.LongTensor | None], torch.LongTensor] | None = None,
        slots: int | None = None,
        top_k: int | None = None,
    ) -> DraftOutput:
        """
        Draw a block left to right: each token's logits are the base logits plus the sequential head's correction for
        the tokens drawn before it (Eq. 4).

        Args:
            hidden_states (`torch.Tensor` of shape `(rows, block_size, hidden_size)`): Output of the backbone.
            anchors (`torch.LongTensor` of shape `(rows,)`): The token each block starts from.
            target_lm_head (`nn.Module`, *optional*): The target's head; needed if the checkpoint has none.
            select (`Callable`, *optional*): Called with the slot, its logits of shape `(rows, tokens)` and the tokens
                that they are of: `None` for all, increasing ids of shape `(tokens,)` for a reduced vocabulary, or
                `(rows, tokens)` with `top_k`. Returns the drawn tokens (the target's, as all tokens are) of shape
                `(rows,)`. Defaults to the argmax.
            slots (`int`, *optional*): How many of the block's slots are drawn, from the first on. Defaults to all.
            top_k (`int`, *optional*): Only the tokens with the highest base logits of each slot are corrected and can
                be drawn. Defaults to all.

        Returns:
            [`DraftOutput`].
        """
        select = select or self._most_likely
        rows, _, width = hidden_states.shape
        # As strides are for this shape: for what is left of a larger one, bfloat16 products on a CPU take 20 times as
        # long, and longer by the row.
        hidden_states = hidden_states[:, :slots].reshape(-1, width).contiguous().view(rows, -1, width)
        base, places, ids = self.base_logits(hidden_states, target_lm_head), None, self.d2t
        if top_k is not None and top_k < base.shape[-1]:
            places = base.topk(top_k, dim=-1, sorted=False).indices.sort(dim=-1).values  # (rows, slots, top_k)
            base = base.gather(-1, places)
            ids = places if self.d2t is None else self.d2t[places]
        head = self.markov_head
        state = head.initial_state(hidden_states) if head is not None else None
        previous, tokens = anchors, []
        for slot in range(hidden_states.shape[1]):
            logits = base[:, slot]
            if head is not None:
                features, state = head.features(previous, hidden_states[:, slot], state)
                logits = logits + head.correction(features, None if places is None else places[:, slot])
            previous = select(slot, logits, ids if places is None else ids[:, slot])
            tokens.append(previous)
        tokens = torch.stack(tokens, dim=1)
        return DraftOutput(tokens, self.confidence_logits(hidden_states, anchors, tokens))

    @staticmethod
    def _most_likely(slot: int, logits: torch.Tensor, ids: torch.LongTensor | None) -> torch.LongTensor:
        return tokens_at(ids, logits.argmax(dim=-1))

    def confidence_logits(
        self, hidden_states: torch.Tensor, anchors: torch.LongTensor, tokens: torch.LongTensor
    ) -> torch.Tensor | None:
        """
        The confidence head's output for whole blocks (Eq. 7).

        Args:
            hidden_states (`torch.Tensor` of shape `(rows, block_size, hidden_size)`): Output of the backbone.
            anchors (`torch.LongTensor` of shape `(rows,)`): The token each block starts from.
            tokens (`torch.LongTensor` of shape `(rows, block_size)`): The block's tokens; the last one is not read.

        Returns:
            `torch.Tensor` of shape `(rows, block_size)`, or `None` without a confidence head.
        """
        if self.confidence_head is None:
            return None
        embeds = None
        if self.confidence_head.with_markov:
            # Slot k reads the token before it, so everything in its confidence is known before token k is drawn.
            embeds = self.markov_head.markov_w1(torch.cat([anchors[:, None], tokens[:, :-1]], dim=1))
        return self.confidence_head(hidden_states, embeds)

    # What transformers asks of a model

    @property
    def speculative_stats(self) -> Any | None:
        """Statistics of this thread's last `generate` with this drafter, or `None`."""
        return self.last_call.stats

    @classmethod
    def can_generate(cls) -> bool:
        """True, so that transformers keeps and saves a `generation_config`: the drafter's defaults for drafting."""
        return True

    def generate(self, *args: Any, **kwargs: Any) -> None:
        """Not possible: a drafter has no text of its own."""
        raise ValueError(
            "A DSpark drafter cannot generate alone: it needs the hidden states of its target. Load the target and "
            "call `target.generate(**inputs, assistant_model=drafter)` after `import dspark_hf`."
        )

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *args: Any,
        config: DSparkConfig | None = None,
        generation_config: GenerationConfig | None = None,
        **kwargs: Any,
    ) -> "DSparkDraftModel":
        """
        Load a drafter from a folder or the Hub: one saved by this library, or by DeepSpec, NeMo AutoModel, z-lab
        DFlash, speculators, SpecForge or NVIDIA ModelOpt. Strictly: each tensor is used, each parameter filled.

        Args:
            pretrained_model_name_or_path (`str` or `Path`): Folder or Hub id.
            config ([`DSparkConfig`], *optional*): Used in place of the folder's; the tensors are called as ours are.
            generation_config (`GenerationConfig`, *optional*): Used in place of the folder's.
            kwargs: As for `PreTrainedModel.from_pretrained`; fields of [`DSparkConfig`] override the folder's.

        Raises:
            `ValueError`: if the format is not readable, the config is wrong, a tensor is missing, left over or of
                another shape, or holds values that are not finite.
            `OSError`: if there is no config or no safetensors file.
        """
        path = str(pretrained_model_name_or_path)
        where = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in DSparkConfig.__annotations__}
        want_info = kwargs.pop("output_loading_info", False)
        if kwargs.pop("use_safetensors", None) is False:
            raise ValueError("`use_safetensors` is False; only safetensors weights are read.")
        if config is None:
            raw = read_raw_config(pretrained_model_name_or_path, where)
            read = find_reader(raw)
        elif getattr(config, "model_type", None) != cls.config_class.model_type:
            raise ValueError(
                f"`config` is a {type(config).__name__}; pass a DSparkConfig, or none to read the folder's."
            )
        files = weight_files(pretrained_model_name_or_path, where, kwargs.get("variant"))
        shapes = tensor_shapes(files)
        reading = Reading({}) if config is not None else read(raw, set(shapes))
        if config is None:
            config = make_config(cls.config_class, reading.fields)
        config = copy.deepcopy(config)
        for name, value in overrides.items():
            setattr(config, name, value)
        config.validate_drafter()
        check_tensors(cls, config, reading, shapes, path)
        kwargs.pop("force_download", None)  # reading the shapes has fetched the files afresh
        source, weights = pretrained_model_name_or_path, None
        if reading.renamed or "d2t" in shapes:
            source, weights = None, converted_weights(files, reading, config, path)
        model, info = super().from_pretrained(
            source,
            *args,
            config=config,
            state_dict=weights,
            use_safetensors=True,
            output_loading_info=True,
            **kwargs,
        )
        model.name_or_path = model.config.name_or_path = path
        check_loaded(model, info, path)
        if generation_config is not None:
            model.generation_config = generation_config
        elif find_file(pretrained_model_name_or_path, GENERATION_CONFIG_NAME, where) is not None:
            model.generation_config = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **where)
        return (model, info) if want_info else model


__all__ = ["DSparkDraftModel"]
