"""What a call and its drafter say about drafting and scheduling, in the fields of a `GenerationConfig`."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import CompileConfig, GenerationConfig

from .scheduling import SCHEDULES


@dataclass(frozen=True)
class ScheduleOptions:
    """
    Each is taken from the call if it was given there, else from `drafter.generation_config`, else the default. What
    equals Transformers' own default, `"constant"` and 0.4, cannot be told from it and counts as not given to a call:
    where the drafter's config says otherwise, `"confidence"` with a threshold of 0 sends whole blocks.

    Args:
        schedule (`str`): `num_assistant_tokens_schedule`, one of `SCHEDULES`; by default `"constant"`, whole blocks,
            or `"confidence"` where a threshold was given.
        threshold (`float`): `assistant_confidence_threshold` of the schedule `"confidence"` and of the hardware-aware
            ones where they have no profile, on the survival; by default Transformers' 0.4.
        min_verify_length (`int`): Drafts of each row that are sent whatever they cost; by default 0.
        max_starved_rounds (`int`, *optional*): A row that was passed over in so many rounds, in which drafts of others
            were sent, gets one sent; by default none does.
        context_window (`int`, *optional*): `draft_context_window`, positions before a block that the drafter sees; by
            default all that its layers see.
        top_k (`int`, *optional*): `draft_top_k`, tokens of each slot, those that the drafter's backbone ranks highest,
            that its sequential head corrects and that can be drafted; by default all.
    """

    schedule: str = "constant"
    threshold: float = 0.0
    min_verify_length: int = 0
    max_starved_rounds: int | None = None
    context_window: int | None = None
    top_k: int | None = None

    @classmethod
    def of_call(cls, drafter: Any, generation_config: GenerationConfig) -> "ScheduleOptions":
        """
        Read the options of a call.

        Args:
            drafter (`DSparkDraftModel`): Its `generation_config` holds the defaults.
            generation_config (`GenerationConfig`): Of the call, as `generate` completed it.

        Raises:
            `ValueError`: naming the option, its value and what is allowed.
        """
        configs = (generation_config, drafter.generation_config)
        # Transformers fills the call's config with defaults of its own, which cannot be told from the same values
        # given by the user: on a call they count as not given.
        defaults = GenerationConfig._get_default_generation_params()

        def given(name: str) -> Any:
            of_call, of_drafter = (getattr(config, name, None) for config in configs)
            return of_call if of_call is not None and of_call != defaults.get(name) else of_drafter

        schedule, threshold = given("num_assistant_tokens_schedule"), given("assistant_confidence_threshold")
        if schedule is None:
            schedule = "confidence" if threshold else "constant"
        elif schedule == "constant" and threshold:
            schedule = "confidence"
        if threshold is None:
            threshold = defaults["assistant_confidence_threshold"]
        floor, patience = given("min_verify_length"), given("max_starved_rounds")
        window, top_k = given("draft_context_window"), given("draft_top_k")
        options = cls(schedule, threshold, 0 if floor is None else floor, patience, window, top_k)
        options._check(drafter)
        return options

    def _check(self, drafter: Any) -> None:
        compile_config = drafter.generation_config.compile_config
        if compile_config is not None and not isinstance(compile_config, CompileConfig):
            raise ValueError(
                f"`compile_config` of `drafter.generation_config` is {compile_config!r}; it must be a "
                "`transformers.CompileConfig`, or None."
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"`num_assistant_tokens_schedule` is {self.schedule!r}; with a DSpark drafter it is one of "
                f"{', '.join(SCHEDULES)}."
            )
        if not _is_number(self.threshold) or not 0.0 <= self.threshold <= 1.0:
            raise ValueError(
                f"`assistant_confidence_threshold` is {self.threshold!r}; it is a probability, 0 (whole blocks) to 1."
            )
        for name, value, least in (
            ("min_verify_length", self.min_verify_length, 0),
            ("max_starved_rounds", self.max_starved_rounds, 1),
            ("draft_context_window", self.context_window, 1),
            ("draft_top_k", self.top_k, 1),
        ):
            if name != "min_verify_length" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"`{name}` is {value!r}; it must be an integer of at least {least}.")
        if self.schedule != "constant" and not drafter.config.enable_confidence_head:
            option, value, off = "num_assistant_tokens_schedule", repr(self.schedule), "'constant'"
            if self.schedule == "confidence":
                option, value, off = "assistant_confidence_threshold", self.threshold, 0
            raise ValueError(
                f"`{option}` is {value} but this drafter has no confidence head; set it to {off} on "
                "`drafter.generation_config` and leave it out of the call."
            )


@contextlib.contextmanager
def drafter_schedule(drafter: Any, schedule: str, threshold: float | None) -> Iterator[None]:
    """
    Let every call with a drafter go by a schedule. It stands in the drafter's own defaults meanwhile, because
    `"constant"` and a threshold of 0.4 count as not given on a call.

    Args:
        drafter (`DSparkDraftModel`): Its `generation_config` is put back afterwards.
        schedule (`str`): One of `SCHEDULES`.
        threshold (`float`, *optional*): `assistant_confidence_threshold`, for `"confidence"`.
    """
    with drafter_defaults(drafter, num_assistant_tokens_schedule=schedule, assistant_confidence_threshold=threshold):
        yield


@contextlib.contextmanager
def drafter_defaults(drafter: Any, **values: Any) -> Iterator[None]:
    """Let fields of a drafter's `generation_config` have other values meanwhile."""
    own = drafter.generation_config
    drafter.generation_config = copy.deepcopy(own)
    for name, value in values.items():
        setattr(drafter.generation_config, name, value)
    try:
        yield
    finally:
        drafter.generation_config = own


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
