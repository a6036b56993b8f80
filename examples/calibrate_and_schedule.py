"""Measure the machine, calibrate the confidence, then let both decide how many drafts of each row are verified.

    python examples/calibrate_and_schedule.py --output calibrated-drafter
    python examples/calibrate_and_schedule.py --target MODEL --drafter DRAFTER --prompts FILE.jsonl --output FOLDER

With the demo pair this takes some minutes on two CPU cores. Let nothing else run meanwhile: seconds are measured.
"""

import argparse
import sys

from dspark_hf.cli import main as dspark
from dspark_hf.command_files import read_prompts
from dspark_hf.loading import left_padded, load_pair


def main() -> None:
    """Profile and calibrate as the commands do, then generate and print each round's decision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", default="demo", help="folder or Hub id of a drafter for it; default: the demo's")
    parser.add_argument("--output", required=True, help="folder for the calibrated copy of the drafter")
    parser.add_argument("--prompts", help=".jsonl file with the field 'prompt'; default: bundled school maths")
    parser.add_argument("--rows", type=int, default=4, help="prompts that are answered at the end")
    parser.add_argument("--budget", default="60", help="seconds for the profile")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    prompts = [] if args.prompts is None else ["--prompts", args.prompts]
    models = ["--target", args.target, "--drafter", args.drafter]
    fit = [*prompts, "--temperature", "0", "--max-new-tokens", str(args.max_new_tokens), "--output", args.output]
    for command in (["profile", *models, "--budget", args.budget], ["calibrate", *models, *fit]):
        if code := dspark(command):
            sys.exit(code)

    pair = load_pair(args.target, args.output)
    texts = [text for group in read_prompts(args.prompts, args.rows).values() for text in group][: args.rows]
    out = pair.target.generate(
        **left_padded([pair.encode(text) for text in texts], pair.tokenizer.pad_token_id or 0),
        assistant_model=pair.drafter,
        num_assistant_tokens_schedule="hardware_aware",
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
        return_dict_in_generate=True,
    )
    decisions = out.speculative_stats.decisions
    sending = [decision for decision in decisions if any(decision.verify_lengths)]
    for decision in sending:
        expected = "" if decision.throughput is None else f", {decision.throughput:.0f} tokens/s expected"
        print(f"round {decision.round}: sent {decision.verify_lengths}, accepted {decision.accepted}{expected}")
    print(f"{len(sending)} of {len(decisions)} rounds sent drafts; in the others they were not expected to pay")
    print(f"tokens a round and row: {out.speculative_stats.mean_acceptance_length:.2f}")


if __name__ == "__main__":
    main()
