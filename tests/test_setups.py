"""Targets and drafters as they are set up: wrapped, compiled, quantised, offloaded, in mixed dtypes, in threads."""

import sys
import tempfile
import threading

import accelerate
import peft
import pytest
import torch
from conftest import FIXTURES
from families import decoder, drafter_for, image_reader, prompts
from test_targets import assert_same, only_row, plain_and_ours, rows_of, streams  # noqa: F401
from tiny import character_tokenizer
from transformers import AutoModelForCausalLM, pipeline


# What PEFT and torch.ao say about themselves.
pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:torch.ao.quantization"
    ),
]


@pytest.fixture(params=[1, 3])
def rows(request) -> int:
    return request.param


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test))


def check(monkeypatch, target, drafter, rows: int) -> None:
    assert_same(*plain_and_ours(monkeypatch, target, drafter, rows_of(prompts(), rows)), drafter)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text"])
def test_eager_attention(name, rows, streams, monkeypatch):  # noqa: F811
    target = decoder(name)
    target.set_attn_implementation("eager")
    check(monkeypatch, target, drafter_for(target), rows)
    assert streams == ["flattened"]
    assert target.config._attn_implementation == "eager"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask")
def test_flex_attention(monkeypatch):
    target = decoder("llama")
    target.set_attn_implementation("flex_attention")
    check(monkeypatch, target, drafter_for(target), rows=1)


# Attention weights

WEIGHTED = "llama mistral gemma3_text gemma4_text gpt_oss llama4_text gpt2 bloom lfm2 gpt_neo".split()


@pytest.mark.parametrize("name", WEIGHTED)
def test_attention_weights(name, rows, monkeypatch):
    target = decoder(name)
    target.set_attn_implementation("eager")
    drafter = drafter_for(target)
    options = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True}
    inputs = rows_of(prompts((9, 6, 12)), rows)
    arguments = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 20} | options
    plain = target.generate(**inputs, **arguments)
    ours = target.generate(**inputs, **arguments, assistant_model=drafter)
    assert torch.equal(ours.sequences, plain.sequences)
    for field in ("attentions", "hidden_states"):
        assert len(getattr(ours, field)) == len(getattr(plain, field)) == 20
        for step, wanted in zip(getattr(ours, field), getattr(plain, field), strict=True):
            assert [layer.shape for layer in step] == [layer.shape for layer in wanted]
            for layer, expected in zip(step, wanted, strict=True):
                torch.testing.assert_close(layer, expected, rtol=1e-3, atol=1e-3)


def test_weights_of_a_window_that_only_the_cache_knows():
    target = decoder("moshi")
    with pytest.raises(ValueError, match="MoshiForCausalLM cannot return attention weights with a drafter"):
        target.generate(
            **only_row(prompts(), 2),
            return_dict_in_generate=True,
            output_attentions=True,
            assistant_model=drafter_for(target),
        )


@pytest.mark.parametrize("wanted", ["output_attentions", "output_hidden_states"])
def test_states_of_a_target_without_a_cache(wanted):
    target = decoder("openai-gpt")
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel has no cache"):
        target.generate(
            **only_row(prompts(), 2),
            return_dict_in_generate=True,
            **{wanted: True},
            assistant_model=drafter_for(target),
        )


# Wrapped


