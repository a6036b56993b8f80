"""What `dspark doctor` checks of a target and a drafter, one finding a check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .card_inputs import TRAINING_NAME, read_training
from .modeling.checkpoint_loading import find_file
from .target_limits import check_target
from .target_outputs import text_config


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .modeling import DSparkConfig
    from .probing import Probe
    from .profiles import Profile

OK, WARNING, PROBLEM = "ok", "warning", "problem"
# Below so many accepted drafts a block a drafter does not know its target.
_STRANGE = 0.1
ROWS = (1, 2, 4, 8, 16, 32)
# Times plain generate that a short measurement cannot make up.
LEAST_GAIN = 1.05


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        status (`str`): `OK`, `WARNING` or `PROBLEM`.
        check (`str`): What was looked at, in a word or two.
        text (`str`): What was found, and what to do about it.
    """

    status: str
    check: str
    text: str


@dataclass(frozen=True)
class Payoff:
    """
    What drafting is expected to bring with a number of rows.

    Attributes:
        rows (`int`): Rows of a batch.
        drafts (`int`): Drafts of each row, the best number.
        plain, drafted (`float`): Tokens a second without and with a drafter.
    """

    rows: int
    drafts: int
    plain: float
    drafted: float

    @property
    def ratio(self) -> float:
        """Drafted over plain."""
        return self.drafted / self.plain


def check_sizes(config: DSparkConfig, target: PreTrainedModel) -> list[Finding]:
    """Vocabulary, width and layers of a drafter's config against its target."""
    wanted, findings = text_config(target), []
    for check, expected, found in (
        ("vocabulary", config.vocab_size, wanted.vocab_size),
        ("width", config.target_hidden_size, wanted.hidden_size),
        ("layers", config.num_target_layers, wanted.num_hidden_layers),
    ):
        if expected is None:
            findings.append(Finding(OK, check, f"the target has {found}; the drafter does not say what it expects"))
        elif expected != found:
            text = f"the drafter was made for {expected}, the target has {found}: load the drafter of this target"
            findings.append(Finding(PROBLEM, check, text))
        else:
            findings.append(Finding(OK, check, f"{found}, as the drafter expects"))
    last = wanted.num_hidden_layers - 2
    if config.target_layer_ids[-1] > last:
        text = f"{list(config.target_layer_ids)} go beyond layer {last}, the last that can be tapped of this target"
        findings.append(Finding(PROBLEM, "taps", text))
    else:
        findings.append(Finding(OK, "taps", f"{list(config.target_layer_ids)} of layers -1 to {last}"))
    return findings


def check_verifiable(target: PreTrainedModel) -> Finding:
    """Whether a target can verify drafts at all."""
    try:
        check_target(target, keep_attentions=False)
    except ValueError as error:
        return Finding(PROBLEM, "target", str(error))
    return Finding(OK, "target", f"{type(target).__name__} can verify several tokens in a step")


def check_tokenizer(
    config: DSparkConfig,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafters: PreTrainedTokenizerBase | None,
) -> list[Finding]:
    """
    The target's tokenizer against the vocabulary, end tokens, the mask token, and the tokenizer in the drafter's
    folder, if there is one.
    """
    findings = []
    vocabulary, size = tokenizer.get_vocab(), text_config(target).vocab_size
    highest = max(vocabulary.values())
    if highest >= size:
        text = f"it makes tokens up to {highest}, the target has {size}: it is another model's"
        findings.append(Finding(PROBLEM, "tokenizer", text))
    else:
        findings.append(Finding(OK, "tokenizer", f"{len(vocabulary)} tokens for a vocabulary of {size}"))
    if drafters is not None:
        theirs = drafters.get_vocab()
        other = sum(vocabulary.get(token) != number for token, number in theirs.items())
        if other:
            text = f"{other} tokens of the one in the drafter's folder are others or absent in the target's"
            findings.append(Finding(PROBLEM, "tokenizer", text + ": the drafter is for another target"))
    ends = target.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        text = f"the tokenizer's is {tokenizer.eos_token_id}, generation ends at {ends}: texts may not end"
        findings.append(Finding(WARNING, "end token", text))
    mask, special = config.mask_token_id, {*ends, tokenizer.bos_token_id, tokenizer.eos_token_id}
    if mask in special:
        text = f"{mask} begins or ends texts as well; the one that filled the blocks in training rarely does"
        findings.append(Finding(WARNING, "mask token", text))
    else:
        name = next((token for token, number in vocabulary.items() if number == mask), None)
        text = f"{mask} ({name!r})" if name is not None else f"{mask}, which the tokenizer never makes"
        findings.append(Finding(OK, "mask token", text))
    return findings


