"""Every example runs, on models small enough for that, and says or writes what it is there for."""

import ast
import importlib.util
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from chat import chat_target, chat_tokenizer, text_of, write_lines
from conftest import FIXTURES
from hub_standin import HubStandIn
from safetensors.torch import load_file
from test_hub import here  # noqa: F401
from tiny import encode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from dspark_hf import DSparkDraftModel, cli, hook
from dspark_hf.data import data_statistics, load_training_data
from dspark_hf.decoding import dspark_decode
from dspark_hf.train_command import parse as parse_training


EXAMPLES = Path(__file__).parents[1] / "examples"
NEW = ["--max-new-tokens", "24"]
# PEFT asks for it, and says so.
quiet_peft = pytest.mark.filterwarnings("default:.*is_gradient_checkpointing:FutureWarning")


def test_every_example_has_a_test():
    """A test is named after its example, perhaps with more words behind."""
    names = [path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(names) > 10
    for name in names:
        assert any(test == f"test_{name}" or test.startswith(f"test_{name}__") for test in globals()), name


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A target with a chat of its own, and a drafter for it."""
    root = tmp_path_factory.mktemp("examples")
    chat_target(root / "target")
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = "~"
    tokenizer.save_pretrained(root / "target")
    drafter = DSparkDraftModel.from_pretrained(FIXTURES / "deepspec-vanilla" / "drafter")
    drafter.save_pretrained(root / "drafter")
    return root


@pytest.fixture
def pair(models) -> list[str]:
    return ["--target", str(models / "target"), "--drafter", str(models / "drafter")]


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., str]:
    """Run an example with these arguments; what it printed."""

    def run_example(name: str, *argv: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLES / name), *argv])
        monkeypatch.syspath_prepend(EXAMPLES)
        capsys.readouterr()
        torch.manual_seed(0)
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def plain_answer(models: Path, question: str, max_new_tokens: int = 24) -> str:
    """What the target alone says."""
    target, tokenizer = (kind.from_pretrained(models / "target") for kind in (AutoModelForCausalLM, AutoTokenizer))
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    out = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_generate(run, pair):
    printed = run("generate.py", *pair, *NEW)
    assert len([line for line in printed.splitlines() if line.startswith("- ")]) == 3
    assert 1 <= float(printed.split("tokens a round: ")[1]) <= 8


def test_chat__once(run, pair, models):
    printed = run("chat.py", *pair, *NEW, "--once", "How many?")
    assert plain_answer(models, "How many?") in printed
    assert "drafts accepted in" in printed


def test_chat__a_conversation_remembers(run, pair, monkeypatch):
    lines = iter(["First", "Second", ""])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    seen = []
    template = PreTrainedTokenizerBase.apply_chat_template

    def apply(self, messages, **options):
        seen.append([message["role"] for message in messages])
        return template(self, messages, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "apply_chat_template", apply)
    assert run("chat.py", *pair, *NEW).count("drafts accepted in") == 2
    assert seen == [["user"], ["user", "assistant", "user"]]


def test_batch(run, pair, models):
    questions = ["How many?", "A much longer question than that one"]
    printed = run("batch.py", *pair, *NEW, *questions)
    for question in questions:
        assert f"> {question}\n{plain_answer(models, question).strip()}\n[" in printed
    assert printed.count("drafts accepted]") == 2


def test_calibrate_and_schedule(run, pair, tmp_path):
    texts = ["Tom has 5 apples", "12 - 7 = ", "Once upon a time", "Hello", "A baker makes 72 rolls", "What is"]
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"prompt": text} for text in texts])
    more = ["--prompts", str(prompts), "--output", str(tmp_path / "calibrated"), "--budget", "0.5", "--rows", "2"]
    printed = run("calibrate_and_schedule.py", *pair, *more, *NEW)
    config = json.loads((tmp_path / "calibrated" / "config.json").read_text())
    (fit,) = config["confidence_temperatures"]
    assert fit["sampling_temperature"] == 0 and len(fit["temperatures"]) == 7
    assert list(Path(os.environ["DSPARK_CACHE"]).glob("profiles/*.json"))
    decisions = [line for line in printed.splitlines() if line.startswith("round ")]
    assert all("sent [" in line and line.endswith("tokens/s expected") for line in decisions), "there was no profile"
    assert f"{len(decisions)} of " in printed and "tokens a round and row: " in printed


@pytest.fixture(scope="module")
def data(models) -> Path:
    """Texts of the target's own as training data."""
    datasets = pytest.importorskip("datasets")
    target = AutoModelForCausalLM.from_pretrained(models / "target")
    prompts = torch.randint(1, 95, (24, 6), generator=torch.Generator().manual_seed(0))
    texts = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_length=40, eos_token_id=None, pad_token_id=0
    )
    rows = [
        {"input_ids": text, "loss_mask": [0] * 6 + [1] * 34, "prompt": str(i)} for i, text in enumerate(texts.tolist())
    ]
    datasets.Dataset.from_list(rows).save_to_disk(models / "data")
    return models / "data"


