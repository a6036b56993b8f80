"""`compile_config` of `drafter.generation_config`: rounds in shapes that stay, the same drafts, the same texts."""

import copy
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES, load_drafter
from test_drafter import FAMILIES, Rows, random_taps, tiny_drafter
from tiny import encode
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig

from dspark_hf import DSparkDraftModel
from dspark_hf.modeling.static_pass import StaticPass


pytestmark = pytest.mark.usefixtures("no_grad")

# Traced as for a compiler, and then run as it is: nothing has to be built.
TRACED = CompileConfig(backend="eager", mode="default", fullgraph=True)
COMPILER = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler (g++, clang++ or $CXX)")
TEXTS = ["a baker makes 6 rolls and sells 4 of them. ", "the box holds 17 pens. ", "ann has 3 "]


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture
def passes(monkeypatch):
    """Lengths of the passes that go the compiled way."""
    found, run = [], StaticPass.__call__

    def counted(static_pass, drafter, embeds, states, lengths, context):
        found.append(list(lengths))
        return run(static_pass, drafter, embeds, states, lengths, context)

    monkeypatch.setattr(StaticPass, "__call__", counted)
    return found


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_passes_draft_the_same_in_shapes_that_stay(family, window, passes):
    drafter = tiny_drafter(**FAMILIES[family])
    starts, taps = [0, 7], random_taps(drafter, [200, 200])
    plain, traced = (Rows(drafter, taps, starts, window=window) for _ in range(2))
    traced.context.compile_config = TRACED
    for turn, new in enumerate([(6, 2), (1, 3), (5, 0), (17, 1), (2, 2), (5, 5), (4, 1), (5, 5), (1, 1)]):
        expected, found = (rows.round(new, [turn, turn + 10]) for rows in (plain, traced))
        torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(found[1], expected[1])
        assert traced.context.lengths == plain.context.lengths and traced.context.starts == plain.context.starts
        if turn % 2:
            traced.spoil_unused_slots()
    # All but the first, and one with more new positions than a round accepts, unless a window leaves them out.
    assert len(passes) == (7 if traced.context.window is None or traced.context.window > 5 else 8)
    assert graphs() <= 3


def test_graphs_are_few_however_long_the_text_gets(passes):
    drafter = tiny_drafter()
    rows = Rows(drafter, random_taps(drafter, [600]), [0], capacity=16)
    rows.context.compile_config = TRACED
    rows.round([3], [1])
    for turn in range(190):
        rows.round([1 + turn % 5], [turn % 30])
    assert len(passes) == 190
    assert rows.context.layers[0].keys.shape[2] == 1024 and graphs() <= 2


@pytest.mark.parametrize("schedule", ["constant", "confidence"])
@pytest.mark.parametrize("folder", ["deepspec-vanilla", "deepspec-rnn", "deepspec-gemma4"])
def test_the_text_is_the_plain_one_and_rows_may_end(folder, schedule, tiny_target, passes):
    if folder == "deepspec-gemma4":
        tiny_target = AutoModelForCausalLM.from_pretrained(FIXTURES / folder / "target").eval()
    drafter = load_drafter(folder)
    drafter.generation_config.compile_config = TRACED
    drafter.generation_config.num_assistant_tokens_schedule = schedule
    inputs = encode(*TEXTS)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": [0, 70, 81], "pad_token_id": 95}
    plain = tiny_target.generate(**inputs, **options)
    assert tiny_target.generate(**inputs, **options, assistant_model=drafter).tolist() == plain.tolist()
    assert len(passes) > 3 and graphs() >= 1


def test_the_drafts_are_the_same_too(tiny_target):
    stats = []
    for compile_config in (None, TRACED):
        drafter = load_drafter("deepspec-vanilla")
        drafter.generation_config.compile_config = compile_config
        out = tiny_target.generate(
            **encode(*TEXTS),
            assistant_model=drafter,
            max_new_tokens=40,
            eos_token_id=None,
            return_dict_in_generate=True,
        )
        stats.append([(decision.verify_lengths, decision.accepted) for decision in out.speculative_stats.decisions])
    assert stats[0] == stats[1]


