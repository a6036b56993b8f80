"""Progress: a bar in a terminal, lines elsewhere."""

import io
import sys

import pytest

from dspark_hf import progress
from dspark_hf.progress import Progress


class Clock:
    """Seconds that pass when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_lines_now_and_then(capsys, monkeypatch):
    clock = Clock(monkeypatch)
    with Progress("Answers", 10, 2, "sample") as shown:
        for _ in range(61):
            clock.now += 1
            shown.add_tokens(5)
        shown.add_units(4)
        clock.now += 60
        shown.add_tokens(5)
        shown.add_units(4)
    assert capsys.readouterr().err.splitlines() == [
        "Answers: 2 of 10 samples, 300 tokens in 60 s, 5 tok/s",
        "Answers: 6 of 10 samples, 310 tokens in 121 s, 3 tok/s, 2 min left",
        "Answers: 10 of 10 samples, 310 tokens in 121 s, 3 tok/s",
    ]


def test_a_bar_in_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    clock = Clock(monkeypatch)
    with Progress("Answers", 10, 2, "sample") as shown:
        clock.now += 1
        shown.add_tokens(50)
        shown.add_units(3)
    bar = sys.stderr.getvalue()
    assert "\r" in bar and "5/10" in bar and "50 tok/s" in bar and "samples, " not in bar
