"""`dspark demo`: a real language model with and without DSpark, same text, both speeds told as they are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from .command_files import read_prompts
from .decoding_methods import DSPARK, PLAIN, Method, dspark_method, plain_method
from .loading import DEMO, Pair, generation_options, load_pair
from .statistics import SpeculativeStats
from .timing import Call, timed_generate, warm_up


if TYPE_CHECKING:
    import torch
    from rich.console import Console

PROMPTS = 3
# Below this the table says that its figures mean little.
FEW_ROUNDS = 60


@dataclass(frozen=True)
class Comparison:
    """Calls of plain `generate` and of DSpark for one prompt, taken in turn."""

    plain: list[Call]
    dspark: list[Call]

    @property
    def plain_speed(self) -> float:
        """Median tokens a second of plain `generate`."""
        return statistics.median(call.tokens_per_second for call in self.plain)

    @property
    def dspark_speed(self) -> float:
        """Median tokens a second of DSpark."""
        return statistics.median(call.tokens_per_second for call in self.dspark)

    @property
    def ratio(self) -> float:
        """Median of DSpark's speed over that of the plain call beside it."""
        pairs = zip(self.dspark, self.plain, strict=True)
        return statistics.median(dspark.tokens_per_second / plain.tokens_per_second for dspark, plain in pairs)

    @property
    def first_difference(self) -> int | None:
        """Index of the first new token where the two texts differ; None if they are identical."""
        dspark, plain = self.dspark[0].new_token_ids, self.plain[0].new_token_ids
        if dspark == plain:
            return None
        pairs = enumerate(zip(dspark, plain, strict=False))
        return next((index for index, (a, b) in pairs if a != b), min(len(dspark), len(plain)))


def compare(
    pair: Pair, inputs: dict[str, torch.Tensor], options: dict[str, Any], repetitions: int, seed: int = 0
) -> Comparison:
    """Time plain `generate` and DSpark in turn, each going first every other time.

    Args:
        pair (`Pair`): target and drafter.
        inputs (`dict`): `input_ids` and `attention_mask` of shape `(1, prompt_length)`.
        options (`dict`): arguments of `generate` that both share.
        repetitions (`int`): calls of each.
        seed (`int`, *optional*, defaults to 0): seeds torch before each call.
    """
    methods = [plain_method(), dspark_method(pair)]
    calls: dict[str, list[Call]] = {PLAIN: [], DSPARK: []}
    with tqdm(total=2 * repetitions, desc="Timing", unit="call", leave=False) as progress:
        for repetition in range(repetitions):
            for method in methods if repetition % 2 == 0 else methods[::-1]:
                call = timed_generate(pair, inputs, method, options, seed)
                calls[method.name].append(call)
                progress.set_postfix_str(f"{method.name} {call.tokens_per_second:.1f} tok/s", refresh=False)
                progress.update()
    return Comparison(calls[PLAIN], calls[DSPARK])


def stream(
    pair: Pair, inputs: dict[str, torch.Tensor], options: dict[str, Any], console: Console, seed: int | None = None
) -> Call:
    """Generate with DSpark and print the text as it comes, accepted draft tokens coloured."""
    from .terminal import ColouredTextStreamer

    arguments = {"assistant_model": pair.drafter, "streamer": ColouredTextStreamer(pair.tokenizer, console)}
    return timed_generate(pair, inputs, Method(DSPARK, arguments, speculative=True), options, seed)


def print_legend(console: Console) -> None:
    """Say what the colours of streamed text mean."""
    from .terminal import DRAFTED_STYLE

    console.print(
        f"[{DRAFTED_STYLE}]coloured: accepted draft tokens[/]; plain: the target's own",
        highlight=False,
    )


