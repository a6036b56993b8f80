"""Publish a drafter: look at what would be sent, then send it with `--push`.

    python examples/publish.py NAMESPACE/NAME
    python examples/publish.py NAMESPACE/NAME --drafter FOLDER --licence apache-2.0 --eval eval.json --push

The token is that of `hf auth login`. `dspark push` is the same as a command.
"""

import argparse
import tempfile
from pathlib import Path

from dspark_hf.card import CardSources
from dspark_hf.demo_target import demo_drafter_folder
from dspark_hf.hub import push_drafter, stage_drafter


def main() -> None:
    """Stage the repository: weights, config, code that runs without dspark_hf, provenance, figures, model card."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo_id", metavar="NAMESPACE/NAME")
    parser.add_argument("--drafter", type=Path, default=demo_drafter_folder(), help="folder; default: the demo's")
    parser.add_argument("--target", help="Hub id of its target; default: what its training.json says")
    parser.add_argument("--licence", help="of the weights, as the Hub names it")
    parser.add_argument("--eval", nargs="*", default=[], metavar="FILE", help="figures of `dspark eval --output`")
    parser.add_argument("--private", action="store_true")
    parser.add_argument("--push", action="store_true", help="send it")
    args = parser.parse_args()

    sources = CardSources(evaluations=args.eval, target=args.target, licence=args.licence)
    staged = Path(tempfile.mkdtemp(prefix="dspark-publish-"))
    stage_drafter(args.drafter, staged, args.repo_id, sources)
    for file in sorted(path for path in staged.rglob("*") if path.is_file()):
        print(f"{file.stat().st_size:>12,} bytes  {file.relative_to(staged)}")
    if args.push:
        commit = push_drafter(args.drafter, args.repo_id, sources, private=args.private or None)
        print(f"Pushed: {commit.repo_url}")
    else:
        print(f"Nothing was sent. Read {staged / 'README.md'}, then add --push.")


if __name__ == "__main__":
    main()
