"""A drafter for SmolLM2-135M-Instruct from nothing but the installed packages: data, training, calibration,
evaluation, card.

    python examples/train_smollm2.py --output runs/smollm2 --data-minutes 240 --train-minutes 240

Each phase is time-boxed and goes on where it was when the command is run again; a phase that is done is passed over.
Two CPU cores want hours; it has not been run on a GPU.

Four of five prompts are those of smollm2_prompts.py, one is the target's own; `--prompts` adds others. All answers
are the target's.
"""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from smollm2_prompts import all_prompts, write_prompts
from transformers import AutoTokenizer

from dspark_hf.data import load_training_data, split_by_prompt
from dspark_hf.demo_target import demo_target_folder


HERE = Path(__file__).parent
CONFIG = HERE / "train_smollm2.yaml"
# As in the config, and the Trainer's default: `dspark train` keeps the same prompts out.
HELD_OUT, SEED = 0.02, 42
# What the target is asked to write its own prompts about.
SUBJECTS = (
    "You are a helpful assistant.",
    "You are a patient teacher of mathematics who solves word problems, algebra and geometry step by step.",
    "You are an expert Python programmer who writes short functions and explains them.",
    "You are a writer who drafts letters, stories and summaries.",
    "You are a well-read assistant who explains science, history and everyday matters.",
    "You solve programming contest problems in Python.",
)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the run")
    parser.add_argument("--prompts", nargs="*", default=[], help="prompts of your own beside the others")
    parser.add_argument("--exclude", nargs="*", default=[], help="prompts that must not be trained on")
    parser.add_argument(
        "--synthesize", type=int, help="prompts that the target writes itself, 1 or more; four times as many are added"
    )
    parser.add_argument("--data-minutes", type=float, default=240)
    parser.add_argument("--train-minutes", type=float, default=240)
    parser.add_argument("--eval-prompts", help="folder of .jsonl files; by default the bundled ones")
    parser.add_argument("--eval-limit", type=int, default=8, help="prompts of each set")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--batch-size", type=int, default=48, help="rows that are decoded at once")
    parser.add_argument("--train-arguments", default="", help="more options of dspark train, as one text")
    args = parser.parse_args()
    if args.synthesize is not None and args.synthesize < 1:
        parser.error(f"--synthesize {args.synthesize}: give at least 1")
    return args


def dspark(*arguments: object) -> None:
    """Run a `dspark` command, shown first; it ends this one if it fails."""
    command = [str(argument) for argument in arguments]
    print("\n$ dspark", shlex.join(command), flush=True)
    done = subprocess.run([sys.executable, "-m", "dspark_hf", *command])
    if done.returncode != 0:
        sys.exit(done.returncode)


def write_held_out_prompts(data: Path, file: Path) -> None:
    """The users' turns that were kept out of the training, to calibrate with."""
    _, held_out = split_by_prompt(load_training_data(data), HELD_OUT, seed=SEED)
    tokenizer = AutoTokenizer.from_pretrained(demo_target_folder())
    texts = [tokenizer.decode(sample["input_ids"][: sample["loss_mask"].index(1)]) for sample in held_out]
    users = (text.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0] for text in texts)
    write_prompts(list(dict.fromkeys(users)), file)


def main() -> None:
    """All phases in turn."""
    args = parse()
    args.output.mkdir(parents=True, exist_ok=True)
    data, drafter = args.output / "data", args.output / "drafter"
    figures, plots, kept = args.output / "eval.json", args.output / "plots", args.output / "held-out.jsonl"
    prompts = args.output / "prompts.jsonl"
    threads = [] if args.threads is None else ["--threads", args.threads]
    evaluated = [] if args.eval_prompts is None else ["--prompts", args.eval_prompts]
    exclude = [*args.exclude, *([] if args.eval_prompts is None else [args.eval_prompts])]

    if args.synthesize is None:
        # Rather more than there is time for: two cores gave some 120 answers a minute, for a GPU it is a guess.
        args.synthesize = max(8, int(args.data_minutes * (400 if torch.cuda.is_available() else 16)))
    if not (data / "dataset_info.json").exists():
        write_prompts(all_prompts(4 * args.synthesize), prompts)
        subjects = [part for subject in SUBJECTS for part in ("--system-prompt", subject)]
        dspark(
            *(
                "prepare-data",
                "--output",
                data,
                "--prompts",
                prompts,
                *args.prompts,
                "--synthesize",
                args.synthesize,
                *subjects,
            ),
            *(("--exclude", *exclude) if exclude else ()),
            *("--temperature", 0, 0.3, 0.7, 1, "--samples-per-prompt", 1, "--top-p", 1, "--top-k", 0),
            *("--max-new-tokens", 256, "--batch-size", args.batch_size, "--dtype", "bfloat16"),
            *("--time-limit", args.data_minutes, *threads),
        )
    if not (data / "dataset_info.json").exists():
        sys.exit(f"{data} holds no answers yet: run this again to go on, or give it more --data-minutes")
    if not (drafter / "training.json").exists():
        dspark(
            *("train", "--config", CONFIG, "--data", data, "--output_dir", drafter),
            *("--time_limit", args.train_minutes, "--plot", args.output / "training.png"),
            *("--feature_cache", args.output / "features"),
            *threads,
            *shlex.split(args.train_arguments),
        )
    pair = ("--target", "demo", "--drafter", drafter, "--dtype", "bfloat16", *threads)
    if not (drafter / "calibration.png").exists():
        write_held_out_prompts(data, kept)
        dspark(
            *("calibrate", *pair, "--prompts", kept, "--limit", 96, "--temperature", 0, 1),
            *("--top-p", 1, "--top-k", 0, "--plot", drafter / "calibration.png"),
        )
    if not figures.exists():
        dspark(
            *("eval", *pair, *evaluated, "--limit", args.eval_limit, "--temperature", 0, 1),
            *("--top-p", 1, "--top-k", 0, "--output", figures, "--plot", plots),
        )
    dspark("card", drafter, "--eval", figures, "--licence", "apache-2.0", "--output", drafter / "README.md")


if __name__ == "__main__":
    main()
