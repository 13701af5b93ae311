"""How far a run is, on stderr: a bar by tqdm where that is installed and a terminal looks, else a count of cases."""

from __future__ import annotations

import sys
from typing import Any


class Progress:
    """Counts the cases of a run, and prints lines with that in front or above the bar.

    Parameters
    ----------
    terminal : bool, optional
        Whether there can be a bar. Default: whether stderr is one.
    """

    def __init__(self, *, terminal: bool | None = None) -> None:
        self._total = self._done = 0
        self._bar: Any = None
        if sys.stderr.isatty() if terminal is None else terminal:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=0, unit="case", file=sys.stderr, dynamic_ncols=True)

    def expect(self, cases: int) -> None:
        """Know of so many more cases."""
        self._total += cases
        if self._bar is not None:
            self._bar.total = self._total
            self._bar.refresh()

    def done(self) -> None:
        """Note that a case is over, measured or not."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
            return
        # The case at work is the one behind those that are over.
        count = f"[{min(self._done + 1, self._total)}/{self._total}] " if self._total else ""
        print(f"{count}{text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
