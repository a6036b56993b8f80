"""The command line: what it accepts, and that bad input is one line that names argument, value and fix."""

import json
import subprocess
import sys

import numpy as np
import pytest
from chat import chat_target
from conftest import FIXTURES

from dspark_hf import bench, cli, command_files, demo, environment, loading, profile_command
from dspark_hf.batch_report import draw_speeds
from dspark_hf.profiles import Profile, StepCurve
from dspark_hf.reliability import ReliabilityRow, draw_reliability
from dspark_hf.training_callbacks import plot_run


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit code and stderr of a command."""
    try:
        code = cli.main(argv)
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


# What `dspark bench` takes only without --batch-sizes.
BENCH_ONLY = "--prompt-lookup-tokens 3 --methods static --contexts 9 --draft-context-windows 4 --draft-top-k 5".split()
BAD_INPUT = [
    (["generate", "--prompt", "x", "--temperature", "-1"], ["--temperature", "-1", "at least 0"]),
    (["generate", "--prompt", "x", "--temperature", "nan"], ["--temperature", "nan", "at least 0"]),
    (["generate", "--prompt", "x", "--top-p", "1.5"], ["--top-p", "1.5", "at most 1"]),
    (["generate", "--prompt", "x", "--top-p", "0.9"], ["--top-p", "0.9", "--temperature above 0"]),
    (["generate", "--prompt", "x", "--top-k", "5"], ["--top-k", "5", "--temperature above 0"]),
    (["generate", "--prompt", "x", "--max-new-tokens", "0"], ["--max-new-tokens", "0", "at least 1"]),
    (["generate", "--prompt", "x", "--max-new-tokens", "ten"], ["--max-new-tokens", "'ten'", "whole number"]),
    (["generate", "--prompt", "x", "--threshold", "1"], ["--threshold", "1", "below 1"]),
    (["generate", "--prompt", "x", "--schedule", "fast"], ["--schedule", "'fast'", "hardware_aware"]),
    (["generate", "--prompt", "x", "--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
    (["generate", "--prompt", ""], ["--prompt", "''", "give a text"]),
    (["generate"], ["--prompt", "required"]),
    (["generate", "--prompt", "x", "--target", "./nowhere"], ["--target", "./nowhere", "no such folder"]),
    (["generate", "--prompt", "x", "--target", "org/model"], ["--drafter is missing", "org/model"]),
    (["generate", "--prompt", "x", "--drafter", "/no/where"], ["--drafter", "/no/where", "no such folder"]),
    (["bench", "--prompts", "/no/where"], ["--prompts", "/no/where", "no such file"]),
    (["bench", "--output", "/no/where/bench.json"], ["--output", "/no/where", "does not exist"]),
    (["bench", "--synthetic-acceptance", "0.5", "2"], ["--synthetic-acceptance", "2", "from 0 to 1"]),
    (["bench", "--repetitions", "-3"], ["--repetitions", "-3", "at least 1"]),
    (["nonsense"], ["nonsense", "demo"]),
    ([], ["COMMAND"]),
]


@pytest.mark.parametrize(("argv", "parts"), BAD_INPUT, ids=lambda value: " ".join(value) or "nothing")
def test_bad_input_is_one_line_naming_argument_value_and_fix(capsys, argv, parts):
    code, message = run(capsys, *argv)
    assert code == 2
    assert message.count("\n") == 1 and "Traceback" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("kind", ["empty folder", "file"])
def test_a_target_that_is_no_checkpoint(capsys, tmp_path, kind):
    path = tmp_path if kind == "empty folder" else tmp_path / "model.gguf"
    if kind == "file":
        path.write_text("")
    code, message = run(capsys, "generate", "--prompt", "x", "--target", str(path), "--drafter", "demo")
    assert code == 2 and "--target" in message and str(path) in message


def test_a_chat_template_that_raises_is_one_line(capsys, tmp_path):
    folder = chat_target(tmp_path / "target", "{{ messages[0]['content'] + 1 }}")
    argv = ["generate", "--prompt", "x", "--chat", "--target", str(folder)]
    code, message = run(capsys, *argv, "--drafter", str(FIXTURES / "deepspec-vanilla" / "drafter"))
    assert code == 2 and "Traceback" not in message
    where = f"dspark generate: error: --target '{folder}': the chat template of the tokenizer '{folder}' fails on"
    assert where in message.splitlines()[-1] and "TypeError: " in message


def test_an_unknown_device(capsys):
    code, message = run(capsys, "generate", "--prompt", "x", "--device", "abacus")
    assert code == 2 and "--device 'abacus'" in message and "cpu" in message


def test_a_cuda_device_that_is_not_there(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, message = run(capsys, "generate", "--prompt", "x", "--device", "cuda:3")
    assert code == 2 and "--device 'cuda:3'" in message and "--device cpu" in message


@pytest.mark.parametrize(
    ("line", "complaint"),
    [("{", "is not JSON"), ('{"text": "x"}', "field 'prompt'"), ('["x"]', "field 'prompt'"), ("", "has no prompts")],
)
def test_bad_prompt_files_name_file_and_line(tmp_path, line, complaint):
    file = tmp_path / "set.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(loading.CommandError, match=complaint) as caught:
        command_files.read_prompts(str(file))
    assert str(file) in str(caught.value)


def test_prompts_are_read_by_file_and_limited(tmp_path):
    for name in ("b", "a"):
        lines = [json.dumps({"prompt": f"{name}{number}"}) for number in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n\n")
    assert command_files.read_prompts(str(tmp_path), limit=2) == {"a": ["a0", "a1"], "b": ["b0", "b1"]}
    assert list(command_files.read_prompts(str(tmp_path / "a.jsonl"))) == ["a"]


def test_bundled_prompts_are_the_default():
    prompts = command_files.read_prompts(None)["school-maths"]
    assert len(prompts) >= demo.PROMPTS == 3


@pytest.mark.parametrize(
    "command", [[], ["demo"], ["generate"], ["bench"], ["ablate"], ["ablate", "schedule"], ["env"]]
)
def test_help(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--help"])
    assert stop.value.code == 0
    assert "usage: dspark" in capsys.readouterr().out


def test_arguments_are_those_of_the_functions():
    """Every option reaches its command's function: a renamed one would be an unexpected keyword."""
    import inspect

    parser = cli.build_parser()
    for argv, function in (
        (["demo"], demo.run),
        (["generate", "--prompt", "x"], cli._run_generate),
        (["bench", *BENCH_ONLY], bench.run),
    ):
        arguments = set(vars(parser.parse_args(argv))) - {"run", "command"}
        assert arguments == set(inspect.signature(function).parameters)


