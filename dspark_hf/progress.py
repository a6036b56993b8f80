"""How far long work has come: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm.auto import tqdm


# Seconds between lines in a log, and between a bar's new rates.
LINE_SECONDS = 60.0
BAR_SECONDS = 0.5


class Progress:
    """
    Context that shows progress on stderr, with tokens a second.

    Args:
        name (`str`): What is done.
        total (`int`): How many units of work there are.
        done (`int`): How many of them an earlier run did.
        unit (`str`): One of them.
    """

    def __init__(self, name: str, total: int, done: int, unit: str):
        self.name, self.total, self.done, self.unit = name, total, done, unit
        self.new, self.tokens = 0, 0
        self.in_terminal = sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=done, desc=name, unit=unit, disable=not self.in_terminal)

    def __enter__(self) -> Progress:
        self.start = self.shown = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._show()
        self.bar.close()

    def add_tokens(self, count: int) -> None:
        """Some tokens more."""
        self.tokens += count
        if time.monotonic() - self.shown >= (BAR_SECONDS if self.in_terminal else LINE_SECONDS):
            self._show()

    def add_units(self, count: int) -> None:
        """Some units of work more."""
        self.new += count
        self.bar.update(count)

    def _show(self) -> None:
        self.shown = time.monotonic()
        seconds = max(self.shown - self.start, 1e-9)
        rate = f"{self.tokens / seconds:.0f} tok/s"
        if self.in_terminal:
            self.bar.set_postfix_str(rate)
            return
        done = self.done + self.new
        line = f"{self.name}: {done} of {self.total} {self.unit}s, {self.tokens} tokens in {seconds:.0f} s, {rate}"
        if self.new and done < self.total:
            line += f", {(self.total - done) * seconds / self.new / 60:.0f} min left"
        print(line, file=sys.stderr, flush=True)
