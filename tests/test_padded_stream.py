"""Several rows as one padded batch: each is its solo run, for each family that is listed."""

import inspect

import pytest
import torch
from families import DECODERS, VARIANTS, decoder, drafter_for, prompts
from test_exactness import Walk, after, check, speculative_distribution, target_distribution
from test_targets import streams  # noqa: F401
from tiny import oracle
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from dspark_hf import padded_stream
from dspark_hf.compat import CACHE_NAME, cache_argument
from dspark_hf.padded_stream import PaddedPlan, PaddedStream


pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.filterwarnings("ignore::UserWarning")]

LISTED = padded_stream._BY_POSITION + padded_stream._BY_DISTANCE
# Among them rows shorter than a block.
LENGTHS = (11, 1, 18, 3)
NEW = 24
THRESHOLD = 0.4  # with which drafts sent differ from row to row
# Without `suppress_tokens` the padding, which is a token 0, would count as text.
OPTIONS = {
    "do_sample": False,
    "max_new_tokens": NEW,
    "eos_token_id": None,
    "pad_token_id": 0,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [0],
}


@pytest.fixture
def counts(monkeypatch) -> list[list[int]]:
    """How many tokens of each row ran, pass by pass, rows that wait included."""
    seen = []

    def verify(stream, tokens, counts):
        seen.append(stream._of_all(counts))
        return original(stream, tokens, counts)

    original = PaddedStream.verify
    monkeypatch.setattr(PaddedStream, "verify", verify)
    return seen


def solo(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **options) -> list[list[int]]:
    """The new tokens of each row, run alone and without padding."""
    texts = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        prompt = ids[mask.bool()][None]
        text = target.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS | options)
        texts.append(text[0, prompt.shape[1] :].tolist())
    return texts


def script(inputs: dict[str, torch.Tensor], texts: list[list[int]], copies: int = 1) -> torch.Tensor:
    """What an oracle drafts from."""
    return torch.cat([inputs["input_ids"], torch.tensor(texts)], dim=1).repeat_interleave(copies, dim=0)


def until(text: list[int], ends: list[int]) -> list[int]:
    """A text up to its first end token."""
    return next((text[: place + 1] for place, token in enumerate(text) if token in ends), text)


def with_drafter(monkeypatch, target, inputs, texts: list[list[int]], copies: int = 1, **options) -> list[list[int]]:
    """The same with a drafter whose drafts are right more often than not, in one batch."""
    oracle(monkeypatch, script(inputs, texts, copies), "alternately")
    options = {"assistant_confidence_threshold": THRESHOLD} | options
    rows = target.generate(**inputs, **OPTIONS | options, assistant_model=drafter_for(target))
    return rows[:, inputs["input_ids"].shape[1] :].tolist()


NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name in DECODERS and DECODERS[name].slow else [])
    for name in (*LISTED, *(name for name, (model_type, _) in VARIANTS.items() if model_type in LISTED))
]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_its_solo_run(name, streams, counts, monkeypatch):  # noqa: F811
    target, inputs = decoder(name), prompts(LENGTHS)
    texts = solo(target, inputs)
    assert all(len(set(text)) > 5 for text in texts)
    assert with_drafter(monkeypatch, target, inputs, texts) == texts
    assert streams == ["padded"]
    assert any(len(set(some)) > 1 for some in counts), "all rows ran equally many tokens in each pass"
    assert len({len(some) for some in counts}) > 1, "no row left before the others"


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize("name", ["bloom", "gpt_neo", "xglm"])
def test_rows_that_end_at_different_times(name, waiting, streams, counts, monkeypatch):  # noqa: F811
    """Rows that are done leave, or wait where the cache is returned."""
    target, inputs = decoder(name), prompts(LENGTHS)
    texts = solo(target, inputs)
    ends = [texts[0][4], texts[2][11]]
    wanted = [until(text, ends) for text in texts]
    assert len(set(map(len, wanted))) > 2
    options = {"eos_token_id": ends, "return_dict_in_generate": waiting}
    oracle(monkeypatch, script(inputs, texts), "alternately")
    found = target.generate(**inputs, **OPTIONS | options, assistant_model=drafter_for(target))
    found = found.sequences if waiting else found
    new = found[:, inputs["input_ids"].shape[1] :]
    assert [text[: len(row)] for text, row in zip(new.tolist(), wanted, strict=True)] == wanted
    assert all(not row[len(text) :].any() for row, text in zip(new, wanted, strict=True))
    assert streams == ["padded"]
    assert {len(some) for some in counts} == {4} if waiting else 1 in {len(some) for some in counts}


@pytest.mark.parametrize("name", ["bloom", "falcon, rotary"])
def test_several_samples_of_each_prompt(name, streams, monkeypatch):  # noqa: F811
    target, inputs = decoder(name), prompts(LENGTHS)
    texts = solo(target, inputs)
    found = with_drafter(monkeypatch, target, inputs, texts, copies=2, num_return_sequences=2, do_sample=True, top_k=1)
    assert found == [text for text in texts for _ in range(2)]
    assert streams == ["padded"]


