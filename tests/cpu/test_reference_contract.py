"""The numerical contract on its edges: sinks, empty rows, NaN, merging, and the same-precision yardstick."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import strategies
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import DTYPES, Problem
from tolerance import LOG2_E, assert_decode, assert_law, expected, score_magnitude, ulp

from cuattn import reference
from cuattn.reference.tensor_core import truncate_to_float32

problems = partial(
    strategies.problems,
    lengths=strategies.lengths(6),
    head_dims=(4, 20, 48),
    groups=(1, 2, 3),
    kv_heads=(1, 2),
    page_sizes=(None, 4),
)
Spoil = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
nonempty = strategies.lengths(6).filter(bool)


def decode_online(problem: Problem, dtype: type, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Decode tile by tile from the last tile to the first, as a kernel might, in `dtype`."""
    problem = replace(problem, page_size=None)
    q, k, v, kv_len = problem.arrays()
    tiles = [(a, min(a + tile, k.shape[1])) for a in range(0, k.shape[1], tile)][::-1]
    tokens = q if q.ndim == 4 else q[:, None]
    out, lse = reference.online_softmax(tokens, k, v, tiles, kv_len=kv_len, **problem.options(), dtype=dtype)
    out, lse = out.astype(q.dtype), lse.astype(np.float32)
    return (out, lse) if q.ndim == 4 else (out[:, 0], lse[:, 0])


def test_a_drawn_window_keeps_both_ends() -> None:
    """The picture in the docstring, and the bounds that None and -1 do not set."""
    see = partial(reference.visible_keys, seqlen_q=2, kv_len=4)
    assert [see(i, causal=True, window=None) for i in (0, 1)] == [(0, 3), (0, 4)]
    assert [see(i, causal=False, window=(1, 0)) for i in (0, 1)] == [(1, 3), (2, 4)]
    assert [see(i, causal=False, window=(0, -1)) for i in (0, 1)] == [(2, 4), (3, 4)]
    assert [see(i, causal=False, window=(None, 0)) for i in (0, 1)] == [(0, 3), (0, 4)]
    assert [reference.visible_keys(i, 3, 1, causal=True, window=None) for i in (0, 1, 2)] == [(0, 0), (0, 0), (0, 1)]


@given(problem=problems(causal=(False,), windows=st.none(), softcaps=(None,), groups=(1,), page_sizes=(None,)))
def test_a_sink_is_one_more_key_with_value_zero(problem: Problem) -> None:
    """The key is built: one more element of head_dim carries its score."""
    q, k, v, kv_len = problem.arrays()
    q, k, v = (x.astype(float) for x in (q[:, None] if q.ndim == 3 else q, k, v))
    scale = problem.head_dim**-0.5
    sinks = np.random.default_rng(problem.seed).standard_normal(problem.num_qo_heads)
    want = reference.attention(q, k, v, kv_len=kv_len, sinks=sinks)
    q = np.concatenate([q, np.ones((*q.shape[:-1], 1))], axis=-1)
    k = np.concatenate([k, np.zeros((*k.shape[:-1], 1))], axis=-1)
    for b, length in enumerate(kv_len):
        k[b, length], v[b, length] = 0, 0
        k[b, length, :, -1] = sinks / scale
    got = reference.attention(q, k, v, kv_len=kv_len + 1, softmax_scale=scale)
    for g, w in zip(got, want, strict=True):
        # Scores of up to 1e5 in float64, whose roundings weights amplify.
        np.testing.assert_allclose(g, w, rtol=1e-13, atol=1e-9)  # ulp(1e5) = 1.5e-11


def test_a_row_with_only_a_sink_is_zero_and_its_lse_is_the_sink() -> None:
    """And a sink of -inf is no sink."""
    q, empty = np.ones((1, 1, 2, 4)), np.ones((1, 0, 2, 4))
    sinks = np.array([1.5, -np.inf], np.float32)
    tiled = partial(reference.online_softmax, tiles=[(0, 0)])
    for attend in (reference.attention, tiled, reference.attention_same_precision):
        out, lse = attend(q.astype(np.float16), empty.astype(np.float16), empty.astype(np.float16), sinks=sinks)
        np.testing.assert_array_equal(out, np.zeros_like(out))
        np.testing.assert_allclose(lse[0, 0], sinks, rtol=1e-6)  # one of the three is float32
    key = np.ones((1, 3, 2, 4))
    with_sinks, without = (reference.attention(q, key, key, sinks=x) for x in (sinks, None))
    assert with_sinks[1][0, 0, 1] == without[1][0, 0, 1]
    assert with_sinks[1][0, 0, 0] > without[1][0, 0, 0]


