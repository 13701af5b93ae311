"""Which tests that take a build of their own a run has: by hand all, in CI some, to be done in a quarter of an hour."""

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")
_IN_CI = os.environ.get("HYPOTHESIS_PROFILE") == "ci"
# Planted faults take as long as everything else on the harness.
_STEP_OF_FAULTS = 15


def selected(faults: Mapping[str, T]) -> dict[str, T]:
    """Return the planted faults of this run, by name."""
    return {name: faults[name] for name in every(list(faults), _STEP_OF_FAULTS)}


def every(values: Sequence[T], step: int) -> list[T]:
    """Return all values or, in CI, every `step`-th of them."""
    return list(values[:: step if _IN_CI else 1])
