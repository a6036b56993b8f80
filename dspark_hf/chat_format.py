"""How prompts of a target are written as tokens: in its chat template, or as plain text if it has none."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

THINKING = ("default", "on", "off")
# Stands where a user's text would, to see what a template puts around it.
_PLACEHOLDER = "DSPARKUSERTEXT"


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
            `ValueError`: if the template refuses them, or there is none and they are several.
        """
        if self.template is None:
            if len(messages) > 1:
                raise ValueError(
                    f"a conversation of {len(messages)} messages, but the target's tokenizer has no chat template; "
                    "give single prompts, or a target with a template"
                )
            return list(self.tokenizer(messages[0]["content"])["input_ids"])
        encoded = self._apply(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def user_turn(self, system: str | None = None) -> tuple[list[int], list[int]]:
        """
        What stands before a user's text, from the start on, and what follows it.

        Args:
            system (`str`, *optional*): The system's message; by default what the template does without one.

        Returns:
            `tuple`: the tokens before, and the tokens behind, without the answer's header.

        Raises:
            `ValueError`: if there is no template, it refuses a system's message, or hides where the text stands.
        """
        if self.template is None:
            raise ValueError("the target's tokenizer has no chat template; give prompts")
        messages = [] if system is None else [{"role": "system", "content": system}]
        text = self._apply([*messages, {"role": "user", "content": _PLACEHOLDER}], tokenize=False)
        before, found, behind = text.partition(_PLACEHOLDER)
        if not found or _PLACEHOLDER in behind:
            raise ValueError("the target's chat template does not show a user's text once and as it is; give prompts")
        return tuple(list(self.tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, behind))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _apply(self, messages: Sequence[dict[str, str]], **arguments: Any) -> Any:
        from jinja2.exceptions import TemplateError

        try:
            return self.tokenizer.apply_chat_template(list(messages), **arguments, **self.options)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the target's chat template refuses the roles {roles}: {error}") from error


def end_tokens(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a target's text: those of its generation config if it has any, else the tokenizer's."""
    own = None if config is None else config.eos_token_id
    if own is None:
        own = tokenizer.eos_token_id
    if own is None:
        return frozenset()
    return frozenset([own] if isinstance(own, int) else own)
