"""`dspark doctor`: what does not go together is found, a wrong reading of a drafter above all; what does, is not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES, load_drafter
from tiny import character_tokenizer, encode, random_drafter, random_target, scramble
from transformers import PreTrainedModel

from dspark_hf import DSparkDraftModel, cli
from dspark_hf.checkup import OK, PROBLEM, WARNING, check_payoff, check_reading, payoffs
from dspark_hf.modeling.draft_context import DraftContext
from dspark_hf.probing import Probe, Reading, greedy_texts, probe, readings_of
from dspark_hf.profiles import DraftCurve, Profile, StepCurve
from dspark_hf.training_blocks import PackedContext, cut_blocks, draw_anchors


SIZES = {
    "vocab_size": 96, "dtype": torch.float32, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
PROMPTS = ["S}lE1[^q", "h?nLs,9r", "@T2w~%Cb", "xkP0!uOe", "7:HjYd+Z", "gV5&aXm(", "#Rf3]iQz", "W8y*oJtB"]
TAPS, LAYERS = [1], 5


def teach(drafter: DSparkDraftModel, target: PreTrainedModel, texts: torch.LongTensor) -> None:
    """Let a drafter learn texts by heart, from the taps that its config names."""
    config, rows, length = drafter.config, *texts.shape
    states = target(texts, output_hidden_states=True, use_cache=False).hidden_states
    taps = torch.cat([states[tap + 1] for tap in config.target_layer_ids], dim=-1).detach().flatten(0, 1)
    written = torch.zeros_like(texts)
    written[:, len(PROMPTS[0]) :] = 1
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for step in range(120):
        blocks = cut_blocks(texts, written, *draw_anchors(texts, written, 16, step), config.block_size)
        noise = drafter.block_tokens(blocks.tokens[..., 0].flatten()).view(rows, -1)
        embeds = drafter.embed(noise, target.get_input_embeddings())
        context = PackedContext(config, blocks.anchors, length)
        hidden = drafter(embeds, taps, [length] * rows, context).view(-1, config.block_size, config.hidden_size)
        features = drafter.markov_head.block_features(blocks.previous.flatten(0, 1), hidden)
        logits = drafter.base_logits(hidden, target.get_output_embeddings()) + drafter.markov_head.markov_w2(features)
        known = blocks.supervised.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits[known], blocks.labels.flatten(0, 1)[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Random, with layers that differ from each other a great deal."""
    target = scramble(random_target("qwen3", num_hidden_layers=LAYERS, **SIZES), 0, 0.3)
    target.requires_grad_(False)
    return target


@pytest.fixture(scope="module")
def texts(target) -> list[tuple[torch.LongTensor, int]]:
    return greedy_texts(target, [encode(prompt) for prompt in PROMPTS], 40)


@pytest.fixture(scope="module")
def drafters(target, texts) -> dict[bool, DSparkDraftModel]:
    """Drafters of both slot conventions that know the texts."""
    drafters = {}
    for from_anchor in (True, False):
        changes = {"target_layer_ids": TAPS, "num_target_layers": LAYERS, "block_size": 4}
        drafter = random_drafter("vanilla", sample_from_anchor=from_anchor, **SIZES, **changes)
        drafters[from_anchor] = scramble(drafter, 1, 0.15)
        teach(drafters[from_anchor], target, torch.cat([ids for ids, _ in texts]))
    return drafters


def declare(drafter: DSparkDraftModel, **changes: Any) -> DSparkDraftModel:
    """The same weights under another config."""
    config = {name: getattr(drafter.config, name) for name in type(drafter.config).__annotations__}
    other = DSparkDraftModel(type(drafter.config)(**config | changes)).eval()
    other.load_state_dict(drafter.state_dict())
    return other


# The probe