def check_template(tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Whether prompts can be put as chats, as instruction-tuned targets and their drafters expect."""
    if tokenizer.chat_template is None:
        text = "the tokenizer has no chat template: prompts are continued as plain text, which drafters of chat"
        return Finding(WARNING, "template", text + " models were not trained on")
    return Finding(OK, "template", "the tokenizer has a chat template; the probe's prompts go through it")


def check_training(drafter: str | Path, target: str) -> Finding | None:
    """Whether the drafter's provenance, if it has one, names this target."""
    path = find_file(drafter, TRAINING_NAME, {})
    if path is None:
        return None
    try:
        trained_for = read_training(Path(path)).get("target", {}).get("id")
    except ValueError as error:
        return Finding(WARNING, "provenance", str(error))
    if trained_for is None:
        return None
    if Path(trained_for).name.lower() != Path(target).name.lower():
        return Finding(WARNING, "provenance", f"the drafter was trained for {trained_for}, this target is {target}")
    return Finding(OK, "provenance", f"the drafter was trained for {trained_for}")


def described(probe: Probe) -> str:
    """A reading in words."""
    slot = "slot 0 is a draft" if probe.reading.sample_from_anchor else "slot 0 is no draft"
    return f"taps {probe.reading.target_layer_ids}, {slot}"


def check_reading(probes: Sequence[Probe]) -> Finding:
    """
    Whether the declared reading, the first of the probes, holds against its neighbours.

    Args:
        probes (`Sequence[Probe]`): None if the texts were too short.
    """
    check = "reading"
    if not probes:
        text = "the target's texts are too short for whole blocks; give other --prompts or more --max-new-tokens"
        return Finding(WARNING, check, text)
    declared = probes[0]
    better = [probe for probe in probes[1:] if probe.clearly_beats(declared)]
    if better:
        best = max(better, key=lambda probe: probe.gain_over(declared)[0])
        gain, (low, high) = best.gain_over(declared)
        fields = {
            "target_layer_ids": best.reading.target_layer_ids,
            "sample_from_anchor": best.reading.sample_from_anchor,
            "block_size": best.reading.block_size,
        }
        changes = [f"{name}={value}" for name, value in fields.items() if value != getattr(declared.reading, name)]
        return Finding(
            PROBLEM,
            check,
            f"the config says {described(declared)}, but {described(best)} is clearly better: {gain:.2f} more drafts "
            f"accepted a block ({low:.2f} to {high:.2f}). Load the drafter with from_pretrained(..., "
            f"{', '.join(changes)}) and save it, or correct its config.json",
        )
    length, interval = declared.mean_acceptance_length, declared.interval
    told = f"{length:.2f} tokens a round" + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})")
    if length - 1 < _STRANGE:
        return Finding(
            PROBLEM,
            check,
            f"{told}: hardly a draft is accepted, and no neighbouring reading is better. The drafter is untrained or "
            "another target's (another size, another fine-tune, another template)",
        )
    if interval is None:
        return Finding(WARNING, check, f"{told} in a single text; give more --prompts to compare readings")
    return Finding(OK, check, f"{described(declared)}: {told}; no neighbouring reading is clearly better")


def payoffs(profile: Profile, survivals: Sequence[float], context: float) -> list[Payoff]:
    """
    What drafting brings at each number of rows that the profile was measured for, with the best number of drafts.

    Args:
        profile ([`Profile`]): Costs on this machine.
        survivals (`Sequence[float]`): Share of blocks of which the first 1, 2, ... drafts are accepted.
        context (`float`): Tokens that each row holds.

    Source: DSpark Eq. 1.
    """
    found, size = [], len(survivals)
    most = max([1, *(curve.rows for curve in profile.row_steps)])
    for rows in (count for count in ROWS if count <= most):
        costs = profile.costs(rows, context, size, do_sample=False)
        plain = rows / float(costs.verify_seconds[rows])
        choices = []
        for drafts in range(1, size + 1):
            seconds = costs.draft_seconds[drafts] + float(costs.verify_seconds[rows * (1 + drafts)])
            choices.append((rows * (1 + sum(survivals[:drafts])) / seconds, drafts))
        drafted, drafts = max(choices)
        found.append(Payoff(rows, drafts, plain, drafted))
    return found


def check_payoff(found: Sequence[Payoff]) -> Finding:
    """At which batch drafting pays on this machine."""
    paying = [payoff for payoff in found if payoff.ratio > LEAST_GAIN]
    if not paying:
        best = max(found, key=lambda payoff: payoff.ratio)
        text = f"it does not pay on this machine: {best.ratio:.2f} times plain generate at best ({best.rows} rows)"
        return Finding(WARNING, "speculation", text + "; a better drafter or a faster draft would")
    told = ", ".join(f"{payoff.rows} row{'s' * (payoff.rows > 1)} {payoff.ratio:.2f}" for payoff in paying)
    return Finding(OK, "speculation", f"it pays: times plain generate, by these costs and greedy texts, {told}")