@given(
    problem=problems(lengths=nonempty, values=("normal", "late_max")),
    in_key=st.booleans(),
    place=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 3),
    bad=st.sampled_from((np.nan, np.inf)),
)
# The newest token is seen by the last query alone, so its value stands hidden among visible ones.
@example(problem=Problem((9,), seqlen_q=5, head_dim=4), in_key=False, place=(0, 0.99, 0), bad=np.nan)
def test_nan_in_a_visible_key_stays_visible_and_a_hidden_one_does_not_leak(
    problem: Problem, *, in_key: bool, place: tuple[float, ...], bad: float
) -> None:
    """In k it reaches every row that sees the key; in v it reaches one column of them."""
    problem = replace(problem, page_size=None)
    q, k, v, kv_len = problem.arrays()
    q = q if q.ndim == 4 else q[:, None]
    b = int(place[0] * len(kv_len))
    key, kv_head = int(place[1] * kv_len[b]), int(place[2] * problem.num_kv_heads)
    heads = slice(kv_head * problem.group, (kv_head + 1) * problem.group)
    options = {**problem.options(), "kv_len": kv_len}
    tiles = [(a, min(a + 7, k.shape[1])) for a in range(0, k.shape[1], 7)]
    attends = (reference.attention, partial(reference.online_softmax, tiles=tiles), reference.attention_same_precision)
    clean = [attend(q, k, v, **options) for attend in attends]
    (k if in_key else v)[b, key, kv_head, 1] = np.nan if in_key else bad
    hit = np.zeros(clean[0][1].shape, bool)
    for i in range(problem.seqlen_q):
        start, stop = reference.visible_keys(
            i, problem.seqlen_q, int(kv_len[b]), causal=problem.causal, window=problem.window
        )
        hit[b, i, heads] = start <= key < stop
    for attend, (clean_out, clean_lse) in zip(attends, clean, strict=True):
        out, lse = attend(q, k, v, **options)
        # The yardstick takes rows one by one beside a NaN, and sums in another order; float64 repeats its bits.
        is_yardstick = attend is reference.attention_same_precision
        close = {"rtol": 0.05, "atol": 0.01} if is_yardstick else {"rtol": 0, "atol": 0}
        if in_key:
            assert np.isnan(out[hit]).all()
            assert np.isnan(lse[hit]).all()
        else:
            assert not np.isfinite(out[hit][:, 1]).any()
            np.testing.assert_allclose(lse, clean_lse, **close)
            others = (np.delete(x[hit], 1, axis=-1).astype(float) for x in (out, clean_out))
            np.testing.assert_allclose(*others, **close)
        np.testing.assert_allclose(out[~hit].astype(float), clean_out[~hit].astype(float), **close)
        np.testing.assert_allclose(lse[~hit], clean_lse[~hit], **close)


