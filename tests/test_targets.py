"""Every family of decoders as the target: the text of plain `generate`, or an error that names the model."""

import functools
import inspect
from pathlib import Path

import families
import pytest
import torch
from families import DECODERS, IMAGE_READERS, VARIANTS, Family, decoder, drafter_for, image_reader, prompts
from packaging.version import Version
from tiny import oracle
from transformers import CONFIG_MAPPING, GenerationMixin, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from dspark_hf import compat, decoding, flattened_stream
from dspark_hf.flattened_stream import FlattenedStream
from dspark_hf.padded_stream import PaddedStream
from dspark_hf.row_stream import RowStream
from dspark_hf.target_outputs import read_taps, text_config


NEW_TOKENS = 40
# The release whose decoders are the table's; in older ones some go row by row, or do not exist.
NEWEST = Version("5.24.0") <= compat.VERSION
KINDS = {FlattenedStream: "flattened", PaddedStream: "padded", RowStream: "row by row"}

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def streams(monkeypatch) -> list[str]:
    """The kinds of streams that were opened, in order."""
    opened = []

    def open_stream(*args):
        stream = original(*args)
        opened.append(KINDS[type(stream)])
        return stream

    original = decoding.open_stream
    monkeypatch.setattr(decoding, "open_stream", open_stream)
    return opened


