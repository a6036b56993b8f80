"""What the documents name is there: files, and the commands and options of `dspark`."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from transformers import HfArgumentParser

from dspark_hf import cli, train_command
from dspark_hf.training_arguments import DSparkTrainingArguments


ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [*(ROOT / "examples").glob("*.py"), *(ROOT / "docs").rglob("*.py")]
CODE = "".join(path.read_text(encoding="utf-8") for path in SCRIPTS)
# Options of other programs that the documents show.
FOREIGN = {
    *("--speculative-config", "--model-path", "--speculative-algorithm", "--speculative-draft-model-path"),
    *("--speculative-dspark-block-size", "--nproc_per_node", "--config_file", "--cpu", "--num_processes"),
}


def named(pattern: str) -> list:
    """What a pattern finds in the documents, with where it stands."""
    return sorted(
        {(path.name, found) for path in DOCUMENTS for found in re.findall(pattern, path.read_text(encoding="utf-8"))}
    )


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Of a parser and its subcommands."""
    options = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            options |= set().union(*map(options_of, action.choices.values()))
    return options


@pytest.mark.parametrize(
    ("document", "path"), named(r"(?:dspark_hf|modeling|tests|docs|examples|hub_cards)/[\w./-]*[\w/](?!\w*\*)")
)
def test_files_are_there(document, path):
    assert (ROOT / path).exists(), f"{document} names {path}"


@pytest.mark.parametrize(("document", "option"), named(r"(?<![\w-])--[a-z][\w-]*"))
def test_options_are_there(document, option):
    groups = (train_command.ModelArguments, train_command.DataArguments, DSparkTrainingArguments)
    known = options_of(cli.build_parser()) | options_of(HfArgumentParser(groups)) | FOREIGN
    assert option in known or f'"{option}"' in CODE, f"{document} names {option}"


@pytest.mark.parametrize(("document", "line"), named(r"(?m)^dspark (?!train)(?:.*\\\n)*.*"))
def test_commands_are_understood(document, line):
    arguments = shlex.split(line.replace("\\\n", " "), comments=True)
    cli.build_parser().parse_args(arguments[1:])
