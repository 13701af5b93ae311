"""append.cu on the CPU harness."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simt import harness, product
from simt.faults import selected
from strategies import APPEND_CHOICES, AppendProblem, append_problems
from tolerance import assert_append

PROBLEM = AppendProblem(
    kv_len=(40, 3, 19), seqlen_new=21, num_kv_heads=2, head_dim=128, k_format="raw16", v_format="tbq4",
    in_dtype="bfloat16", dtype="bfloat16", page_size=5, capacity=33, means=True, num_sink=4, num_recent=6, views=True,
)  # fmt: skip


@given(problem=append_problems(), seed=st.integers(0, 3))
def test_tokens_go_where_the_reference_puts_them_and_nothing_else_changes(problem, seed):
    assert_append(problem, product.append(problem, seed))


@pytest.mark.parametrize("choice", APPEND_CHOICES, ids=str)
def test_every_choice_of_formats_dtypes_and_head_dim_fills_caches_sinks_and_rings(choice):
    names = ("k_format", "v_format", "in_dtype", "dtype", "head_dim")
    problem = replace(PROBLEM, **dict(zip(names, choice, strict=True)))
    assert_append(problem, product.append(problem, seed=1))


@pytest.mark.parametrize(("in_dtype", "dtype"), [("float32", "float16"), ("float32", "bfloat16"), ("float16",) * 2])
def test_values_are_rounded_to_nearest_even_and_pass_what_is_not_finite(in_dtype, dtype):
    """Ties, the largest numbers, subnormals, zeros of both signs, infinities and NaN."""
    problem = AppendProblem(kv_len=(1,), in_dtype=in_dtype, dtype=dtype, num_sink=1, num_recent=1)
    values = np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-8, 1 + 3 * 2.0**-8, 65504, 65519.9, 65520, 3e38, 1e-7,
                       2.0**-25, 3 * 2.0**-26, -0.0, np.inf, -np.inf, np.nan], np.float32)  # fmt: skip
    with np.errstate(over="ignore"):
        row = np.resize(values, 64).astype(in_dtype)
    bases = problem.bases()
    bases["k_new"][...] = row
    got = product.append_arrays(problem, bases)
    with np.errstate(over="ignore"):
        want = row.astype(got["k_cache"].dtype)
    for name in ("k_cache", "k_sink", "k_recent"):
        stored = got[name][0, 0, 0]
        is_nan = np.isnan(want)
        assert np.array_equal(np.isnan(stored), is_nan)
        assert stored[~is_nan].tobytes() == want[~is_nan].tobytes()


def test_bits_of_the_same_dtype_are_copied():
    """All 65,536 of them, NaN with payloads included."""
    problem = AppendProblem(kv_len=(32,), seqlen_new=32, num_kv_heads=4, head_dim=512, dtype="bfloat16",
                            in_dtype="bfloat16")  # fmt: skip
    bases = problem.bases()
    bases["v_new"].view(np.uint16)[...] = np.arange(2**16, dtype=np.uint16).reshape(bases["v_new"].shape)
    got = product.append_arrays(problem, bases)
    assert got["v_cache"].tobytes() == bases["v_new"].tobytes()


def test_norms_too_large_for_float16_are_counted_for_k_and_v_apart():
    problem = AppendProblem(
        kv_len=(9, 2, 0), seqlen_new=4, head_dim=128, k_format="tbq4", v_format="tbq4", in_dtype="float16",
        dtype="bfloat16", scale=1.0,
    )  # fmt: skip
    bases = problem.bases()
    bases["k_new"][:, 1:3] = 6000  # of six tokens with a place, two and one have a norm of 67,882
    got = product.append_arrays(problem, bases)
    assert (int(got["k_clamped"][0]), int(got["v_clamped"][0])) == (5 + 3, 5)


FAULTS = {
    "a token past the capacity": ("append.cu", "place < p.capacity", "true"),
    "a token before the sequence": ("append.cu", "place >= 0 &&", ""),
    "lanes past the end write": ("append.cu", "exists && place", "place"),
    "left-aligned tokens": ("append.cu", "end - p.seqlen_new + token", "end - 1 - token"),
    "the first token of a slot of the ring": ("append.cu", "- p.num_recent) {", "- 2 * p.num_recent) {"),
    "a ring that starts at the first token": ("append.cu", "position % p.num_recent", "position % p.num_recent ^ 1"),
    "one more sink": ("append.cu", "position < p.num_sink", "position <= p.num_sink"),
    "a mean that stays": ("kv/writer.cuh", "if (side.mean != nullptr)", "if (false)"),
    "a mean of another head": ("kv/writer.cuh", "slot.head * cfg::HEAD_DIM", "0"),
    "another slot of the page": ("append.cu", "pages.slot(position)", "pages.slot(position ^ 1)"),
    "a missing barrier": ("kv/writer.cuh", "__syncthreads();  // the table is there", ""),
}


@pytest.mark.parametrize("fault", selected(FAULTS))
def test_a_planted_fault_is_caught(fault):
    # Three tokens before and three past what the cache holds are in the heads around, not outside of the array. Lanes
    # past the end repeat a row: what shows is that its norm counts twice.
    dense = replace(PROBLEM, page_size=None, kv_len=(36, 18, 21), scale=1e4 if "past the end" in fault else 1.0)
    problem = PROBLEM if "page" in fault else dense
    caught = []
    for seed in range(4):
        assert_append(problem, product.append(problem, seed))
        try:
            assert_append(problem, product.append(problem, seed, patches=[FAULTS[fault]]))
        except (harness.KernelError, AssertionError) as error:
            caught.append(error)
    assert caught