def only_row(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """One row of inputs, each of which holds equally much of every row."""
    rows = len(inputs["input_ids"])
    return {name: value[len(value) // rows * row :][: len(value) // rows] for name, value in inputs.items()}


def plain_and_ours(monkeypatch, target: PreTrainedModel, drafter, inputs: dict[str, torch.Tensor], **options):
    """Greedy text without and with a drafter whose drafts are right more often than not."""
    options = {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": None,
        "pad_token_id": 0,
        "no_repeat_ngram_size": 2,  # random models fall into loops, in which any mistake goes unnoticed
    } | options
    plain = target.generate(**inputs, **options)
    oracle(monkeypatch, plain, "alternately")
    return plain, target.generate(**inputs, **options, assistant_model=drafter)


def assert_same(plain: torch.Tensor, ours: torch.Tensor, drafter) -> None:
    assert ours.tolist() == plain.tolist()
    assert drafter.speculative_stats.mean_acceptance_length > 2


def params(families: dict[str, Family]) -> list:
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(name, marks=marks[family.slow]) for name, family in families.items()]


def check(name: str, family: Family, target, drafter, inputs, streams, monkeypatch) -> None:
    for rows, expected in ((1, family.stream), (3, family.several or family.stream)):
        streams.clear()
        some = inputs if rows == 3 else only_row(inputs, 2)
        if expected == "refused":
            with pytest.raises(ValueError, match=f"^{type(target).__name__} .*`assistant_model`"):
                target.generate(**some, assistant_model=drafter, max_new_tokens=9, pad_token_id=0)
            continue
        plain, ours = plain_and_ours(monkeypatch, target, drafter, some)
        assert_same(plain, ours, drafter)
        assert len(plain[0, -NEW_TOKENS:].unique()) > 5
        if NEWEST:
            assert streams[-1] == expected


@pytest.mark.parametrize("name", params(DECODERS))
def test_text(name, streams, monkeypatch):
    if name not in CONFIG_MAPPING:
        pytest.skip("not in this release")
    target = decoder(name)
    check(name, DECODERS[name], target, drafter_for(target), prompts(), streams, monkeypatch)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, streams, monkeypatch):
    target = decoder(name)
    check(name, VARIANTS[name][1], target, drafter_for(target), prompts(), streams, monkeypatch)


@pytest.mark.parametrize("name", params(IMAGE_READERS))
def test_images_and_text(name, streams, monkeypatch):
    target, inputs = image_reader(name)
    drafter = drafter_for(target)
    check(name, IMAGE_READERS[name], target, drafter, inputs, streams, monkeypatch)
    row = only_row(inputs, 2)
    seen = [
        target.generate(**row | {"pixel_values": pixels}, max_new_tokens=9, do_sample=False, pad_token_id=0)
        for pixels in (row["pixel_values"], 1 - 2 * row["pixel_values"])
    ]
    assert not torch.equal(*seen), "the image makes no difference"


# What a target may do otherwise than Llama: it is noticed, or it is right anyway


def with_attention(forward) -> PreTrainedModel:
    """A tiny Llama of a class of its own, whose attention layers run `forward`."""
    target = decoder("llama")
    target.__class__ = type("OddLlama", (type(target),), {})
    for layer in target.model.layers:
        layer.self_attn.__class__ = type("OddAttention", (type(layer.self_attn),), {"forward": forward})
    return target


def attend(self, hidden_states, position_embeddings, cache, call):
    """A Llama attention layer whose last step is `call(query, key, value)`."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (
        projection(hidden_states).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = cache.update(key, value, self.layer_idx)
    output, weights = call(query, key, value)
    return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


def host_attention(self, query, key, value, mask, **kwargs):
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
    return interface(self, query, key, value, mask, scaling=self.scaling, **kwargs)


def own_mask(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
    def call(query, key, value):
        # Further back than ten places, every other key is left out.
        places = torch.arange(key.shape[2])
        last = key.shape[2] - query.shape[2] + torch.arange(query.shape[2])
        mask = (places <= last[:, None]) & ((places > last[:, None] - 10) | (places % 2 == 0))
        if isinstance(attention_mask, torch.Tensor):
            mask = mask & attention_mask
        return host_attention(self, query, key, value, mask.expand(len(query), 1, *mask.shape[-2:]))

    return attend(self, hidden_states, position_embeddings, cache_in(kwargs), call)


def no_interface(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
    def call(query, key, value):
        key, value = (states.repeat_interleave(2, dim=1) for states in (key, value))
        scores = query @ key.transpose(2, 3) * self.scaling
        mask = attention_mask
        if mask is None:
            places = torch.arange(key.shape[2])
            mask = places <= key.shape[2] - query.shape[2] + torch.arange(query.shape[2])[:, None]
        weights = scores.masked_fill(~mask, -1e9).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    return attend(self, hidden_states, position_embeddings, cache_in(kwargs), call)


def bias(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
    def call(query, key, value):
        distances = torch.arange(key.shape[2]) - key.shape[2] + torch.arange(query.shape[2], 0, -1)[:, None]
        position_bias = 0.1 * distances[None, None].expand(1, 4, *distances.shape).to(query)
        return host_attention(self, query, key, value, attention_mask, position_bias=position_bias)

    return attend(self, hidden_states, position_embeddings, cache_in(kwargs), call)


def looks_at_layers(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
    cache = cache_in(kwargs)

    def call(query, key, value):
        return host_attention(self, query, cache.layers[self.layer_idx].keys, value, attention_mask)

    return attend(self, hidden_states, position_embeddings, cache, call)


def sliced_mask(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
    def call(query, key, value):
        mask = attention_mask[:, :, :, : key.shape[2]] if attention_mask is not None else None
        return host_attention(self, query, key, value, mask)

    return attend(self, hidden_states, position_embeddings, cache_in(kwargs), call)


def cache_in(kwargs):
    return kwargs.get("cache", kwargs.get("past_key_values"))


ODD = {
    own_mask: "row by row",
    no_interface: "row by row",
    bias: "row by row",
    looks_at_layers: "row by row",
    sliced_mask: "flattened",
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("forward", ODD)
def test_odd_attention(forward, rows, streams, monkeypatch):
    target = with_attention(forward)
    drafter = drafter_for(target)
    for _ in range(2):  # in the second call it is known
        streams.clear()
        assert_same(*plain_and_ours(monkeypatch, target, drafter, rows_of(prompts(), rows)), drafter)
        assert streams[-1] == ODD[forward]
    assert len(streams) == 1


def test_a_mask_that_sees_more_than_the_past(streams, monkeypatch):
    """As prefix-LM and image masks do."""
    target = decoder("llama")
    target.__class__ = type("PrefixLlama", (type(target),), {})

    def forward(self, *args, **kwargs):
        mask = functools.partial(original, or_mask_function=lambda batch, head, query, key: key < 3)
        monkeypatch.setattr(modeling_llama, "create_causal_mask", mask)
        try:
            return type(self).forward(self, *args, **kwargs)
        finally:
            monkeypatch.setattr(modeling_llama, "create_causal_mask", original)

    original = modeling_llama.create_causal_mask
    target.model.forward = functools.partial(forward, target.model)
    drafter = drafter_for(target)
    assert_same(*plain_and_ours(monkeypatch, target, drafter, only_row(prompts(), 2)), drafter)
    assert streams == ["flattened", "row by row"]


def test_a_class_that_changes_its_mind_is_no_silent_error():
    """An attention that leaves the interface after the first pass, when it is too late to change the stream."""
    target = with_attention(own_mask)
    for layer in target.model.layers:
        layer.self_attn.forward = functools.partial(_after_some_time, layer.self_attn)
    with pytest.raises(RuntimeError, match="OddLlama changed its attention while generating"):
        target.generate(
            **only_row(prompts(), 2), max_new_tokens=40, eos_token_id=None, assistant_model=drafter_for(target)
        )


def _after_some_time(attention, hidden_states, *args, **kwargs):
    attention.calls = getattr(attention, "calls", 0) + 1
    forward = sliced_mask if attention.calls < 4 else own_mask
    return forward(attention, hidden_states, *args, **kwargs)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_hole_in_the_mask(rows, streams, monkeypatch):
    """Padding in the middle of a row counts towards its windows."""
    target = decoder("gemma3_text")
    inputs = rows_of(prompts(), rows)
    inputs["attention_mask"][:, -6:-3] = 0
    drafter = drafter_for(target)
    assert_same(*plain_and_ours(monkeypatch, target, drafter, inputs), drafter)
    assert streams[-1] == "row by row"


def rows_of(inputs: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    return inputs if rows == 3 else only_row(inputs, 2)


# Rotary embeddings that depend on the length of the text


def long_rope(original: int) -> PreTrainedModel:
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 4.0]}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original} | factors
    return decoder("phi3", rope_parameters=parameters, original_max_position_embeddings=original)


@pytest.mark.parametrize("original", [8, 200])
@pytest.mark.parametrize("rows", [1, 3])
def test_long_rope_on_one_side(rows, original, monkeypatch):
    target = long_rope(original)
    drafter = drafter_for(target)
    inputs = rows_of(prompts((14, 10, 18)), rows)
    assert_same(*plain_and_ours(monkeypatch, target, drafter, inputs), drafter)


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_a_rope_that_could_change_is_refused(rope_type):
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    target = (
        long_rope(30)
        if rope_type == "longrope"
        else decoder("llama", rope_parameters=dynamic, max_position_embeddings=30)
    )
    drafter = drafter_for(target)
    inputs = only_row(prompts(), 2)  # 18 tokens
    target.generate(**inputs, max_new_tokens=13, eos_token_id=None, assistant_model=drafter)
    with pytest.raises(ValueError, match=rf"{rope_type}\) when the text grows past 30 tokens, and 18 \+ 14 could"):
        target.generate(**inputs, max_new_tokens=14, eos_token_id=None, assistant_model=drafter)


# Hidden states


def test_only_the_tapped_states_are_kept(tiny_target, load_drafter):
    drafter = load_drafter("deepspec-vanilla")
    kept = []

    def look(module, args, outputs):
        kept.append([index for index, state in enumerate(outputs.hidden_states) if state is not None])

    with tiny_target.register_forward_hook(look):
        tiny_target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=9, assistant_model=drafter)
    assert len(kept) > 1
    assert {len(indices) for indices in kept} == {len(drafter.config.target_layer_ids)}


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bloom", "qwen3_vl"])
@pytest.mark.parametrize("keep_all", [False, True])
def test_taps_are_outputs_of_layers(name, keep_all):
    """Which entry of `hidden_states` is which layer's output changed in 5.23: held against the layers themselves."""
    target, inputs = image_reader(name) if name in IMAGE_READERS else (decoder(name), prompts())
    layers = next(
        module
        for module in target.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == text_config(target).num_hidden_layers
    )
    outputs_of = {}

    def keep(module, args, output, index):
        if index == 0:
            outputs_of[-1] = args[0]
        outputs_of[index] = output[0] if isinstance(output, tuple) else output

    for index, layer in enumerate(layers):
        layer.register_forward_hook(functools.partial(keep, index=index))
    taps = sorted(range(-1, len(layers) - 1))
    outputs = target(**inputs, output_hidden_states=compat.hidden_states_request(taps, keep_all))
    tapped = read_taps(target, outputs, taps)
    torch.testing.assert_close(tapped, torch.cat([outputs_of[tap] for tap in taps], dim=-1), rtol=0, atol=0)


@pytest.mark.parametrize(
    "states, message",
    [
        (None, "BareLlama returns no hidden states"),
        ((torch.zeros(1, 18, 32),) * 9, "BareLlama returns 9 hidden states for 4 layers"),
        ((None,) * 5, r"BareLlama does not return the hidden states of the layers \[-1, 0, 2\]"),
        ((torch.zeros(1, 18, 7),) * 5, r"BareLlama returns hidden states of shape .* where \(rows, length, 32\)"),
    ],
)
def test_targets_without_usable_hidden_states(states, message):
    target = decoder("llama")

    def forward(self, *args, **kwargs):
        outputs = super(target.__class__, self).forward(*args, **kwargs)
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "hidden_states"} | change)

    change = {} if states is None else {"hidden_states": states}
    forward.__signature__ = inspect.signature(type(target).forward)
    target.__class__ = type("BareLlama", (type(target),), {"forward": forward})
    with pytest.raises(ValueError, match=f"^{message}"):
        target.generate(**only_row(prompts(), 2), max_new_tokens=9, assistant_model=drafter_for(target))