def test_a_call_is_not_compiled_by_what_it_says_of_the_target(tiny_target, passes):
    drafter = load_drafter("deepspec-vanilla")
    call = GenerationConfig(compile_config=TRACED, disable_compile=True, max_new_tokens=12)
    tiny_target.generate(**encode(TEXTS[0]), assistant_model=drafter, generation_config=call)
    assert passes == []


def test_what_is_no_compile_config_is_refused(tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    drafter.generation_config.compile_config = True
    with pytest.raises(ValueError, match="`compile_config` of `drafter.generation_config` is True; it must be"):
        tiny_target.generate(**encode(TEXTS[0]), assistant_model=drafter, max_new_tokens=4)


def test_copies_and_files_hold_nothing_compiled(tiny_target, tmp_path):
    drafter = load_drafter("deepspec-vanilla")
    drafter.generation_config.compile_config = TRACED
    tiny_target.generate(**encode(TEXTS[0]), assistant_model=drafter, max_new_tokens=20)
    assert drafter.static_pass._config == TRACED
    assert copy.deepcopy(drafter).static_pass._config is None
    assert pickle.loads(pickle.dumps(drafter)).static_pass._config is None
    drafter.save_pretrained(tmp_path)
    assert DSparkDraftModel.from_pretrained(tmp_path).generation_config.compile_config is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "chosen"),
    [
        ("eager", ["test_exactness.py"]),
        ("eager", ["test_parity.py", "test_outputs.py", "test_prompts.py", "test_batches.py"]),
        pytest.param("inductor", ["test_exactness.py", "-k", "each_head"], marks=needs_compiler),
    ],
    ids=["exactness", "parity", "exactness, built"],
)
def test_what_is_proven_of_decoding_holds_compiled(backend, chosen):
    here = Path(__file__).parent
    files = [str(here / name) if name.endswith(".py") else name for name in chosen]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "compiled_drafters", *files]
    paths = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"COMPILE_BACKEND": backend, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here.parent)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.slow
@needs_compiler
def test_what_the_compiler_builds_drafts_the_same(tiny_target):
    drafter = load_drafter("deepspec-vanilla")
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    inputs = encode(*TEXTS)
    plain = tiny_target.generate(**inputs, **options)
    assert tiny_target.generate(**inputs, **options, assistant_model=drafter).tolist() == plain.tolist()
    accepted = drafter.speculative_stats.accepted
    drafter.generation_config.compile_config = CompileConfig()
    assert tiny_target.generate(**inputs, **options, assistant_model=drafter).tolist() == plain.tolist()
    assert graphs() >= 1 and abs(drafter.speculative_stats.accepted - accepted) <= 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_gpu_graphs_are_replayed(mode, tiny_target):
    target = copy.deepcopy(tiny_target).to("cuda")
    drafter = load_drafter("deepspec-vanilla").to("cuda")
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    for texts in (TEXTS[:1], TEXTS):
        inputs = {name: values.to("cuda") for name, values in encode(*texts).items()}
        plain = target.generate(**inputs, **options)
        drafter.generation_config.compile_config = None
        target.generate(**inputs, **options, assistant_model=drafter)
        accepted = drafter.speculative_stats.accepted
        drafter.generation_config.compile_config = CompileConfig(mode=mode)
        for _ in range(3):  # recorded, then replayed
            assert target.generate(**inputs, **options, assistant_model=drafter).tolist() == plain.tolist()
            assert abs(drafter.speculative_stats.accepted - accepted) <= 2
    assert graphs() >= 1
    skipped = {name for name in counters["inductor"] if "cudagraph_skips" in name}
    assert mode == "default" or not skipped