def test_the_readings_of_a_drafter():
    config = load_drafter("deepspec-vanilla").config  # taps 1, 2, 4 of six layers, seven drafts
    found = readings_of(config, 6)
    assert [(one.tap_shift, one.sample_from_anchor, one.block_size) for one in found] == [
        (0, True, 7), (-1, True, 7), (0, False, 6), (-1, False, 6),
    ]  # fmt: skip
    assert [one.declared for one in found] == [True, False, False, False]
    assert found[1].target_layer_ids == [0, 1, 3]
    assert len(readings_of(config, 7)) == 6  # there is a layer above the last tap


@torch.no_grad()
def test_a_probe_counts_what_greedy_decoding_would_accept(tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    ((ids, start),) = greedy_texts(tiny_target, [encode("12 - 7 = ")], 40)
    (declared, *_) = probe(tiny_target, drafter, [(ids, start)])
    states = tiny_target(ids, output_hidden_states=True).hidden_states
    taps = torch.cat([states[tap + 1] for tap in drafter.config.target_layer_ids], dim=-1)[0]
    expected = []
    for anchor in range(start, ids.shape[1] - 7):
        context = DraftContext(drafter.config, [0])
        block = drafter.embed(drafter.block_tokens(ids[0, anchor : anchor + 1]))
        drafts = drafter.draft(drafter(block, taps[:anchor], [anchor], context), ids[0, anchor : anchor + 1]).tokens
        right = (drafts[0] == ids[0, anchor + 1 : anchor + 8]).tolist()
        expected.append((right + [False]).index(False))
    assert declared.accepted == [expected] and sum(expected) > 5
    assert declared.survivals[0] == sum(count > 0 for count in expected) / len(expected)


@pytest.mark.parametrize("from_anchor", [True, False])
def test_the_right_reading_is_not_beaten(target, texts, drafters, from_anchor):
    probes = probe(target, drafters[from_anchor], texts)
    assert len(probes) == 6 and probes[0].mean_acceptance_length > 4
    finding = check_reading(probes)
    assert finding.status == OK and "no neighbouring reading is clearly better" in finding.text


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize(("shift", "flipped"), [(-1, False), (1, False), (0, True), (-1, True), (1, True)])
def test_a_wrong_reading_is_found_and_the_right_one_named(target, texts, drafters, from_anchor, flipped, shift):
    drafter = drafters[from_anchor]
    changes: dict[str, Any] = {"target_layer_ids": [tap + shift for tap in TAPS]} if shift else {}
    if flipped:
        size = drafter.config.block_slots - from_anchor
        changes |= {"sample_from_anchor": not from_anchor, "block_size": size}
    finding = check_reading(probe(target, declare(drafter, **changes), texts))
    assert finding.status == PROBLEM and "is clearly better" in finding.text
    fix = finding.text.partition("from_pretrained(..., ")[2]
    assert (f"target_layer_ids={TAPS}" in fix) == bool(shift)
    assert (f"sample_from_anchor={from_anchor}" in fix) == flipped
    assert (f"block_size={drafter.config.block_size}" in fix) == flipped


def test_a_drafter_of_another_target_is_strange(texts, drafters):
    other = scramble(random_target("qwen3", num_hidden_layers=LAYERS, **SIZES), 7, 0.3)
    finding = check_reading(probe(other, drafters[True], greedy_texts(other, [encode(p) for p in PROMPTS], 40)))
    assert finding.status == PROBLEM and "hardly a draft is accepted" in finding.text


def test_texts_without_room_for_a_block(target, drafters):
    short = greedy_texts(target, [encode(prompt) for prompt in PROMPTS[:2]], 3)
    assert probe(target, drafters[True], short) == []
    assert check_reading([]).status == WARNING


def test_one_text_compares_nothing(target, texts, drafters):
    wrong = declare(drafters[True], target_layer_ids=[2])
    assert check_reading(probe(target, wrong, texts[:1])).status == WARNING
    assert check_reading(probe(target, wrong, texts[:2])).status == PROBLEM


def make_probe(accepted: list[list[int]], declared: bool = False, block_size: int = 4) -> Probe:
    return Probe(Reading(0, True, [1], block_size, declared), accepted, common=3)


def test_what_clearly_better_means():
    declared = make_probe([[0, 1], [1, 0], [0, 1], [1, 1]], declared=True)
    much = make_probe([[2, 1], [2, 1], [1, 3], [2, 2]])
    assert much.gain_over(declared)[0] == pytest.approx(9 / 8) and much.clearly_beats(declared)
    little = make_probe([[0, 1], [1, 0], [0, 1], [1, 1.05]])
    assert little.gain_over(declared)[0] > 0 and not little.clearly_beats(declared)
    mixed = make_probe([[3, 3], [0, 0], [0, 0], [0, 0]])  # more on average, by one text
    assert mixed.gain_over(declared)[0] > 0.1 and not mixed.clearly_beats(declared)
    # Beyond what every reading has, drafts do not count.
    longer = make_probe([[4, 4], [4, 4]])
    assert longer.gain_over(make_probe([[3, 3], [3, 3]], declared=True))[0] == 0
    assert longer.mean_acceptance_length == 5


# Whether it pays


def profile(draft_seconds: float) -> Profile:
    """A machine on which a step takes 10 ms and 1 ms for each token, several rows no more."""
    tokens = [1, 2, 64]
    curve = StepCurve(128, tokens, [0.01 + 0.001 * count for count in tokens])
    rows = [
        StepCurve(128, [count, count * 5], [0.01 + 0.001 * count, 0.01 + 0.005 * count], count) for count in (2, 4)
    ]
    draft = DraftCurve([1, 2, 4], [draft_seconds] * 3, [draft_seconds] * 3)
    return Profile({}, 4, [curve], draft, draft, row_steps=rows)


def test_payoffs_are_those_of_equation_1():
    found = payoffs(profile(0.002), [0.9, 0.8, 0.1, 0.0], context=100)
    assert [one.rows for one in found] == [1, 2, 4]
    for one in found:
        rows, choices = one.rows, {}
        for drafts, tokens in enumerate([1.9, 2.7, 2.8, 2.8], start=1):
            choices[rows * tokens / (0.002 + 0.01 + 0.001 * rows * (1 + drafts))] = drafts
        assert one.drafted == pytest.approx(max(choices)) and one.drafts == choices[max(choices)]
        assert one.plain == pytest.approx(rows / (0.01 + 0.001 * rows))
    assert check_payoff(found).status == OK and "1 row 1." in check_payoff(found).text


def test_a_slow_draft_does_not_pay():
    finding = check_payoff(payoffs(profile(0.1), [0.5, 0.2, 0.1, 0.0], context=100))
    assert finding.status == WARNING and "does not pay on this machine: 0." in finding.text


# The command


@pytest.fixture
def pair(tmp_path, target, drafters) -> tuple[Path, Path]:
    """Folders of target and drafter."""
    target.save_pretrained(tmp_path / "target")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "target")
    drafters[True].save_pretrained(tmp_path / "drafter")
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text(lines)
    return tmp_path / "target", tmp_path / "drafter"


Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored profile, so that nothing is measured."""
    monkeypatch.setattr("dspark_hf.profiles.find_profile", lambda target, drafter: profile(0.002))


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    def run(target: Path, drafter: Path, *more: str) -> tuple[int, str, str]:
        folders = ["--target", str(target), "--drafter", str(drafter)]
        small = ["--prompts", str(target.parent / "prompts.jsonl"), "--max-new-tokens", "40", "--budget", "0.1"]
        code = cli.main(["doctor", *folders, *small, *more])
        captured = capsys.readouterr()
        return code, " ".join(captured.out.split()), captured.err

    return run


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_sound_pair(pair, doctor):
    code, out, _ = doctor(*pair)
    assert code == 0, out
    assert "problem" not in out and "ok reading taps [1], slot 0 is a draft" in out
    assert "ok vocabulary 96" in out and "ok width 32" in out and "ok template" in out
    assert "Expected tokens a second on this machine" in out and " speculation it " in out
    assert "transformers: " in out and "processor: " in out


@pytest.mark.usefixtures("known_costs")
def test_wrong_taps(pair, doctor):
    edit(pair[1], target_layer_ids=[2])
    code, out, _ = doctor(*pair)
    assert code == 1 and "problem reading" in out and "target_layer_ids=[1]" in out


@pytest.mark.usefixtures("known_costs")
def test_the_other_slot_convention(pair, doctor):
    edit(pair[1], sample_from_anchor=False, block_size=3)
    code, out, _ = doctor(*pair)
    assert code == 1 and "problem reading" in out and "sample_from_anchor=True, block_size=4" in out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 95, "draft_vocab_size": None}, "problem checkpoint"),  # the weights are of another size
        ({"num_target_layers": 6}, "problem layers the drafter was made for 6, the target has 5"),
        ({"num_target_layers": None, "target_layer_ids": [4]}, "problem taps [4] go beyond layer 3"),
    ],
)
def test_what_does_not_fit_is_not_run(pair, doctor, changes, told):
    edit(pair[1], **changes)
    code, out, _ = doctor(*pair)
    assert code == 1 and told in out and "Readings" not in out


def test_another_tokenizer(pair, doctor):
    other = character_tokenizer()
    other.add_tokens(["<one>", "<more>"])
    other.save_pretrained(pair[1])
    code, out, _ = doctor(*pair)
    assert code == 1 and "2 tokens of the one in the drafter's folder" in out
    other.save_pretrained(pair[0])
    code, out, _ = doctor(*pair)
    assert code == 1 and "it makes tokens up to 97, the target has 96" in out


@pytest.mark.usefixtures("known_costs")
def test_warnings_are_no_problems(pair, doctor):
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(pair[0])
    (pair[0] / "chat_template.jinja").unlink()
    (pair[1] / "training.json").write_text('{"target": {"id": "org/another"}}')
    code, out, _ = doctor(*pair)
    assert code == 0
    assert "warning template the tokenizer has no chat template" in out
    assert "warning provenance the drafter was trained for org/another" in out


@pytest.mark.parametrize("argv", [["--drafter", "/no/where"], ["--budget", "0"], ["--prompts", "/no/where"]])
def test_usage(pair, capsys, argv):
    try:
        code = cli.main(["doctor", "--target", str(pair[0]), "--drafter", str(pair[1]), *argv])
    except SystemExit as stop:
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1 and argv[0] in error


@pytest.fixture
def tiny_folder(tmp_path) -> Path:
    """The target of the fixtures, with a tokenizer and prompts."""
    shutil.copytree(FIXTURES / "tiny-target", tmp_path / "target")
    character_tokenizer().save_pretrained(tmp_path / "target")
    prompts = ("Tom has 5 apples and buys", "12 - 7 = ", "Once upon")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
    return tmp_path / "target"


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize("name", ["deepspec-gated", "speculators-sliding", "dflash-top-level"])
def test_real_drafters_of_the_fixtures(name, tiny_folder, doctor):
    code, out, _ = doctor(tiny_folder, FIXTURES / name / "drafter")
    assert code == 0 and "ok reading" in out


@pytest.mark.usefixtures("known_costs")
def test_a_real_drafter_in_the_other_slot_convention(tiny_folder, tmp_path, doctor):
    load_drafter("deepspec-vanilla").save_pretrained(tmp_path / "drafter")
    edit(tmp_path / "drafter", sample_from_anchor=False, block_size=6)
    code, out, _ = doctor(tiny_folder, tmp_path / "drafter")
    assert code == 1 and "sample_from_anchor=True, block_size=7" in out
