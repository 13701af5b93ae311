"""prefill_mma.cu with keys that are cut into splits, and merge.cu, on the CPU harness."""

from dataclasses import replace
from itertools import cycle
from itertools import product as combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simt import product
from simt.prefill_cases import (
    BASE,
    CODES,
    SMALL,
    SMALL_TBQ4,
    assert_same_bits,
    changed,
    check,
    every_format,
    run,
    small,
)
from strategies import PrefillProblem
from tolerance import assert_prefill_call

from cuattn import reference

NUMS = (2, 3, 8)
NAMES = ("k_format", "v_format", "dtype", "head_dim", "value_dim")
# Fewer keys than query tokens, none, one, and more; the tokens of the first see from 11 to 50.
PADDED = ((40, 50), (40, 0), (40, 1), (40, 150))


def dense(base: PrefillProblem, **fields: Any) -> PrefillProblem:
    return replace(base, q_layout="dense", **{"seqlens": PADDED, "kv_layout": "padded", "causal": True, **fields})


@pytest.mark.parametrize(("choice", "num_splits"), list(zip((*SMALL, *SMALL_TBQ4), cycle(NUMS))), ids=str)
def test_any_number_of_splits_obeys_the_error_law(choice: tuple[Any, ...], num_splits: int) -> None:
    """Of rows without a key, of splits without a tile, and with a sink, which counts once."""
    fields = dict(zip(NAMES, choice, strict=True))
    problem = dense(BASE, **fields, means="tbq4" in choice, sinks=True, num_kv_heads=1)
    check(problem, num_splits=num_splits, seed=num_splits)
    more = {"causal": False, "window": (37, 3), "kv_layout": "paged", "page_size": 5, "values": "rising"}
    check(replace(problem, **more), num_splits=num_splits, seed=2)


@pytest.mark.parametrize("values", ["late_max", "huge", "equal", "tiny_v"])
@every_format
def test_splits_of_unusual_scores_obey_the_error_law(base: PrefillProblem, values: str) -> None:
    for softcap in (None, 0.5):
        check(dense(base, values=values, softcap=softcap, num_kv_heads=1), num_splits=3)


def test_no_sequence_and_no_key_in_splits() -> None:
    q, k = np.zeros((2, 5, 6, 64), np.float16), np.zeros((2, 0, 2, 64), np.float16)
    out, lse = product.prefill_arrays(q, k, k, num_splits=3)
    assert not out.any()
    assert np.isneginf(lse).all()
    out, lse = product.prefill_arrays(q[:0], k[:0], k[:0], num_splits=3)
    assert (out.shape, lse.shape) == ((0, 5, 6, 64), (0, 5, 6))


@given(
    tokens=st.integers(1, 40),
    keys=st.integers(0, 150),
    num_splits=st.integers(2, 12),
    causal=st.booleans(),
    window=st.none() | st.tuples(st.integers(0, 70), st.none() | st.integers(0, 20)),
    choice=st.sampled_from(((*("raw16",) * 2, "float16", 64, None), (*("raw32",) * 2, "float32", 64, None))),
)
@settings(max_examples=25)
def test_splits_cover_the_visible_keys_exactly_once(
    tokens: int, keys: int, num_splits: int, window: Any, choice: tuple[Any, ...], *, causal: bool
) -> None:
    """With a scale of 0 each key weighs 1, and with v = (position, 1, ...) the sums are those of a range."""
    q, k, v = (np.ones((1, n, 1, 64), choice[2]) for n in (tokens, keys, keys))
    v[0, :, 0, 0] = np.arange(keys) % 64
    parts, state = product.prefill_arrays(
        q, k, v, causal=causal, window=window, softmax_scale=0.0, num_splits=num_splits, merge=False,
        changes=SMALL[choice],
    )  # fmt: skip
    position, key = np.arange(tokens)[:, None] + keys - tokens, np.arange(keys)
    left, right = window or (None, None)
    sees = np.ones((tokens, keys), bool)
    if left is not None:
        sees &= key >= position - left
    if causal or right is not None:
        sees &= key <= position + (0 if causal else right)
    tile = small(PrefillProblem(((1, 1),), **dict(zip(NAMES, choice, strict=True))))["tile_kv"]
    counts = np.maximum(state[:, 0, :, 0, 1], 0).astype(int)
    np.testing.assert_array_equal(counts.sum(axis=0), sees.sum(axis=1))
    for row, visible in enumerate(map(np.flatnonzero, sees)):
        chunks = np.split(visible, np.cumsum(counts[:, row])[:-1])
        for part, chunk in zip(parts[:, 0, row, 0], chunks, strict=True):
            if len(chunk):
                assert part[0] == (chunk % 64).sum()  # exact: sums of small integers
                assert (part[1:] == len(chunk)).all()
                assert chunk[0] % tile == 0 or chunk[0] == visible[0]


@pytest.mark.parametrize("sinks", [False, True])
@every_format
def test_an_empty_part_is_marked_by_its_state_alone(base: PrefillProblem, *, sinks: bool) -> None:
    """Only the sink of the first part has a weight where there are no keys."""
    problem = dense(base, seqlens=((40, 0), (40, 5), (40, 20)), sinks=sinks)
    parts, state = run(problem, num_splits=4, merge=False)
    assert np.isfinite(state[..., 1]).all()
    empty = np.broadcast_to(np.float32([-np.inf, -1]), state.shape)
    # All keys are in the first two tiles, and so are the parts.
    np.testing.assert_array_equal(state[2:], empty[2:])
    np.testing.assert_array_equal(state[1:, :2], empty[1:, :2])
    of_sink = problem.options()["sinks"] > -np.inf if sinks else np.zeros(6, bool)
    np.testing.assert_array_equal(state[0, 0, :, ~of_sink], empty[0, 0, :, ~of_sink])
    assert (state[0, 0, :, of_sink, 1] == 1).all()
    assert not parts[0, 0].any()
    patch = ("common/prefill_epilogue.cuh", "l == 0.f && max(keys.lo, w.lo)", "l < 0.f && max(keys.lo, w.lo)")
    _, unmarked = run(problem, num_splits=4, merge=False, patches=(patch,))
    assert (unmarked[2:, ..., 1] == 0).all()