@quiet_peft
def test_lora(run, pair, models, data, tmp_path):
    pytest.importorskip("peft")
    more = ["--data", str(data), "--output", str(tmp_path / "tuned"), "--rank", "2", "--steps", "6"]
    printed = run("lora.py", *pair, *more)
    before, after = map(float, re.search(r"texts: (\S+) before, (\S+) after", printed).groups())
    assert after < before
    old, new = (load_file(folder / "model.safetensors") for folder in (models / "drafter", tmp_path / "tuned"))
    assert old.keys() == new.keys()
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert any("q_proj" in name for name in changed) and not any("mlp" in name for name in changed)
    DSparkDraftModel.from_pretrained(tmp_path / "tuned")


def test_train(run, data, models, tmp_path):
    given = ["--target", str(models / "target"), "--data", str(data), "--output_dir", str(tmp_path / "drafter")]
    given += [
        "--use_cpu",
        "True",
        "--report_to",
        "none",
        "--max_steps",
        "2",
        "--num_anchors",
        "4",
        "--decode_samples",
        "0",
    ]
    given += ["--num_hidden_layers", "1", "--markov_rank", "4", "--mask_token_id", "95", "--save_strategy", "no"]
    with pytest.raises(SystemExit) as ended:
        run("train.py", *given, "--held_out", "0.2")
    assert ended.value.code == 0
    assert DSparkDraftModel.from_pretrained(tmp_path / "drafter").config.markov_rank == 4


def test_train_smollm2(run, monkeypatch, tmp_path, data):
    """The commands that it runs, in order, each of which takes its arguments; nothing is run."""
    commands = []

    def record(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command[3:])
        if command[3] == "prepare-data":
            (tmp_path / "run" / "data").symlink_to(data)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", record)
    monkeypatch.setattr("dspark_hf.demo_target.demo_target_folder", lambda: data.parent / "target")
    printed = run("train_smollm2.py", "--output", str(tmp_path / "run"), "--threads", "2", "--synthesize", "90")
    assert [command[0] for command in commands] == ["prepare-data", "train", "calibrate", "eval", "card"]
    for command in commands:
        assert f"$ dspark {shlex.join(command)}" in printed
        if command[0] == "train":
            model, _, training = parse_training([*command[1:], "--use_cpu", "True", "--bf16", "False"])
            assert model.draft_vocab_size == 20480 and training.time_limit == 240
        else:
            cli.build_parser().parse_args(command)
    kept = (tmp_path / "run" / "held-out.jsonl").read_text().splitlines()
    assert kept and all(json.loads(line)["prompt"] for line in kept)
    asked = [json.loads(line)["prompt"] for line in open(tmp_path / "run" / "prompts.jsonl")]
    assert 300 < len(set(asked)) == len(asked) <= 360


def test_smollm2_prompts(run, tmp_path):
    """Of all kinds, none twice, with no gap of a template left."""
    printed = run("smollm2_prompts.py", "--count", "400", "--output", str(tmp_path / "prompts.jsonl"))
    prompts = [json.loads(line)["prompt"] for line in open(tmp_path / "prompts.jsonl", encoding="utf-8")]
    assert f"{len(prompts)} prompts" in printed and 380 < len(set(prompts)) == len(prompts) <= 400
    for kind in (
        "def ",
        "Write a Python",
        "Sample Input 1",
        "\\boxed",
        "Summarize",
        "unit tests",
    ):
        assert any(kind.lower() in prompt.lower() for prompt in prompts), kind
    # Which of the other languages are drawn depends on the standard library that is there.
    assert any(re.search("[а-яぁ-ん一-龥]", prompt) for prompt in prompts)
    gaps = re.compile(r"\{(signature|summary|head|source|text|problem|subject|other|person|role|word|[abcd])\}")
    written = [prompt for prompt in prompts if "\\" not in prompt and "```" not in prompt and "def " not in prompt]
    assert not any(gaps.search(prompt) for prompt in written)


