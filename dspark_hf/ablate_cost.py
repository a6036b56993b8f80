"""`dspark ablate cost`: what a drafter adds to its target in parameters, memory and time, as shares of the target."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ablate import write_report
from .ablate_report import Report, Sheet, plot_cost
from .command_files import check_outputs, read_prompts
from .decoding_methods import PLAIN, dspark_method, plain_method
from .loading import CommandError, Pair, check_drafting, generation_options, left_padded, load_pair, reporting
from .simulate import check_block_sizes, read_profile
from .timing import BARE_STEPS, bare_draft_seconds, bare_step_seconds, timed_rows, warm_up


if TYPE_CHECKING:
    import torch
    from torch import nn

    from .modeling import DSparkDraftModel
    from .profiles import Profile

# The parts of a drafter by the names of its modules; all others are the backbone's.
PARTS = {
    "markov_head": "sequential head",
    "confidence_head": "confidence head",
    "embed_tokens": "embedding of its own",
    "lm_head": "output head of its own",
    "d2t": "reduced vocabulary",
}
BACKBONE = "backbone"
# Positions that a draft takes in where none was measured: a round's tokens.
_NEW_TOKENS = 3


@dataclass(frozen=True)
class Weights:
    """
    Attributes:
        parameters (`int`): How many numbers are learnt; shared ones count once.
        bytes (`int`): Of these and of the buffers that stand beside them.
    """

    parameters: int
    bytes: int


@dataclass(frozen=True)
class Time:
    """
    Seconds of a round's parts.

    Attributes:
        rows (`int`): Rows they are for.
        step (`float`): Of a target step with one token a row.
        draft (`float`): Of whole blocks.
        verify (`float`): Of a target step that verifies whole blocks.
    """

    rows: int
    step: float
    draft: float
    verify: float


@dataclass(frozen=True)
class Memory:
    """
    Peaks of a call, weights and all else that was there before included.

    Attributes:
        rows (`int`): Of the call.
        plain, speculative (`int`, *optional*): Bytes without the drafter in use, and with it; `None` where the device
            does not tell.
    """

    rows: int
    plain: int | None
    speculative: int | None

    @property
    def extra(self) -> int | None:
        """What drafting takes beside the drafter's weights, which are there in both calls."""
        return None if self.plain is None or self.speculative is None else self.speculative - self.plain


