"""decode.cu and append.cu on the CPU harness with K, V or both in fp8."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import strategies
from fp8_codes import NANS, NUMBERS, TOKENS, ZERO, all_codes, all_pairs, assert_codes, values_to_encode, without_nan
from hypothesis import given
from hypothesis import strategies as st
from simt import product
from strategies import DTYPES, AppendProblem, Problem, with_unused
from tolerance import assert_call, assert_decode

from cuattn import Fp8Array, reference

BOTH = Problem((131, 0, 37), num_kv_heads=2, group=2, head_dim=128, k_format="fp8", v_format="fp8")
# Each query token sees its own key; parts in float32.
NEWEST = {"window": (0, 0), "num_splits": 2, "merge": False}
# As GPUs from Ada on convert, and as those before them do.
BITS = ("common/e4m3.cuh", "if constexpr (ptx::CONVERTS_E4M3) {\n    ptx", "if constexpr (false) {\n    ptx")
ROUNDING = (BITS[0], "if constexpr (ptx::CONVERTS_E4M3) {\n    return", "if constexpr (false) {\n    return")
# Each is a build of its own: CI has K and V in fp8, and each of them beside another format.
CHOICES = strategies.FP8_CHOICES[:: 2 if os.environ.get("HYPOTHESIS_PROFILE") == "ci" else 1]
both_ways = pytest.mark.parametrize("patches", [(), (BITS,)], ids=["instruction", "bits"])


def assert_same_bits(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()


@given(
    problem=strategies.fp8_problems(CHOICES, batch_max=2, groups=(1, 3, 4), seqlens_q=(1, 2)),
    num_splits=st.integers(1, 5),
    seed=st.integers(0, 5),
)
def test_any_problem_obeys_the_error_law_under_any_schedule(problem: Problem, num_splits: int, seed: int) -> None:
    assert_decode(problem, *product.decode(problem, num_splits=num_splits, seed=seed))


@pytest.mark.parametrize(("head_dim", "group"), [(96, 2), (192, 12), (256, 2), (512, 12)])
def test_every_other_head_dim_obeys_the_error_law(head_dim: int, group: int) -> None:
    """One row tile, two, and the rows of a CTA and some of another."""
    problem = replace(BOTH, head_dim=head_dim, group=group, page_size=5, sinks=True, window=(60, None), seed=head_dim)
    assert_decode(problem, *product.decode(problem, num_splits=2, seed=1))
    problem = replace(problem, seqlen_q=3, values="late_max", page_size=None)
    assert_decode(problem, *product.decode(problem, num_splits=3, seed=2))


def test_a_group_of_64_and_16_query_tokens_fill_several_row_blocks() -> None:
    problem = replace(BOTH, kv_len=(45,), seqlen_q=16, group=64, num_kv_heads=1, head_dim=64, window=(20, None))
    assert_decode(problem, *product.decode(problem, num_splits=2, seed=1))


# Codes


def test_scores_of_one_hot_queries_are_the_numbers_of_all_codes() -> None:
    head_dim = 64
    codes = without_nan(all_codes(head_dim))
    k, v = Fp8Array(codes, 0.25), Fp8Array(np.zeros_like(codes))
    q = np.tile(np.eye(head_dim, dtype=np.float16), (len(codes), TOKENS, 1, 1))
    # In base-2 units, so that the maximum of the softmax is the score.
    _, states = product.decode_arrays(q, k, v, TOKENS, **NEWEST, softmax_scale=float(np.log(2)))
    np.testing.assert_array_equal(states[0, ..., 1], 1)
    np.testing.assert_array_equal(states[0, ..., 0], NUMBERS[codes[:, :, 0]] * 0.25)


@both_ways
def test_values_of_one_hot_weights_are_the_numbers_of_all_pairs_of_codes(patches: Any) -> None:
    codes = without_nan(all_pairs(128))
    q = np.ones((len(codes), TOKENS, 1, 128), np.float16)
    k, v = Fp8Array(np.zeros_like(codes)), Fp8Array(codes, np.array([4], np.float32))
    parts, states = product.decode_arrays(q, k, v, TOKENS, **NEWEST, patches=patches)
    np.testing.assert_array_equal(states[0, ..., 1], 1)
    np.testing.assert_array_equal(parts[0, :, :, 0], NUMBERS[codes[:, :, 0]] * 4)


@both_ways
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_nan_is_seen_by_the_rows_that_see_its_token(seqlen_q: int, patches: Any) -> None:
    """In K by all of a row, in V by its element; both codes, in operands and where keys are added one by one."""
    group = 12 // seqlen_q  # two row tiles
    problem = replace(BOTH, kv_len=(300, 300, 7), seqlen_q=seqlen_q, group=group)
    q, k, v, kv_len = problem.arrays()
    clean = product.decode_arrays(q, k, v, kv_len)
    places = ((0, 0x7F, "k"), (150, 0xFF, "v"), (298, 0x7F, "v"), (299, 0xFF, "k"), (299, 0xFF, "v"))
    for token, code, which in places:
        spoiled = (k if which == "k" else v).codes.copy()
        spoiled[1, token, 1, 37] = code
        caches = (Fp8Array(spoiled, k.scale), v) if which == "k" else (k, Fp8Array(spoiled, v.scale))
        out, lse = product.decode_arrays(q, *caches, kv_len, patches=patches)
        sees = np.zeros(out.shape, bool)
        sees[1, max(0, token - 300 + seqlen_q) :, group:, slice(None) if which == "k" else 37] = True
        np.testing.assert_array_equal(np.isnan(out), sees)
        np.testing.assert_array_equal(np.isnan(lse), sees[..., 0] & (which == "k"))
        if seqlen_q == 1:
            elsewhere = ~sees.any(axis=-1)
            assert_same_bits((out[elsewhere], lse[elsewhere]), (clean[0][elsewhere], clean[1][elsewhere]))
        else:
            assert_call((q, *caches, kv_len), {}, (out, lse))


@pytest.mark.parametrize("code", [0, 0x7E, 0xFF])
def test_what_lies_where_no_token_is_never_shows(code: int) -> None:
    problem = replace(BOTH, page_size=16, num_sink=3, num_recent=7, seqlen_q=2)
    q, k, v, kv_len = problem.arrays()
    want = product.decode_arrays(q, k, v, kv_len, **problem.options())
    caches = [with_unused(x, code, 0) for x in (k, v)]
    assert_same_bits(product.decode_arrays(q, *caches, kv_len, **problem.options()), want)


# Scales and queries


def test_a_scale_of_all_heads_is_that_of_each() -> None:
    q, k, v, kv_len = BOTH.arrays()
    k, v = (Fp8Array(x.codes, 0.03) for x in (k, v))
    each = [Fp8Array(x.codes, np.full(2, 0.03, np.float32)) for x in (k, v)]
    assert_same_bits(product.decode_arrays(q, *each, kv_len), product.decode_arrays(q, k, v, kv_len))


def test_scales_of_keys_multiply_scores_and_scales_of_values_the_output() -> None:
    """Powers of two, of each head another."""
    q, k, v, kv_len = BOTH.arrays()
    powers, of_queries = np.array([4, 2], np.float32), np.array([4, 4, 2, 2], np.float16)[:, None]
    out, lse = product.decode_arrays(q, k, v, kv_len)
    of_values = product.decode_arrays(q, k, Fp8Array(v.codes, v.scale * powers), kv_len)
    assert_same_bits(of_values, (out * of_queries, lse))
    of_keys = product.decode_arrays(q * of_queries, Fp8Array(k.codes, k.scale / powers), v, kv_len)
    assert_same_bits(of_keys, (out, lse))


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float16", 6e-8), ("float16", 6e4), ("bfloat16", 1e-16), ("bfloat16", 1e16)]
)
def test_queries_of_any_size_keep_their_bits(dtype: str, scale: float) -> None:
    q, k, v, kv_len = replace(BOTH, dtype=dtype).arrays()
    q = (np.sign(q.astype(np.float32)) * scale).astype(DTYPES[dtype])
    arrays, options = (q, k, v, kv_len), {"softmax_scale": 128**-0.5 / scale}
    out, lse = product.decode_arrays(*arrays, **options)
    assert_call(arrays, options, (out[:, 0], lse[:, 0]))


def test_an_infinite_value_of_a_query_leaves_large_ones_beside_it_finite() -> None:
    """Otherwise a score of minus infinity, which hides a key, would be NaN."""
    q = np.zeros((1, 1, 128), DTYPES["bfloat16"])
    q[..., 0], q[..., 1] = -np.inf, 1e30
    k = reference.quantize_fp8(np.ones((1, 3, 1, 128), np.float32))
    out, lse = product.decode_arrays(q, Fp8Array(*k), Fp8Array(*k), 3)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


# append


@pytest.mark.parametrize("patches", [(), (ROUNDING,)], ids=["instruction", "bits"])
def test_appended_values_are_rounded_to_nearest_even_and_saturate(patches: Any) -> None:
    x = values_to_encode()
    x = np.resize(x, (-(-len(x) // 64), 64))
    problem = AppendProblem(
        kv_len=(len(x),), seqlen_new=len(x), capacity=len(x), k_format="fp8", v_format="fp8", in_dtype="float32"
    )
    bases = problem.bases()
    bases["k_new"][0, :, 0] = x
    bases["k_scale"][:], bases["v_scale"][:] = 1, 0.125
    bases["v_new"][0, :, 0] = with_range = np.clip(x, -1e30, 1e30) * np.float32(0.125)
    got = product.append_arrays(problem, bases, patches=patches)
    assert_codes(got["k_codes"][0, :, 0], x)
    assert_codes(got["v_codes"][0, :, 0], with_range, 0.125)
    assert ZERO in got["k_codes"]
    assert np.isin(NANS, got["k_codes"]).any()


def test_quantize_fp8_encodes_rows_of_any_shape_and_strides() -> None:
    """More of them than the CTAs hold at once."""
    x = np.random.default_rng(0).standard_normal((3, 41, 2, 64)).astype(np.float32)
    scale = np.array([0.004, 0.02], np.float32)
    for rows in (x, x[0], x[0, 0], x[:, ::-2], x[::2].swapaxes(0, 1)):
        want = reference.quantize_fp8(rows, scale=scale).codes
        np.testing.assert_array_equal(product.quantize_fp8(rows, scale), want)
