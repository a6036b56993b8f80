"""Logits processors over positions of several rows: each as plain `generate` would have called it."""

from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as host

from dspark_hf.compat import VERSION
from dspark_hf.processing import ProcessorChain


VOCAB = 12
PROMPTS = torch.tensor([[11, 11, 1, 2], [3, 4, 5, 3], [11, 7, 7, 7]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])


def chain(*processors: Any, rows: int = 1, end_tokens: tuple[int, ...] = ()) -> ProcessorChain:
    return ProcessorChain(LogitsProcessorList(processors), rows, end_tokens)


def prefixes_of(ids: torch.Tensor) -> list[tuple[int, torch.Tensor, int]]:
    return [(row, ids[row : row + 1], 0) for row in range(len(ids))]


ROWS_IN_STEP = {
    "repetition penalty": lambda: host.RepetitionPenaltyLogitsProcessor(1.5, (MASK != 0).int().argmax(dim=1)),
    "repetition penalty of a length": lambda: host.RepetitionPenaltyLogitsProcessor(1.5, 2),
    "repetition penalty of all": lambda: host.RepetitionPenaltyLogitsProcessor(1.5),
    "encoder repetition penalty": lambda: host.EncoderRepetitionPenaltyLogitsProcessor(1.5, PROMPTS),
    "encoder n-grams": lambda: host.EncoderNoRepeatNGramLogitsProcessor(2, PROMPTS),
    "n-grams": lambda: host.NoRepeatNGramLogitsProcessor(2),
    "prefix": lambda: host.PrefixConstrainedLogitsProcessor(lambda row, ids: [row, int(ids[-1])], 1),
    "bias": lambda: host.SequenceBiasLogitsProcessor({(3,): 2.0, (2, 5): -3.0}),
    "bad words": lambda: host.NoBadWordsLogitsProcessor([[3], [7, 5]], eos_token_id=torch.tensor([0])),
    "watermark": lambda: host.WatermarkLogitsProcessor(VOCAB, "cpu"),
    "top-h": lambda: host.TopHLogitsWarper(0.4),
    "top-k": lambda: host.TopKLogitsWarper(3),
    "top-p": lambda: host.TopPLogitsWarper(0.5),
    "typical": lambda: host.TypicalLogitsWarper(0.5),
    "eta": lambda: host.EtaLogitsWarper(0.1),
    "minimum": lambda: host.MinNewTokensLengthLogitsProcessor(4, 2, torch.tensor([0, 3])),
    "forced end": lambda: host.ForcedEOSTokenLogitsProcessor(5, [0]),
    "decay": lambda: host.ExponentialDecayLengthPenalty((0, 1.3), torch.tensor([0]), 1),
}


