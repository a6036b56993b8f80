"""`dspark prepare-data`: what is written, that it can be stopped anywhere, and what is refused."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
from chat import (
    END,
    FORGETFUL,
    MARKED,
    TEMPLATE,
    THINKING,
    chat_target,
    chat_tokenizer,
    contents,
    marked,
    provenance,
    run,
    text_of,
    write_lines,
)
from filelock import FileLock
from transformers import AutoModelForCausalLM

from dspark_hf import answering, cli, data, data_making, prepare_data, progress, shards
from dspark_hf.loading import CommandError
from dspark_hf.prompt_sources import Prompt, read_dataset, read_files


QUESTIONS = [f"Tom has {number} apples and buys {number % 7} more." for number in range(20)]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return chat_target(tmp_path_factory.mktemp("prepare") / "target")


@pytest.fixture
def prompts(tmp_path) -> Path:
    return write_lines(tmp_path / "sums.jsonl", [{"prompt": question} for question in QUESTIONS])


def keeping(target: Path, prompts: Path, output: Path) -> list[str]:
    given = ["--target", str(target), "--prompts", str(prompts), "--output", str(output)]
    return ["prepare-data", *given, "--keep-responses"]


def command(target: Path, prompts: Path, output: Path, *argv: str) -> list[str]:
    return [*keeping(target, prompts, output)[:-1], "--max-new-tokens", "24", "--batch-size", "8", *argv]


# What is written.


def test_records_are_the_targets_own_answers(capsys, target, prompts, tmp_path):
    code, out, err = run(capsys, command(target, prompts, tmp_path / "data", "--temperature", "0"))
    assert code == 0, err
    made = datasets.load_from_disk(str(tmp_path / "data"))
    assert len(made) == len(QUESTIONS) and not (tmp_path / "data.work").exists()
    model = AutoModelForCausalLM.from_pretrained(target)
    endings = set()
    for record in made:
        text = marked(record["input_ids"], record["loss_mask"])
        asked, answer = text.split(END + "A:[")
        assert asked.removeprefix("U:") in QUESTIONS
        prompt = chat_tokenizer()(asked + END + "A:", return_tensors="pt")["input_ids"]
        alone = model.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0].tolist()
        assert record["input_ids"] == alone
        assert record["finished"] == answer.endswith(END + "]") and record["finished"] == (
            len(answer) < 25 or text_of(alone)[-1] == END
        )
        assert (record["temperature"], record["source"]) == (0.0, "sums")
        endings.add(record["finished"])
    assert endings == {True, False}
    assert "20 prompts, 20 of sums" in out and "temperature 0" in out
    assert "tok/s" in err and "\r" not in err  # no bar where there is no terminal


def test_each_prompt_at_each_temperature(capsys, target, prompts, tmp_path):
    output = tmp_path / "data"
    argv = command(target, prompts, output, "--temperature", "0", "0.7", "1.5", "--limit", "4")
    assert run(capsys, argv)[0] == 0
    made = contents(output)
    by_prompt: dict[str, list[float]] = {}
    for record in made:
        by_prompt.setdefault(record["prompt"], []).append(record["temperature"])
    assert sorted(map(sorted, by_prompt.values())) == [[0.0, 0.7, 1.5]] * 4
    assert len({tuple(record["input_ids"]) for record in made}) > 8


def test_temperatures_in_turn(capsys, target, prompts, tmp_path):
    argv = command(target, prompts, tmp_path / "data", "--temperature", "0", "1", "--samples-per-prompt", "1")
    assert run(capsys, argv)[0] == 0
    made = contents(tmp_path / "data")
    assert len(made) == 20 and sorted(record["temperature"] for record in made) == [0.0] * 10 + [1.0] * 10
    argv = command(target, prompts, tmp_path / "more", "--samples-per-prompt", "3", "--limit", "2")
    assert run(capsys, argv)[0] == 0
    assert [record["temperature"] for record in contents(tmp_path / "more")] == [1.0] * 6


def test_provenance_says_how_it_was_made(capsys, target, prompts, tmp_path):
    argv = command(target, prompts, tmp_path / "data", "--limit", "6", "--top-p", "0.9", "--seed", "3")
    assert run(capsys, argv)[0] == 0
    found = provenance(tmp_path / "data")
    assert found["complete"] and found["seconds"] > 0 and found["thinking"] == "default"
    assert found["prompts"] == {"sources": {"sums": 6}, "dropped": {}}
    assert found["target"]["id"] == str(target) and found["target"]["weights"]["model.safetensors"] > 0
    assert len(found["tokenizer"]["chat_template_sha256"]) == 64
    sampling = found["sampling"]
    assert (sampling["temperatures"], sampling["top_p"], sampling["top_k"]) == ([1.0], 0.9, 50)
    assert (sampling["end_tokens"], sampling["seed"], sampling["max_new_tokens"]) == ([84], 3, 24)
    assert found["samples"] == {"planned": 6, "done": 6, "too_long": 0}
    assert {"datasets", "torch", "transformers", "dspark-hf"} <= set(found["versions"])


def test_statistics_are_printed(capsys, target, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = run(capsys, command(target, prompts, tmp_path / "data", "--temperature", "0", "1"))
    total = data.data_statistics(data.load_training_data(tmp_path / "data")).total
    for part in ("sums", "temperature 0", "temperature 1", "all", f"{total.tokens:,}", f"{total.supervised:,}"):
        assert part in out
    assert f"{total.finished:.0%}" in out and " ".join(map(str, total.lengths)) in out


# Conversations of several turns.

TURNS = {
    "messages": [
        {"role": "system", "content": "Sums"},
        {"role": "user", "content": "2 + 2 = ?"},
        {"role": "assistant", "content": "not the target's"},
        {"role": "user", "content": "And 3 more?"},
        {"role": "user", "content": "And 5 more?"},
    ]
}


def test_all_of_the_targets_turns_have_a_loss(capsys, target, tmp_path, monkeypatch):
    turns = write_lines(tmp_path / "turns.jsonl", [TURNS])
    run(capsys, command(target, turns, tmp_path / "data", "--temperature", "0", "--max-new-tokens", "120"))
    (record,) = contents(tmp_path / "data")
    text = marked(record["input_ids"], record["loss_mask"])
    assert "not the target's" not in text
    assert text.startswith("S:SumssU:2 + 2 = ?sA:[")
    assert "s]U:And 3 more?sA:[" in text and "s]U:And 5 more?sA:[" in text and text.endswith("s]")
    assert text.count("[") == 3 == text.count("]")
    # Each turn is what the target says to the conversation before it.
    model = AutoModelForCausalLM.from_pretrained(target)
    plain = text_of(record["input_ids"])
    for place in (place for place, _ in enumerate(plain) if plain[place - 2 : place] == "A:"):
        prompt = chat_tokenizer()(plain[:place], return_tensors="pt")["input_ids"]
        alone = model.generate(prompt, max_new_tokens=120, do_sample=False, pad_token_id=0)[0].tolist()
        assert text_of(alone) == plain[: len(alone)]


def test_a_template_that_forgets_makes_a_record_a_turn(capsys, tmp_path):
    target = chat_target(tmp_path / "target", FORGETFUL)
    messages = [message for message in TURNS["messages"] if message["role"] != "system"]
    turns = write_lines(tmp_path / "turns.jsonl", [{"messages": messages}])
    run(capsys, command(target, turns, tmp_path / "data", "--temperature", "0", "--max-new-tokens", "120"))
    made = contents(tmp_path / "data")
    assert len(made) == 3 and len({record["prompt"] for record in made}) == 1
    texts = sorted((marked(record["input_ids"], record["loss_mask"]) for record in made), key=lambda t: t.count("U:"))
    assert [text.count("U:") for text in texts] == [1, 2, 3]
    assert all(text.count("[") == 1 and text.endswith("s]") for text in texts)
    (answer,) = texts[0].split("[")[1:]
    assert texts[1].startswith(f"U:2 + 2 = ?sA:{answer[-3:-2]}sU:And 3 more?sA:[")


def test_a_turn_that_was_cut_ends_the_conversation(capsys, target, tmp_path):
    turns = write_lines(tmp_path / "turns.jsonl", [TURNS])
    run(capsys, command(target, turns, tmp_path / "data", "--temperature", "0", "--max-new-tokens", "3"))
    (record,) = contents(tmp_path / "data")
    assert sum(record["loss_mask"]) == 3 and not record["finished"]


def test_without_a_chat_template_prompts_are_continued(capsys, tmp_path):
    target = chat_target(tmp_path / "target", None)
    lines = write_lines(tmp_path / "texts.jsonl", [{"prompt": question} for question in QUESTIONS[:3]])
    assert run(capsys, command(target, lines, tmp_path / "data"))[0] == 0
    for record in contents(tmp_path / "data"):
        assert marked(record["input_ids"], record["loss_mask"]).split("[")[0] in QUESTIONS[:3]
    turns = write_lines(tmp_path / "turns.jsonl", [TURNS])
    code, _, err = run(capsys, command(target, turns, tmp_path / "more"))
    assert code == 2 and "no chat template" in err and err.count("\n") == 1


def test_prompts_without_room_are_counted(capsys, target, tmp_path):
    lines = write_lines(tmp_path / "texts.jsonl", [{"prompt": "x" * 600}, {"prompt": "x" * 500}, {"prompt": "Hi"}])
    run(capsys, command(target, lines, tmp_path / "data"))
    assert provenance(tmp_path / "data")["samples"] == {"planned": 3, "done": 3, "too_long": 1}
    assert max(map(len, (record["input_ids"] for record in contents(tmp_path / "data")))) == 512
    only = write_lines(tmp_path / "only.jsonl", [{"prompt": "x" * 600}])
    code, _, err = run(capsys, command(target, only, tmp_path / "more"))
    assert code == 2 and "all 1 prompts are too long" in err


# Thinking.


def test_thinking_reaches_the_template(capsys, tmp_path):
    target = chat_target(tmp_path / "target", THINKING)
    lines = write_lines(tmp_path / "texts.jsonl", [{"prompt": "Hi"}])
    for thinking, expected in (("default", "A:["), ("on", "A:["), ("off", "A:~[")):
        output = tmp_path / thinking
        assert run(capsys, command(target, lines, output, "--thinking", thinking))[0] == 0
        (record,) = contents(output)
        assert expected in marked(record["input_ids"], record["loss_mask"])
        found = provenance(output)
        assert found["thinking"] == thinking and found["tokenizer"]["template_reads_enable_thinking"]


def test_thinking_that_the_template_does_not_know(capsys, target, prompts, tmp_path):
    code, _, err = run(capsys, command(target, prompts, tmp_path / "data", "--thinking", "off"))
    assert code == 2 and "thinking 'off'" in err and "enable_thinking" in err and err.count("\n") == 1


# Responses that are there.


@pytest.mark.parametrize("template", [None, MARKED], ids=["prefixes", "marks"])
def test_responses_are_kept(capsys, target, tmp_path, template):
    if template is not None:
        target = chat_target(tmp_path / "target", template)
    chats = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {
            "conversations": [
                {"from": "human", "value": "1?"},
                {"from": "gpt", "value": "2"},
                {"from": "human", "value": "3?"},
                {"from": "gpt", "value": "4"},
                {"from": "human", "value": "5?"},
            ]
        },
    ]
    lines = write_lines(tmp_path / "chats.jsonl", chats)
    assert run(capsys, keeping(target, lines, tmp_path / "data"))[0] == 0
    dash = "-" if template else ""
    made = data.load_training_data(tmp_path / "data")
    assert [marked(record["input_ids"], record["loss_mask"]) for record in made] == [
        f"U:His{dash}A:[Hos]{dash}",
        f"U:1?s{dash}A:[2s]{dash}U:3?s{dash}A:[4s]{dash}",
    ]
    assert list(made["temperature"]) == [None, None] and list(made["finished"]) == [True, True]
    assert provenance(tmp_path / "data")["responses"] == "kept as they were"


def test_responses_that_cannot_be_told_from_the_rest(capsys, tmp_path):
    target = chat_target(tmp_path / "target", FORGETFUL)
    messages = [
        {"role": role, "content": text}
        for role, text in (("user", "Hi"), ("assistant", "Ho"), ("user", "So"), ("assistant", "No"))
    ]
    lines = write_lines(tmp_path / "chats.jsonl", [{"messages": messages}])
    code, _, err = run(capsys, keeping(target, lines, tmp_path / "data"))
    assert code == 2 and "conversation 1, of chats" in err and "generation" in err and err.count("\n") == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "1.0"),
        ("--samples-per-prompt", "2"),
        ("--max-new-tokens", "512"),
        ("--top-p", "0.5"),
        ("--top-k", "5"),
        ("--seed", "3"),
        ("--batch-size", "64"),
        ("--time-limit", "2.0"),
        ("--synthesize", "5"),
        ("--dtype", "float32"),
        ("--device", "cpu"),
        ("--threads", "1"),
    ],
)
def test_options_of_decoding_are_refused_where_responses_are_kept(capsys, target, prompts, tmp_path, option, value):
    code, _, err = run(capsys, [*keeping(target, prompts, tmp_path / "data"), option, value])
    assert code == 2 and err.count("\n") == 1
    assert f"{option} {value}: with --keep-responses nothing is decoded; leave one of them out" in err


# Templates that fail.

# Its author did not think of lower-case letters.
BROKEN = TEMPLATE.replace(
    "{{ message['content'] +", "{{ 1 // (message['content'] | upper == message['content']) }}{{ '' +"
)


@pytest.mark.parametrize("keep", [False, True], ids=["answers", "kept"])
def test_a_template_that_raises_is_one_line(capsys, tmp_path, keep):
    target = chat_target(tmp_path / "target", BROKEN)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "HO"}]
    lines = write_lines(tmp_path / "chats.jsonl", [{"messages": messages}])
    code, _, err = run(capsys, (keeping if keep else command)(target, lines, tmp_path / "data"))
    assert code == 2 and "Traceback" not in err and "user" in err
    assert f"the chat template of the tokenizer '{target}' fails on the roles user" in err.splitlines()[-1]
    assert "ZeroDivisionError: " in err


def test_a_template_that_raises_in_the_midst_is_one_line(capsys, tmp_path):
    target = chat_target(tmp_path / "target", BROKEN)
    lines = write_lines(tmp_path / "sums.jsonl", [{"prompt": text} for text in ("1 + 1", "one and one")])
    code, _, err = run(capsys, command(target, lines, tmp_path / "data"))
    assert code == 2 and f"--target '{target}': the chat template" in err.splitlines()[-1]


# Stopping and going on.


class Killed(BaseException):
    """The process is no more."""


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """The rows of each batch that is decoded."""
    rows, decode = [], answering.decode_rows

    def counted(target, prompts, *arguments, **options):
        rows.append(len(prompts))
        return decode(target, prompts, *arguments, **options)

    monkeypatch.setattr(answering, "decode_rows", counted)
    return rows


@pytest.fixture
def whole(capsys, target, prompts, tmp_path, batches) -> tuple[list[dict], int]:
    """What a run gives that nothing stops, and its batches."""
    assert run(capsys, command(target, prompts, tmp_path / "whole", "--temperature", "0", "1"))[0] == 0
    count = len(batches)
    batches.clear()
    return contents(tmp_path / "whole"), count


@pytest.mark.parametrize("survivors", [0, 1, 4])
def test_a_run_killed_while_it_writes(capsys, target, prompts, tmp_path, monkeypatch, whole, batches, survivors):
    argv = command(target, prompts, tmp_path / "data", "--temperature", "0", "1")
    write, written = shards.write_text, []

    def write_and_die(path: Path, text: str) -> None:
        if len(written) == survivors:
            (path.parent / "tmpabc.tmp").write_text(text[: len(text) // 2])
            raise Killed
        written.append(path)
        write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_text", write_and_die)
        with pytest.raises(Killed):
            cli.main(argv)
    capsys.readouterr()
    files = sorted(path.name for path in (tmp_path / "data.work" / "answers").glob("*"))
    assert files == [f"{number:06d}.jsonl" for number in range(survivors)] + ["tmpabc.tmp"]
    assert not (tmp_path / "data").exists()
    batches.clear()
    records = [json.loads(line) for path in written for line in path.read_text().splitlines()[1:]]
    code, out, _ = run(capsys, argv)
    assert code == 0
    assert contents(tmp_path / "data") == whole[0]
    assert len(batches) == whole[1] - survivors and not (tmp_path / "data.work").exists()
    tokens = sum(sum(record["loss_mask"]) for record in records)
    found = f"data.work/answers: {len(records)} of 40 samples, {tokens:,} tokens, are done."
    assert (f"Going on with {tmp_path}/{found}" in out) == bool(survivors) == ("Going on" in out)


def test_a_run_killed_from_outside(capsys, target, prompts, tmp_path, whole, batches):
    output = tmp_path / "data"
    argv = command(target, prompts, output, "--temperature", "0", "1", "--threads", "1")
    process = subprocess.Popen([sys.executable, "-m", "dspark_hf", *argv], stderr=subprocess.DEVNULL)
    patience = time.monotonic() + 60
    while not (output.with_name("data.work") / "answers" / "000001.jsonl").exists():
        assert time.monotonic() < patience and process.poll() is None
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert run(capsys, argv)[0] == 0
    assert contents(output) == whole[0] and len(batches) <= whole[1] - 2


def test_a_run_killed_before_it_tidied_up(capsys, target, prompts, tmp_path, monkeypatch):
    argv = command(target, prompts, tmp_path / "data", "--limit", "4")
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data.DataFolder, "remove_work", lambda self: None)
        run(capsys, argv)
    made = contents(tmp_path / "data")
    assert (tmp_path / "data.work").exists()
    monkeypatch.setattr(data_making, "load_target", lambda *arguments: 1 / 0)
    code, out, _ = run(capsys, argv)
    assert code == 0 and "is complete" in out and "all" in out
    assert contents(tmp_path / "data") == made and not (tmp_path / "data.work").exists()


def test_a_time_limit(capsys, target, prompts, tmp_path, monkeypatch):
    argv = command(target, prompts, tmp_path / "data", "--temperature", "0")
    clock, steps = [0.0], []
    monkeypatch.setattr(answering.time, "monotonic", lambda: clock[0])

    def tick(self, count: int) -> None:
        steps.append(count)
        clock[0] += 2.0

    monkeypatch.setattr(progress.Progress, "add_tokens", tick)
    code, out, _ = run(capsys, [*argv, "--time-limit", "1"])
    assert code == 0 and "Not complete yet" in out and len(steps) == 30
    some, found = contents(tmp_path / "data"), provenance(tmp_path / "data")
    assert 4 <= len(some) < 20 and not found["complete"] and found["samples"]["done"] == len(some)
    code, out, _ = run(capsys, [*argv, "--time-limit", "0"])
    assert code == 0 and len(steps) == 30 and contents(tmp_path / "data") == some
    code, out, _ = run(capsys, [*argv, "--batch-size", "7"])
    assert code == 0 and "Not complete" not in out
    made = contents(tmp_path / "data")
    assert len(made) == 20 and provenance(tmp_path / "data")["complete"]
    assert run(capsys, command(target, prompts, tmp_path / "whole", "--temperature", "0"))[0] == 0
    assert made == contents(tmp_path / "whole")  # greedy texts do not depend on their neighbours


def test_no_time_at_all(capsys, target, prompts, tmp_path):
    code, _, err = run(capsys, command(target, prompts, tmp_path / "data", "--time-limit", "0"))
    assert code == 2 and "--time-limit: no answer was finished" in err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--temperature", "0.5"], ["--temperature", "is 0.5 and was 1.0"]),
        (["--max-new-tokens", "25"], ["--max-new-tokens", "is 25 and was 24"]),
        (["--top-p", "0.5"], ["--top-p", "is 0.5 and was left out"]),
        (["--seed", "1"], ["--seed"]),
        (["--dtype", "float32"], ["--dtype", "is float32 and was auto"]),
        (["--limit", "3"], ["what is asked is not what it was"]),
        (["--samples-per-prompt", "2"], ["--samples-per-prompt"]),
    ],
    ids=lambda value: value[0],
)
def test_other_arguments_are_refused(capsys, target, prompts, tmp_path, monkeypatch, change, told):
    output = tmp_path / "data"
    (tmp_path / "data.work").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(data_making, "load_target", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            cli.main(command(target, prompts, output))
    code, _, err = run(capsys, command(target, prompts, output, *change))
    assert code == 2 and err.count("\n") == 1 and "another --output" in err
    for part in told:
        assert part in err


def test_a_complete_data_set_is_not_overwritten(capsys, target, prompts, tmp_path):
    argv = command(target, prompts, tmp_path / "data", "--limit", "2")
    assert run(capsys, argv)[0] == 0
    code, _, err = run(capsys, [*argv, "--seed", "5"])
    assert code == 2 and "--seed is 5 and was 0" in err
    found = provenance(tmp_path / "data")
    (tmp_path / "data" / "provenance.json").write_text(json.dumps(found | {"complete": False}))
    code, _, err = run(capsys, argv)
    assert code == 2 and "data.work, needed to go on, is gone" in err


def test_two_at_a_time_are_refused(capsys, target, prompts, tmp_path):
    (tmp_path / "data.work").mkdir()
    with FileLock(tmp_path / "data.work" / "lock"):
        code, _, err = run(capsys, command(target, prompts, tmp_path / "data"))
    assert code == 2 and "another process" in err and err.count("\n") == 1


def test_damaged_work_is_refused(tmp_path):
    kept = shards.Shards(tmp_path / "work")
    for number in range(3):
        kept.append({"number": number}, [{"record": number}])
    assert shards.Shards(tmp_path / "work").last_state() == {"number": 2}
    (tmp_path / "work" / "000001.jsonl").unlink()
    with pytest.raises(ValueError, match="lacks some of its files"):
        shards.Shards(tmp_path / "work")


# Where prompts come from.


def test_excluded_prompts_are_dropped(capsys, target, prompts, tmp_path):
    kept_out = [
        {"prompt": QUESTIONS[3].upper()},
        {"messages": [{"role": "user", "content": "Think: " + QUESTIONS[5]}]},
    ]
    (tmp_path / "eval").mkdir()
    write_lines(tmp_path / "eval" / "a.jsonl", kept_out)
    argv = command(target, prompts, tmp_path / "data", "--exclude", str(tmp_path / "eval"))
    code, out, _ = run(capsys, argv)
    asked = {text_of(record["input_ids"]).split(END + "A:")[0] for record in contents(tmp_path / "data")}
    assert code == 0 and f"{20 - len(asked)} excluded" in out
    assert "U:" + QUESTIONS[3] not in asked and "U:" + QUESTIONS[5] not in asked
    assert provenance(tmp_path / "data")["prompts"]["dropped"] == {"excluded": 20 - len(asked)}
    code, _, err = run(capsys, command(target, prompts, tmp_path / "more", "--exclude", str(prompts)))
    assert code == 2 and "exclude all 20 prompts" in err


def test_prompts_of_a_data_set(capsys, target, tmp_path):
    path = tmp_path / "questions"
    datasets.Dataset.from_dict({"question": QUESTIONS[:5], "prompt": ["no"] * 5}).save_to_disk(str(path))
    argv = ["prepare-data", "--target", str(target), "--dataset", str(path), "--column", "question", "--limit", "3"]
    argv += ["--output", str(tmp_path / "data"), "--max-new-tokens", "4"]
    assert run(capsys, argv)[0] == 0
    assert provenance(tmp_path / "data")["prompts"]["sources"] == {str(path): 3}
    with pytest.raises(CommandError, match="columns question, prompt, not --column 'text'"):
        read_dataset(str(path), None, "train", "text", None)


def test_a_data_set_in_files(tmp_path):
    write_lines(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    found = read_dataset(str(tmp_path), None, "train", None, 1)
    assert [prompt.user_texts for prompt in found] == [["a"]]
    with pytest.raises(CommandError, match="--dataset"):
        read_dataset(str(tmp_path), None, "nowhere", None, None)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is not JSON"),
        ('{"text": "x"}', "no text or turns in the field 'messages' or 'prompt'"),
        ('{"prompt": ""}', "no text or turns"),
        ('["x"]', "no text or turns"),
        ('{"messages": [{"role": "user"}]}', "'role'"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "'role'"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no user's turn"),
        ("", "has no prompts"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, complaint):
    file = tmp_path / "set.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(CommandError, match=complaint) as caught:
        read_files("--prompts", [str(file)], None)
    assert "set.jsonl" in str(caught.value)


def test_responses_to_keep_must_be_there(tmp_path):
    lines = write_lines(tmp_path / "set.jsonl", [{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(CommandError, match="followed by an assistant's"):
        read_files("--prompts", [str(lines)], None, keep_responses=True)
    write_lines(tmp_path / "set.jsonl", [{"prompt": "x"}])
    with pytest.raises(CommandError, match="no turns in the field"):
        read_files("--prompts", [str(lines)], None, keep_responses=True)


def test_the_same_question_has_the_same_key():
    turns = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
    assert Prompt("a", turns).key == Prompt.of_text("b", "x").key != Prompt.of_text("b", "z").key


# What is refused.

BAD_INPUT = [
    ([], ["--output", "required"]),
    (["--output", "/no/where/data"], ["--output", "/no/where", "does not exist"]),
    (["--output", "data"], ["--prompts is missing", "--dataset"]),
    (["--output", "data", "--prompts", "/no/where"], ["--prompts", "/no/where", "no such file"]),
    (["--output", "data", "--target", "./nowhere"], ["--target", "./nowhere", "no such folder"]),
    (["--output", "data", "--temperature", "-1"], ["--temperature", "-1", "at least 0"]),
    (["--output", "data", "--temperature", "0", "--top-k", "3"], ["--top-k 3", "no effect at --temperature 0"]),
    (["--output", "data", "--temperature", "0", "--samples-per-prompt", "2"], ["--samples-per-prompt 2", "more"]),
    (["--output", "data", "--thinking", "maybe"], ["--thinking", "maybe", "off"]),
    (["--output", "data", "--time-limit", "-1"], ["--time-limit", "-1", "at least 0"]),
    (["--output", "data", "--batch-size", "0"], ["--batch-size", "0", "at least 1"]),
    (["--output", "data", "--prompts", ".", "--column", "x"], ["--column 'x'", "--dataset"]),
    (["--output", "data", "--synthesize", "0"], ["--synthesize", "0", "at least 1"]),
    (["--output", "data", "--prompts", ".", "--examples", "."], ["--examples", "for --synthesize"]),
]


@pytest.mark.parametrize(("argv", "parts"), BAD_INPUT, ids=lambda value: " ".join(value) or "nothing")
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, argv, parts):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, ["prepare-data", *argv])
    assert code == 2 and err.count("\n") == 1 and "Traceback" not in err
    for part in parts:
        assert part in err


def test_a_folder_with_something_else_in_it(capsys, target, prompts, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("x")
    code, _, err = run(capsys, command(target, prompts, tmp_path / "data"))
    assert code == 2 and "holds no training data" in err and (tmp_path / "data" / "thesis.tex").exists()


def test_without_the_package_datasets(capsys, target, prompts, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))
    code, _, err = run(capsys, command(target, prompts, tmp_path / "data"))
    assert code == 2 and "dspark-hf[train]" in err and err.count("\n") == 1


def test_arguments_are_those_of_the_function():
    import inspect

    arguments = set(vars(cli.build_parser().parse_args(["prepare-data", "--output", "x"]))) - {"run", "command"}
    assert arguments == set(inspect.signature(prepare_data.run).parameters)
