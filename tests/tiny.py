"""Random targets and drafters, small enough to be run thousands of times, and drafters that know the answer."""

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark_hf import DSparkConfig, DSparkDraftModel, decoding
from dspark_hf.candidate_generator import Candidates, DSparkCandidateGenerator
from dspark_hf.modeling.configuration_dspark import MARKOV_HEAD_TYPES
from dspark_hf.sequences import Sequences


HEADS = ("none", *MARKOV_HEAD_TYPES)


def scramble(model: PreTrainedModel, seed: int, scale: float) -> PreTrainedModel:
    """Random weights, large enough for distributions far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.copy_(1 + 0.3 * noise if "norm" in name else scale * noise)
    return model.eval()


def random_target(family: str = "llama", vocab_size: int = 4, seed: int = 0, dtype=torch.float64, **changes: Any):
    """A two-layer target without an end token."""
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[family]
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    target = model_class(config_class(**fields | changes)).to(dtype)
    return scramble(target, seed, scale=0.6)


def random_drafter(head: str = "vanilla", vocab_size: int = 4, seed: int = 1, dtype=torch.float64, **changes: Any):
    """A one-layer drafter for [`random_target`], whose confidence is all over the place."""
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "target_layer_ids": [-1, 0],
        "num_target_layers": 2,
        "block_size": 2,
        "mask_token_id": 0,
        "markov_rank": 0 if head == "none" else 3,
        "markov_head_type": "vanilla" if head == "none" else head,
        "confidence_head_with_markov": head != "none",
    }
    drafter = DSparkDraftModel(DSparkConfig(**fields | changes)).to(dtype)
    return scramble(drafter, seed, scale=0.6)


def reduced_drafter(head: str = "vanilla", ids: tuple[int, ...] = (0, 2, 3), seed: int = 1, **changes: Any):
    """A random drafter for [`random_target`] that drafts these tokens and borrows embedding and head."""
    drafter = random_drafter(head, seed=seed, draft_vocab_size=len(ids), **changes)
    drafter.set_draft_vocabulary(torch.tensor(ids))
    return drafter


class Oracle(DSparkCandidateGenerator):
    """
    Drafts as its parent does, so that everything around it happens, but hands out what the target is going to say.

    Class attributes are set by [`oracle`]: `script`, each row's tokens from the prompt on, and `right`, how many
    drafts of each block in turn are right before one is wrong.
    """

    script: Sequence[Sequence[int]]
    right: Iterator[int]

    def get_candidates(self, sequences: Sequences, rows: Sequence[int], room: Sequence[int], slots: int) -> Candidates:
        candidates = super().get_candidates(sequences, rows, room, slots)
        for index, row in enumerate(rows):
            place = sequences.lengths[row]
            known = list(self.script[row][place : place + slots])
            drafts = torch.tensor(known + [0] * (slots - len(known)))
            wrong = next(self.right)
            if wrong < slots:
                drafts[wrong] = (drafts[wrong] + 1) % self.drafter.config.vocab_size
            candidates.tokens[index] = drafts
        return candidates


# How many drafts of each block in turn are right.
PATTERNS = {"everything": [99], "nothing": [0], "alternately": [99, 0, 2, 1, 4]}


def oracle(monkeypatch: pytest.MonkeyPatch, script: torch.Tensor, pattern: str) -> None:
    """Let every drafter be an [`Oracle`] from now on."""
    attributes = {"script": script.tolist(), "right": cycle(PATTERNS[pattern])}
    monkeypatch.setattr(decoding, "DSparkCandidateGenerator", type("Oracle", (Oracle,), attributes))


def character_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of `tiny-target`: id 0 is a newline, id i the character 31 + i."""
    vocab = {"\n": 0} | {chr(31 + token): token for token in range(1, 96)}
    model = Tokenizer(models.WordLevel(vocab, unk_token="~"))
    model.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    model.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=model, clean_up_tokenization_spaces=False)


def encode(*texts: str) -> dict[str, torch.Tensor]:
    """Prompts of `tiny-target`, left-padded with tildes."""
    longest = max(map(len, texts))
    ids = [[0 if char == "\n" else ord(char) - 31 for char in text.rjust(longest, "~")] for text in texts]
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
