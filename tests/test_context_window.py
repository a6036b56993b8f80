"""`draft_context_window`: how much of the text the drafter sees, which changes no text."""

import json

import pytest
import torch
from conftest import FIXTURES, load_drafter
from tiny import character_tokenizer, encode
from transformers import GenerationConfig

from dspark_hf import candidate_generator, cli
from dspark_hf.modeling.draft_context import DraftContext


TEXTS = ["a baker makes 6 rolls and sells 4 of them. ", "the box holds 17 pens. ", "ann has 3 "]
FOLDERS = ("deepspec-vanilla", "deepspec-rnn", "speculators-sliding", "dflash-nested-sliding", "dflash-top-level")


@pytest.fixture
def contexts(monkeypatch):
    """All contexts that are made from now on."""
    made = []

    def record(*args, **options):
        made.append(DraftContext(*args, **options))
        return made[-1]

    monkeypatch.setattr(candidate_generator, "DraftContext", record)
    return made


@pytest.mark.parametrize("window", [1, 7, 10_000])
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_text_is_the_plain_one(folder, window, tiny_target, contexts):
    drafter = load_drafter(folder)
    drafter.generation_config.draft_context_window = window
    for texts in (TEXTS[:1], TEXTS):
        inputs = encode(*texts)
        options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
        plain = tiny_target.generate(**inputs, **options)
        assert tiny_target.generate(**inputs, **options, assistant_model=drafter).tolist() == plain.tolist()
        context = contexts.pop()
        assert context.window <= window
        assert all(length <= 2 * context.window + drafter.config.block_size for length in context.lengths)


def test_a_call_goes_before_the_drafters_default(tiny_target, contexts):
    drafter = load_drafter("deepspec-vanilla")
    inputs = encode(TEXTS[0])
    tiny_target.generate(**inputs, assistant_model=drafter, max_new_tokens=2)
    drafter.generation_config.draft_context_window = 5
    tiny_target.generate(**inputs, assistant_model=drafter, max_new_tokens=2)
    call = GenerationConfig(draft_context_window=3, max_new_tokens=2)
    tiny_target.generate(**inputs, assistant_model=drafter, generation_config=call)
    assert [context.window for context in contexts] == [None, 5, 3]


def test_a_window_that_holds_everything_drafts_the_same(tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    stats = []
    for window in (None, 500, 2):
        drafter.generation_config.draft_context_window = window
        tiny_target.generate(**encode(TEXTS[0]), assistant_model=drafter, max_new_tokens=60, eos_token_id=None)
        stats.append((drafter.speculative_stats.rounds, drafter.speculative_stats.accepted))
    assert stats[0] == stats[1] != stats[2]


def test_the_bench_sets_windows_beside_the_whole_context(tiny_target, tmp_path, capsys):
    tiny_target.save_pretrained(tmp_path / "target")
    character_tokenizer().save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the box holds 17 "}\n{"prompt": "a baker makes 6 "}\n')
    pair = ["--target", str(tmp_path / "target"), "--drafter", str(FIXTURES / "deepspec-vanilla" / "drafter")]
    how = ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "8", "--repetitions", "1"]
    windows = [
        "--contexts",
        "60",
        "--draft-context-windows",
        "4",
        "30",
        "--draft-top-k",
        "5",
        "--output",
        str(tmp_path / "out.json"),
    ]
    assert cli.main(["bench", *pair, *how, *windows]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert {"DSpark", "DSpark, last 4", "DSpark, last 30", "DSpark, top 5"} <= set(found["summary"]["context 60"])
    assert all(call["same_text"] for call in found["calls"])
    assert cli.main(["bench", *pair, "--batch-sizes", "2", "--draft-context-windows", "4"]) == 2
    assert "--draft-context-windows 4: not with --batch-sizes" in capsys.readouterr().err
    assert cli.main(["bench", *pair, "--synthetic-acceptance", "1", "--draft-context-windows", "4"]) == 2
    assert "--draft-context-windows 4: not with --synthetic-acceptance" in capsys.readouterr().err


def test_a_bare_draft_sees_the_window_too(tiny_target, monkeypatch):
    from dspark_hf import timing
    from dspark_hf.loading import Pair

    drafter = load_drafter("deepspec-vanilla")
    projected = []
    drafter.fc.register_forward_hook(lambda module, inputs, output: projected.append(len(inputs[0])))
    pair = Pair(tiny_target, drafter, character_tokenizer(), ("target", "drafter"))
    drafter.generation_config.draft_context_window = 6
    assert timing.bare_draft_seconds(pair, 50, 2) > 0
    assert projected == [6] + [2] * timing.BARE_STEPS
    assert torch.is_grad_enabled()
