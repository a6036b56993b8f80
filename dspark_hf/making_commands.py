"""The subcommands that make and move drafters and their data: their options."""

from __future__ import annotations

import argparse

from .command_options import (
    Commands,
    add_placement,
    add_sampling,
    add_target,
    add_temperatures,
    calling,
    minutes_value,
    positive_int,
)


def add_prepare_data(commands: Commands) -> None:
    """`dspark prepare-data`."""
    prepare = commands.add_parser(
        "prepare-data",
        help="training data: prompts answered by the target itself",
        description="Let the target answer prompts and write a data set of whole conversations, with a mask of the "
        "tokens that the target wrote. It can be stopped at any moment; the same command goes on.",
    )
    add_target(prepare)
    prepare.add_argument("--output", required=True, metavar="FOLDER", help="for the data set")
    given = prepare.add_argument_group("prompts")
    given.add_argument(
        "--prompts",
        nargs="+",
        action="extend",
        metavar="PATH",
        help=".jsonl files, or folders of them, with the field 'prompt' (text) or 'messages' (turns; the target "
        "answers each of the user's)",
    )
    given.add_argument("--dataset", metavar="NAME", help="a data set on the Hub or in a folder")
    given.add_argument("--subset", metavar="NAME", help="of the data set, if it has several")
    given.add_argument("--split", default="train", help="of the data set; default: %(default)s")
    given.add_argument("--column", help="of the data set; default: messages, prompt or conversations")
    given.add_argument("--limit", type=positive_int, help="prompts of each file and data set; default: all")
    given.add_argument(
        "--exclude",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="drop prompts that are, hold or nearly repeat one of these files' or folders', as those kept for "
        "evaluation",
    )
    given.add_argument(
        "--keep-responses",
        action="store_true",
        help="decode nothing: take conversations with the assistant's turns that they have; of the options of "
        "decoding only --thinking goes with it",
    )
    given.add_argument(
        "--synthesize",
        metavar="N",
        type=positive_int,
        help="let the target write N prompts too, as the user of its chat template",
    )
    given.add_argument(
        "--system-prompt",
        dest="system_prompts",
        metavar="TEXT",
        nargs="+",
        action="extend",
        help="with --synthesize, for variety: each in turn, and not in the answers; default: the template's own",
    )
    given.add_argument(
        "--examples",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="with --synthesize: prompts to write others like, as for --prompts",
    )
    decoding = prepare.add_argument_group("decoding")
    add_temperatures(decoding, "answer", "1")
    decoding.add_argument(
        "--samples-per-prompt",
        type=positive_int,
        help="answers to a prompt, the temperatures taken in turn; default: one at each temperature",
    )
    decoding.add_argument("--max-new-tokens", type=positive_int, help="of an answer; default: 512")
    add_sampling(decoding)
    decoding.add_argument(
        "--thinking",
        choices=("default", "on", "off"),
        default="default",
        help="enable_thinking, for chat templates that know of it; default: the template's own",
    )
    decoding.add_argument("--batch-size", type=positive_int, help="default: 64")
    decoding.add_argument(
        "--time-limit",
        metavar="MINUTES",
        type=minutes_value,
        help="stop then, with the data set as far as it is; 0 only gathers what there is; default: none",
    )
    add_placement(prepare, dtype="auto")
    prepare.set_defaults(run=calling("prepare_data"))


def add_card(commands: Commands) -> None:
    """`dspark card`."""
    card = commands.add_parser(
        "card",
        help="the model card of a drafter, as dspark push writes it",
        description="Render a drafter's model card from its config, its training.json and measured figures. What is "
        "not known, it says.",
    )
    _add_card_sources(card)
    card.add_argument("--repo-id", metavar="REPO_ID", help="what its code loads; default: the folder by its name")
    card.add_argument("--output", metavar="FILE", help="write it to this file; default: print it")
    card.set_defaults(run=calling("hub_commands", "card"))


def add_push(commands: Commands) -> None:
    """`dspark push`."""
    push = commands.add_parser(
        "push",
        help="a drafter with its code, provenance, figures and card to the Hub",
        description="Check a drafter, stage it as a repository that loads with and without dspark_hf, and upload it "
        "in one commit. The token is that of `hf auth login` or HF_TOKEN. A card that was edited on the Hub stays.",
    )
    _add_card_sources(push)
    push.add_argument("repo_id", metavar="REPO_ID", help="NAMESPACE/NAME, created if it is not there")
    push.add_argument("--plot", metavar="FILE", help="calibration plot, PNG; default: the folder's calibration.png")
    push.add_argument("--private", action="store_true", help="a new repository is private; an old one must be")
    push.add_argument("--revision", metavar="BRANCH", help="created if it is not there; default: the main branch")
    push.add_argument("--message", help="of the commit; default: Upload DSpark drafter")
    push.add_argument("--overwrite-card", action="store_true", help="replace a card that was edited by hand as well")
    push.add_argument("--dry-run", action="store_true", help="send nothing: leave the staged repository in a folder")
    push.set_defaults(run=calling("hub_commands", "push"))


def _add_card_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="of the drafter, with its training.json if there is one")
    for option, name, command in (("--eval", "evaluations", "eval"), ("--bench", "benchmarks", "bench")):
        parser.add_argument(
            option,
            dest=name,
            metavar="FILE",
            nargs="+",
            action="extend",
            default=[],
            help=f"figures of `dspark {command} --output`",
        )
    parser.add_argument("--target", metavar="REPO_ID", help="Hub id of the target; default: what training.json says")
    parser.add_argument("--licence", metavar="ID", help="of the weights, as the Hub names it, for example apache-2.0")
    parser.add_argument(
        "--dataset",
        dest="datasets",
        metavar="REPO_ID",
        action="append",
        default=[],
        help="Hub id of a data set it was trained on, besides those that training.json names (repeatable)",
    )


def add_convert(commands: Commands) -> None:
    """`dspark convert`."""
    convert = commands.add_parser(
        "convert",
        help="a drafter into the format of DeepSpec or speculators, for vLLM and SGLang, or into ours",
        description="Write a drafter of any readable format in another one, weights bit for bit, and say how vLLM and "
        "SGLang are started with it. What the format cannot express is refused by name.",
    )
    convert.add_argument("source", metavar="SRC", help="folder or Hub id of the drafter")
    convert.add_argument("destination", metavar="DST", help="the new folder")
    convert.add_argument("--to", choices=("dspark", "deepspec", "speculators"), required=True)
    convert.add_argument(
        "--target",
        help="folder or Hub id: lends embedding and head where the drafter borrows them and the format saves them; "
        "speculators' config names it",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace a checkpoint at DST")
    convert.set_defaults(run=calling("convert_command"))