def print_comparison(comparisons: Sequence[Comparison], pair: Pair, console: Console, greedy: bool) -> None:
    """The table of speeds, acceptance and identity, and what has to be said about them.

    Args:
        comparisons (`Sequence[Comparison]`): one a prompt.
        pair (`Pair`): target and drafter.
        console (`rich.console.Console`): prints.
        greedy (`bool`): whether texts are expected to be identical.
    """
    from rich.table import Table

    from .terminal import format_positions

    table = Table(title="Plain generate against DSpark, in turn in this run, by prompt")
    # Two-line headings keep the table within 80 columns.
    for column in ("#", "tokens", "plain\ntok/s", "DSpark\ntok/s", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("mean_acceptance_length", justify="right", no_wrap=True)
    table.add_column("identical\ntext", justify="right")
    for number, comparison in enumerate(comparisons, start=1):
        identical = "yes" if comparison.first_difference is None else "no"
        length = pooled([comparison]).mean_acceptance_length
        table.add_row(
            str(number),
            str(len(comparison.dspark[0].new_token_ids)),
            f"{comparison.plain_speed:.1f}",
            f"{comparison.dspark_speed:.1f}",
            f"{comparison.ratio:.2f}",
            "–" if length is None else f"{length:.2f}",
            identical if greedy else "sampled",
        )
    console.print(table)
    repetitions = len(comparisons[0].plain)
    if repetitions > 1:
        console.print(
            f"Speeds are medians of {repetitions} calls each; the ratio is the median over the {repetitions} pairs of "
            "neighbouring calls, not the quotient of the two speeds.",
            highlight=False,
        )
    acceptance = format_positions(pooled(comparisons).acceptance_by_position)
    console.print(f"Acceptance by block position: {acceptance}", highlight=False)
    for sentence in remarks(comparisons, pair, greedy):
        console.print(sentence, highlight=False, markup=False)


def pooled(comparisons: Sequence[Comparison]) -> SpeculativeStats:
    """Counts of all of DSpark's calls together."""
    stats = [call.stats for comparison in comparisons for call in comparison.dspark if call.stats is not None]
    return SpeculativeStats.total(stats, max((len(one.sent_by_position) for one in stats), default=0))


def remarks(comparisons: Sequence[Comparison], pair: Pair, greedy: bool) -> list[str]:
    """What the table does not say by itself: why it is slower if it is, and where texts differ if they do."""
    sentences = []
    ratio = statistics.median(comparison.ratio for comparison in comparisons)
    counts = pooled(comparisons)
    length = counts.mean_acceptance_length
    if ratio < 1 and length is not None:
        cost = length / ratio
        sentences.append(
            f"DSpark is slower than plain generate here: a round costs about {cost:.2f} plain steps and yields "
            f"{length:.2f} tokens; this drafter's guesses are rarely right for these prompts."
        )
    elif ratio >= 1:
        sentences.append(f"DSpark is {ratio:.2f} times as fast as plain generate here.")
    if counts.rounds < FEW_ROUNDS:
        sentences.append(f"These are only {counts.rounds} rounds: too few for a figure; raise --max-new-tokens.")
    if pair.names[1] == DEMO:
        sentences.append("School maths is what the bundled drafter does best; other prompts accept less.")
    differing = [
        (number, comparison.first_difference)
        for number, comparison in enumerate(comparisons, start=1)
        if comparison.first_difference is not None
    ]
    if greedy and differing:
        places = ", ".join(f"prompt {number} at new token {index + 1}" for number, index in differing)
        dtype = str(pair.target.dtype).removeprefix("torch.")
        if dtype == "float32":
            sentences.append(f"The texts differ ({places}): in float32 that is a defect, please report it.")
        else:
            sentences.append(
                f"The texts differ ({places}): in {dtype} a step over several tokens rounds otherwise than a step "
                "over one, so near-ties can fall the other way; --dtype float32 is exact."
            )
    return sentences


def run(
    *,
    prompts: Sequence[str],
    max_new_tokens: int,
    repetitions: int,
    dtype: str,
    device: str,
    threads: int | None,
    threshold: float | None,
    prepare: bool,
) -> int:
    """`dspark demo`. The command line's help says what is what.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used, or the target cannot be fetched.
    """
    import torch
    from rich.console import Console

    console = Console()
    options = generation_options(max_new_tokens, threshold=threshold)
    pair = load_pair(DEMO, DEMO, dtype, device, threads)
    if prepare:
        console.print("The demo target is ready; from now on the demo needs no network.", highlight=False)
        return 0
    bundled = Path(__file__).parent / "assets" / "prompts" / "school-maths.jsonl"
    texts = list(prompts) or read_prompts(str(bundled), PROMPTS)["school-maths"]

    console.print("[bold]DSpark on SmolLM2-135M-Instruct[/]", highlight=False)
    console.print(f"{pair.description}, {torch.get_num_threads()} CPU thread(s), greedy", highlight=False)
    print_legend(console)
    encoded = [pair.encode(text) for text in texts]
    warm_up(pair, encoded[0], [plain_method(), dspark_method(pair)], options)

    comparisons = []
    for number, (text, inputs) in enumerate(zip(texts, encoded, strict=True), start=1):
        console.rule(f"Prompt {number} of {len(texts)}")
        console.print(text, style="italic", highlight=False, markup=False)
        console.print()
        stream(pair, inputs, options, console)
        comparisons.append(compare(pair, inputs, options, repetitions))
    console.rule("Result")
    print_comparison(comparisons, pair, console, greedy=True)
    return 0
