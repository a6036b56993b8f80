"""Training data: masks, divisions, statistics, and texts that are the same."""

import importlib.util
import random
import shutil

import datasets
import pytest
from chat import DASHED, FORGETFUL, MARKED, MARKED_TEXT, TEMPLATE, chat_tokenizer, marked

from dspark_hf import data
from dspark_hf.chat_format import chat_loss_mask
from dspark_hf.near_duplicates import ExcludedTexts, NearDuplicates, normalise


def conversation(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(texts)]


# Masks.


@pytest.mark.parametrize(
    ("template", "one", "two"),
    [
        (TEMPLATE, "U:Hi\nA:[Ho\n]", "U:Hi\nA:[Ho\n]U:Why\nA:[So\n]"),
        (DASHED, "U:Hi\n-A:[Ho\n]-", "U:Hi\n-A:[Ho\n]-U:Why\n-A:[So\n]-"),
        (MARKED, "U:Hi\n-A:[Ho\n]-", "U:Hi\n-A:[Ho\n]-U:Why\n-A:[So\n]-"),
        (MARKED_TEXT, "U:Hi\n-A:[Ho\n]-", "U:Hi\n-A:[Ho\n]-U:Why\n-A:[So\n]-"),
    ],
    ids=["plain", "dash behind", "marked", "text marked"],
)
def test_the_assistants_turns_have_a_loss_through_their_end(template, one, two):
    tokenizer = chat_tokenizer(template, "\n")
    assert marked(*chat_loss_mask(tokenizer, conversation("Hi", "Ho"))) == one
    assert marked(*chat_loss_mask(tokenizer, conversation("Hi", "Ho", "Why", "So"))) == two


def test_end_tokens_other_than_the_tokenizers():
    tokenizer = chat_tokenizer(DASHED, "\n")
    dash = tokenizer.convert_tokens_to_ids("-")
    assert marked(*chat_loss_mask(tokenizer, conversation("Hi", "Ho"), {dash})) == "U:Hi\n-A:[Ho\n-]"


def test_a_template_that_rewrites_earlier_turns_is_refused():
    tokenizer = chat_tokenizer(FORGETFUL, "\n")
    assert marked(*chat_loss_mask(tokenizer, conversation("Hi", "Ho"))) == "U:Hi\nA:[Ho\n]"
    with pytest.raises(ValueError, match="message 2 of 4 differently.*generation"):
        chat_loss_mask(tokenizer, conversation("Hi", "Ho", "Why", "So"))
    with pytest.raises(ValueError, match="begins with an assistant's turn"):
        chat_loss_mask(tokenizer, conversation("Hi", "Ho")[1:])


def test_template_options_reach_the_template():
    tokenizer = chat_tokenizer(TEMPLATE.replace("{% for", "{{ greeting }}{% for", 1), "\n")
    token_ids, mask = chat_loss_mask(tokenizer, conversation("Hi", "Ho"), template_options={"greeting": "S:x"})
    assert marked(token_ids, mask).startswith("S:xU:Hi")


# Data sets.


def records(count: int = 12, samples: int = 2) -> list[dict]:
    made = []
    for index in range(count * samples):
        prompt = index % count
        answer = [1] * (1 + index)
        made.append(
            {
                "input_ids": [5, 6, prompt] + answer,
                "loss_mask": [0, 0, 0] + [1] * len(answer),
                "temperature": (0.0, 1.0)[index // count],
                "source": "ab"[prompt % 2],
                "finished": index % 4 == 0,
                "prompt": str(prompt),
            }
        )
    return made


def test_samples_of_a_prompt_stay_together():
    made = records()
    whole = datasets.Dataset.from_list(made)
    train, held_out = data.split_by_prompt(whole, 0.25, seed=3)
    assert len(held_out) == 6 and len(train) == 18
    assert set(train["prompt"]).isdisjoint(held_out["prompt"])
    random.Random(0).shuffle(made)
    again = data.split_by_prompt(datasets.Dataset.from_list(made), 0.25, seed=3)[1]
    assert set(again["prompt"]) == set(held_out["prompt"])
    without = whole.remove_columns("prompt")
    by_tokens = data.split_by_prompt(without, 0.25, seed=3)
    assert {tuple(ids[:3]) for ids in by_tokens[0]["input_ids"]}.isdisjoint(
        tuple(ids[:3]) for ids in by_tokens[1]["input_ids"]
    )
    assert len(by_tokens[1]) == 6
    others = [set(data.split_by_prompt(whole, 0.25, seed=seed)[1]["prompt"]) for seed in range(4)]
    assert any(other != others[0] for other in others)
    assert len(data.split_by_prompt(whole, 0.001)[1]) == 2  # at least one prompt


@pytest.mark.parametrize(("share", "message"), [(0.0, "between 0 and 1"), (0.99, "keep 12 out")])
def test_a_division_with_an_empty_side_is_refused(share, message):
    with pytest.raises(ValueError, match=message):
        data.split_by_prompt(datasets.Dataset.from_list(records()), share)


def test_statistics():
    statistics = data.data_statistics(datasets.Dataset.from_list(records()))
    total = statistics.total
    assert (total.samples, total.tokens, total.supervised) == (24, 3 * 24 + 300, 300)
    assert total.lengths == (5, 16, 26, 27)
    assert total.finished == pytest.approx(0.25)
    assert {name: group.samples for name, group in statistics.by_source.items()} == {"a": 12, "b": 12}
    assert statistics.by_source["b"].finished == 0 and statistics.by_source["a"].finished == 0.5
    assert [(t, group.samples) for t, group in statistics.by_temperature.items()] == [(0.0, 12), (1.0, 12)]
    assert statistics.by_temperature[0.0].supervised == sum(range(1, 13))


def test_temperatures_that_are_not_known():
    made = [record | {"temperature": None} for record in records()[:5]] + records()[:2]
    statistics = data.data_statistics(datasets.Dataset.from_list(made))
    assert {t: group.samples for t, group in statistics.by_temperature.items()} == {0.0: 2, None: 5}


def test_loading(tmp_path):
    datasets.Dataset.from_list(records()).save_to_disk(str(tmp_path / "data"))
    assert data.load_training_data(tmp_path / "data")[0]["input_ids"] == [5, 6, 0, 1]


def test_loading_parquet_files(tmp_path):
    for name, part in (("a", records()[:2]), ("b", records()[2:])):
        datasets.Dataset.from_list(part).to_parquet(str(tmp_path / f"{name}.parquet"))
    assert data.load_training_data(tmp_path).to_list() == records()
    fetched = tmp_path / "fetched"  # from the Hub
    shutil.copytree(tmp_path, fetched / "data", ignore=shutil.ignore_patterns("fetched"))
    assert data.load_training_data(fetched).to_list() == records()
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="Parquet files that cannot be read together"):
        data.load_training_data(tmp_path)
    (tmp_path / "a.parquet").rename(tmp_path / "c.parquet")
    datasets.Dataset.from_dict({"text": ["x"]}).to_parquet(str(tmp_path / "b.parquet"))
    with pytest.raises(ValueError, match="cannot be read together"):
        data.load_training_data(tmp_path)
    (tmp_path / "c.parquet").unlink()
    with pytest.raises(ValueError, match="has the columns text and lacks input_ids, loss_mask"):
        data.load_training_data(tmp_path)
    datasets.Dataset.from_dict({"input_ids": [], "loss_mask": []}).to_parquet(str(tmp_path / "b.parquet"))
    with pytest.raises(ValueError, match="is empty"):
        data.load_training_data(tmp_path)