def test_interrupt_is_quiet(capsys, monkeypatch):
    def interrupted(**arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    code, message = run(capsys, "demo")
    assert code == 130 and "interrupted" in message and "Traceback" not in message


def test_env_names_versions(capsys):
    assert cli.main(["env"]) == 0
    output = capsys.readouterr().out
    for name in ("transformers: ", "torch: ", "python: ", "processor: "):
        assert name in output


def test_generation_options():
    assert loading.generation_options(8) == {"max_new_tokens": 8, "do_sample": False}
    sampled = loading.generation_options(8, 0.7, top_p=0.9, top_k=0, threshold=0.5)
    assert sampled == {
        "max_new_tokens": 8,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "assistant_confidence_threshold": 0.5,
    }


def test_module_runs_as_a_program():
    result = subprocess.run(
        [sys.executable, "-m", "dspark_hf", "bench", "--limit", "0"], capture_output=True, text=True
    )
    assert result.returncode == 2 and "--limit" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"prompt": "a\\ud800b"}', [":1 holds half of a surrogate pair"]),
        ('{"prompt": "a"', [":1 is not JSON"]),
        ("[" * 100_000, [":1 is not JSON"]),
    ],
)
def test_lines_that_are_no_prompts_are_named(tmp_path, text, parts):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(loading.CommandError) as caught:
        command_files.read_prompts(str(file))
    for part in parts:
        assert part in str(caught.value)


