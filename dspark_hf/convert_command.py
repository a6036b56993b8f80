"""`dspark convert`: a drafter into the format of another program, and how that is started with it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from .files import check_replaceable
from .loading import DEMO, CommandError, check_source, load_target, reporting


if TYPE_CHECKING:
    from .modeling import DSparkConfig


def run(*, source: str, destination: str, to: str, target: str | None, overwrite: bool) -> int:
    """`dspark convert`: check, convert, tell. The command line's help says what is what.

    Returns:
        `int`: the exit code, 0.

    Raises:
        `CommandError`: something given cannot be used, or the format cannot express the drafter.
    """
    check_source("SRC", source)
    if target is not None:
        check_source("--target", target)
    elif to == "speculators":
        raise CommandError("--target is missing: speculators' config names the target; give its folder or Hub id")
    with reporting(f"DST {destination!r}"):
        check_replaceable(Path(destination).expanduser().absolute(), overwrite)

    from .conversion import convert
    from .demo_target import demo_drafter_folder

    model, name = None, None
    if target is not None:
        model, found = load_target(target, "auto", "cpu", None)
        name = str(Path(found).expanduser().absolute()) if Path(found).expanduser().is_dir() else target
    with reporting(f"SRC {source!r} --to {to}"):
        origin = demo_drafter_folder() if source == DEMO else Path(source).expanduser()
        config = convert(origin if Path(origin).is_dir() else source, destination, to, model, name, overwrite)
    print(f"Written: {destination}")
    for line in serving_lines(config, to, name or "TARGET", destination):
        print(line)
    return 0


def serving_lines(config: DSparkConfig, to: str, target: str, folder: str) -> list[str]:
    """
    How other programs are started with what was written, and what they do not do with it.

    Source: vLLM's `qwen3_dspark.py` and SGLang's `models/dspark.py`, `dspark_config.py` as of autumn 2026.
    """
    if to == "dspark":
        command = ["dspark", "generate", "--target", target, "--drafter", folder, "--prompt", "..."]
        return [f"Use it: {shlex.join(command)}"]
    lines = []
    reduced = config.draft_vocab_size is not None
    dflash = to == "speculators" and not (config.markov_rank or config.enable_confidence_head)
    vllm = {"method": "dflash" if dflash else "dspark", "model": folder, "num_speculative_tokens": config.block_size}
    if not dflash and (config.markov_rank == 0 or config.markov_head_type != "vanilla"):
        lines.append("vLLM runs drafters with a vanilla Markov head only; this one it does not.")
    elif config.sandwich_norms:
        lines.append("vLLM runs DeepSpec drafters with Qwen3 layers; this one it does not.")
    else:
        lines.append(f"vLLM: {shlex.join(['vllm', 'serve', target, '--speculative-config', json.dumps(vllm)])}")
        if to == "speculators" and config.sample_from_anchor:
            safe = "" if reduced else "; deepspec is safe"
            lines.append(f"vLLM before pull request 48639 reads such a folder with the other slot convention{safe}.")
    if to == "speculators":
        other = "and deepspec, which it runs, has no reduced vocabulary" if reduced else "convert to deepspec for it"
        lines.append(f"SGLang does not run speculators' DSpark drafters; {other}.")
    elif config.markov_rank == 0 or config.sandwich_norms:
        lines.append("SGLang runs DSpark drafters with a Markov head and Qwen3 layers; this one it does not.")
    else:
        command = ["python", "-m", "sglang.launch_server", "--model-path", target]
        command += ["--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", folder]
        command += ["--speculative-dspark-block-size", str(config.block_size)]
        lines.append(f"SGLang: {shlex.join(command)}")
    if config.confidence_temperatures:
        lines.append(
            "The calibration stands in config.json as `confidence_temperatures`; of the programs above none reads it."
        )
    return lines