def test_lora_on_the_target(rows, monkeypatch):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    target = decoder("llama")
    drafter = drafter_for(target)
    before = target.generate(**only_row(prompts(), 2), max_new_tokens=9, do_sample=False)
    wrapped = peft.get_peft_model(target, config)
    check(monkeypatch, wrapped, drafter, rows)
    after = wrapped.generate(**only_row(prompts(), 2), max_new_tokens=9, do_sample=False)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_virtual_tokens_are_refused(kind):
    target = peft.get_peft_model(decoder("llama"), kind(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match=f"LlamaForCausalLM is wrapped by PEFT with virtual tokens .{kind.__name__}"):
        target.generate(**only_row(prompts(), 2), max_new_tokens=4, assistant_model=drafter_for(decoder("llama")))


def test_lora_on_the_drafter(rows, monkeypatch):
    target = decoder("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "fc"], init_lora_weights=False)
    check(monkeypatch, target, peft.get_peft_model(drafter_for(target), config), rows)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["target", "drafter"])
@pytest.mark.parametrize("how", ["torch.compile", "compile in place"])
def test_compiled(which, how, rows, monkeypatch):
    target = decoder("llama")
    drafter = drafter_for(target)
    module = target if which == "target" else drafter
    if how == "compile in place":
        module.compile(backend="eager")
        compiled = module
    else:
        compiled = torch.compile(module, backend="eager")
    check(monkeypatch, *((compiled, drafter) if which == "target" else (target, compiled)), rows)
    torch.compiler.reset()


def test_pipeline(load_drafter):
    target = AutoModelForCausalLM.from_pretrained(FIXTURES / "tiny-target").eval()
    drafter = load_drafter("deepspec-vanilla")
    drafter.config.eos_token_id = target.config.eos_token_id  # else the pipeline wants a tokenizer of the drafter's
    tokenizer = character_tokenizer()
    tokenizer.pad_token = "~"
    texts = ["Tom has 5 apples and", "The quick"]
    options = {"max_new_tokens": 20, "do_sample": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)(texts, **options)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert drafted(texts, **options) == plain
    assert drafted(texts, **options, batch_size=2) == plain
    assert len(drafter.speculative_stats.rows) == 2


# Dtypes, heads, devices


@pytest.mark.parametrize(
    "target_dtype, drafter_dtype", [("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")]
)
def test_mixed_dtypes(target_dtype, drafter_dtype, rows, monkeypatch):
    target = decoder("llama").to(getattr(torch, target_dtype))
    drafter = drafter_for(target).to(getattr(torch, drafter_dtype))
    plain, ours = plain_and_ours(monkeypatch, target, drafter, rows_of(prompts(), rows))
    assert ours.shape == plain.shape
    if target_dtype == "float32":  # in bfloat16 near ties fall differently in passes of different shapes
        assert_same(plain, ours, drafter)
    target.generate(**only_row(prompts(), 0), do_sample=True, max_new_tokens=9, assistant_model=drafter)


class EightBitHead(torch.nn.Module):
    """A head without a `weight`."""

    def __init__(self, head: torch.nn.Linear):
        super().__init__()
        self.register_buffer("codes", (head.weight * 64).round().to(torch.int8))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden_states, self.codes.to(hidden_states.dtype) / 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_without_a_weight(dtype, rows, monkeypatch):
    target = decoder("llama").to(dtype)
    target.lm_head = EightBitHead(target.lm_head)
    drafter = drafter_for(target)
    plain, ours = plain_and_ours(monkeypatch, target, drafter, rows_of(prompts(), rows))
    assert ours.shape == plain.shape
    if dtype == torch.float32:
        assert_same(plain, ours, drafter)


def test_dynamic_quantisation_runs():
    """Its scales depend on all that is in a pass, so the text is near plain `generate`'s and no more."""
    target = torch.ao.quantization.quantize_dynamic(decoder("llama"), {torch.nn.Linear}, dtype=torch.qint8)
    drafter = drafter_for(decoder("llama"))
    text = target.generate(**prompts(), max_new_tokens=9, eos_token_id=None, pad_token_id=0, assistant_model=drafter)
    assert text.shape == (3, 27)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tied_embeddings(name, rows, monkeypatch):
    target = decoder(name, tie_word_embeddings=True)
    assert target.get_input_embeddings().weight is target.get_output_embeddings().weight
    check(monkeypatch, target, drafter_for(target), rows)


def test_a_vocabulary_larger_than_the_tokenizer(rows, monkeypatch):
    target = decoder("llama", vocab_size=128)
    check(monkeypatch, target, drafter_for(target), rows)


def test_an_embedding_of_another_width_is_not_borrowed():
    target = decoder("electra", embedding_size=16)
    message = "borrows the target's embedding for its `hidden_size` of 32, but ElectraForCausalLM has one of width 16"
    with pytest.raises(ValueError, match=message):
        target.generate(**only_row(prompts(), 2), assistant_model=drafter_for(target))
    own = drafter_for(target, owns_embedding=True, owns_lm_head=True)
    target.generate(**only_row(prompts(), 2), max_new_tokens=4, assistant_model=own)


def test_a_device_map(rows, monkeypatch):
    target = accelerate.dispatch_model(decoder("llama"), device_map={"": "cpu"}, force_hooks=True)
    drafter = accelerate.dispatch_model(drafter_for(target), device_map={"": "cpu"}, force_hooks=True)
    check(monkeypatch, target, drafter, rows)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bloom"])
def test_an_offloaded_target(name, rows, monkeypatch):
    target = decoder(name)
    drafter = drafter_for(target)
    accelerate.cpu_offload(target, execution_device="cpu")
    assert target.device.type == "meta"
    check(monkeypatch, target, drafter, rows)


def test_a_target_on_disk(rows, monkeypatch):
    target = decoder("llama")
    with tempfile.TemporaryDirectory() as folder:
        accelerate.disk_offload(target, folder, execution_device="cpu")
        check(monkeypatch, target, drafter_for(target), rows)


def test_an_offloaded_drafter_is_refused():
    target = decoder("llama")
    drafter = drafter_for(target)
    accelerate.cpu_offload(drafter, execution_device="cpu")
    with pytest.raises(ValueError, match="The drafter's weights are on the `meta` device"):
        target.generate(**only_row(prompts(), 2), assistant_model=drafter)


@gpu
@pytest.mark.parametrize("devices", [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_vl", "bloom"])
def test_devices(name, devices, rows, monkeypatch):
    target, inputs = image_reader(name) if name == "qwen3_vl" else (decoder(name), prompts())
    drafter = drafter_for(target).to(devices[1])
    inputs = {key: value.to(devices[0]) for key, value in rows_of(inputs, rows).items()}
    assert_same(*plain_and_ours(monkeypatch, target.to(devices[0]), drafter, inputs), drafter)


@gpu
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_an_offloaded_cache(name, rows, monkeypatch):
    target = decoder(name).to("cuda")
    drafter = drafter_for(target).to("cuda")
    inputs = {key: value.to("cuda") for key, value in rows_of(prompts(), rows).items()}
    plain, ours = plain_and_ours(monkeypatch, target, drafter, inputs, cache_implementation="offloaded")
    assert_same(plain, ours, drafter)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_threads(name):
    """While one thread streams, another generates with the same target and no drafter."""
    target = decoder(name)
    target.set_attn_implementation("eager")  # whose masks and attention must come as a pair
    drafter = drafter_for(target)
    options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    inputs = [*(only_row(prompts(), row) for row in range(3)), prompts()]
    wanted = [target.generate(**some, **options) for some in inputs]
    wrong = []

    def work(first: int, assistant) -> None:
        for step in range(3):
            index = (first + step) % 4
            text = target.generate(**inputs[index], **options, assistant_model=assistant)
            if not torch.equal(text, wanted[index]):
                wrong.append((first, step))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(n, drafter if n % 2 else None)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert target.config._attn_implementation == "eager"
