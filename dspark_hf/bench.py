"""Measure plain `generate`, prompt lookup and DSpark in turn, and set DSpark beside Equation 1's bound.

The ways of decoding alternate prompt by prompt, so that a machine's slow minutes fall on all of them; ratios are taken
between neighbours and their median is reported. The bound is tau * T(1) / (T_draft + T_verify): what a round yields,
times a bare one-token step of the target, over what the two forwards of a round cost.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from .bench_report import print_tables, round_costs, summarise
from .command_files import check_writable, read_prompts, write_results
from .decoding_methods import (
    COMPILED,
    COMPILED_DRAFTER,
    HOST_DFLASH,
    PROMPT_LOOKUP,
    STATIC,
    Method,
    at_contexts,
    chosen_methods,
    drafting_methods,
    dspark_method,
    plain_method,
    synthetic_methods,
)
from .loading import CommandError, Pair, generation_options, load_pair
from .timing import (
    BareForwards,
    Call,
    bare_draft_seconds,
    bare_step_seconds,
    timed_generate,
    warm_up,
)


if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from .statistics import SpeculativeStats

PROMPT_LOOKUP_TOKENS = 10


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
                with method.surroundings():
                    forwards = bare(call.stats, method)
                records.append(place | _record(call, calls[methods[0].name], forwards, method))
            progress.write(_progress_line(name, index, calls, methods), file=sys.stderr)
    return records


def working_methods(
    pair: Pair, inputs: dict[str, torch.Tensor], methods: Sequence[Method], options: dict
) -> tuple[list[Method], dict[str, str]]:
    """
    Try each way of decoding for a few tokens. Those that are not ours do not work for every pair and machine.

    Returns:
        Those that work, and why the others do not, by name.
    """
    working, reasons = [], {}
    for method in methods:
        if method.unfit is not None:
            reasons[method.name] = method.unfit
            continue
        try:
            warm_up(pair, inputs, [method], options)
        except (CommandError, RuntimeError, TypeError, NotImplementedError, LookupError, AttributeError) as error:
            if method.name not in (STATIC, COMPILED, HOST_DFLASH, COMPILED_DRAFTER):
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
) -> Callable[[SpeculativeStats | None, Method], BareForwards]:
    """Bare forwards at the middle of what was generated, by a call's statistics and method, which is in force."""
    prompt = inputs["input_ids"][0].tolist()
    text = prompt + calls[methods[0].name].new_token_ids
    context_length = (len(prompt) + len(text)) // 2
    one = bare_step_seconds(pair, text, context_length, 1)

    @functools.cache
    def of_widths(verified: int, kept: int, method: str) -> BareForwards:
        return BareForwards(
            one,
            bare_draft_seconds(pair, context_length, kept),
            bare_step_seconds(pair, text, context_length, verified),
        )

    def of_call(stats: SpeculativeStats | None, method: Method) -> BareForwards:
        if stats is None or stats.rounds == 0:
            return BareForwards(one, 0.0, one)
        verified, kept = round(stats.verified / stats.rounds) + 1, round(stats.mean_acceptance_length)
        return of_widths(verified, kept, method.name)

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


def _progress_line(name: str, index: int, calls: dict[str, Call], methods: Sequence[Method]) -> str:
    parts = [f"{method.name} {calls[method.name].tokens_per_second:.1f} tok/s" for method in methods]
    for method in methods:
        stats = calls[method.name].stats
        if stats is not None and stats.rounds:  # a text of one token, its end, has none
            parts.append(f"mean_acceptance_length {stats.mean_acceptance_length:.2f} ({method.name})")
    return f"{name} {index + 1}: " + ", ".join(parts)


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
    draft_context_windows: Sequence[int] = (),
    draft_top_k: Sequence[int] = (),
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

    named = {"methods": methods, "draft-context-windows": draft_context_windows, "draft-top-k": draft_top_k}
    for name, values in named.items():
        if values and synthetic:
            told = " ".join(map(str, values))
            raise CommandError(f"--{name} {told}: not with --synthetic-acceptance; leave one of them out")
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
    ways += drafting_methods(pair, draft_context_windows, draft_top_k)
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
