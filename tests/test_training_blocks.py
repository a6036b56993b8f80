"""Blocks cut out of texts, and the pass that trains many of them at once against the pass that decodes one."""

import pytest
import torch
from conftest import load_golden
from tiny import random_drafter

from dspark_hf.modeling.draft_context import DraftContext
from dspark_hf.training_blocks import PackedContext, cut_blocks, draw_anchors


TEXTS = torch.arange(40).view(2, 20)


def mask_of(*spans: tuple[int, int], length: int = 20) -> list[int]:
    return [int(any(begin <= place < end for begin, end in spans)) for place in range(length)]


def test_anchors_are_written_by_the_target_and_so_is_what_follows():
    mask = torch.tensor([mask_of((3, 6), (8, 9)), mask_of((17, 20))])
    anchors, kept = draw_anchors(TEXTS, mask, num_anchors=10, seed=0)
    assert [row[keep].tolist() for row, keep in zip(anchors, kept, strict=True)] == [[3, 4], [17, 18]]


def test_a_text_without_a_place_has_no_block_that_counts():
    anchors, kept = draw_anchors(TEXTS, torch.zeros(2, 20), num_anchors=4, seed=0)
    assert anchors.shape == (2, 1) and not kept.any()
    assert not cut_blocks(TEXTS, torch.zeros(2, 20), anchors, kept, block_size=3).supervised.any()


def test_anchors_depend_on_seed_and_text_alone():
    mask = torch.ones(2, 20)
    both, _ = draw_anchors(TEXTS, mask, num_anchors=5, seed=3)
    alone, _ = draw_anchors(TEXTS[1:], mask[1:], num_anchors=5, seed=3)
    assert torch.equal(both[1], alone[0])
    padded = torch.cat([TEXTS[1:], torch.zeros(1, 7, dtype=torch.long)], dim=1)
    longer, _ = draw_anchors(padded, torch.cat([mask[1:], torch.zeros(1, 7)], dim=1), num_anchors=5, seed=3)
    assert torch.equal(longer[0], alone[0])
    assert torch.equal(both, both.sort(dim=1).values) and all(len(set(row)) == 5 for row in both.tolist())
    assert not torch.equal(both, draw_anchors(TEXTS, mask, num_anchors=5, seed=4)[0])


def test_only_the_contiguous_prefix_that_the_target_wrote_counts():
    mask = torch.tensor([mask_of((2, 5), (6, 20)), mask_of((0, 20))])
    anchors = torch.tensor([[3, 12], [16, 0]])
    kept = torch.tensor([[True, True], [True, False]])
    blocks = cut_blocks(TEXTS, mask, anchors, kept, block_size=4)
    assert blocks.supervised.int().tolist() == [[[1, 0, 0, 0], [1, 1, 1, 1]], [[1, 1, 1, 0], [0, 0, 0, 0]]]
    assert blocks.tokens[0, 0].tolist() == [3, 4, 5, 6, 7] and blocks.tokens[1, 0, :4].tolist() == [36, 37, 38, 39]
    assert torch.equal(blocks.labels[..., :-1], blocks.previous[..., 1:])


def test_blocks_and_masks_are_those_of_deepspec():
    _, golden = load_golden("deepspec-vanilla")
    blocks = cut_blocks(
        golden["train.input_ids"],
        golden["train.loss_mask"],
        golden["train.anchor_positions"],
        golden["train.block_keep_mask"].bool(),
        block_size=7,
    )
    assert torch.equal(blocks.supervised.long(), golden["train.eval_mask"])
    counted = blocks.supervised
    assert torch.equal(blocks.labels[counted], golden["train.target_ids"][counted])


def packed(drafter, taps: torch.Tensor, blocks: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """Hidden states `(rows, blocks, slots, hidden)` of block tokens `(rows, blocks, slots)`."""
    rows, count, _ = blocks.shape
    hidden = drafter(
        drafter.embed(blocks.flatten(1)),
        context_hidden_states=taps.flatten(0, 1),
        context_lengths=[taps.shape[1]] * rows,
        context=PackedContext(drafter.config, anchors, taps.shape[1]),
    )
    return hidden.view(rows, count, drafter.config.block_size, -1)


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "num_hidden_layers": 2}


VARIANTS = {
    "full": {},
    "sliding": SLIDING,
    "causal": SLIDING | {"causal_layer_types": ["sliding_attention"]},
    "slot 0 is no draft": {"sample_from_anchor": False, "block_size": 2},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_packed_block_is_the_block_that_decoding_drafts(changes):
    fields = {"vocab_size": 11, "block_size": 3, "owns_embedding": True, "owns_lm_head": True}
    drafter = random_drafter(**fields | changes)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(2, 9, 16, generator=generator, dtype=torch.float64)
    anchors = torch.tensor([[0, 3, 8], [5, 6, 7]])
    blocks = torch.randint(11, (2, 3, 3), generator=generator)
    with torch.no_grad():
        found = packed(drafter, taps, blocks, anchors)
        for row in range(2):
            for block, anchor in enumerate(anchors[row].tolist()):
                alone = drafter(
                    drafter.embed(blocks[row, block][None]),
                    context_hidden_states=taps[row, :anchor],
                    context_lengths=[anchor],
                    context=DraftContext(drafter.config, [0]),
                )
                torch.testing.assert_close(found[row, block], alone[0], rtol=0, atol=1e-12)


def test_blocks_see_neither_each_other_nor_what_comes_later():
    drafter = random_drafter(vocab_size=11, block_size=3, owns_embedding=True, owns_lm_head=True)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(1, 9, 16, generator=generator, dtype=torch.float64)
    anchors = torch.tensor([[4, 6]])
    blocks = torch.randint(11, (1, 2, 3), generator=generator)
    with torch.no_grad():
        before = packed(drafter, taps, blocks, anchors)
        taps[:, 4:] += 1
        blocks[:, 1] = (blocks[:, 1] + 1) % 11
        after = packed(drafter, taps, blocks, anchors)
    assert torch.equal(before[0, 0], after[0, 0])
    assert not torch.allclose(before[0, 1], after[0, 1])


def test_checkpointed_layers_give_the_same_gradients():
    gradients = []
    for checkpointing in (False, True):
        drafter = random_drafter(vocab_size=11, block_size=3, owns_embedding=True, owns_lm_head=True).train()
        if checkpointing:
            new = getattr(drafter, "activation_checkpointing_enable", None)  # the name since 5.24
            (new or drafter.gradient_checkpointing_enable)()
        generator = torch.Generator().manual_seed(0)
        taps = torch.randn(1, 9, 16, generator=generator, dtype=torch.float64)
        blocks = torch.randint(11, (1, 2, 3), generator=generator)
        packed(drafter, taps, blocks, torch.tensor([[4, 6]])).square().sum().backward()
        gradients.append({name: value.grad for name, value in drafter.named_parameters() if value.grad is not None})
    plain, checkpointed = gradients
    assert plain.keys() == checkpointed.keys() and plain
    for name in plain:
        torch.testing.assert_close(plain[name], checkpointed[name])
