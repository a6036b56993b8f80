"""`dspark prepare-data --synthesize`: prompts that the target writes, and which of them are of use."""

import json
from pathlib import Path

import pytest
from chat import END, MARKED, chat_target, chat_tokenizer, contents, provenance, run, text_of, write_lines

from dspark_hf import cli, shards, synthesis


QUESTIONS = [f"Tom has {number} apples and buys {number % 7} more." for number in range(20)]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return chat_target(tmp_path_factory.mktemp("synthesis") / "target")


# Knows no system.
FUSSY = MARKED.replace(
    "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for", 1
)


class Killed(BaseException):
    """The process is no more."""


def command(target: Path, output: Path, *argv: str) -> list[str]:
    return ["prepare-data", "--target", str(target), "--output", str(output), "--synthesize", "12"] + [
        *("--max-new-tokens", "8", "--batch-size", "16", *argv)
    ]


def prompts_of(output: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in (output / "prompts.jsonl").read_text().splitlines()]


def test_the_target_writes_prompts(capsys, target, tmp_path):
    code, out, err = run(capsys, command(target, tmp_path / "data"))
    assert code == 0, err
    written = prompts_of(tmp_path / "data")
    assert len(written) == 12 == len(set(written)) and "0 prompts" not in out
    assert "12 prompts of" in out and "dropped: " in out
    asked = {
        text_of(record["input_ids"]).split(END + "A:")[0].removeprefix("U:") for record in contents(tmp_path / "data")
    }
    assert {text.strip() for text in asked} == set(written)
    found = provenance(tmp_path / "data")["synthesis"]
    assert found["prompts"] == 12 and found["texts"] == 12 + sum(found["dropped"].values())
    assert {record["source"] for record in contents(tmp_path / "data")} == {"synthetic"}
    assert run(capsys, command(target, tmp_path / "again"))[0] == 0
    assert prompts_of(tmp_path / "again") == written
    assert run(capsys, command(target, tmp_path / "other", "--seed", "1"))[0] == 0
    assert set(prompts_of(tmp_path / "other")) != set(written)


def test_what_the_target_sees_before_it_writes(capsys, target, tmp_path, monkeypatch):
    prompts = write_lines(tmp_path / "sums.jsonl", [{"prompt": question} for question in QUESTIONS])
    headers, decode = [], synthesis.decode_rows

    def seen(model, rows, *arguments, **options):
        headers.extend(map(text_of, rows))
        return decode(model, rows, *arguments, **options)

    monkeypatch.setattr(synthesis, "decode_rows", seen)
    systems = ("--system-prompt", "Sums", "Tales")
    assert run(capsys, command(target, tmp_path / "data", *systems))[0] == 0
    assert headers[:4] == ["S:SumssU:", "S:TalessU:"] * 2
    assert {record["source"] for record in contents(tmp_path / "data")} == {"synthetic 1", "synthetic 2"}
    headers.clear()
    assert run(capsys, command(target, tmp_path / "more", "--examples", str(prompts)))[0] == 0
    shown = [[question for question in QUESTIONS if f"- {question}" in header] for header in headers]
    assert all(header.startswith("S:The user asks") and header.endswith("U:") for header in headers)
    assert len(set(headers)) > 8 and max(map(len, shown)) == 3
    assert not set(prompts_of(tmp_path / "more")) & set(QUESTIONS)


def test_excluded_and_given_prompts_are_not_written(capsys, target, tmp_path):
    assert run(capsys, command(target, tmp_path / "data"))[0] == 0
    written = prompts_of(tmp_path / "data")
    kept_out = write_lines(tmp_path / "eval.jsonl", [{"prompt": text.upper()} for text in written[:3]])
    given = write_lines(tmp_path / "given.jsonl", [{"prompt": text} for text in written[3:5]])
    argv = command(target, tmp_path / "more", "--exclude", str(kept_out), "--prompts", str(given))
    assert run(capsys, argv)[0] == 0
    again = prompts_of(tmp_path / "more")
    assert len(again) == 12 and not set(again) & set(written[:5]) and set(again) & set(written[5:])
    found = provenance(tmp_path / "more")
    assert found["synthesis"]["dropped"]["excluded"] >= 3 and found["synthesis"]["dropped"]["alike"] >= 2
    assert found["samples"]["planned"] == 14
    code, _, err = run(capsys, command(target, tmp_path / "more", "--prompts", str(given)))
    assert code == 2 and "what is in --exclude is not what it was" in err