def run(
    *,
    target: str,
    drafter: str | None,
    profile: str | None,
    context: int,
    rows: Sequence[int],
    max_new_tokens: int,
    output: str | None,
    markdown: str | None,
    plot: str | None,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark ablate cost`: count, measure, print the tables, write the files. The command line's help says the rest.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    check_outputs(output, markdown, plot)
    check_drafting(max_new_tokens)
    rows = sorted(set(rows))
    known = None if profile is None else read_profile(profile)

    from rich.console import Console

    from .profiles import find_profile

    pair = load_pair(target, drafter, dtype, device, threads)
    console = Console()
    console.print(pair.description, highlight=False)
    if known is not None:
        check_block_sizes({Path(profile).name: known}, pair.drafter.config.block_size)
        if known.draft_greedy is None:
            raise CommandError(
                f"--profile {profile!r}: no draft was measured; make one with `dspark profile` and the drafter"
            )
    else:
        known = find_profile(pair.target, pair.drafter)
    own, parts = weights_of(pair.target), weights_by_part(pair.drafter)
    with reporting(f"--target {target!r} with --drafter {pair.names[1]!r}"):
        if known is None or known.draft_greedy is None:
            times, origin = (
                [_measured_time(pair, context)],
                "measured now, for one row; `dspark profile` measures more",
            )
        else:
            times = times_by_rows(known, rows, context, pair.drafter.config.block_size)
            origin = "this machine's stored profile" if profile is None else f"the profile {Path(profile).name}"
        memory = _measured_memory(pair, rows, max_new_tokens)
    results = {
        "target": {"id": target, "dtype": str(pair.target.dtype).removeprefix("torch.")} | asdict(own),
        "drafter": {"id": pair.names[1], "block_size": pair.drafter.config.block_size} | asdict(total(parts)),
        "parts": {name: asdict(weights) for name, weights in parts.items()},
        "shares": shares(own, parts, times, memory),
        "times": {"origin": origin, "context": context, "rows": [asdict(each) for each in times]},
        "memory": {
            "max_new_tokens": max_new_tokens,
            "rows": [asdict(each) | {"extra": each.extra} for each in memory],
        },
    }
    sheets = [_weight_sheet(own, parts), _memory_sheet(own, parts, memory), _time_sheet(times)]
    notes = [
        "Embedding and output head that the drafter borrows are the target's and cost nothing more.",
        f"Times: {origin}. A draft is that of whole blocks of {pair.drafter.config.block_size}, greedy.",
        "Peak: of a whole call, on CUDA what torch allocated, else what the process held. Beside its weights drafting "
        f"takes the difference; texts of {max_new_tokens} new tokens.",
    ]
    report = Report(f"What {pair.names[1]} adds to {target}", sheets, notes)
    write_report(console, report, results, lambda folder: plot_cost(folder, results["shares"]), output, markdown, plot)
    return 0


def weights_of(model: nn.Module) -> Weights:
    """All weights of a model."""
    return _weights([*model.parameters()], [*model.buffers()])


def _weights(parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> Weights:
    return Weights(
        sum(each.numel() for each in parameters),
        sum(each.numel() * each.element_size() for each in (*parameters, *buffers)),
    )


def weights_by_part(drafter: DSparkDraftModel) -> dict[str, Weights]:
    """
    A drafter's own weights, part by part.

    Args:
        drafter ([`DSparkDraftModel`]): The drafter.

    Returns:
        `dict[str, Weights]`: `BACKBONE`, then those of `PARTS` that it has.
    """
    found: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {BACKBONE: ([], [])}
    for index, tensors in enumerate((drafter.named_parameters(), drafter.named_buffers())):
        for name, tensor in tensors:
            part = PARTS.get(name.partition(".")[0], BACKBONE)
            found.setdefault(part, ([], []))[index].append(tensor)
    return {part: _weights(*found[part]) for part in (BACKBONE, *PARTS.values()) if part in found}


def total(parts: dict[str, Weights]) -> Weights:
    """All parts together."""
    return Weights(sum(each.parameters for each in parts.values()), sum(each.bytes for each in parts.values()))


def times_by_rows(profile: Profile, rows: Sequence[int], context: int, block_size: int) -> list[Time]:
    """
    What a round's parts take by a profile, choosing tokens included.

    Args:
        profile ([`Profile`]): With drafts.
        rows (`Sequence[int]`): Numbers of rows.
        context (`int`): Tokens that each row holds.
        block_size (`int`): Of the drafter.
    """
    times = []
    for count in rows:
        costs = profile.costs(count, context, block_size, do_sample=False)
        verify = costs.verify_seconds
        times.append(Time(count, float(verify[count]), float(costs.draft_seconds[block_size]), float(verify[-1])))
    return times


def _measured_time(pair: Pair, context: int) -> Time:
    """The same of bare forwards of one row, as `dspark bench` measures them."""
    slots = 1 + pair.drafter.config.block_size
    limit = getattr(pair.target.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None:
        context = max(min(context, limit - slots * BARE_STEPS), 1)
    text = [0]
    return Time(
        1,
        bare_step_seconds(pair, text, context, 1),
        bare_draft_seconds(pair, context, _NEW_TOKENS),
        bare_step_seconds(pair, text, context, slots),
    )


def _measured_memory(pair: Pair, rows: Sequence[int], max_new_tokens: int) -> list[Memory]:
    """Peaks of calls on the bundled prompts, the same text with the drafter and without."""
    prompts = [pair.encode(prompt) for each in read_prompts(None).values() for prompt in each]
    options = generation_options(max_new_tokens, threshold=0.0) | {"min_new_tokens": max_new_tokens}
    methods = [plain_method(), dspark_method(pair)]
    warm_up(pair, prompts[0], methods, options | {"min_new_tokens": None})
    found = []
    for count in rows:
        batch = left_padded(
            [prompts[place % len(prompts)] for place in range(count)], pair.tokenizer.pad_token_id or 0
        )
        calls = {method.name: partial(timed_rows, pair, batch, method, options) for method in methods}
        peaks = {name: peak_bytes(call, pair.target.device) for name, call in calls.items()}
        found.append(Memory(count, peaks.pop(PLAIN), *peaks.values()))
    return found


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """
    The most memory that was held during a call, all that was there before included.

    Args:
        call (`Callable`): Does the work.
        device (`torch.device`): Of the work: of CUDA what torch allocated there, else what this process held.

    Returns:
        `int`: bytes, or `None` where the system does not tell (it does on Linux).
    """
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    _give_back_freed_memory()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak from now on, see proc(5)
    except OSError:
        return None
    call()
    (line,) = [line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def _give_back_freed_memory() -> None:
    """Let the C library keep nothing for later of what was freed: a call that takes it again would not be seen."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError, TypeError):  # of other C libraries than glibc
        return


def shares(
    own: Weights, parts: dict[str, Weights], times: Sequence[Time], memory: Sequence[Memory]
) -> dict[str, float]:
    """
    The drafter's costs over the target's.

    Args:
        own ([`Weights`]): The target's.
        parts (`dict[str, Weights]`): The drafter's.
        times (`Sequence[Time]`): By rows.
        memory (`Sequence[Memory]`): By rows.

    Returns:
        `dict[str, float]`: By what is compared, in words.

    Source: the critical assessment of DSpark (arXiv 2607.05147), suggestion 5.
    """
    added = total(parts)
    values = {"parameters": added.parameters / own.parameters, "weight bytes": added.bytes / own.bytes}
    for each in memory:
        if each.extra is not None:
            values[f"weights and peak, {_rows(each.rows)}"] = (added.bytes + each.extra) / own.bytes
    return values | {f"draft over step, {_rows(each.rows)}": each.draft / each.step for each in times}


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _mebibytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 2**20:.2f}"


def _weight_sheet(own: Weights, parts: dict[str, Weights]) -> Sheet:
    rows = [
        [name, f"{each.parameters:,}", _mebibytes(each.bytes), f"{each.bytes / own.bytes:.2%}"]
        for name, each in {"target": own, "drafter": total(parts), **{f"– {k}": v for k, v in parts.items()}}.items()
    ]
    return Sheet("Weights", ["", "parameters", "MiB", "of the target's"], rows)


def _memory_sheet(own: Weights, parts: dict[str, Weights], memory: Sequence[Memory]) -> Sheet:
    added = total(parts).bytes
    rows = []
    for each in memory:
        share = "–" if each.extra is None else f"{(added + each.extra) / own.bytes:.1%}"
        rows.append([str(each.rows), *map(_mebibytes, (each.plain, each.speculative, each.extra)), share])
    head = [
        "rows",
        "peak, plain\nMiB",
        "peak, DSpark\nMiB",
        "beside weights\nMiB",
        "with weights, of the\ntarget's weights",
    ]
    return Sheet("Memory of a call", head, rows)


def _time_sheet(times: Sequence[Time]) -> Sheet:
    rows = [
        [
            str(each.rows), *(f"{1000 * value:.2f}" for value in (each.step, each.draft, each.verify)),
            f"{each.draft / each.step:.1%}", f"{each.draft / (each.draft + each.verify):.1%}",
        ]
        for each in times
    ]  # fmt: skip
    head = ["rows", "one-token step\nms", "draft\nms", "verification\nms", "draft of\na step", "draft of\na round"]
    return Sheet("Time", head, rows)
