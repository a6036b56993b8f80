"""
How prompts and conversations of a target are written as tokens: in its chat template, or as plain text if it has none.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

THINKING = ("default", "on", "off")
# Stands where a user's text would, to see what a template puts around it.
_PLACEHOLDER = "DSPARKUSERTEXT"
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatFormat:
    """
    A tokenizer and its chat template.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its chat template is used if it has one.
        thinking (`str`, *optional*, defaults to `"default"`): `"on"` or `"off"` is handed to the template as
            `enable_thinking`; `"default"` leaves it to the template.

    Raises:
        `ValueError`: if thinking is to be switched and there is no template, or it does not ask for it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: str = "default"):
        if thinking not in THINKING:
            raise ValueError(f"`thinking` is {thinking!r}; it must be one of {', '.join(THINKING)}.")
        self.tokenizer = tokenizer
        self.template: str | None = tokenizer.get_chat_template() if tokenizer.chat_template else None
        self.knows_thinking = bool(self.template) and re.search(r"\benable_thinking\b", self.template) is not None
        if thinking != "default" and not self.knows_thinking:
            raise ValueError(
                f"thinking {thinking!r}: the target's chat template does not read `enable_thinking`, so thinking "
                "cannot be switched; leave it at 'default'"
            )
        self.options: dict[str, Any] = {} if thinking == "default" else {"enable_thinking": thinking == "on"}

    def describe(self) -> dict[str, Any]:
        """What provenance says of it: the tokenizer's class and size, and a hash of the template."""
        digest = hashlib.sha256(self.template.encode()).hexdigest() if self.template else None
        return {
            "class": type(self.tokenizer).__name__,
            "size": len(self.tokenizer),
            "chat_template_sha256": digest,
            "template_reads_enable_thinking": self.knows_thinking,
        }

    def encode_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """
        The tokens up to where the target answers.

        Args:
            messages (`Sequence[dict]`): With `role` and `content`, the last a user's. Without a template one user's
                message, which is continued.

        Raises:
            `ValueError`: if the template fails, or there is none and they are several.
        """
        if self.template is None:
            if len(messages) > 1:
                raise ValueError(
                    f"a conversation of {len(messages)} messages, but the target's tokenizer has no chat template; "
                    "give single prompts, or a target with a template"
                )
            return list(self.tokenizer(messages[0]["content"])["input_ids"])
        encoded = apply_template(
            self.tokenizer, messages, add_generation_prompt=True, return_dict=True, **self.options
        )
        return list(encoded["input_ids"])

    def user_turn(self, system: str | None = None) -> tuple[list[int], list[int]]:
        """
        What stands before a user's text, from the start on, and what follows it.

        Args:
            system (`str`, *optional*): The system's message; by default what the template does without one.

        Returns:
            `tuple`: the tokens before, and the tokens behind, without the answer's header.

        Raises:
            `ValueError`: if there is no template, it fails, or hides where the text stands.
        """
        if self.template is None:
            raise ValueError("the target's tokenizer has no chat template; give prompts")
        messages = [] if system is None else [{"role": "system", "content": system}]
        turns = [*messages, {"role": "user", "content": _PLACEHOLDER}]
        text = apply_template(self.tokenizer, turns, tokenize=False, **self.options)
        before, found, behind = text.partition(_PLACEHOLDER)
        if not found or _PLACEHOLDER in behind:
            raise ValueError("the target's chat template does not show a user's text once and as it is; give prompts")
        return tuple(list(self.tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, behind))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def apply_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], **arguments: Any) -> Any:
    """
    `apply_chat_template`, whose every error says whose template it is.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        messages (`Sequence[dict]`): With `role` and `content`.
        arguments: As for `apply_chat_template`.

    Raises:
        `ValueError`: naming the tokenizer, the roles and what the template raised.
    """
    try:
        return tokenizer.apply_chat_template(list(messages), **arguments)
    except Exception as error:  # a template is a program of somebody else's, so it can be any
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template of the tokenizer {tokenizer.name_or_path!r} fails on the roles {roles}: "
            f"{type(error).__name__}: {error}; give what it takes, or mend it"
        ) from error


def end_tokens(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a target's text: those of its generation config if it has any, else the tokenizer's."""
    own = None if config is None else config.eos_token_id
    if own is None:
        own = tokenizer.eos_token_id
    if own is None:
        return frozenset()
    return frozenset([own] if isinstance(own, int) else own)


def chat_loss_mask(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, str]],
    end_tokens: Collection[int] = (),
    template_options: dict[str, Any] | None = None,
) -> tuple[list[int], list[int]]:
    """
    A conversation as tokens, and which of them the assistant wrote.

    A template that marks its assistant turns (`{% generation %}`) is asked; otherwise a turn is what the template
    adds to the conversation before it. In both cases a turn lasts through the token that ends it, and what the
    template puts behind that (often a newline) is not the assistant's.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): With a chat template.
        messages (`Sequence[dict]`): With `role` and `content`.
        end_tokens (`Collection[int]`, *optional*): Tokens that end a turn; by default the tokenizer's `eos_token_id`.
        template_options (`dict`, *optional*): Handed to the template, for example `{"enable_thinking": False}`.

    Returns:
        `tuple`: `input_ids` and `loss_mask`, lists of the same length.

    Raises:
        `ValueError`: if the template fails, or has no such marks and rewrites earlier turns, so that what it adds
            cannot be told.
    """
    options = template_options or {}
    ends = set(end_tokens) or {tokenizer.eos_token_id}
    if tokenizer.is_fast and _GENERATION_MARK.search(tokenizer.get_chat_template()):
        encoded = apply_template(tokenizer, messages, return_dict=True, return_assistant_tokens_mask=True, **options)
        token_ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    else:
        token_ids, mask = _mask_by_prefixes(tokenizer, list(messages), options)
    return token_ids, _through_end_of_turn(token_ids, mask, ends)


def _mask_by_prefixes(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], options: dict[str, Any]
) -> tuple[list[int], list[int]]:
    def encode(count: int, **more: bool) -> list[int]:
        encoded = apply_template(tokenizer, messages[:count], return_dict=True, **more, **options)
        return list(encoded["input_ids"])

    token_ids = encode(len(messages))
    mask = [0] * len(token_ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise ValueError("The conversation begins with an assistant's turn; it must begin with a user's.")
        before, through = encode(index, add_generation_prompt=True), encode(index + 1)
        if through[: len(before)] != before or token_ids[: len(through)] != through:
            raise ValueError(
                f"The chat template writes message {index + 1} of {len(messages)} differently when other messages "
                "follow or precede it, so the assistant's tokens cannot be told from the others. Use a template with "
                "{% generation %} marks, or conversations with one assistant turn."
            )
        mask[len(before) : len(through)] = [1] * (len(through) - len(before))
    return token_ids, mask


def _through_end_of_turn(token_ids: Sequence[int], mask: Sequence[int], ends: Collection[int]) -> list[int]:
    """A mask whose turns end with their last end token, or with one that stands right behind them."""
    mask, start = list(mask), 0
    while 1 in mask[start:]:
        first = mask.index(1, start)
        behind = mask.index(0, first) if 0 in mask[first:] else len(mask)
        last = next((place for place in range(behind - 1, first - 1, -1) if token_ids[place] in ends), None)
        if last is not None:
            mask[last + 1 : behind] = [0] * (behind - last - 1)
        elif behind < len(mask) and token_ids[behind] in ends:
            mask[behind] = 1
            behind += 1
        start = behind
    return mask