def test_lines_end_at_newlines_alone(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('\ufeff{"prompt": "a\u2028b\x85c"}\r\n\n{"prompt": "d"}'.encode())
    assert command_files.read_prompts(str(file)) == {"prompts": ["a\u2028b\x85c", "d"]}


def test_an_output_that_is_a_folder_is_refused(tmp_path):
    with pytest.raises(loading.CommandError, match="--output .*is a folder"):
        command_files.check_writable("--output", str(tmp_path))


def test_what_is_no_file_is_not_replaced_by_one():
    with pytest.raises(loading.CommandError, match="--output '/dev/null': it is a device; give a file"):
        command_files.check_writable("--output", "/dev/null")


@pytest.mark.parametrize("check", ["check_writable", "check_outputs", "check_plot", "check_plot_folder"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, check):
    path = str(tmp_path / "out.png")
    arguments = {"check_writable": ("--output", path), "check_outputs": (None, path, None)}.get(check, (path,))
    getattr(command_files, check)(*arguments)
    monkeypatch.setattr(command_files.os, "access", lambda folder, mode: folder != tmp_path)  # the root may write
    with pytest.raises(loading.CommandError, match="out.png': .* cannot be written; give another folder"):
        getattr(command_files, check)(*arguments)
    if check == "check_plot_folder":
        (tmp_path / "out.png").mkdir()
        command_files.check_plot_folder(path)


@pytest.mark.parametrize(("name", "start"), [("plot", b"\x89PNG"), ("plot.png", b"\x89PNG"), ("plot.pdf", b"%PDF")])
def test_plots_are_what_their_names_say(tmp_path, name, start):
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    cell = {"accept_prob": None, "batch_size": 2, "method": "constant", "decode_ratio": 1.5}
    row = ReliabilityRow("greedy", np.array([[0.0, 1.0], [2.0, -1.0]]), np.array([1, 2]), None)
    for draw in (
        lambda: profile_command.draw_profile(Profile({}, 0, [StepCurve(8, [1, 2], [1.0, 2.0])]), path),
        lambda: draw_speeds([cell], path),
        lambda: draw_reliability([row], path),
        lambda: plot_run(path, [{"step": 1, "blocks": 4, "cross_entropy": 2.0}], 2),
    ):
        draw()
        assert path.read_bytes().startswith(start)
        path.unlink()


def test_a_cache_in_nobodys_home_is_named(monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", "~nobody-of-that-name/cache")
    with pytest.raises(ValueError, match="~nobody-of-that-name.*set DSPARK_CACHE"):
        environment.cache_folder()


@pytest.mark.parametrize("threads", [0, 5000, 2**40])
def test_threads_have_bounds(threads):
    with pytest.raises(loading.CommandError, match=f"--threads {threads}: it must be from 1"):
        loading.load_target("demo", "auto", "cpu", threads)


@pytest.mark.parametrize(
    "started",
    [
        "sys.argv = ['/usr/bin/dspark', {arguments}]; from dspark_hf.cli import main; main()",  # the script pip writes
        "sys.argv = ['-m', {arguments}]; sys.orig_argv = ['python', '-m', 'dspark_hf']; import dspark_hf.__main__",
    ],
    ids=["script", "module"],
)
@pytest.mark.parametrize(
    ("arguments", "code"), [(["--help"], 0), (["eval", "--help"], 0), (["eval", "--limit", "0"], 2)]
)
def test_help_and_wrong_options_do_not_wait_for_torch(started, arguments, code):
    program = f"""
import sys
try:
    {started.format(arguments=", ".join(map(repr, arguments)))}
except SystemExit as stop:
    print("code", stop.code or 0)
print("loaded", sorted({{"torch", "transformers"}} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert f"code {code}\nloaded []" in result.stdout


def test_a_script_of_the_commands_name_finds_the_public_names():
    program = """
import sys
sys.argv = ["dspark"]
from dspark_hf import DSparkDraftModel
import dspark_hf
assert not hasattr(dspark_hf, "nothing")
"""
    subprocess.run([sys.executable, "-c", program], check=True, stderr=subprocess.PIPE)


def test_the_command_sets_the_package_up_once_it_runs():
    program = """
import sys
sys.argv = ["dspark", "convert", "/no/where", "x", "--to", "deepspec"]
from dspark_hf import cli
assert cli.main() == 2
import dspark_hf
from transformers import AutoConfig, GenerationMixin
assert dspark_hf.DSparkDraftModel.config_class is type(AutoConfig.for_model("dspark"))
assert hasattr(GenerationMixin._assisted_decoding, "dspark_hf_original")
"""
    subprocess.run([sys.executable, "-c", program], check=True, stderr=subprocess.PIPE)