def test_loading_what_is_no_training_data(tmp_path):
    with pytest.raises(ValueError, match="no data set. Make one with"):
        data.load_training_data(tmp_path / "data")
    (tmp_path / "data.work").mkdir()
    with pytest.raises(ValueError, match="data.work holds what was not finished.*--time-limit 0"):
        data.load_training_data(tmp_path / "data")
    datasets.Dataset.from_dict({"text": ["x"]}).save_to_disk(str(tmp_path / "data"))
    with pytest.raises(ValueError, match="has the columns text and lacks input_ids, loss_mask"):
        data.load_training_data(tmp_path / "data")
    datasets.Dataset.from_dict({"input_ids": [], "loss_mask": []}).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="is empty"):
        data.load_training_data(tmp_path / "empty")
    for state in ("[]", "{}"):
        (tmp_path / "empty" / "state.json").write_text(state)
        with pytest.raises(ValueError, match="state.json that `datasets` did not write"):
            data.load_training_data(tmp_path / "empty")


def test_without_the_package_datasets(monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))
    with pytest.raises(ImportError, match=r"dspark-hf\[train\]"):
        data.load_training_data(tmp_path)


# Texts that are the same.

QUESTION = "A baker packs 6 rolls into each bag and sells a bag for $4. How much money did she take on Saturday?"


def test_normalising():
    assert normalise("  Häuser, HÄUSER!\tｆｕｌｌ ") == "häuser häuser full"
    assert normalise("价格？ 多少") == "价格 多少"


def test_near_duplicates():
    seen = NearDuplicates()
    assert seen.add(QUESTION)
    assert not seen.add(QUESTION.upper().replace(".", " !"))
    assert not seen.add(QUESTION.replace("Saturday", "Sunday"))
    assert seen.add("A baker sells bread. What does a loaf cost if five of them cost 10 dollars?")
    assert seen.add("Hello") and seen.add("Hello there") and not seen.add("hello!")
    assert seen.add("写一首关于春天的诗，要有四行，每行七个字。") and not seen.add(
        "写一首关于春天的诗，要有四行，每行七个字!"
    )


def test_near_duplicates_among_many_with_a_common_end():
    rng = random.Random(0)
    words = [f"{rng.choice('bcdfglmn')}{rng.choice('aeiou')}{number}" for number in range(300)]
    end = " Please reason step by step, and put your final answer within the box."
    texts = [" ".join(rng.choices(words, k=20)) + end for _ in range(700)]
    seen = NearDuplicates()
    assert all(map(seen.add, texts))
    assert not any(seen.add("So: " + text) for text in texts)


def test_excluded_texts():
    end = " Please reason step by step, and put your final answer within the box."
    others = [f"What is the {number}th root of the number {number * number + 7}?" + end for number in range(30)]
    excluded = ExcludedTexts([QUESTION + end, "Hi there", *others])
    assert QUESTION in excluded  # without the phrase that all of them have
    assert "Solve this, my friend: " + QUESTION in excluded
    assert QUESTION.replace("rolls", "buns") in excluded
    assert QUESTION[:60] in excluded  # a part of it
    assert "hi THERE!" in excluded
    assert "Hi there, how are you doing today? I hope that all is well." not in excluded
    assert "A train leaves at 9:40 and arrives at 12:10. How long does it take?" + end not in excluded
    assert "Please reason step by step, and put your final answer within the box." not in excluded
    assert "x" not in excluded and "" not in excluded
