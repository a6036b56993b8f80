"""Drafters that draft only some of the target's tokens: the target's head by rows, and the same text."""

import copy
import json
import math
import pickle

import accelerate
import pytest
import torch
from conftest import load_drafter
from repackaging import assert_same_drafts, drafts_of
from tiny import HEADS, character_tokenizer, encode, random_drafter, random_target, reduced_drafter
from torch import nn

from dspark_hf import DSparkConfig, DSparkDraftModel, measure_profile
from dspark_hf.blocks import record_blocks
from dspark_hf.loading import Pair
from dspark_hf.profiles import find_profile, use_profile
from dspark_hf.timing import bare_draft_seconds


pytestmark = pytest.mark.usefixtures("no_grad")


# The model


def test_its_shapes():
    drafter = reduced_drafter(vocab_size=9, ids=(1, 4, 8), owns_embedding=True, owns_lm_head=True)
    state = {name: list(value.shape) for name, value in drafter.state_dict().items()}
    assert state["markov_head.markov_w1.weight"] == [9, 3] and state["markov_head.markov_w2.weight"] == [3, 3]
    assert state["embed_tokens.weight"] == [9, 8] and state["lm_head.weight"] == [3, 8]
    assert state["d2t"] == [3] and drafter.d2t.dtype == torch.int64
    assert "d2t" not in random_drafter().state_dict()


def test_a_new_one_drafts_the_first_tokens_until_it_is_told():
    drafter = random_drafter(vocab_size=9, draft_vocab_size=4)
    assert drafter.d2t.tolist() == [0, 1, 2, 3]
    drafter.set_draft_vocabulary([1, 2, 5, 8])
    assert drafter.d2t.tolist() == [1, 2, 5, 8]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 2, 3], "`token_ids` has 3 tokens; `draft_vocab_size` is 4"),
        ([1, 2, 3, 9], "names token 9; the target's are 0 to 8"),
        ([1, 2, 2, 3], "increasing, each once"),
        ([3, 2, 1, 0], "increasing, each once"),
        ([0.0, 1.0, 2.0, 3.0], "torch.float32"),
        ([[0, 1, 2, 3]], r"shape \[1, 4\]"),
    ],
)
def test_tokens_that_cannot_be_drafted(ids, said):
    with pytest.raises(ValueError, match=said):
        random_drafter(vocab_size=9, draft_vocab_size=4).set_draft_vocabulary(torch.tensor(ids))


def test_a_whole_vocabulary_is_not_set():
    with pytest.raises(ValueError, match="`draft_vocab_size` is null"):
        random_drafter().set_draft_vocabulary(torch.arange(4))


