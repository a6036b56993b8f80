"""Train a drafter: what `dspark train` runs, as a script that `accelerate launch` takes.

    accelerate launch examples/train.py --target TARGET --data DATA --output_dir drafter --max_steps 1000

Make DATA with `dspark prepare-data`; `--help` names the options.
"""

import sys

from dspark_hf.cli import main


if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
