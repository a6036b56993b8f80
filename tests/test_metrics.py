"""The metrics as `evaluate` modules: loaded without a network, and right by hand and by scikit-learn."""

import ast
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from dspark_hf import calibration, metrics


evaluate = pytest.importorskip("evaluate")


@pytest.fixture(scope="module", autouse=True)
def _caches_of_its_own_and_no_network(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*arguments: object) -> None:
            raise AssertionError("a metric went to the network")

        patch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path_factory.mktemp("modules"))
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", tmp_path_factory.mktemp("metrics"))
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(sys, "path", list(sys.path))  # evaluate adds its cache of modules
        yield


@pytest.fixture(scope="module")
def loaded(_caches_of_its_own_and_no_network) -> dict[str, "evaluate.EvaluationModule"]:
    return {name: metrics.load(name) for name in metrics.NAMES}


def test_each_is_a_module_of_its_name(loaded):
    folder = Path(metrics.__file__).parent
    assert sorted(path.parent.name for path in folder.glob("*/__init__.py")) == sorted(metrics.NAMES)
    for name, metric in loaded.items():
        assert metric.name == name and metric.description and "Args:" in metric.inputs_description
        assert type(evaluate.load(str(folder / name / f"{name}.py"))).__name__ == type(metric).__name__


def test_they_import_as_well():
    from dspark_hf.metrics.acceptance_by_position import AcceptanceByPosition
    from dspark_hf.metrics.acceptance_length import AcceptanceLength
    from dspark_hf.metrics.calibration_error import CalibrationError

    for metric in (AcceptanceByPosition, AcceptanceLength, CalibrationError):
        assert issubclass(metric, evaluate.Metric)
    assert AcceptanceLength().compute(accepted=[1], verified=[2])["mean_acceptance_length"] == 2.0


def test_the_examples_in_the_descriptions(loaded):
    for metric in loaded.values():
        lines = [line.strip() for line in metric.inputs_description.splitlines()]
        (call,) = [line.removeprefix(">>> ") for line in lines if line.startswith(">>> metric.compute")]
        assert eval(call, {"metric": metric}) == ast.literal_eval(lines[lines.index(f">>> {call}") + 1])


def test_acceptance_of_three_rounds(loaded):
    rounds = {"accepted": [2, 3, 0], "verified": [4, 3, 1]}
    lengths = loaded["acceptance_length"].compute(**rounds)
    assert lengths == {"mean_acceptance_length": pytest.approx(1 + 5 / 3), "draft_acceptance_rate": 5 / 8}
    assert loaded["acceptance_by_position"].compute(**rounds) == {
        "acceptance_by_position": [pytest.approx(2 / 3), 1.0, 0.5, None],
        "reached_by_position": [3, 2, 2, 0],
    }


def test_rounds_may_come_in_batches(loaded):
    metric = loaded["acceptance_length"]
    metric.add_batch(accepted=[2, 3], verified=[4, 3])
    metric.add(accepted=0, verified=0)
    assert metric.compute() == {"mean_acceptance_length": pytest.approx(1 + 5 / 3), "draft_acceptance_rate": 5 / 7}


def test_nothing_verified(loaded):
    rounds = {"accepted": [0, 0], "verified": [0, 0]}
    assert loaded["acceptance_length"].compute(**rounds) == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": None,
    }
    assert loaded["acceptance_by_position"].compute(**rounds) == {
        "acceptance_by_position": [],
        "reached_by_position": [],
    }


@pytest.mark.parametrize("name", ["acceptance_length", "acceptance_by_position"])
def test_more_accepted_than_sent_is_refused(loaded, name):
    with pytest.raises(ValueError, match="3 in `accepted` and 2 in `verified`"):
        loaded[name].compute(accepted=[3], verified=[2])


@pytest.fixture(scope="module")
def blocks() -> tuple[np.ndarray, np.ndarray]:
    """Confidence logits, too sure of themselves by a factor of two, and accepted lengths."""
    generator = np.random.default_rng(3)
    logits = generator.normal(1.0, 1.5, size=(400, 5))
    kept = generator.random((400, 5)) < 1 / (1 + np.exp(-logits / 2))
    return logits, np.cumprod(kept, axis=1).sum(axis=1)


@pytest.mark.parametrize("temperatures", [None, [2.0] * 5])
def test_calibration_by_hand_and_by_scikit_learn(loaded, blocks, temperatures):
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, accepted = blocks
    found = loaded["calibration_error"].compute(
        confidence_logits=logits.tolist(), accepted=accepted.tolist(), temperatures=temperatures
    )
    assert found["reached_by_position"] == [int((accepted >= position).sum()) for position in range(5)]
    survivals = np.cumprod(1 / (1 + np.exp(-logits / (temperatures or [1.0] * 5))), axis=1)
    for position, survival in enumerate(survivals.T):
        happened = (accepted > position).astype(int)
        assert found["brier"][position] == pytest.approx(sklearn.brier_score_loss(happened, survival))
        assert found["roc_auc"][position] == pytest.approx(sklearn.roc_auc_score(happened, survival))
        error = 0.0
        for low in range(15):
            inside = (survival >= low / 15) & (survival < (low + 1) / 15)
            if inside.any():
                error += inside.mean() * abs(survival[inside].mean() - happened[inside].mean())
        assert found["ece"][position] == pytest.approx(error, abs=1e-9)
    assert np.mean(found["ece"]) < 0.05 if temperatures else np.mean(found["ece"]) > 0.08


def test_the_metric_is_the_one_implementation(loaded, blocks):
    logits, accepted = blocks
    own = calibration.position_metrics(logits, accepted, [1.0] * 5)
    found = loaded["calibration_error"].compute(confidence_logits=logits.tolist(), accepted=accepted.tolist())
    assert found["ece"] == [each.ece for each in own]


def test_where_all_blocks_ended_alike_there_is_no_auc(loaded):
    found = loaded["calibration_error"].compute(confidence_logits=[[1.0, 1.0], [2.0, 0.0]], accepted=[1, 1])
    assert found["roc_auc"] == [None, None]


def test_blocks_of_different_sizes_are_refused(loaded):
    with pytest.raises(ValueError, match=r"blocks of \[1, 2\] positions"):
        loaded["calibration_error"].compute(confidence_logits=[[1.0, 1.0], [2.0]], accepted=[1, 1])


def test_unknown_and_missing(monkeypatch):
    with pytest.raises(ValueError, match="'bleu'.*one of acceptance_length"):
        metrics.load("bleu")
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ImportError, match=r"pip install 'dspark-hf\[train\]'"):
        metrics.load("acceptance_length")