def test_targets_that_know_of_no_list(monkeypatch):
    """Models of older code return all hidden states where some are asked for."""
    target = decoder("llama")

    def forward(self, *args, output_hidden_states=None, **kwargs):
        return super(target.__class__, self).forward(*args, output_hidden_states=bool(output_hidden_states), **kwargs)

    forward.__signature__ = inspect.signature(type(target).forward)
    drafter = drafter_for(target)
    plain, ours = plain_and_ours(monkeypatch, target, drafter, prompts())
    rounds = drafter.speculative_stats.rounds
    monkeypatch.undo()
    target.__class__ = type("OldLlama", (type(target),), {"forward": forward})
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0, "no_repeat_ngram_size": 2}
    assert torch.equal(target.generate(**prompts(), **options, assistant_model=drafter), plain)
    assert torch.equal(ours, plain) and rounds


# What is used of Transformers that is not public: a test that fails loudly when it changes


def test_the_host_is_as_expected():
    def names(function) -> list[str]:
        return list(inspect.signature(function).parameters)

    assisted = names(GenerationMixin._assisted_decoding)
    wanted = ["input_ids", "logits_processor", "stopping_criteria", "generation_config", "synced_gpus", "streamer"]
    assert set(wanted) | {"inputs_tensor", "assistant_model", "model_kwargs"} <= set(assisted)
    mode = ["self", "generation_mode", "generation_config", "generation_mode_kwargs"]
    assert names(GenerationMixin._validate_generation_mode) == mode
    assert names(GenerationMixin._prefill)[:4] == ["self", "input_ids", "generation_config", "model_kwargs"]
    update = ["self", "outputs", "model_kwargs", "is_encoder_decoder", "num_new_tokens"]
    assert names(GenerationMixin._update_model_kwargs_for_generation) == update
    prepare = names(GenerationMixin.prepare_inputs_for_generation)
    assert {"input_ids", "next_sequence_length", "is_first_iteration", "kwargs"} <= set(prepare)
    assert compat.CACHE_NAME in prepare
    assert compat.CACHE_NAME in names(type(decoder("llama")).forward)
    assert isinstance(GenerationMixin._supports_default_dynamic_cache, object)
    mask = names(ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    assert {"mask_function", "allow_is_causal_skip", "kwargs"} <= set(mask)


@pytest.mark.parametrize("name", flattened_stream._INTERFACE_UNSAID)
def test_what_a_class_leaves_unsaid(name):
    assert not decoder(name)._supports_attention_backend, "its class says it now: take it off the list"


def test_the_documentation_is_what_was_seen():
    page = Path(__file__).parents[1] / "docs" / "targets.md"
    release = page.read_text().split("decoders of Transformers ")[1].split(" ")[0]
    assert page.read_text() == families.page(release), "run `python tests/families.py docs/targets.md`"
