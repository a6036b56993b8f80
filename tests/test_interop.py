"""What is exported for speculators, loaded and run by that package itself (`make test-interop`)."""

import pytest
import torch
from conftest import FIXTURES, load_drafter
from test_golden_formats import draft_block, taps_of

from dspark_hf.conversion import convert


pytest.importorskip("speculators", reason="the package speculators is not installed (make test-interop)")
pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("no_grad")]

TOLERANCE = 1e-4
DRAFTERS = (
    "deepspec-vanilla",
    "deepspec-gated",
    "deepspec-rnn",
    "deepspec-noconf",
    "deepspec-nomarkov",
    "dflash-top-level",
    "speculators-sliding",
    "speculators-reduced-vocab",
)


def load(folder):
    """A drafter by speculators, with attention that runs without a GPU."""
    from speculators import SpeculatorModel
    from speculators.config import SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=config).eval().float()


@pytest.mark.filterwarnings("ignore")  # what speculators and its packages warn of is theirs
@pytest.mark.parametrize("name", DRAFTERS)
def test_speculators_computes_the_same(name, tiny_target, tmp_path):
    convert(FIXTURES / name / "drafter", tmp_path / "new", "speculators", tiny_target, str(FIXTURES / "tiny-target"))
    theirs, ours = load(tmp_path / "new"), load_drafter(name)
    slots, own = ours.config.block_slots, ours.config.block_slots - ours.config.block_size
    ids = torch.tensor([list(range(33, 73))])
    context = taps_of(tiny_target, ours, ids)
    last = tiny_target(ids, output_hidden_states=True).hidden_states[-2]
    mask = torch.zeros_like(ids)
    mask[:, 16:24] = 1
    hidden, logits, _, _, places = theirs._backbone_forward(
        context[None], ids, mask, last, torch.zeros_like(ids), None, max_anchors=8
    )
    blocks = places.view(8, slots)
    hidden, logits = hidden.view(8, slots, -1), logits.view(8, slots, -1)
    tokens = ids[0, blocks]
    embeds = None
    if getattr(theirs, "markov_head", None) is not None:
        embeds = theirs.markov_head.prev_embeddings(tokens)
        logits = logits + theirs.markov_head.block_bias(prev_token_ids=tokens, hidden_states=hidden, prev_emb=embeds)
    confidence = None
    if getattr(theirs, "confidence_head", None) is not None:
        read = [hidden, embeds] if theirs.config.confidence_head_with_markov else [hidden]
        confidence = theirs.confidence_head(torch.cat(read, dim=-1))
    assert sorted(blocks[:, 0].tolist()) == list(range(16, 24))
    for row, place in enumerate(blocks[:, 0].tolist()):
        following = ids[0, place + 1 : place + 1 + ours.config.block_size]
        found = draft_block(
            ours, tiny_target, context[:place], ids[0, place : place + 1], lambda slot, t=following: t[slot : slot + 1]
        )
        torch.testing.assert_close(found["block_hidden"], hidden[row, own:], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(found["draft_logits"], logits[row, own:], atol=TOLERANCE, rtol=0)
        assert ("confidence_logits" in found) == (confidence is not None)
        if confidence is not None:
            torch.testing.assert_close(found["confidence_logits"], confidence[row, own:], atol=TOLERANCE, rtol=0)
