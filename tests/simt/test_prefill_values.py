"""prefill_mma.cu with values that are not finite, and at the ends of their range."""

from dataclasses import replace
from itertools import product as combinations
from typing import Any

import numpy as np
import pytest
from simt import product
from simt.prefill_cases import (
    BASE,
    CODES,
    SINGLE,
    assert_same_bits,
    changed,
    run,
)
from strategies import DTYPES, PrefillProblem
from tolerance import assert_prefill_call, of_positive_sums

from cuattn import reference


@pytest.mark.parametrize("window", [None, (3, None)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("base", "dtype", "head_dim"),
    [(BASE, "float16", 64), (BASE, "bfloat16", 64), (BASE, "float16", 512), (SINGLE, "float32", 64)],
    ids=["float16-64", "bfloat16-64", "float16-512", "float32-64"],
)
def test_a_value_that_is_not_finite_shows_in_the_rows_that_see_it_and_in_no_other(
    base: PrefillProblem, dtype: str, head_dim: int, bad: float, window: tuple[int, None] | None
) -> None:
    problem = replace(base, seqlens=((9, 70), (9, 71)), dtype=dtype, head_dim=head_dim, causal=True, window=window,
                      q_layout="dense", kv_layout="padded")  # fmt: skip
    q, k, v = problem.arrays()
    clean = run(problem)
    for key in (61, 66, 69):  # of the first sequence; its tokens stand at 61 to 69
        spoiled = v.copy()
        spoiled[0, key, 1, 5] = bad
        out, lse = run(problem, (q, k, spoiled))
        assert_prefill_call((q, k, spoiled), problem.options(), (out, lse))
        sees = np.zeros(out.shape, bool)
        sees[0, key - 61 : None if window is None else key - 61 + 4, 3:, 5] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(np.float32)), sees)
        # What meets such a value in floats is attended to anew, by other sums.
        unchanged = slice(1 if base is SINGLE else 0, None)
        assert_same_bits((lse[unchanged], out[1]), (clean[1][unchanged], clean[0][1]))
        spoiled = k.copy()
        spoiled[0, key, 1, 5] = np.nan
        out, lse = run(problem, (q, spoiled, v))
        np.testing.assert_array_equal(np.isnan(lse), sees[..., 5])
        assert_prefill_call((q, spoiled, v), problem.options(), (out, lse))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("window", [None, (10, None)])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 512)])
def test_a_norm_that_is_not_finite_is_seen_by_the_rows_that_see_its_token(
    dtype: str, head_dim: int, window: tuple[int, None] | None, value: float
) -> None:
    """In K by all of a row, whatever the sign of the sum that it multiplies; in V by its block."""
    problem = replace(CODES, seqlens=((20, 50),), dtype=dtype, head_dim=head_dim, causal=True, window=window,
                      q_layout="dense", kv_layout="dense")  # fmt: skip
    q, k, v = problem.arrays()
    clean, block = run(problem), head_dim // k.norms.shape[-1]
    for token, which in combinations((0, 15, 35, 48), "kv"):
        norms = (k if which == "k" else v).norms.copy()
        norms[0, token, 1, -1] = value
        arrays = (q, changed(k, norms=norms), v) if which == "k" else (q, k, changed(v, norms=norms))
        out, lse = run(problem, arrays)
        sees = np.zeros(out.shape, bool)
        stop = None if window is None else max(0, token - 30 + 11)
        sees[0, max(0, token - 30) : stop, 3:, 0 if which == "k" else head_dim - block :] = True
        np.testing.assert_array_equal(~np.isfinite(out), sees)
        np.testing.assert_array_equal(np.isnan(lse), sees[..., 0] & (which == "k"))
        assert_prefill_call(arrays, problem.options(), (out, lse))
        elsewhere = ~sees.any(axis=-1)
        assert_same_bits((out[0, :, :3], lse[elsewhere]), (clean[0][0, :, :3], clean[1][elsewhere]))


def test_a_query_that_is_nan_is_seen_in_its_row_alone() -> None:
    for base in (BASE, SINGLE, CODES):
        problem = replace(base, causal=True)
        arrays = problem.arrays()
        clean = run(problem, arrays)
        arrays[0][30, 4, 5] = np.nan
        out, lse = run(problem, arrays)
        sees = np.zeros(lse.shape, bool)
        sees[30, 4] = True
        np.testing.assert_array_equal(np.isnan(lse), sees)
        assert np.isnan(out[30, 4]).all()
        if base is SINGLE:
            assert_prefill_call(arrays, problem.options(), (out, lse))
        else:
            assert_same_bits((out[~sees], lse[~sees]), (clean[0][~sees], clean[1][~sees]))


@pytest.mark.parametrize("sinks", [False, True])
def test_a_query_that_is_nan_and_sees_no_key_changes_nothing(*, sinks: bool) -> None:
    """Its dot product with the mean of K is NaN, too."""
    problem = replace(CODES, causal=True, sinks=sinks)
    arrays = problem.arrays()
    clean = run(problem, arrays)
    empty = 90  # of the sequence that has 50 queries and 20 keys
    assert sinks or np.isneginf(clean[1][empty]).all()
    arrays[0][empty, 4, 5] = np.nan
    assert_same_bits(run(problem, arrays), clean)


