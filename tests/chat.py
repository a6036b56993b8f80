"""A chat of one's own for the character model: what tests of training data talk with."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import FIXTURES
from tiny import character_tokenizer
from transformers import GenerationConfig, PreTrainedTokenizerFast

from dspark_hf import cli, data


# A turn is `U:` or `S:` and what was said, or `A:` and the answer, and the tokenizer's end token.
TEMPLATE = (
    "{% for message in messages %}{{ {'user': 'U:', 'system': 'S:', 'assistant': 'A:'}[message['role']] }}"
    "{{ message['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
# A dash behind each turn.
DASHED = TEMPLATE.replace("{% endfor %}", "-{% endfor %}")
# The same, with the assistant's turns marked.
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A:{% generation %}{{ message['content'] }}"
    "{{ eos_token }}{% endgeneration %}-{% else %}{{ 'U:' + message['content'] + eos_token }}-{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
# Marks the text, not the token that ends it.
MARKED_TEXT = MARKED.replace("{{ eos_token }}{% endgeneration %}-", "{% endgeneration %}{{ eos_token }}-")
# Leaves out most of what earlier answers say, as templates of thinking models do.
FORGETFUL = TEMPLATE.replace(
    "{{ message['content'] +",
    "{{ (message['content'] if message['role'] != 'assistant' or loop.last else message['content'][-1:]) +",
)
# Asks whether to think.
THINKING = TEMPLATE.replace("A:{% endif %}", "A:{% if not enable_thinking | default(true) %}~{% endif %}{% endif %}")
# What the character model writes often enough to end its turns with.
END = "s"


def chat_tokenizer(template: str | None = TEMPLATE, end: str = END) -> PreTrainedTokenizerFast:
    """The character tokenizer with a chat template and an end token."""
    tokenizer = character_tokenizer()
    tokenizer.eos_token = end
    tokenizer.chat_template = template
    return tokenizer


def chat_target(folder: Path, template: str | None = TEMPLATE) -> Path:
    """The character model in a folder, with the tokenizer; it ends its text with [`END`]."""
    shutil.copytree(FIXTURES / "tiny-target", folder)
    tokenizer = chat_tokenizer(template)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)
    return folder


def write_lines(path: Path, records: Sequence[dict]) -> Path:
    """A `.jsonl` file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def text_of(token_ids: Sequence[int]) -> str:
    """What tokens stand for."""
    return "".join("\n" if token == 0 else chr(31 + token) for token in token_ids)


def marked(token_ids: Sequence[int], mask: Sequence[int]) -> str:
    """The text with what has a loss in brackets."""
    text, inside = "", 0
    for token, loss in zip(token_ids, mask, strict=True):
        text += ("[" if loss else "]") * (loss != inside) + text_of([token])
        inside = loss
    return text + "]" * inside


def run(capsys: pytest.CaptureFixture[str], argv: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, *capsys.readouterr()


def contents(folder: Path) -> list[dict]:
    """The records of a data set, in an order of their own."""
    return sorted(data.load_training_data(folder), key=str)


def provenance(folder: Path) -> dict:
    """How a data set says that it was made."""
    return json.loads((folder / "provenance.json").read_text())