@pytest.mark.parametrize("name", ["falcon, rotary", "gpt_neox_japanese"])
def test_every_outcome_of_sampling(name, streams, monkeypatch):  # noqa: F811
    """Of families whose attention is in float64 throughout."""
    target = decoder(name, vocab_size=4).double()
    drafter = drafter_for(target, block_size=2, mask_token_id=0).double()
    walk, options = Walk(monkeypatch, width=1), after(4, top_k=2)
    found = speculative_distribution(target, drafter, walk, options, walkers=512)
    check(found, target_distribution(target, options), walk)
    assert "padded" in streams


@pytest.mark.parametrize("keep_finished", [False, True])
def test_hidden_states_are_those_of_plain_generate(keep_finished, monkeypatch):
    target, inputs = decoder("gpt_neo"), prompts((11, 7, 18))
    options = OPTIONS | {"output_hidden_states": True, "return_dict_in_generate": True, "use_cache": keep_finished}
    plain = target.generate(**inputs, **OPTIONS | options | {"use_cache": True})
    oracle(monkeypatch, plain.sequences, "alternately")
    ours = target.generate(**inputs, **options, assistant_model=drafter_for(target))
    assert ours.sequences.tolist() == plain.sequences.tolist()
    for mine, theirs in zip(ours.hidden_states[1:], plain.hidden_states[1:], strict=True):
        for layer, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(layer, other, rtol=1e-3, atol=1e-4)


# What of Transformers the list rests on


@pytest.mark.parametrize("name", LISTED)
def test_the_list_is_that_of_the_table(name):
    assert DECODERS[name].several == "padded"
    target = decoder(name)
    assert not target._supports_attention_backend, "its class says that it goes through the interface now"
    takes_positions = "position_ids" in inspect.signature(type(target).forward).parameters
    assert takes_positions == (name in padded_stream._BY_POSITION)


def test_the_table_has_no_other():
    assert {name for name, family in DECODERS.items() if family.several == "padded"} == set(LISTED)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_depends_on_the_place_of_a_key(name):
    """Logits of several tokens over Transformers' own cache, however much padding stands before the row."""
    target = decoder(name)
    ids = prompts((23,))["input_ids"]
    seen = []
    for padding in (0, 1, 9):
        whole = torch.cat([ids.new_full((1, padding), 5), ids], dim=1)
        mask = (torch.arange(whole.shape[1]) >= padding).long()[None]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        inputs = {cache_argument(target): DynamicCache(config=target.config), "use_cache": True}
        for first, end in ((0, padding + 18), (padding + 18, padding + 23)):
            if name not in padded_stream._BY_DISTANCE:
                inputs["position_ids"] = positions[:, first:end]
            logits = target(whole[:, first:end], attention_mask=mask[:, :end], **inputs).logits
        seen.append(logits)
    assert seen[0].std() > 0.1
    for logits in seen[1:]:
        torch.testing.assert_close(logits, seen[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("change", ["a subclass", "flash attention", "a hole", "a window", "one row"])
def test_what_is_not_known_goes_row_by_row(change, streams, monkeypatch):  # noqa: F811
    target, inputs = decoder("gpt_neo"), prompts(LENGTHS[:1] if change == "one row" else LENGTHS)
    if change == "a subclass":
        target.__class__ = type("OddNeo", (type(target),), {"__module__": "odd"})
    elif change == "flash attention":
        monkeypatch.setattr(padded_stream, "_ATTENTIONS", ("sdpa",))  # this one is eager
    elif change == "a hole":
        inputs["attention_mask"][:, -4] = 0
    plain = target.generate(**inputs, **OPTIONS)
    if change == "a window":
        inputs[CACHE_NAME] = DynamicCache(config=target.config)
        inputs[CACHE_NAME].layers = [DynamicSlidingWindowLayer(sliding_window=200) for _ in range(4)]
    assert target.generate(**inputs, **OPTIONS, assistant_model=drafter_for(target)).tolist() == plain.tolist()
    assert streams == ["row by row"]


def test_a_plan_that_is_easy_to_follow():
    plan = PaddedPlan(held=[4, 1, 0], counts=[1, 3, 0])
    device = torch.device("cpu")
    assert (plan.width, plan.used) == (3, 5)
    assert [values.tolist() for values in plan.tokens(device)] == [[0, 1, 1, 1], [2, 0, 1, 2], [4, 1, 2, 3]]
    assert plan.first_places(device).tolist() == [[0], [1], [5]]
    assert plan.order(device).tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3], [0, 0, 0, 0, 0]]
    assert PaddedPlan(held=[4, 2], counts=[1, 3]).order(device) is None