class Written:
    """A synthesis that judges texts."""

    def __init__(self, target: Path, tmp_path: Path, *texts: str):
        tokenizer = chat_tokenizer()
        settings = synthesis.SynthesisSettings(99, (), (), 4)
        end = frozenset({tokenizer.eos_token_id})
        kept = shards.Shards(tmp_path / "work")
        records = [{"system": 0, "token_ids": tokenizer(text)["input_ids"]} for text in texts]
        kept.append({"seconds": 1.0}, records)
        excluded = synthesis.ExcludedTexts(["Is this a riddle or a dream?"])
        self.found = synthesis.Synthesis(
            None, synthesis.ChatFormat(tokenizer), settings, end, ["Why?! Oh, why"], excluded, kept
        )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("How many of them are there", "unfinished"),
        ("Hos", "too short"),
        ("?? .. !! ??s", "too short"),
        ("(1 + 2) / (3 - 4) = ?! ((5))s", "not text"),
        ("ho ho ho ho ho ho ho ho ho ho ho ho ho hos", "repeating themselves"),
        ("i THI", "unfinished"),
        ("Why, oh whys", "alike"),
        ("How old are you? Tell me!s", None),
    ],
)
def test_what_is_of_no_use(target, tmp_path, text, reason):
    found = Written(target, tmp_path, text).found
    assert dict(found.dropped) == ({} if reason is None else {reason: 1})
    assert [prompt.user_texts[0] for prompt in found.prompts] == ([] if reason else [text[:-1]])
    assert found.texts == 1


def test_texts_alike_and_excluded(target, tmp_path):
    found = Written(target, tmp_path, "I wonder how you do its", "I WONDER, how you do it!s").found
    assert dict(found.dropped) == {"alike": 1} and len(found.prompts) == 1
    assert found.reasons() == "1 alike"


def test_a_synthesis_that_was_killed(capsys, target, tmp_path, monkeypatch):
    argv = command(target, tmp_path / "data", "--batch-size", "4")
    assert run(capsys, command(target, tmp_path / "whole", "--batch-size", "4"))[0] == 0
    write, written = shards.write_text, []

    def write_and_die(path: Path, text: str) -> None:
        if len(written) == 2:
            raise Killed
        written.append(path)
        write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_text", write_and_die)
        with pytest.raises(Killed):
            cli.main(argv)
    assert len(list((tmp_path / "data.work" / "prompts").glob("*.jsonl"))) == 2
    capsys.readouterr()
    code, out, _ = run(capsys, argv)
    assert code == 0 and f"Going on with {tmp_path}/data.work/prompts: " in out and "of 12 prompts are written." in out
    assert prompts_of(tmp_path / "data") == prompts_of(tmp_path / "whole")
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")


def test_a_synthesis_without_time(capsys, target, tmp_path):
    argv = command(target, tmp_path / "data")
    code, out, _ = run(capsys, [*argv, "--time-limit", "0"])
    assert code == 0 and "Not complete yet" in out and not (tmp_path / "data").exists()
    assert run(capsys, argv)[0] == 0 and len(contents(tmp_path / "data")) == 12


def test_a_target_that_writes_nothing_of_use_is_given_up(capsys, target, tmp_path, monkeypatch):
    monkeypatch.setattr(synthesis, "FEWEST_TEXTS", 20)
    monkeypatch.setattr(synthesis, "MOST_TEXTS", 2)
    monkeypatch.setattr(synthesis, "FEWEST_TOKENS", 500)
    code, _, err = run(capsys, command(target, tmp_path / "data"))
    assert code == 2 and "of 32 texts that the target wrote, 0 were of use (" in err and "--system-prompt" in err


@pytest.mark.parametrize(
    ("template", "argv", "complaint"),
    [
        (None, [], "no chat template"),
        (MARKED.replace("message['content'] +", "message['content'] | lower +"), [], "as it is"),
        (FUSSY, ["--system-prompt", "x"], "fails on the roles system, user: TemplateError: no"),
    ],
    ids=["none", "changes texts", "no system"],
)
def test_templates_that_do_not_allow_it(capsys, tmp_path, template, argv, complaint):
    target = chat_target(tmp_path / "target", template)
    code, _, err = run(capsys, command(target, tmp_path / "data", *argv))
    assert code == 2 and complaint in err and err.count("\n") == 1
