"""Write a drafter as vLLM and SGLang read it, and say how they are started with it.

    python examples/convert_for_vllm.py --output drafter-vllm
    python examples/convert_for_vllm.py --target MODEL --drafter DRAFTER --output drafter-vllm

The weights stay bit for bit; embedding and head, which a drafter borrows here, are copied from the target.
"""

import argparse

from dspark_hf import DSparkDraftModel
from dspark_hf.conversion import convert
from dspark_hf.convert_command import serving_lines
from dspark_hf.demo_target import demo_drafter_folder
from dspark_hf.loading import load_target


def main() -> None:
    """Convert to DeepSpec's format, which both of them read, or to that of speculators, which vLLM reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo", help="folder or Hub id; default: the demo's target")
    parser.add_argument("--drafter", default=demo_drafter_folder(), help="folder or Hub id; default: the demo's")
    parser.add_argument("--output", required=True, help="the new folder")
    parser.add_argument(
        "--to",
        choices=("deepspec", "speculators"),
        help="default: deepspec, or speculators for a reduced vocabulary, as the demo's drafter has",
    )
    args = parser.parse_args()

    target, source = load_target(args.target, dtype="auto", device="cpu", threads=None)
    reduced = DSparkDraftModel.from_pretrained(args.drafter, dtype="auto").config.draft_vocab_size is not None
    to = args.to or ("speculators" if reduced else "deepspec")
    config = convert(args.drafter, args.output, to, target, str(source))
    print(f"Written: {args.output}")
    for line in serving_lines(config, to, str(source), args.output):
        print(line)


if __name__ == "__main__":
    main()