def test_splits_do_not_lose_the_precision_that_an_lse_would() -> None:
    """Scores of 1e5 that are exact, whose lse has an ulp of 2^-7: parts have weights of their states."""
    q, k = np.full((1, 3, 1, 64), 100, np.float16), np.full((1, 600, 1, 64), 130, np.float16)
    v = np.zeros_like(k)
    v[:, :320] = 1
    want, _ = product.prefill_arrays(q, k, v)
    for num_splits in NUMS:
        out, lse = product.prefill_arrays(q, k, v, num_splits=num_splits)
        assert (out == want).all(), num_splits
        # The scores are exact; m, the logarithm and their sum are rounded once each, and so is the product with ln 2.
        four_roundings = 4 * 2.0**-24
        np.testing.assert_allclose(lse, 104000 + np.log(600), rtol=four_roundings)


@pytest.mark.parametrize("num_splits", [2, 8])
@every_format
def test_neither_the_schedule_nor_the_layout_changes_a_bit_of_splits(base: PrefillProblem, num_splits: int) -> None:
    problem = dense(base, seqlens=((20, 130),) * 2, kv_layout="dense", sinks=True)
    want = run(problem, num_splits=num_splits)
    for seed in (1, 2, 3):
        assert_same_bits(run(problem, num_splits=num_splits, seed=seed), want, seed)
    for kv_layout, size in (("ragged", 1), ("padded", 1), ("paged", 3), ("paged", 64)):
        got = run(replace(problem, kv_layout=kv_layout, page_size=size), num_splits=num_splits)
        assert_same_bits(got, want, (kv_layout, size))


@pytest.mark.parametrize(("given_len", "used_len"), [(150, 150), (33, 33), (2**31 - 1, 150), (-3, 0)])
@every_format
def test_splits_follow_lengths_on_the_device(base: PrefillProblem, given_len: int, used_len: int) -> None:
    problem = dense(base, seqlens=((20, 150),), kv_layout="dense")
    want = run(problem, kv_len=[used_len], num_splits=3)
    got = run(problem, kv_len=[20], device_lengths={"kv_len": np.array([given_len], np.int32)}, num_splits=3)
    assert_same_bits(got, want)
    assert_prefill_call(problem.arrays(), problem.options() | {"kv_len": [used_len]}, got)


@pytest.mark.parametrize("num_splits", [2, 8])
@pytest.mark.parametrize(("bad", "window"), [(np.nan, None), (np.inf, (3, None))], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_value_that_is_not_finite_shows_in_the_rows_that_see_it_and_in_no_other(
    dtype: str, window: Any, bad: float, num_splits: int
) -> None:
    """Also in tiles with a mask, whichever split they are of."""
    kv_format = "raw32" if dtype == "float32" else "raw16"
    problem = dense(
        BASE, seqlens=((9, 70), (9, 71)), dtype=dtype, k_format=kv_format, v_format=kv_format, window=window
    )
    q, k, v = problem.arrays()
    for key, which in combinations((5, 61, 66, 69), "kv"):  # the tokens of the first sequence stand at 61 to 69
        spoiled = {"k": k.copy(), "v": v.copy()}
        spoiled[which][0, key, 1, 5] = bad if which == "v" else np.nan
        arrays = (q, *spoiled.values())
        out, lse = run(problem, arrays, num_splits=num_splits)
        sees = np.zeros(out.shape, bool)
        rows = slice(max(0, key - 61), None if window is None else max(0, key - 61 + 4))
        sees[0, rows, 3:, 5 if which == "v" else slice(None)] = True
        np.testing.assert_array_equal(~np.isfinite(out.astype(np.float32)), sees)
        np.testing.assert_array_equal(np.isnan(lse), sees.all(axis=-1))
        assert_prefill_call(arrays, problem.options(), (out, lse))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_norm_that_is_not_finite_is_seen_by_the_rows_that_see_its_token(value: float) -> None:
    problem = dense(CODES, seqlens=((20, 50),))
    q, k, v = problem.arrays()
    for token, which in combinations((0, 15, 35, 48), "kv"):
        norms = (k if which == "k" else v).norms.copy()
        norms[0, token, 1, -1] = value
        arrays = (q, changed(k, norms=norms), v) if which == "k" else (q, k, changed(v, norms=norms))
        out, lse = run(problem, arrays, num_splits=3)
        sees = np.zeros(lse.shape, bool)
        sees[0, max(0, token - 30) :, 3:] = True
        np.testing.assert_array_equal(~np.isfinite(out), sees[..., None].repeat(64, axis=-1))
        np.testing.assert_array_equal(np.isnan(lse), sees & (which == "k"))
        assert_prefill_call(arrays, problem.options(), (out, lse))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_value_that_is_nan_shows_where_no_key_of_its_part_has_a_finite_score(dtype: Any, num_splits: int) -> None:
    q, k, v = (np.ones((1, n, 1, 64), dtype) for n in (9, 256, 256))
    k[0, :128] = 0
    k[0, :128, 0, 3] = -np.inf
    v[0, 5, 0, 7] = np.nan
    out, _ = product.prefill_arrays(q, k, v, num_splits=num_splits)
    want = reference.prefill(q, k, v)
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)), np.isnan(want))
