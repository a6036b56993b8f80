"""Verification lengths: plain numbers in, plain numbers out."""

import ast
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_hf import scheduling
from dspark_hf.scheduling import lengths_by_threshold, survivals


rows = st.lists(st.floats(0, 1), max_size=8)


def test_survival_is_the_cumulative_product():
    assert survivals([0.5, 0.5, 1.0, 0.1]) == [0.5, 0.25, 0.25, 0.025]
    assert survivals([]) == []


@pytest.mark.parametrize(
    ("threshold", "length"), [(0.0, 4), (0.02, 4), (0.1, 3), (0.25, 3), (0.26, 1), (0.5, 1), (0.51, 0), (1.0, 0)]
)
def test_a_block_is_cut_at_the_first_slot_below_the_threshold(threshold, length):
    assert lengths_by_threshold([survivals([0.5, 0.5, 1.0, 0.1])], threshold) == [length]


def test_rows_are_cut_each_for_itself():
    confidences = [[0.9, 0.9, 0.9], [0.1, 1.0, 1.0], [1.0, 1.0, 1.0], []]
    assert lengths_by_threshold([survivals(row) for row in confidences], 0.8) == [2, 0, 3, 0]


def test_conditional_confidences_above_the_threshold_do_not_save_a_block():
    """Each slot is likely given those before it; all of them together are not."""
    assert lengths_by_threshold([survivals([0.8] * 7)], 0.5) == [3]


@settings(deadline=None, derandomize=True)
@given(rows, st.floats(0, 1))
def test_every_slot_that_is_sent_survives(confidences, threshold):
    (length,) = lengths_by_threshold([survivals(confidences)], threshold)
    for slot in range(1, len(confidences) + 1):
        survival = math.prod(confidences[:slot])
        if slot <= length:
            assert survival >= threshold or math.isclose(survival, threshold)
    if length < len(confidences):
        assert math.prod(confidences[: length + 1]) <= threshold


@settings(deadline=None, derandomize=True)
@given(rows, st.floats(0, 1), st.floats(0, 1))
def test_a_higher_threshold_never_sends_more(confidences, first, second):
    low, high = sorted((first, second))
    assert lengths_by_threshold([survivals(confidences)], low) >= lengths_by_threshold([survivals(confidences)], high)


def test_no_tensors_come_in():
    tree = ast.parse(Path(scheduling.__file__).read_text())
    names = {name for node in ast.walk(tree) for name in _imported(node)}
    assert names <= {"collections", "collections.abc", "itertools", "operator", "dataclasses", "numpy"}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