@given(
    lse=st.lists(st.sampled_from((-np.inf, 0.0, 1e4, -1e4, 3.0)), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
@example(lse=[-np.inf, -np.inf], seed=0)
def test_a_part_without_keys_has_no_weight_whatever_it_holds(lse: list[float], seed: int) -> None:
    """NaN included; and parts that are all empty merge to an empty row."""
    lse_partial = np.array(lse)[:, None]
    out_partial = np.random.default_rng(seed).standard_normal((len(lse), 1, 3))
    empty = np.isneginf(lse_partial)
    out_partial[empty] = np.nan
    out, merged = reference.merge(out_partial, lse_partial)
    if empty.all():
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(merged, -np.inf)
    else:
        want = reference.merge(out_partial[~empty[:, 0]], lse_partial[~empty[:, 0]])
        np.testing.assert_allclose(out, want[0], rtol=1e-15, atol=1e-15)  # the same sums, zeros aside
        np.testing.assert_allclose(merged, want[1], rtol=1e-15)  # the same
        weights = np.exp(lse_partial - lse_partial.max())[~empty[:, 0]]
        mean = (weights[..., None] * out_partial[~empty[:, 0]]).sum(axis=0) / weights.sum()
        np.testing.assert_allclose(out, mean, rtol=1e-14, atol=1e-14)  # a few sums and a quotient of float64


def test_merge_keeps_nan_visible_and_gives_no_part_an_empty_row() -> None:
    """A NaN lse is an error somewhere before, and must not look like an empty part."""
    out, lse = reference.merge(np.ones((2, 2, 3)), np.array([[0.0, np.nan], [-np.inf, 0.0]]))
    np.testing.assert_array_equal(out, [[1, 1, 1], [np.nan] * 3])
    np.testing.assert_array_equal(lse, [0, np.nan])
    out, lse = reference.merge(np.ones((0, 2, 3)), np.ones((0, 2)))
    np.testing.assert_array_equal(out, np.zeros((2, 3)))
    np.testing.assert_array_equal(lse, [-np.inf] * 2)


def test_out_is_filled_in_its_own_dtype_and_returned() -> None:
    """For every function; a wrong shape is refused."""
    q, k, v, kv_len = Problem((5, 2), head_dim=4).arrays()
    out = np.full(q.shape, np.nan, np.float16)
    want = reference.decode(q, k, v, kv_len)
    assert reference.decode(q, k, v, kv_len, out=out) is out
    np.testing.assert_array_equal(out, want.astype(np.float16))
    out = np.full((2, 1, 1, 4), np.nan, np.float16)
    assert reference.prefill(q[:, None], k, v, kv_len=kv_len, out=out) is out
    np.testing.assert_array_equal(out[:, 0], want.astype(np.float16))
    merged = np.zeros((1, 1, 4), np.float32)
    assert reference.merge(out, np.zeros((2, 1, 1)), out=merged)[0] is merged
    np.testing.assert_allclose(merged[0, 0], out.astype(float).mean(axis=(0, 1, 2)), rtol=1e-6)  # stored in float32
    for call in (partial(reference.decode, q, k, v, kv_len), partial(reference.merge, out, np.zeros((2, 1, 1)))):
        with pytest.raises(ValueError, match="out must have shape"):
            call(out=np.zeros(3))
    with pytest.raises(ValueError, match="kv_len must lie in"):
        reference.decode(q, k, v, k.shape[1] + 1)
    assert reference.decode(q, k, v, 2, dtype=np.float32).dtype == np.float32


def test_truncation_is_toward_zero() -> None:
    """Exact values stay; anything between two float32 goes to the one nearer zero, also past the largest."""
    step = 2.0**-23
    x = np.array([1, 1 + 0.9 * step, -1 - 0.9 * step, 1 - 0.1 * step, 0.0, 1e300, -np.inf, np.nan])
    with np.errstate(over="ignore"):
        got = truncate_to_float32(x)
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(got, np.float32([1, 1, -1, 1 - step / 2, 0, largest, -np.inf, np.nan]))


@given(problem=problems(lengths=st.just(1), seqlens_q=(1,), windows=st.none(), sinks=(False,)))
def test_one_key_is_returned_exactly_in_the_same_precision(problem: Problem) -> None:
    """Its weight is 1, so no rounding is left."""
    out, lse = reference.decode_same_precision(*problem.arrays(), **problem.options(), return_lse=True)
    assert out.dtype == DTYPES[problem.dtype]
    assert lse.dtype == np.float32
    for b, (_, _, v) in enumerate(problem.sequences()):
        np.testing.assert_array_equal(out[b], np.repeat(v[0], problem.group, axis=0))


@given(problem=problems())
def test_the_same_precision_result_is_within_its_roundings_of_float64(problem: Problem) -> None:
    """A bound from the sizes alone.

    With u the half ulp of 1 in 16 bit and e = 2^-23 the step of float32: a score in base-2 units errs by at most e
    times the sum of its products' magnitudes for each of head_dim / 16 truncations, once for the constant and the
    product with it, once for the difference with the maximum, and with a softcap by a few e of the cap. Call that s; a
    weight errs by the factor 2^s, its quotient with the sum by 2^2s. Rounding the weight costs u (or half the smallest
    float16, per key), the sums over n keys (n + n / 16) e, rounding the result u.
    """
    want = expected(problem)
    dtype = DTYPES[problem.dtype]
    u, e = ulp(1.0, dtype) / 2, 2.0**-23
    for b, (q, k, v) in enumerate(problem.sequences()):
        # Without the random walk that `score_magnitude` counts in: this bound has the worst case instead.
        magnitude = score_magnitude(q, k) / np.sqrt(max(1, problem.head_dim / 16))
        s = magnitude * (-(-problem.head_dim // 16) + 4) * e + 8 * e * LOG2_E * (problem.softcap or 0)
        n = len(k)
        relative = (2.0 ** (2 * s) - 1) + 2 * u + 2 * e * (n + 8) + n * 2.0**-25
        largest = np.abs(v.astype(float)).max(initial=0.0)
        out, ref = want.same[0][b].astype(float), want.ref[0][b]
        assert np.abs(out - ref).max() <= 1.01 * relative * largest
        seen = np.isfinite(want.ref[1][b])
        np.testing.assert_array_equal(np.isneginf(want.same[1][b]), ~seen)
        same_lse, ref_lse = (x[1][b][seen].astype(float) for x in (want.same, want.ref))
        bound = s + e * (n + 8 + 4 * np.abs(ref_lse).max(initial=0.0))
        assert np.abs(same_lse - ref_lse).max(initial=0.0) <= bound


@given(problem=problems(dtypes=("bfloat16",), values=("normal", "late_max", "equal")))
def test_the_law_accepts_another_order_of_float32_sums(problem: Problem) -> None:
    """Tiles from the last to the first, natural exponentials, and weights that are not rounded."""
    assert_decode(problem, *decode_online(problem, np.float32, 16))


CASE = Problem((64, 37), seqlen_q=2, num_kv_heads=2, group=2, head_dim=32, window=(20, 0), softcap=5.0, sinks=True)
WRONG = {
    "window one too wide": {"window": (21, 0)},
    "window one too narrow": {"window": (19, 0)},
    "no causal mask": {"causal": False, "window": (20, 1)},
    "no softcap": {"softcap": None},
    "no sinks": {"sinks": None},
    "another scale": {"softmax_scale": 1.1 * 32**-0.5},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_the_law_rejects_another_problem(wrong: dict, dtype: str) -> None:
    """Each in out by itself and in lse by itself; the right options pass."""
    problem = replace(CASE, dtype=dtype)
    want = expected(problem)
    assert_decode(problem, *want.same)
    out, lse = reference.decode_same_precision(*problem.arrays(), **problem.options() | wrong, return_lse=True)
    for got in ((out, want.same[1]), (want.same[0], lse)):
        with pytest.raises(AssertionError, match=r"exceeds(.|\n)*Problem\("):
            assert_decode(problem, *got)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda out, lse: (out, lse * np.float32(LOG2_E)), "exceeds"),
        (lambda out, lse: (out + out.dtype.type(0.01), lse), "exceeds|must be zero"),
        (lambda out, lse: (np.where(np.arange(64) == 5, np.nan, out).astype(out.dtype), lse), "NaN in other places"),
        (lambda out, lse: (out, np.where(np.isneginf(lse), np.inf, lse).astype(np.float32)), "inf in other places"),
        (lambda out, lse: (out.astype(np.float32), lse), "out must be float16"),
        (lambda out, lse: (out, lse[:1]), "lse must be float32"),
    ],
    ids=["lse in base 2", "offset", "NaN", "empty row", "dtype", "shape"],
)
def test_the_law_rejects_a_spoiled_result(spoil: Spoil, message: str) -> None:
    """Places first, then values."""
    problem = Problem((30, 0))
    with pytest.raises(AssertionError, match=message):
        assert_decode(problem, *spoil(*expected(problem).same))


def test_ulp_and_the_law_are_those_of_the_dtype() -> None:
    """Written down for the three formats, subnormal numbers included."""
    assert ulp(1.0, np.float16) == 2.0**-10
    assert ulp(1.99, DTYPES["bfloat16"]) == 2.0**-7
    assert ulp(-4.0, np.float32) == 2.0**-21
    assert ulp(0.0, np.float16) == ulp(1e-7, np.float16) == 2.0**-24
    one = np.ones(3)
    assert_law(one + 2.0**-10, one, one, dtype=np.float16)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_law(one + 2.1 * 2.0**-10, one, one, dtype=np.float16)