@pytest.mark.parametrize("value", [0, -1, 5, "3", 2.0])
def test_its_size_is_checked(value):
    with pytest.raises(ValueError, match="`draft_vocab_size` is"):
        DSparkDraftModel(DSparkConfig(**random_drafter().config.to_dict() | {"draft_vocab_size": value}))


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_logits_are_those_of_its_tokens(head, owned):
    """The same weights over the whole vocabulary, looked at where the tokens are."""
    ids = torch.tensor([0, 3, 4, 7])
    lent = nn.Embedding(9, 8).double(), nn.Linear(8, 9).double()
    whole = random_drafter(head, vocab_size=9, owns_embedding=owned, owns_lm_head=owned)
    part = random_drafter(head, vocab_size=9, owns_embedding=owned, owns_lm_head=owned, draft_vocab_size=4)
    state = whole.state_dict() | {"d2t": ids}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in state:
            state[name] = state[name][ids]
    part.load_state_dict(state)
    hidden, anchors = torch.randn(2, 2, 8, dtype=torch.float64), torch.tensor([5, 8])
    seen: list[list[torch.Tensor]] = [[], []]

    def forced(logits_of: list[torch.Tensor]):
        def choose(slot: int, logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
            logits_of.append(logits)
            return torch.tensor([[7, 3], [4, 0]])[slot]

        return choose

    drafts = [
        drafter.draft(hidden, anchors, lent[1], forced(logits_of))
        for drafter, logits_of in zip((whole, part), seen, strict=True)
    ]
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(other, one[:, ids])
    torch.testing.assert_close(drafts[1].confidence_logits, drafts[0].confidence_logits)
    chosen = part.draft(hidden, anchors, lent[1]).tokens
    assert torch.isin(chosen, ids).all()


def test_it_is_saved_and_loaded_without_anything_of_its_target(tmp_path):
    drafter = reduced_drafter("rnn", dtype=torch.float32)
    lent = nn.Embedding(4, 8), nn.Linear(8, 4, bias=False)
    before = drafter.draft(torch.ones(1, 2, 8), torch.tensor([1]), lent[1])
    drafter.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["draft_vocab_size"] == 3
    again = DSparkDraftModel.from_pretrained(tmp_path)
    assert torch.equal(again.d2t, drafter.d2t) and again.d2t.dtype == torch.int64
    assert not {"lm_head.weight", "embed_tokens.weight"} & again.state_dict().keys()
    after_ = again.draft(torch.ones(1, 2, 8), torch.tensor([1]), lent[1])
    assert torch.equal(after_.tokens, before.tokens)
    half = DSparkDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.d2t.dtype == torch.int64 and torch.equal(half.d2t, drafter.d2t)
    drafter.save_pretrained(tmp_path / "parts", max_shard_size="1KB")
    assert torch.equal(DSparkDraftModel.from_pretrained(tmp_path / "parts").d2t, drafter.d2t)


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_draft_the_same_and_keep_no_head(remake):
    drafter = load_drafter("speculators-reduced-vocab")
    drafter.lm_head, drafter.config.owns_lm_head = None, False
    head, embedding = nn.Linear(64, 96), nn.Embedding(96, 64)
    expected = drafts_of(drafter, embedding, head)
    assert len(drafter.head_rows._kept) == 1
    again = remake(drafter)
    assert len(again.head_rows._kept) == 0
    assert_same_drafts(drafts_of(again, embedding, head), expected)


# Rows of the target's head


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """How many rows were selected each time."""
    found: list[int] = []
    select = torch.Tensor.index_select

    def counting(self, dim, index):
        found.append(len(index))
        return select(self, dim, index)

    monkeypatch.setattr(torch.Tensor, "index_select", counting)
    return found


@pytest.mark.parametrize("bias", [False, True])
def test_rows_are_selected_once_for_a_head(bias, counted):
    drafter, hidden = reduced_drafter(dtype=torch.float32), torch.randn(1, 2, 8)
    heads = [nn.Linear(8, 4, bias=bias) for _ in range(2)]
    for _ in range(3):
        for head in heads:
            torch.testing.assert_close(drafter.base_logits(hidden, head), head(hidden)[..., drafter.d2t])
    assert counted == [3] * (2 + 2 * bias)
    del head
    heads.pop()
    assert len(drafter.head_rows._kept) == 1, "the rows of a head that is gone were kept"


def double(head: nn.Linear) -> None:
    head.double()


def replace_weight(head: nn.Linear) -> None:
    head.weight = nn.Parameter(torch.randn(4, 8))


def train(head: nn.Linear) -> None:
    head.weight.mul_(2.0)


def load(head: nn.Linear) -> None:
    head.load_state_dict({"weight": torch.randn(4, 8)})


def swap_data(head: nn.Linear) -> None:
    head.weight.data = torch.randn(4, 8)


@pytest.mark.parametrize("change", [double, replace_weight, train, load, swap_data])
def test_rows_follow_the_heads_weight(change, counted):
    drafter, hidden, head = reduced_drafter(dtype=torch.float32), torch.randn(1, 2, 8), nn.Linear(8, 4, bias=False)
    drafter.base_logits(hidden, head)
    change(head)
    expected = head(hidden.to(head.weight.dtype))[..., drafter.d2t]
    torch.testing.assert_close(drafter.base_logits(hidden, head), expected)
    assert counted == [3, 3]


def test_rows_follow_the_vocabulary():
    drafter, hidden, head = reduced_drafter(dtype=torch.float32), torch.randn(1, 2, 8), nn.Linear(8, 4, bias=False)
    drafter.base_logits(hidden, head)
    drafter.set_draft_vocabulary(torch.tensor([0, 1, 2]))
    torch.testing.assert_close(drafter.base_logits(hidden, head), head(hidden)[..., :3])


def test_a_head_that_is_not_plain_is_called():
    drafter, hidden = reduced_drafter(dtype=torch.float32), torch.randn(1, 2, 8)

    class Adapted(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs) + 1

    adapted, hooked, offloaded = Adapted(8, 4), nn.Linear(8, 4), nn.Linear(8, 4)
    hooked.register_forward_hook(lambda module, inputs, output: output * 3)
    expected = offloaded(hidden)
    accelerate.cpu_offload(offloaded, execution_device="cpu")
    for head, output in ((adapted, adapted(hidden)), (hooked, hooked(hidden)), (offloaded, expected)):
        torch.testing.assert_close(drafter.base_logits(hidden, head), output[..., drafter.d2t])
    assert not drafter.head_rows._kept


def test_rows_selected_while_generating_can_be_trained_through():
    drafter, head = reduced_drafter(dtype=torch.float32), nn.Linear(8, 4, bias=False).requires_grad_(False)
    hidden = torch.randn(1, 2, 8)
    with torch.inference_mode():
        drafter.base_logits(hidden, head)
    with torch.enable_grad():
        hidden.requires_grad_()
        drafter.base_logits(hidden, head).sum().backward()
    assert hidden.grad is not None and head.weight.grad is None


def test_the_targets_softcap_and_multiplier_apply_to_the_rows():
    drafter = reduced_drafter(dtype=torch.float32, output_multiplier=0.5, final_logit_softcapping=2.0)
    hidden, head = torch.randn(1, 2, 8), nn.Linear(8, 4)
    expected = 2.0 * torch.tanh(head(hidden)[..., drafter.d2t] * 0.5 / 2.0)
    torch.testing.assert_close(drafter.base_logits(hidden, head), expected)


# The same text


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"bad_words_ids": [[2], [7, 1]]}], ids=str)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("rows", [1, 3])
def test_greedy_text_is_plain_generates(rows, head, options):
    target = random_target(vocab_size=24, dtype=torch.float32)
    ids = tuple(range(0, 24, 2)) + (23,)
    drafter = reduced_drafter(head, ids, vocab_size=24, dtype=torch.float32, block_size=4)
    accepted = 0
    for seed in range(3):
        inputs = torch.randint(1, 24, (rows, 5), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones_like(inputs)
        if rows > 1:
            mask[1, :2] = 0
        options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0} | options
        expected = target.generate(inputs, **options)
        assert torch.equal(target.generate(inputs, assistant_model=drafter, **options), expected)
        accepted += drafter.speculative_stats.accepted
    assert accepted > 0


