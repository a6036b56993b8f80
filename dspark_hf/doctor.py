"""`dspark doctor`: whether a target and a drafter go together, are read as they were trained, and pay here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .command_files import read_prompts
from .loading import DEMO, CommandError, Pair, check_source, load_target, load_tokenizer, reporting


if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from .checkup import Finding, Payoff
    from .probing import Probe

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def run(
    *,
    target: str,
    drafter: str | None,
    prompts: str | None,
    limit: int | None,
    max_new_tokens: int,
    budget: float,
    dtype: str,
    device: str,
    threads: int | None,
) -> int:
    """`dspark doctor`: check, probe, measure, tell. The command line's help says the rest.

    Returns:
        `int`: the exit code: 1 if there are problems, else 0.

    Raises:
        `CommandError`: something given cannot be used.
    """
    check_source("--target", target)
    if drafter is None and target != DEMO:
        raise CommandError(f"--drafter is missing: give the one that is to be used with --target {target!r}")
    drafter = drafter or DEMO
    check_source("--drafter", drafter)
    texts = [prompt for file in read_prompts(prompts, limit).values() for prompt in file]

    from rich.console import Console

    from .checkup import PROBLEM, Finding
    from .demo_target import demo_drafter_folder
    from .modeling import DSparkDraftModel

    console = Console()
    model, _ = load_target(target, dtype, device, threads)
    tokenizer = load_tokenizer(target)
    source = demo_drafter_folder() if drafter == DEMO else Path(drafter).expanduser()
    source = source if source.is_dir() else drafter
    findings: list[Finding] = []
    try:
        draft_model = DSparkDraftModel.from_pretrained(source, dtype=model.dtype).to(model.device).eval()
    except ValueError as error:
        findings.append(Finding(PROBLEM, "checkpoint", str(error)))
    except OSError as error:
        raise CommandError(f"--drafter {drafter!r}: {' '.join(str(error).split())}") from error
    else:
        pair = Pair(model, draft_model, tokenizer, (target, drafter))
        console.print(pair.description, highlight=False)
        findings += _examine(pair, source, texts, max_new_tokens, budget, console)
    _print_findings(findings, console)
    _print_environment(console)
    return int(any(finding.status == PROBLEM for finding in findings))


def _examine(
    pair: Pair, source: str | Path, prompts: Sequence[str], max_new_tokens: int, budget: float, console: Console
) -> Iterator[Finding]:
    """All that can be looked at of a pair; what runs both is left out if they do not fit."""
    from .checkup import (
        OK,
        PROBLEM,
        Finding,
        check_reading,
        check_sizes,
        check_template,
        check_tokenizer,
        check_training,
        check_verifiable,
    )
    from .probing import greedy_texts, probe

    config = pair.drafter.config
    fits = [Finding(OK, "checkpoint", "all tensors are used, all parameters filled, all values finite")]
    fits += [check_verifiable(pair.target), *check_sizes(config, pair.target)]
    fits += check_tokenizer(config, pair.target, pair.tokenizer, _own_tokenizer(source))
    yield from fits
    yield check_template(pair.tokenizer)
    if (provenance := check_training(source, pair.names[0])) is not None:
        yield provenance
    if any(finding.status == PROBLEM for finding in fits):
        return
    encoded = [pair.encode(prompt) for prompt in prompts]
    with reporting(f"--target {pair.names[0]!r}"):
        texts = greedy_texts(pair.target, encoded, max_new_tokens)
        probes = probe(pair.target, pair.drafter, texts)
    if probes:
        _print_probes(probes, console)
    yield check_reading(probes)
    if probes:
        yield _speculation(pair, probes[0], max(ids.shape[1] for ids, _ in texts), budget, console)


def _speculation(pair: Pair, declared: Probe, context: int, budget: float, console: Console) -> Finding:
    """Whether drafting pays, by the stored profile or by costs measured now."""
    from .checkup import WARNING, Finding, check_payoff, payoffs
    from .profiles import find_profile
    from .profiling import measure_profile

    profile = find_profile(pair.target, pair.drafter)
    if profile is None:
        try:
            # Of one context only, so too little to be stored for the schedules.
            profile = measure_profile(pair.target, pair.drafter, contexts=(context,), budget=budget, save=False)
        except ValueError as error:
            return Finding(WARNING, "speculation", f"what rounds cost could not be measured: {error}")
    found = payoffs(profile, declared.survivals, context)
    _print_payoffs(found, console)
    return check_payoff(found)


def _own_tokenizer(source: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the drafter's folder, if it carries one."""
    from transformers import AutoTokenizer

    from .modeling.checkpoint_loading import find_file

    if find_file(source, "tokenizer_config.json", {}) is None:
        return None
    with reporting(f"--drafter {str(source)!r}"):
        return AutoTokenizer.from_pretrained(source)


def _print_probes(probes: Sequence[Probe], console: Console) -> None:
    from rich.table import Table

    from .checkup import described

    blocks, texts = probes[0].blocks, len(probes[0].accepted)
    table = Table(
        title=f"Readings: the same {blocks} blocks in {texts} greedy texts, the config's own first",
        box=None,
        padding=(0, 1),
    )
    for column in ("reading", "tokens a round", "drafts gained", "95% interval"):
        table.add_column(column, justify="left" if column == "reading" else "right")
    for one in probes:
        gain, interval = one.gain_over(probes[0])
        told = "–" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"
        own = one.reading.declared
        row = ("–", "–") if own else (f"{gain:+.2f}", told)
        table.add_row(described(one), f"{one.mean_acceptance_length:.2f}", *row)
    console.print(table)


def _print_payoffs(found: Sequence[Payoff], console: Console) -> None:
    from rich.table import Table

    table = Table(title="Expected tokens a second on this machine", box=None, padding=(0, 1))
    for column in ("rows", "plain", "DSpark", "ratio", "drafts sent"):
        table.add_column(column, justify="right")
    for one in found:
        table.add_row(str(one.rows), f"{one.plain:.1f}", f"{one.drafted:.1f}", f"{one.ratio:.2f}", str(one.drafts))
    console.print(table)


def _print_findings(findings: Sequence[Finding], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), show_header=False)
    for finding in findings:
        table.add_row(Text(finding.status, _STYLES[finding.status]), finding.check, Text(finding.text))
    console.print(table)


def _print_environment(console: Console) -> None:
    from .environment import machine, package_versions

    console.print("\nFor a bug report:")
    for name, value in (package_versions() | machine()).items():
        console.print(f"{name}: {value}", highlight=False, soft_wrap=True)
