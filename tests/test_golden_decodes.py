"""Whole greedy decodes of the public implementations: the same text, and the same tokens in each round."""

import json

import pytest
import torch
from conftest import DEEPSPEC, FIXTURES, load_drafter, load_golden
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDraftModel, SpeculativeStats
from dspark_hf.demo_target import load_demo_target


def check(target, drafter, decode: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode a prompt and compare with what the reference implementation wrote, round by round."""
    rounds = []
    record = SpeculativeStats.record

    def remember(stats, drafted, verified, accepted):
        if stats.rows:  # the total, not the row's own
            rounds.append(accepted + 1)
        record(stats, drafted, verified, accepted)

    monkeypatch.setattr(SpeculativeStats, "record", remember)
    prompt = torch.tensor([decode["prompt_ids"]])
    out = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        assistant_model=drafter,
        max_new_tokens=len(decode["output_ids"]) - prompt.shape[1],
        do_sample=False,
        eos_token_id=None,
    )
    assert out[0].tolist() == decode["output_ids"]
    # The references run past the length limit in their last rounds, where drafts are cut here.
    block_size = drafter.config.block_size
    until = len(decode["output_ids"]) - block_size - 1
    length, whole = prompt.shape[1] + 1, 0
    for tokens in decode["acceptance_lengths"]:
        if length > until:
            break
        length, whole = length + tokens, whole + 1
    assert whole > 3
    assert rounds[:whole] == decode["acceptance_lengths"][:whole]


@pytest.mark.parametrize("name", DEEPSPEC)
def test_fixtures(name, tiny_target, monkeypatch):
    golden, _ = load_golden(name)
    own = FIXTURES / name / "target"
    target = AutoModelForCausalLM.from_pretrained(own) if own.is_dir() else tiny_target
    monkeypatch.setattr(target.generation_config, "eos_token_id", None)
    decodes = [decode for decode in golden["decodes"] if decode.get("threshold", 0.0) == 0.0]
    for decode in decodes:
        with monkeypatch.context() as patch:
            check(target, load_drafter(name), decode, patch)


@pytest.mark.slow
def test_a_real_pair(monkeypatch):
    target, _ = load_demo_target(torch.float32)
    monkeypatch.setattr(target.generation_config, "eos_token_id", None)
    folder = FIXTURES / "smollm2-interim"
    drafter = DSparkDraftModel.from_pretrained(folder, dtype=torch.float32)
    for decode in json.loads((folder / "golden.json").read_text())["decodes"]:
        with monkeypatch.context() as patch:
            check(target, drafter, decode, patch)
