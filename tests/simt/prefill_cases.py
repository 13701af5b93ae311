"""Problems of prefill for the CPU harness, in tiles so small that short sequences have edges."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simt import product
from strategies import PrefillProblem
from tolerance import assert_prefill

from cuattn import Tbq4Array

RAW, FLOATS, TBQ4 = ("raw16", "raw16"), ("raw32", "raw32"), ("tbq4", "tbq4")


def config(tile_q: int, tile_kv: int, num_stages: int, num_warps: int, dim_splits: int = 1) -> dict[str, int]:
    return {
        "tile_q": tile_q, "tile_kv": tile_kv, "num_stages": num_stages, "num_warps": num_warps, "dim_splits": dim_splits
    }  # fmt: skip


# By formats of K and V, dtype, head_dim and value_dim, of which each is one build. Warps have 16 rows or 32.
SMALL = {
    (*RAW, "float16", 64, None): config(32, 16, 2, 2),
    (*RAW, "bfloat16", 64, None): config(64, 32, 3, 2),
    (*RAW, "float16", 128, None): config(32, 64, 2, 2),
    (*RAW, "bfloat16", 192, 128): config(32, 16, 4, 2),
    (*RAW, "float16", 512, None): config(16, 16, 2, 2, 2),
    (*FLOATS, "float32", 64, None): config(64, 16, 2, 2),
    (*FLOATS, "float32", 128, None): config(32, 8, 3, 2),
    (*FLOATS, "float32", 192, 128): config(16, 32, 2, 2, 2),
}
SMALL_TBQ4 = {
    (*TBQ4, "float16", 64, None): config(32, 16, 2, 2),
    (*TBQ4, "bfloat16", 128, None): config(64, 32, 3, 2),
    (*TBQ4, "bfloat16", 512, None): config(16, 16, 2, 2, 2),
    ("tbq4", "raw16", "float16", 128, None): config(16, 32, 2, 2, 2),
    ("raw16", "tbq4", "bfloat16", 64, None): config(64, 16, 4, 2),
}
# Many query tokens to few, more queries than keys, and sequences without either.
MIXED = ((40, 70), (0, 5), (33, 33), (3, 0), (50, 20))
BASE = PrefillProblem(MIXED, num_kv_heads=2, group=3)
CODES = replace(BASE, k_format="tbq4", v_format="tbq4", means=True)
SINGLE = replace(BASE, k_format="raw32", v_format="raw32", dtype="float32")
every_format = pytest.mark.parametrize("base", [BASE, SINGLE, CODES], ids=["raw16", "raw32", "tbq4"])


def small(problem: PrefillProblem) -> dict[str, int]:
    choice = (problem.k_format, problem.v_format, problem.dtype, problem.head_dim, problem.value_dim)
    return (SMALL | SMALL_TBQ4)[choice]


def run(problem: PrefillProblem, arrays: tuple[Any, ...] | None = None, **changes: Any) -> tuple[np.ndarray, ...]:
    """Run a problem, or such a call with other arrays and options, in the small tiles of its choice."""
    options = {"changes": small(problem), **problem.options(), **changes}
    return product.prefill_arrays(*(arrays or problem.arrays()), **options)


def check(problem: PrefillProblem, **choices: Any) -> None:
    assert_prefill(problem, *product.prefill(problem, **{"changes": small(problem), **choices}))


def assert_same_bits(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...], context: object = "") -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape, context
        assert a.tobytes() == b.tobytes(), context


def changed(cache: Tbq4Array, **parts: Any) -> Tbq4Array:
    return Tbq4Array(**{name: getattr(cache, name) for name in ("codes", "norms", "mean")} | parts)
