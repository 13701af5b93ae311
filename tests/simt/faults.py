"""Which of the planted faults a run tries."""

import os
from collections.abc import Mapping
from typing import TypeVar

Fault = TypeVar("Fault")
# Each fault takes a build of its own, and all together as long as everything else on the harness. CI tries every fifth
# of a list, in a quarter of an hour; a run by hand tries all.
STEP = 5 if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else 1


def selected(faults: Mapping[str, Fault]) -> dict[str, Fault]:
    """Return the faults of this run, by name."""
    return {name: faults[name] for name in list(faults)[::STEP]}