def test_prompts_are_well_formed(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import smollm2_prompts
    from smollm2_prompts import all_prompts

    part = list(smollm2_prompts.library())[::8]
    monkeypatch.setattr(smollm2_prompts, "library", lambda: iter(part))
    node = ast.parse("def f(self, /, a, b=(1, 2), *, c): pass").body[0]
    assert smollm2_prompts._arguments(node.args) == "a, b=(1, 2), *, c"
    assert [len(all_prompts(count)) for count in (1, 2, 40)] == [1, 2, 40]
    prompts = all_prompts(2000)
    heads = [prompt for prompt in prompts if prompt.startswith("def ")]
    assert len(heads) > 20 and all(map(ast.parse, heads))
    names = [name for prompt in prompts for name in re.findall(r"    def (.*)\(self, [^)]*\) -> int", prompt)]
    assert names and all(map(str.isidentifier, names))
    assert not [prompt for prompt in prompts if re.search(r"^You are .*\. a|^Tickets cost \$|\(x\^\d", prompt)]
    with pytest.raises(ValueError, match="`count` is -5; give the number of prompts, at least 1"):
        all_prompts(-5)


def test_the_bundled_answers():
    """What its card counts, and that each sample is one answer behind a prompt."""
    folder = EXAMPLES / "smollm2-answers"
    samples = load_training_data(folder)
    total = data_statistics(samples).total
    card = (folder / "README.md").read_text()
    for number, what in ((total.samples, "conversations"), (total.tokens, "tokens"), (total.supervised, "of them")):
        assert f"{number:,} {what}" in card
    for sample in samples:
        token_ids, mask = sample["input_ids"], sample["loss_mask"]
        first = mask.index(1)
        assert first > 0 and all(mask[first : first + sum(mask)]) and sum(mask) <= 256
        assert len(mask) == len(token_ids) and 0 <= min(token_ids) <= max(token_ids) < 49152
    parts = json.loads((folder / "provenance.json").read_text())["parts"]
    assert sum(part["samples"]["done"] for part in parts) == total.samples


def test_publish__looks_first(run, models, here: HubStandIn, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    printed = run("publish.py", "ann/drafter", "--drafter", str(models / "drafter"), "--licence", "apache-2.0")
    card = Path(printed.split("Nothing was sent. Read ")[1].split(", then")[0])
    assert "license: apache-2.0" in card.read_text() and "ann/drafter" in card.read_text()
    for name in ("model.safetensors", "modeling_dspark.py", "config.json"):
        assert f"  {name}\n" in printed and (card.parent / name).is_file()
    assert not here.requests


def test_publish__sends(run, models, here: HubStandIn, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    printed = run("publish.py", "ann/drafter", "--drafter", str(models / "drafter"), "--private", "--push")
    assert f"Pushed: {here.endpoint}/ann/drafter" in printed
    assert here.repositories["ann/drafter"].private
    assert {"model.safetensors", "README.md", "config.json"} <= here.files("ann/drafter").keys()


@pytest.mark.parametrize("to", ["deepspec", "speculators"])
def test_convert_for_vllm(run, pair, models, tmp_path, to):
    output = tmp_path / "converted"
    printed = run("convert_for_vllm.py", *pair, "--output", str(output), "--to", to)
    (line,) = [line for line in printed.splitlines() if line.startswith("vLLM: ")]
    command = shlex.split(line.removeprefix("vLLM: "))
    assert command[:3] == ["vllm", "serve", str(models / "target")]
    told = json.loads(command[-1])
    assert told == {"method": "dspark", "model": str(output), "num_speculative_tokens": 7}
    weights, old = load_file(output / "model.safetensors"), load_file(models / "drafter" / "model.safetensors")
    assert torch.equal(weights["fc.weight"], old["fc.weight"])
    DSparkDraftModel.from_pretrained(output)


def test_convert_for_vllm__reduced_vocabulary(run, models, tmp_path):
    """As the demo's drafter: the default is the format that can hold it."""
    drafter = FIXTURES / "speculators-reduced-vocab" / "drafter"
    pair = ["--target", str(models / "target"), "--drafter", str(drafter)]
    printed = run("convert_for_vllm.py", *pair, "--output", str(tmp_path / "converted"))
    assert "vLLM: vllm serve" in printed and "SGLang does not run" in printed
    assert DSparkDraftModel.from_pretrained(tmp_path / "converted").config.draft_vocab_size is not None
    with pytest.raises(ValueError, match="`draft_vocab_size`.*speculators"):
        run("convert_for_vllm.py", *pair, "--output", str(tmp_path / "other"), "--to", "deepspec")


TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: {until}
  max_gen_toks: 24
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="pip install lm-eval")
@pytest.mark.filterwarnings("default")  # its own, and those of what it imports
@pytest.mark.parametrize("size", ["1", "3"])
def test_evaluate_with_lm_eval(run, pair, models, tmp_path, monkeypatch, size):
    """Scores and texts are those without the drafter, row by row and in batches."""
    questions = ["Tom has 5", "12 - 7 = ", "Once upon a time", "Hello", "A baker makes 72 rolls", "What"]
    target = AutoModelForCausalLM.from_pretrained(models / "target")
    texts = [text_of(target.generate(**encode(text), max_new_tokens=24)[0].tolist()) for text in questions]
    answers = [text[len(question) :].split("e")[0] for question, text in zip(questions, texts, strict=True)]
    rows = [{"question": text, "answer": "no"} for text in questions]
    rows[1]["answer"] = answers[1].removesuffix("s")  # which is the end token
    file = write_lines(tmp_path / "letters.jsonl", rows)
    first = texts[0][len(questions[0]) - 1 :][:2]
    # A prompt's last character and the first new one: that is no stop, though Transformers' `stop_strings` think so.
    (tmp_path / "letters.yaml").write_text(TASK.format(file=file, until=json.dumps([first, "e"])))
    calls = []
    monkeypatch.setattr(hook, "dspark_decode", lambda *given, **more: calls.append(1) or dspark_decode(*given, **more))
    more = ["--tasks", "letters", "--include-path", str(tmp_path), "--batch-size", size, "--compare"]
    printed = run("evaluate_with_lm_eval.py", *pair, *more)
    scores = [line.split(": ", 1)[1] for line in printed.splitlines() if line.startswith(("with", "without"))]
    assert len(scores) == 2 and scores[0] == scores[1] and "exact_match,none': 0.1666" in scores[0]
    assert f"the same text: {len(questions)} of {len(questions)}" in printed
    assert len(calls) == len(questions) / int(size)


def test_quickstart(models, monkeypatch, capsys):
    """A valid notebook without outputs, whose cells run in turn."""
    pytest.importorskip("matplotlib").use("Agg")
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    names: dict[str, object] = {}
    for cell in cells:
        assert cell["cell_type"] in ("markdown", "code") and isinstance(cell["metadata"], dict)
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
        if cell["id"] == "parameters":
            assert names["TARGET"] == names["DRAFTER"] == "demo"
            names |= {"TARGET": str(models / "target"), "DRAFTER": str(models / "drafter")}
            names |= {"NEW_TOKENS": 24, "PROFILE_SECONDS": 0.5, "PROMPTS": 2}
    printed = capsys.readouterr().out
    assert "0.6: " in printed and names["task"]["rounds"] > 0
    assert any(decision.throughput for decision in names["out"].speculative_stats.decisions)
    assert len(names["axes"].patches) == 7


# With the demo pair.


@pytest.mark.slow
def test_chat__with_the_demo_pair(run):
    assert "12 times 6 is" in run("chat.py", "--once", "What is 12 times 6?", "--max-new-tokens", "40")


@pytest.mark.slow
def test_training_speed():
    command = [sys.executable, str(EXAMPLES / "training_speed.py")]
    small = ["--rows", "1", "--length", "64", "--anchors", "4", "--steps", "1", "--threads", "1"]
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=300, check=True)
    plain, chunked, ratio = done.stdout.splitlines()
    # In bfloat16, whose sums the two round at different places.
    losses = [float(line.split("loss ")[1]) for line in (plain, chunked)]
    assert losses[0] == pytest.approx(losses[1], abs=2e-3) and float(ratio.split(": ")[1]) > 0