@pytest.mark.parametrize("name", ROWS_IN_STEP)
@pytest.mark.parametrize("with_own", [False, True])
def test_rows_are_processed_as_a_batch_would_be(name, with_own):
    if name == "repetition penalty" and Version("5.23.0") > VERSION:
        pytest.skip("this release has one length for all rows")
    torch.manual_seed(0)
    scores = torch.randn(3, VOCAB)
    plain = LogitsProcessorList([ROWS_IN_STEP[name]()])
    ours = [ROWS_IN_STEP[name]()] + ([lambda input_ids, scores: scores * 2] if with_own else [])
    expected = plain(PROMPTS, scores.clone()) * (2 if with_own else 1)
    torch.testing.assert_close(chain(*ours, rows=3)(prefixes_of(PROMPTS), scores.clone()), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda prompts: host.EncoderRepetitionPenaltyLogitsProcessor(1.5, prompts),
        lambda prompts: host.EncoderNoRepeatNGramLogitsProcessor(2, prompts),
    ],
)
def test_samples_of_one_prompt_share_it(make):
    torch.manual_seed(0)
    ids, scores = PROMPTS.repeat_interleave(2, dim=0), torch.randn(6, VOCAB)
    found = chain(make(PROMPTS), rows=6)(prefixes_of(ids), scores.clone())
    for row in range(6):
        alone = make(PROMPTS[row // 2 : row // 2 + 1])(ids[row : row + 1], scores[row : row + 1])
        torch.testing.assert_close(found[row : row + 1], alone)


def test_a_prefix_function_is_told_the_prompt_of_several_samples():
    told = []

    def function(row: int, ids: torch.Tensor) -> list[int]:
        told.append((row, ids.tolist()))
        return [0]

    ids = PROMPTS.repeat_interleave(2, dim=0)
    chain(host.PrefixConstrainedLogitsProcessor(function, 2), rows=6)(prefixes_of(ids), torch.zeros(6, VOCAB))
    assert told == [(row // 2, ids[row].tolist()) for row in range(6)]


def test_positions_of_one_row_see_what_stands_before_them():
    class Last(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids[:, -1:], 9.0)

    ids = torch.tensor([[1, 2, 3, 4]])
    prefixes = [(0, ids[:, :length], length - 1) for length in (1, 2, 3, 4)]
    for processors in ([Last()], [Last(), host.TemperatureLogitsWarper(1.0001)]):
        found = chain(*processors)(prefixes, torch.zeros(4, VOCAB))
        assert found.argmax(dim=-1).tolist() == [1, 2, 3, 4]


class Count(LogitsProcessor):
    def __init__(self):
        self.calls, self.seen = 0, []

    def __call__(self, input_ids, scores):
        self.calls += 1
        self.seen.append(input_ids.shape[1])
        return scores + self.calls


def test_a_state_goes_through_positions_and_back():
    count = Count()
    processors = chain(count)
    ids = torch.arange(8)[None]
    prefixes = [(0, ids[:, :length], 0) for length in (1, 2, 3, 4)]
    before = processors.state()
    assert processors(prefixes, torch.zeros(4, VOCAB))[:, 0].tolist() == [1, 2, 3, 4]
    processors.restore(before)  # as after drafting
    assert (count.calls, count.seen) == (0, [])
    assert processors(prefixes, torch.zeros(4, VOCAB), record=True)[:, 0].tolist() == [1, 2, 3, 4]
    processors.commit(2)  # as after a rejection
    assert (count.calls, count.seen) == (2, [1, 2])


def test_a_state_is_refused_with_several_rows():
    with pytest.raises(ValueError, match="Count changes its attributes while it is called. With 3 rows"):
        chain(Count(), rows=3)(prefixes_of(PROMPTS), torch.zeros(3, VOCAB))


def test_setting_up_at_the_first_call_is_not_a_state():
    class Lazy(LogitsProcessor):
        bias = None

        def __call__(self, input_ids, scores):
            if self.bias is None:
                self.bias = torch.arange(VOCAB, dtype=scores.dtype)
            return scores + self.bias

    processors = chain(Lazy(), rows=3)
    for _ in range(3):
        found = processors(prefixes_of(PROMPTS), torch.zeros(3, VOCAB))
        assert found.tolist() == torch.arange(VOCAB).float().repeat(3, 1).tolist()


def test_a_plain_function_is_a_processor():
    assert chain(lambda input_ids, scores: scores + 1)(prefixes_of(PROMPTS[:1]), torch.zeros(1, 2)).tolist() == [
        [1, 1]
    ]


def test_the_users_code_is_not_asked_after_a_drafted_end():
    asked = []

    class Own(LogitsProcessor):
        def __call__(self, input_ids, scores):
            asked.append(input_ids[0].tolist())
            return scores + 1

    ids = torch.tensor([[5, 0, 2, 0, 3]])  # 0 ends a text; the first one stands in the prompt
    prefixes = [(0, ids[:, : 3 + drafted], drafted) for drafted in range(3)]
    found = chain(Own(), end_tokens=(0,))(prefixes, torch.zeros(3, VOCAB))
    assert asked == [[5, 0, 2]] and found[:, 0].tolist() == [1, 0, 0]
    asked.clear()
    assert chain(Own())(prefixes, torch.zeros(3, VOCAB))[:, 0].tolist() == [1, 1, 1] and len(asked) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_positions_are_processed_like_each_alone(dtype):
    """A few at a time, where nothing but scores is read."""
    kinds = [host.TemperatureLogitsWarper(0.5), host.TopKLogitsWarper(30), host.TopPLogitsWarper(0.8)]
    processors = chain(*kinds, host.SuppressTokensLogitsProcessor([3]), rows=2)
    scores = torch.randn(19, 50, dtype=dtype, generator=torch.Generator().manual_seed(0))
    alone = [processors((), row[None].clone()) for row in scores]
    assert torch.equal(processors((), scores.clone()), torch.cat(alone))


def test_guidance_is_refused():
    with pytest.raises(ValueError, match="ClassifierFreeGuidanceLogitsProcessor keeps a state"):
        chain(host.ClassifierFreeGuidanceLogitsProcessor(2.0))


def test_no_processors_are_false():
    assert not chain() and chain(host.TopKLogitsWarper(3))
