"""Measure plain `generate`, prompt lookup and DSpark in turn, and set DSpark beside Equation 1's bound.

The ways of decoding alternate prompt by prompt, so that a machine's slow minutes fall on all of them; ratios are taken
between neighbours and their median is reported. The bound is tau * T(1) / (T_draft + T_verify): what a round yields,
times a bare one-token step of the target, over what the two forwards of a round cost.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from .command_files import check_writable, read_prompts, write_results
from .decoding_methods import (
    COMPILED,
    PROMPT_LOOKUP,
    STATIC,
    Method,
    at_contexts,
    chosen_methods,
    dspark_method,
    plain_method,
    synthetic_methods,
)
from .loading import CommandError, Pair, generation_options, load_pair, reporting


if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from .statistics import SpeculativeStats

PROMPT_LOOKUP_TOKENS = 10
BARE_STEPS = 12
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class BareForwards:
    """Seconds of forwards outside the loop: a one-token step of the target T(1), a block's draft, a verification."""

    step: float
    draft: float
    verify: float


@dataclass(frozen=True)
class Call:
    """One timed call of `generate`."""

    new_token_ids: list[int]
    seconds: float
    stats: SpeculativeStats | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens a second of the whole call, prefill included."""
        return len(self.new_token_ids) / self.seconds


def timed_generate(
    pair: Pair, inputs: dict[str, torch.Tensor], method: Method, options: dict[str, Any], seed: int | None = None
) -> Call:
    """Generate once and time it.

    Args:
        pair (`Pair`): target and drafter.
        inputs (`dict`): `input_ids` and `attention_mask` of shape `(1, prompt_length)`.
        method (`Method`): the way of decoding.
        options (`dict`): arguments of `generate` that all methods share.
        seed (`int`, *optional*): seeds torch before the call.
    """
    rows, seconds = timed_rows(pair, inputs, method, options, seed)
    return Call(rows[0], seconds, pair.drafter.speculative_stats if method.speculative else None)


def timed_rows(
    pair: Pair, inputs: dict[str, torch.Tensor], method: Method, options: dict[str, Any], seed: int | None = None
) -> tuple[list[list[int]], float]:
    """The same of a batch, with inputs of shape `(batch_size, prompt_length)`.

    Returns:
        `tuple[list[list[int]], float]`: each row's new tokens, and the seconds of the call.
    """
    import torch

    if seed is not None:
        torch.manual_seed(seed)
    if not method.speculative:
        options = {name: value for name, value in options.items() if name != "assistant_confidence_threshold"}
    with method.surroundings():
        _synchronize(pair)
        start = time.perf_counter()
        output = pair.target.generate(**inputs, **options, **method.arguments)
        _synchronize(pair)
        seconds = time.perf_counter() - start
    return output[:, inputs["input_ids"].shape[1] :].tolist(), seconds


def bare_step_seconds(pair: Pair, token_ids: Sequence[int], context_length: int, step_tokens: int) -> float:
    """Median time of a bare target forward with a cache.

    Args:
        pair (`Pair`): its target is measured.
        token_ids (`Sequence[int]`): a text; the steps run over it (and over its last token again at its end).
        context_length (`int`): tokens in the cache before the first step, at least 1.
        step_tokens (`int`): tokens a step, at least 1.

    Returns:
        `float`: seconds a step.
    """
    import torch
    from transformers import DynamicCache

    from .compat import cache_argument

    cache = DynamicCache(config=pair.target.config)
    keywords = {cache_argument(pair.target): cache, "use_cache": True}
    wanted = context_length + step_tokens * BARE_STEPS
    ids = list(token_ids[:wanted])
    ids += ids[-1:] * (wanted - len(ids))
    text = torch.tensor([ids], device=pair.target.device)
    times = []
    with torch.no_grad():
        pair.target(text[:, :context_length], logits_to_keep=1, **keywords)
        for start in range(context_length, wanted, step_tokens):
            chunk = text[:, start : start + step_tokens]
            _synchronize(pair)
            begin = time.perf_counter()
            pair.target(chunk, **keywords)
            _synchronize(pair)
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def bare_draft_seconds(pair: Pair, context_length: int, new_tokens: int) -> float:
    """Median time of a bare greedy draft: one backbone pass and the sequential loop, without the engine around it.

    Args:
        pair (`Pair`): its drafter is measured.
        context_length (`int`): positions remembered before each draft.
        new_tokens (`int`): positions observed since the draft before, at least 1.

    Returns:
        `float`: seconds a block.
    """
    import torch

    from .modeling.modeling_dspark import DraftContext

    drafter, target = pair.drafter, pair.target
    config, device = drafter.config, drafter.device
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    width = len(config.target_layer_ids) * config.target_hidden_size
    block = drafter.block_tokens(torch.full((1,), config.mask_token_id, device=device))
    context = DraftContext(config, [0], capacity=2 * context_length)
    times = []
    with torch.no_grad():
        for step in range(1 + BARE_STEPS):
            length = new_tokens if step else context_length
            taps = torch.randn(length, width, device=device, dtype=drafter.dtype)
            _synchronize(pair)
            begin = time.perf_counter()
            hidden = drafter(drafter.embed(block, embedding), taps, [length], context)
            drafter.draft(hidden, block[:, 0], head)
            _synchronize(pair)
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def run_methods(
    pair: Pair,
    encoded: dict[str, list[dict[str, torch.Tensor]]],
    methods: Sequence[Method],
    options: dict[str, Any],
    repetitions: int,
    seed: int,
) -> list[dict[str, Any]]:
    """All timed calls: each prompt by each method in turn, the order rotating, with the bare steps between.

    Args:
        pair (`Pair`): target and drafter.
        encoded (`dict`): prompts by set, `input_ids` and `attention_mask` of shape `(1, prompt_length)`.
        methods (`Sequence[Method]`): the first is the one that ratios are taken against.
        options (`dict`): arguments of `generate` that all methods share.
        repetitions (`int`): how often each prompt is run by each method.
        seed (`int`): each repetition of a prompt is seeded with this number plus the repetition's.

    Returns:
        `list[dict]`: one record a call, of plain values.
    """
    warm_up(pair, next(iter(encoded.values()))[0], methods, options)

    records: list[dict[str, Any]] = []
    turns = [
        (repetition, name, index)
        for repetition in range(repetitions)
        for name, prompts in encoded.items()
        for index in range(len(prompts))
    ]
    with tqdm(total=len(turns) * len(methods), desc="Benchmark", unit="call") as progress:
        for turn, (repetition, name, index) in enumerate(turns):
            inputs = encoded[name][index]
            shift = turn % len(methods)
            calls = {}
            for method in (*methods[shift:], *methods[:shift]):
                progress.set_postfix_str(f"{name}, {method.name}", refresh=False)
                calls[method.name] = timed_generate(pair, inputs, method, options, seed + repetition)
                progress.update()
            bare = _bare_steps(pair, inputs, calls, methods)
            for method in methods:
                place = {"set": name, "prompt": index, "repetition": repetition, "method": method.name}
                call = calls[method.name]
                records.append(place | _record(call, calls[methods[0].name], bare(call.stats), method))
            progress.write(_progress_line(name, index, calls, methods), file=sys.stderr)
    return records


def warm_up(pair: Pair, inputs: dict[str, torch.Tensor], methods: Iterable[Method], options: dict[str, Any]) -> None:
    """Run each method for a few tokens, so that no first-time cost is measured.

    Raises:
        `CommandError`: target and drafter do not go together, or do not take these options.
    """
    short = options | {"max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
    for method in methods:
        with reporting(f"{method.name} with --target {pair.names[0]!r} and --drafter {pair.names[1]!r}"):
            timed_generate(pair, inputs, method, short, seed=0)


def working_methods(
    pair: Pair, inputs: dict[str, torch.Tensor], methods: Sequence[Method], options: dict
) -> tuple[list[Method], dict[str, str]]:
    """
    Try each way of decoding for a few tokens. Static caches and compilation do not work for every target and machine.

    Returns:
        Those that work, and why the others do not, by name.
    """
    working, reasons = [], {}
    for method in methods:
        try:
            warm_up(pair, inputs, [method], options)
        except (CommandError, RuntimeError, TypeError, NotImplementedError) as error:
            if method.name not in (STATIC, COMPILED):
                raise
            reasons[method.name] = " ".join(str(error).split())[:300]
        else:
            working.append(method)
    return working, reasons


def check_lengths(pair: Pair, encoded: dict[str, list[dict[str, torch.Tensor]]], max_new_tokens: int) -> None:
    """Check that prompts, encoded one by one and by set, leave room for the text.

    Raises:
        `CommandError`: naming the first that does not.
    """
    limit = getattr(pair.target.config.get_text_config(), "max_position_embeddings", None)
    for name, prompts in encoded.items():
        for index, inputs in enumerate(prompts):
            length = inputs["input_ids"].shape[1]
            if limit is not None and length + max_new_tokens > limit:
                raise CommandError(
                    f"--prompts: prompt {index + 1} of {name} has {length} tokens, and with --max-new-tokens "
                    f"{max_new_tokens} that is more than the target's {limit}; remove it or lower --max-new-tokens"
                )


def _bare_steps(
    pair: Pair, inputs: dict[str, torch.Tensor], calls: dict[str, Call], methods: Sequence[Method]
) -> Callable[[SpeculativeStats | None], BareForwards]:
    """Bare forwards at the middle of what was generated, by the statistics of a call."""
    prompt = inputs["input_ids"][0].tolist()
    text = prompt + calls[methods[0].name].new_token_ids
    context_length = (len(prompt) + len(text)) // 2
    one = bare_step_seconds(pair, text, context_length, 1)

    @functools.cache
    def of_widths(verified: int, kept: int) -> BareForwards:
        return BareForwards(
            one,
            bare_draft_seconds(pair, context_length, kept),
            bare_step_seconds(pair, text, context_length, verified),
        )

    def of_call(stats: SpeculativeStats | None) -> BareForwards:
        if stats is None or stats.rounds == 0:
            return BareForwards(one, 0.0, one)
        return of_widths(round(stats.verified / stats.rounds) + 1, round(stats.mean_acceptance_length))

    return of_call


def _record(call: Call, baseline: Call, bare: BareForwards, method: Method) -> dict[str, Any]:
    """A call as plain values, with what a round cost if it was speculative."""
    record: dict[str, Any] = {
        "new_tokens": len(call.new_token_ids),
        "seconds": call.seconds,
        "tokens_per_second": call.tokens_per_second,
        "ratio": call.tokens_per_second / baseline.tokens_per_second,
        "same_text": call.new_token_ids == baseline.new_token_ids,
        "t1": bare.step,
    }
    if method.speculative and call.stats is not None and call.stats.rounds > 0:
        record["stats"] = call.stats.to_dict()
        record |= round_costs(call.stats, call.seconds, bare)
    return record


def round_costs(stats: SpeculativeStats, seconds: float, bare: BareForwards) -> dict[str, float]:
    """What a round cost, and Equation 1's bound.

    Args:
        stats (`SpeculativeStats`): of one call with at least one round.
        seconds (`float`): the whole call, measured from outside.
        bare (`BareForwards`): the same forwards outside the loop.

    Returns:
        `dict[str, float]`: `t_draft`, `t_verify` and `t_outside` (seconds a round; the last is all that is neither
        forward nor prefill), `outside_share` (of a round), `draft_share` (`t_draft` over T(1)), `bare_draft` and
        `bare_verify`, `bound` (Equation 1 with the bare forwards) and `reached` (of the bound, by the speed after the
        prefill against a loop of bare one-token steps).

    Source: Equation 1 of arXiv 2607.05147.
    """
    t_draft, t_verify = stats.seconds_draft / stats.rounds, stats.seconds_verify / stats.rounds
    t_round = (seconds - stats.seconds_prefill) / stats.rounds
    return {
        "t_draft": t_draft,
        "t_verify": t_verify,
        "t_outside": t_round - t_draft - t_verify,
        "outside_share": 1 - (t_draft + t_verify) / t_round,
        "draft_share": t_draft / bare.step,
        "bare_draft": bare.draft,
        "bare_verify": bare.verify,
        "bound": stats.mean_acceptance_length * bare.step / (bare.draft + bare.verify),
        "reached": (bare.draft + bare.verify) / t_round,
    }


def summarise(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float | int | None]]]:
    """Medians and ratios by set and method, and their mean over the sets under `"macro"`.

    Args:
        records (`Sequence[dict]`): as [`run_methods`] returns them.

    Returns:
        `dict`: set name to method name to values. Speeds, ratios and costs are medians over the calls;
        `mean_acceptance_length` and `draft_acceptance_rate` are those of all the set's rounds together.
    """
    summary: dict[str, dict[str, dict[str, float | int | None]]] = {}
    for record in records:
        summary.setdefault(record["set"], {}).setdefault(record["method"], {})
    for name, methods in summary.items():
        for method in methods:
            methods[method] = _summarise_calls([r for r in records if r["set"] == name and r["method"] == method])
    macro: dict[str, dict[str, float | int | None]] = {}
    for method in next(iter(summary.values())):
        rows = [methods[method] for methods in summary.values()]
        keys = dict.fromkeys(key for row in rows for key in row)
        macro[method] = {key: _mean([row.get(key) for row in rows]) for key in keys}
    return summary | {"macro": macro}


def _summarise_calls(calls: Sequence[dict[str, Any]]) -> dict[str, float | int | None]:
    values: dict[str, float | int | None] = {
        "calls": len(calls),
        "same_text": sum(call["same_text"] for call in calls) / len(calls),
    }
    for key in ("tokens_per_second", "ratio", "t1"):
        values[key] = statistics.median(call[key] for call in calls)
    with_rounds = [call for call in calls if "stats" in call]
    if not with_rounds:
        return values
    rounds = sum(call["stats"]["rounds"] for call in with_rounds)
    accepted = sum(call["stats"]["accepted"] for call in with_rounds)
    verified = sum(call["stats"]["verified"] for call in with_rounds)
    tokens = sum(call["stats"]["mean_acceptance_length"] * call["stats"]["rounds"] for call in with_rounds)
    values["mean_acceptance_length"] = tokens / rounds
    values["draft_acceptance_rate"] = accepted / verified if verified else None
    costs = ("t_draft", "t_verify", "t_outside", "outside_share", "draft_share", "bare_draft", "bare_verify")
    for key in (*costs, "bound", "reached"):
        values[key] = statistics.median(call[key] for call in with_rounds)
    return values


def _mean(values: Sequence[float | int | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def _progress_line(name: str, index: int, calls: dict[str, Call], methods: Sequence[Method]) -> str:
    parts = [f"{method.name} {calls[method.name].tokens_per_second:.1f} tok/s" for method in methods]
    for method in methods:
        stats = calls[method.name].stats
        if stats is not None and stats.rounds:  # a text of one token, its end, has none
            parts.append(f"mean_acceptance_length {stats.mean_acceptance_length:.2f} ({method.name})")
    return f"{name} {index + 1}: " + ", ".join(parts)


def print_tables(summary: dict[str, dict[str, dict[str, float | int | None]]], console: Console, greedy: bool) -> None:
    """Tables within 80 columns: speed by set and method, then where a round's time goes against Equation 1.

    Args:
        summary (`dict`): as [`summarise`] returns it.
        console (`rich.console.Console`): prints.
        greedy (`bool`): whether texts are expected to be identical.
    """
    from rich.table import Table

    names = [name for name in summary if name != "macro" or len(summary) > 2]
    methods = list(summary["macro"])
    speed = Table(title="Speed (medians; ratio between neighbouring calls)")
    for column in ("prompts", "method"):
        speed.add_column(column, no_wrap=True)
    for column in ("tok/s", "ratio", "tokens\na round", "accepted", "same\ntext"):
        speed.add_column(column, justify="right", no_wrap=True)
    for name in names:
        for method in methods:
            row = summary[name][method]
            # Drawn text differs by nature, and synthetic text is not meant to agree.
            comparable = greedy and "synthetic" not in method and method != methods[0]
            speed.add_row(
                name if method == methods[0] else "",
                method,
                format_number(row["tokens_per_second"], ".1f"),
                format_number(row["ratio"], ".2f"),
                format_number(row.get("mean_acceptance_length"), ".2f"),
                format_number(row.get("draft_acceptance_rate"), ".2f"),
                format_number(row["same_text"], ".0%") if comparable else "–",
            )
        speed.add_section()
    console.print(speed)
    for method in methods:
        if summary["macro"][method].get("bound") is not None:
            with_rounds = [name for name in names if "bound" in summary[name][method]]
            console.print(_round_table(method, {name: summary[name][method] for name in with_rounds}))


def _round_table(method: str, rows: dict[str, dict[str, float | int | None]]) -> Table:
    """What a round of one method costs, by prompt set; times in milliseconds."""
    from rich.table import Table

    table = Table(
        title=f"{method}: a round against Equation 1 (ms; bare is a forward outside the loop)",
        box=None,
        padding=(0, 1),
    )
    table.add_column("prompts", no_wrap=True)
    columns = (
        "T(1)",
        "draft",
        "bare\ndraft",
        "verify",
        "bare\nverify",
        "out-\nside",
        "draft/\nT(1)",
        "bound",
        "reach-\ned",
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in rows.items():
        seconds = [row[key] for key in ("t1", "t_draft", "bare_draft", "t_verify", "bare_verify")]
        table.add_row(
            name,
            *(format_number(None if value is None else 1000 * value, ".1f") for value in seconds),
            format_number(row["outside_share"], ".0%"),
            format_number(row["draft_share"], ".2f"),
            format_number(row["bound"], ".2f"),
            format_number(row["reached"], ".0%"),
        )
    return table


def format_number(value: float | int | None, style: str) -> str:
    """A number for a table; a dash for one that there is not."""
    return "–" if value is None else format(value, style)


def _synchronize(pair: Pair) -> None:
    """Wait for the device, so that a clock read on the host means something."""
    if pair.target.device.type == "cuda":
        import torch

        torch.cuda.synchronize(pair.target.device)


def run(
    *,
    target: str,
    drafter: str | None,
    prompts: str | None,
    limit: int | None,
    max_new_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    threshold: float | None,
    repetitions: int,
    dtype: str,
    device: str,
    threads: int | None,
    seed: int,
    prompt_lookup_tokens: int = PROMPT_LOOKUP_TOKENS,
    methods: Sequence[str] = (),
    contexts: Sequence[int] = (),
    synthetic: Sequence[float],
    output: str | None,
) -> int:
    """`dspark bench`: measure, print the tables, write the JSON file. The command line's help says what is what.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    check_writable("--output", output)
    options = bench_options(max_new_tokens, temperature, top_p, top_k, threshold)
    prompt_sets = read_prompts(prompts, limit)

    from rich.console import Console

    if methods and synthetic:
        raise CommandError(f"--methods {' '.join(methods)}: not with --synthetic-acceptance; leave one of them out")
    pair = load_pair(target, drafter, dtype, device, threads)
    encoded = {name: [pair.encode(prompt) for prompt in texts] for name, texts in prompt_sets.items()}
    if contexts:
        encoded = at_contexts(encoded, contexts)
    check_lengths(pair, encoded, max_new_tokens)
    ways, left_out = [plain_method()], {}
    if synthetic:
        ways += synthetic_methods(pair, synthetic)
        # Such text means nothing, so its end does not either: every call runs to the full length. This is an id that
        # no token has.
        options["eos_token_id"] = pair.target.config.get_text_config().vocab_size
    elif methods:
        given = chosen_methods(pair, methods, prompt_lookup_tokens)
        working, left_out = working_methods(pair, next(iter(encoded.values()))[0], given, options)
        ways += working
    else:
        ways += [Method(PROMPT_LOOKUP, {"prompt_lookup_num_tokens": prompt_lookup_tokens}), dspark_method(pair)]
    console = Console()
    introduce(pair, console, bool(synthetic))
    for name, reason in left_out.items():
        console.print(f"Left out: {name} does not work here ({reason})", highlight=False, markup=False)
    records = run_methods(pair, encoded, ways, options, repetitions, seed)
    summary = summarise(records)
    print_tables(summary, console, greedy=temperature == 0)
    if output is not None:
        settings = pair_settings(pair, target, prompts) | {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": options.get("top_p"),
            "top_k": options.get("top_k"), "threshold": threshold, "repetitions": repetitions, "seed": seed,
            "synthetic": list(synthetic), "left_out": left_out,
        }  # fmt: skip
        write_results(output, {"settings": settings, "summary": summary, "calls": records})
        console.print(f"Written: {output}", highlight=False)
    return 0


def introduce(pair: Pair, console: Console, synthetic: bool) -> None:
    """Say what is measured, and what the figures are not."""
    console.print(pair.description, highlight=False)
    if synthetic:
        console.print("[bold]SYNTHETIC acceptance: the engine is measured, not the drafter; the text is not meant.[/]")
    if pair.target.device.type == "cuda":
        console.print("On CUDA, draft and verify are the times until the calls returned, not until they were done.")


def bench_options(
    max_new_tokens: int,
    temperature: float,
    top_p: float | None = None,
    top_k: int | None = None,
    threshold: float | None = None,
) -> dict[str, Any]:
    """As [`generation_options`], but without `top_p` and `top_k` tokens are drawn from the distribution itself,
    whatever truncation the target's own generation config suggests."""
    if temperature > 0:
        top_p, top_k = 1.0 if top_p is None else top_p, 0 if top_k is None else top_k
    return generation_options(max_new_tokens, temperature, top_p, top_k, threshold)


def pair_settings(pair: Pair, target: str, prompts: str | None) -> dict[str, Any]:
    """What was measured, on what, as plain values."""
    return {
        "target": target,
        "drafter": pair.names[1],
        "prompts": prompts or "school-maths (bundled)",
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "device": str(pair.target.device),
    }