@pytest.mark.parametrize("sample_from_anchor", [False, True])
@pytest.mark.parametrize("causal", [[], ["sliding_attention"], ["full_attention", "sliding_attention"]], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_other_kinds_of_blocks_keep_the_text_too(rows, causal, sample_from_anchor):
    target = random_target(vocab_size=24, dtype=torch.float32)
    drafter = random_drafter(
        vocab_size=24,
        dtype=torch.float32,
        block_size=3,
        sample_from_anchor=sample_from_anchor,
        causal_layer_types=causal,
        layer_types=["sliding_attention"],
        sliding_window=4,
        window_from_anchor=not causal,
    )
    inputs = torch.randint(1, 24, (rows, 7), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(inputs, **options)
    assert torch.equal(target.generate(inputs, assistant_model=drafter, **options), expected)


# Everything around it


@pytest.fixture
def pair(tiny_target) -> Pair:
    """A reduced drafter that owns nothing, as one trained here would be."""
    drafter = load_drafter("speculators-reduced-vocab")
    drafter.lm_head, drafter.config.owns_lm_head = None, False
    return Pair(tiny_target, drafter, character_tokenizer(), ("target", "drafter"))


def test_blocks_are_recorded_and_calibrated(pair):
    prompts = {"a": ["Tom has 5 apples and buys 3 more. How many"], "b": ["Once upon a time"]}
    blocks = record_blocks(pair, prompts, 40, 0.0, seed=0)
    assert blocks.confidence_logits.shape[1] == 7 and len(blocks.accepted) > 3


@pytest.mark.parametrize("name", ["speculators-reduced-vocab", "dflash-top-level"])
def test_a_profile_is_measured_and_used(name, tiny_target):
    drafter = load_drafter(name)
    profile = measure_profile(tiny_target, drafter, contexts=(8,), most_tokens=16, budget=0.2)
    assert profile.block_size == drafter.config.block_size == 7
    inputs = encode("Tom has 5 apples")
    schedule = "hardware_aware" if drafter.config.enable_confidence_head else "constant"
    with use_profile(profile):
        out = tiny_target.generate(
            **inputs, assistant_model=drafter, num_assistant_tokens_schedule=schedule, max_new_tokens=12
        )
    assert torch.equal(out, tiny_target.generate(**inputs, max_new_tokens=12))
    assert find_profile(tiny_target, drafter) is not None


@pytest.mark.parametrize("name", ["speculators-reduced-vocab", "dflash-nested-sliding"])
def test_a_bare_draft_is_timed(name, tiny_target):
    pair = Pair(tiny_target, load_drafter(name), character_tokenizer(), ("target", "drafter"))
    seconds = bare_draft_seconds(pair, context_length=20, new_tokens=2)
    assert 0 < seconds < math.inf
