"""Problems of prefill_sm90.cu for the CPU harness, in tiles so small that short sequences have edges."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simt import harness, product
from strategies import PrefillProblem
from tolerance import assert_prefill, assert_prefill_call


def config(consumers: int, tile_kv: int, num_stages: int, **choices: bool) -> dict[str, int]:
    return {"consumers": consumers, "tile_kv": tile_kv, "num_stages": num_stages, **choices}


# By dtype, head_dim and value_dim, of which each is one build, and one more with pages, with a softcap, and with both.
SMALL = {
    ("float16", 64, None): config(2, 16, 2, weigh_first=True),
    ("bfloat16", 64, None): config(3, 32, 3),
    ("bfloat16", 96, None): config(1, 32, 2),
    ("float16", 192, 128): config(1, 64, 2, weigh_first=False),
    ("bfloat16", 256, None): config(2, 32, 1, take_turns=False),
}
BASE = PrefillProblem(((150, 210), (150, 210)), num_kv_heads=2, group=2, q_layout="dense", kv_layout="dense")


def run(problem: PrefillProblem, arrays: tuple[Any, ...] | None = None, **choices: Any) -> tuple[np.ndarray, ...]:
    """Run a problem, or such a call with other arrays and options, in the small tiles of its dtype and dims."""
    options = {
        "changes": SMALL.get((problem.dtype, problem.head_dim, problem.value_dim)),
        **problem.options(),
        **choices,
    }
    return product.tiled_prefill_arrays(*(arrays or problem.arrays()), **options)


def check(problem: PrefillProblem, **choices: Any) -> None:
    assert_prefill(problem, *run(problem, **choices))


# Schedules of which one must show a fault.
SEEDS = 6


def assert_caught(
    problem: PrefillProblem, arrays: tuple[Any, ...], patch: tuple[str, str, str], run: Callable[..., Any]
) -> None:
    """A call is right without a fault; wrong, or stopped by the harness, with it under one of a few schedules."""
    for seed in range(SEEDS):
        assert_prefill_call(arrays, problem.options(), run(problem, arrays, seed=seed))
        try:
            assert_prefill_call(arrays, problem.options(), run(problem, arrays, seed=seed, patches=(patch,)))
        except (harness.KernelError, AssertionError) as error:
            if "does not compile" in str(error):
                raise
            return
    pytest.fail("no schedule shows the fault")