@pytest.mark.parametrize("key", [5, 66])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_value_that_is_nan_shows_where_the_score_of_its_key_is_minus_infinity(dtype: Any, key: int) -> None:
    """In tiles with a mask as in others: it has the weight 0 and is seen."""
    q, k, v = (np.ones((1, n, 1, 64), dtype) for n in (9, 70, 70))
    k[0, key] = 0
    k[0, key, 0, 3] = -np.inf
    v[0, key, 0, 7] = np.nan
    out, _ = product.prefill_arrays(q, k, v, causal=True)
    want = reference.prefill(q, k, v, causal=True)
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), np.isnan(want))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("which", "size"), [(0, np.inf), (1, np.inf), (1, -np.inf), (1, 3.4028e38), (2, 3.4028e38)])
def test_floats_that_are_no_sum_of_two_parts_have_their_products(which: int, size: float, *, causal: bool) -> None:
    """Infinities, and floats that round to one where 11 bits are kept."""
    arrays = [np.random.default_rng(which).random((1, n, 1, 64), np.float32) * 1e-3 for n in (9, 70, 70)]
    arrays[which][0, 5, 0, 3] = size
    options = {"causal": causal, "softcap": 5.0 if which == 1 else None}
    got = product.prefill_arrays(*arrays, **options)
    want = reference.prefill(*arrays, **options, return_lse=True)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=of_positive_sums(70))


def test_sums_of_many_keys_in_floats_do_not_drift() -> None:
    """As they would in accumulators that cut off. Without scores the law knows no other error."""
    problem = replace(SINGLE, seqlens=((3, 3000),), num_kv_heads=1, group=1, q_layout="dense", kv_layout="dense")
    q, k, v = problem.arrays()
    v = np.abs(v)
    options = problem.options() | {"softmax_scale": 0.0}
    assert_prefill_call((q, k, v), options, run(problem, (q, k, v), num_splits=1, **options))
    patch = ("common/products32.cuh", "(sum[r], a.hi, b.hi)", "(o[r][d], a.hi, b.hi)")
    drifted = run(problem, (q, k, v), num_splits=1, patches=(patch,), **options)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_prefill_call((q, k, v), options, drifted)


@pytest.mark.parametrize("some", [1, 5])
def test_norms_below_zero_are_norms(some: int) -> None:
    """No encoder writes them; the format has them."""
    problem = replace(CODES, causal=True, values="normal")
    q, k, v = problem.arrays()
    for cache in (k, v):
        cache.norms[::some] *= -1
    assert_prefill_call((q, k, v), problem.options(), product.prefill_arrays(q, k, v, **problem.options()))


# Norms and queries at the ends of their range


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_largest_norms_of_values_do_not_overflow(dtype: str) -> None:
    """Scores that grow by less than the softmax follows: weights of up to 2^7, times 65504, in float16 operands."""
    head_dim = {"float16": 64, "bfloat16": 128}[dtype]
    problem = replace(CODES, seqlens=((40, 300),), group=1, num_kv_heads=1, head_dim=head_dim, dtype=dtype,
                      means=False, values="equal")  # fmt: skip
    q, k, v = problem.arrays()
    # Equal keys with norms that grow: scores from 0 to at most 4.4, that is 6.4 in base-2 units.
    scores = np.einsum("qhd,d->qh", q.astype(np.float32), reference.dequantize(k.codes, k.norms)[0, 0])
    grow = np.linspace(0, 1, 300)[:, None, None] * k.norms.astype(np.float64)
    k = changed(k, norms=grow.astype(np.float16))
    v = changed(v, norms=np.full_like(v.norms, 65504))
    options = problem.options() | {"softmax_scale": float(4.4 / np.abs(scores).max())}
    out, lse = run(problem, (q, k, v), **options)
    assert np.isfinite(out.astype(np.float64)).all()
    assert_prefill_call((q, k, v), options, (out, lse))


@pytest.mark.parametrize("scale", [1e-16, 6e-8, 1e-4, 6e4, 1e16])
@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 64), ("bfloat16", 128)])
def test_queries_of_any_size_are_rotated_without_loss(dtype: str, head_dim: int, scale: float) -> None:
    problem = replace(CODES, dtype=dtype, head_dim=head_dim, seqlens=((9, 40),))
    q, k, v = problem.arrays()
    with np.errstate(over="ignore"):
        q = (np.sign(q.astype(np.float32)) * scale).astype(DTYPES[dtype])
    if not np.isfinite(q.astype(np.float32)).all() or not q.any():
        pytest.skip(reason=f"{dtype} has no {scale}")
    options = problem.options() | {"softmax_scale": head_dim**-0.5 / scale}
    assert_prefill_call((q, k, v), options, run(problem, (q, k, v), **options))
