"""decode.cu and merge.cu, the very files that a GPU runs, on the CPU harness."""

import os
from itertools import product as product_of
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simt import harness, product
from simt.faults import every
from strategies import DTYPES, Problem, lengths, problems
from tolerance import LSE_OF_TWO_ORDERS, assert_decode, assert_merge, of_positive_sums

from cuattn import _check, _plan, _segments, reference
from cuattn._plan import decode as plan_module

# A warp step is 32 keys, and a step of the whole CTA 256, in the configs drawn here.
STEP = 32
CTA_STEP = 256
SEEDS = st.integers(0, 5)
SPLITS = st.integers(1, 5)
# Rows of one KV head: one tile of 8 and, with several query tokens or a group of 8, up to four.
DRAWN = {"head_dims": (64, 128), "groups": (1, 3, 8), "page_sizes": (None, 16), "seqlens_q": (1, 2, 4), "batch_max": 2}
FLOATS = {"dtypes": ("float32",), "k_formats": ("raw32",), "v_formats": ("raw32",)}
SINGLE = {"dtype": "float32", "k_format": "raw32", "v_format": "raw32"}


@given(
    problem=st.one_of(problems(lengths=lengths(STEP) | lengths(CTA_STEP), **DRAWN, **more) for more in ({}, FLOATS)),
    num_splits=SPLITS,
    seed=SEEDS,
    asks_ahead=st.booleans(),
)
def test_decode_and_merge_obey_the_error_law_under_any_schedule(problem, num_splits, seed, asks_ahead):
    assert_decode(problem, *product.decode(problem, num_splits=num_splits, seed=seed, asks_ahead=asks_ahead))


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    every(list(product_of((96, 192, 256, 512), ({"dtype": "float16"}, {"dtype": "bfloat16"}, SINGLE))), 2),
    ids=lambda x: x["dtype"] if isinstance(x, dict) else x,
)
def test_every_head_dim_obeys_the_error_law(head_dim, dtype):
    for group, seqlen_q, num_splits in ((5, 1, 2), (12, 1, 1), (7, 3, 3)):
        problem = Problem(
            kv_len=(0, 131, 37), seqlen_q=seqlen_q, num_kv_heads=2, group=group, head_dim=head_dim, **dtype,
            page_size=5, sinks=True, window=(60, None), values="late_max",
        )  # fmt: skip
        assert_decode(problem, *product.decode(problem, num_splits=num_splits, seed=2))


@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_the_tiles_of_gpus_with_little_shared_memory_obey_the_error_law(head_dim):
    problem = Problem(kv_len=(131, 1), num_kv_heads=2, group=4, head_dim=head_dim, page_size=16, values="late_max")
    device = _plan.DEVICES["sm_86"]
    assert_decode(problem, *product.decode(problem, num_splits=2, seed=3, device=device))


@pytest.mark.parametrize(("page_size", "asks"), [(None, [1]), (16, [0])])
def test_the_kernel_is_told_to_ask_ahead_where_a_sequence_is_one_page(monkeypatch, page_size, asks):
    monkeypatch.setattr(plan_module, "_AHEAD_BYTES", -1)  # so that every call is a long one
    problem = Problem(kv_len=(200, 33), group=3, page_size=page_size)
    call = _check.decode(*problem.arrays(), **problem.options(), num_splits=1)
    found = _segments.segments(call, product.H200)
    launches = _segments.launches(
        call, found, out=np.empty(call.q.shape, call.q.dtype), lse=None, parts=None, states=None,
        kv_len=call.kv_len, sinks=None,
    )  # fmt: skip
    assert [int(params["asks_ahead"][0]) for _, params in launches] == asks


@given(seed=SEEDS)
@settings(max_examples=6)
def test_the_schedule_does_not_change_a_bit(seed):
    problem = Problem(kv_len=(200, 33), num_kv_heads=1, group=3, page_size=16, values="late_max", sinks=True)
    first, other = product.decode(problem, num_splits=2), product.decode(problem, num_splits=2, seed=seed)
    for a, b in zip(first, other, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_group_of_64_and_16_query_tokens_fill_several_row_blocks():
    problem = Problem(kv_len=(45,), seqlen_q=16, group=64, head_dim=64, window=(20, None))
    assert_decode(problem, *product.decode(problem, num_splits=2, seed=1))


def test_an_empty_split_is_marked_by_its_state_alone():
    problem = Problem(kv_len=(0, 5), group=3)
    out_partial, state = product.decode_arrays(*problem.arrays(), num_splits=4, merge=False)
    assert np.array_equal(state[1:], np.broadcast_to(np.float32([-np.inf, -1]), state[1:].shape))
    assert np.isnan(out_partial[1:]).all()  # not written, and merge reads none of it
    assert np.array_equal(state[0, 0, 0], [[-np.inf, 0]] * 3)
    assert not out_partial[0, 0].any()


@given(
    kv_len=st.integers(0, 1500),
    num_splits=st.integers(1, 12),
    window=st.none() | st.tuples(st.integers(0, 700), st.just(None)),
    head_dim=st.sampled_from((64, 128)),
)
@settings(max_examples=25)
def test_splits_cover_the_visible_keys_exactly_once(kv_len, num_splits, window, head_dim):
    """With a scale of 0 each key weighs 1, and with v = (position, 1, ...) the sums are those of a range."""
    visible = np.arange(0 if window is None else max(0, kv_len - 1 - window[0]), kv_len)
    q = np.ones((1, 1, head_dim), np.float16)
    k_cache = np.zeros((1, max(1, kv_len), 1, head_dim), np.float16)
    v_cache = np.ones_like(k_cache)
    v_cache[0, :, 0, 0] = np.arange(max(1, kv_len)) % 64
    parts, state = product.decode_arrays(
        q, k_cache, v_cache, kv_len, window=window, softmax_scale=0.0, num_splits=max(2, num_splits), merge=False
    )
    keys = np.maximum(state[:, 0, 0, 0, 1], 0).astype(int)
    assert keys.sum() == len(visible)
    chunks = np.split(visible, np.cumsum(keys)[:-1])
    for chunk, part in zip(chunks, parts[:, 0, 0, 0], strict=True):
        if len(chunk):
            assert part[0] == (chunk % 64).sum()  # exact: sums of small integers
            assert part[1] == len(chunk)


def test_splits_do_not_lose_the_precision_that_an_lse_would():
    """Scores of 1e5 that are exact, so that any number of splits must give the same weights."""
    q = np.full((1, 1, 64), 100, np.float16)
    k_cache = np.full((1, 600, 1, 64), 130, np.float16)
    v_cache = np.zeros_like(k_cache)
    v_cache[:, :320] = 1
    for num_splits in (1, 2, 3, 5):
        out, lse = product.decode_arrays(q, k_cache, v_cache, 600, num_splits=num_splits)
        assert (out == np.float16(320 / 600)).all(), num_splits
        assert lse[0, 0, 0] == pytest.approx(104000 + np.log(600), rel=2.0**-22)


@pytest.mark.parametrize(("given_len", "used_len"), [(99, 45), (2**31 - 1, 45), (-3, 0), (-(2**31), 0)])
def test_a_device_length_outside_of_the_cache_is_limited_to_it(given_len, used_len):
    problem = Problem(kv_len=(used_len,), group=2)
    q, k_cache, v_cache, _ = Problem(kv_len=(40,), group=2).arrays()  # capacity 45, the last five are NaN
    k_cache, v_cache = np.nan_to_num(k_cache), np.nan_to_num(v_cache)
    want = product.decode_arrays(q, k_cache, v_cache, np.array(problem.kv_len, np.int32))
    got = product.decode_arrays(
        q, k_cache, v_cache, np.array([20], np.int32), device_kv_len=np.array([given_len], np.int32)
    )
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("window", [None, (3, None)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_value_that_is_not_finite_shows_in_the_rows_that_see_it_and_in_no_other(bad, window, dtype):
    """Several query tokens share a tile of keys that only some of them see."""
    problem = Problem(kv_len=(70,), seqlen_q=4, group=3, window=window, dtype=dtype)
    q, k_cache, v_cache, kv_len = problem.arrays()
    seen_from = 68  # key 68 is hidden from the tokens at positions 66 and 67
    v_cache[0, seen_from, 0, 5] = bad
    k_cache[0, seen_from + 1] = np.nan  # key 69 makes every element of the last token NaN
    out, lse = product.decode_arrays(q, k_cache, v_cache, kv_len, num_splits=2, window=window)
    clean, clean_lse = product.decode(problem, num_splits=2)
    first = slice(0, 2)
    if dtype == "float32":
        # Scores of 64 products are summed in another order too.
        np.testing.assert_allclose(lse[:, first], clean_lse[:, first], rtol=LSE_OF_TWO_ORDERS)
    else:
        np.testing.assert_array_equal(lse[:, first], clean_lse[:, first])
    assert np.isfinite(out[:, first].astype(np.float32)).all()
    # Summed in another order, key by key.
    assert (
        np.abs(out[:, first].astype(np.float64) - clean[:, first].astype(np.float64)).max()
        < np.abs(clean[:, first].astype(np.float64)).max() * 2.0**-7
    )
    third = out[:, 2].astype(np.float32)
    assert np.array_equal(third[..., 5], np.full_like(third[..., 5], bad), equal_nan=True)
    assert np.isfinite(np.delete(third, 5, axis=-1)).all()
    assert np.isnan(out[:, 3].astype(np.float32)).all()


@pytest.mark.parametrize(("which", "size"), [(0, np.inf), (1, np.inf), (1, -np.inf), (1, 3.4028e38), (2, 3.4028e38)])
def test_floats_that_are_no_sum_of_two_parts_have_their_products(which, size):
    """Infinities, and floats that round to one where 11 bits are kept."""
    arrays = [np.random.default_rng(which).random((1, n, 1, 64), np.float32) * 1e-3 for n in (3, 70, 70)]
    arrays[which][0, -1, 0, 3] = size
    options = {"softcap": 5.0 if which == 1 else None}
    got = product.decode_arrays(*arrays, np.array([70], np.int32), **options)
    want = reference.decode(*arrays, [70], **options, return_lse=True)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=of_positive_sums(70))


def test_views_with_any_outer_strides_are_read_in_place():
    problem = Problem(kv_len=(70, 9), num_kv_heads=2, group=3)
    q, k_cache, v_cache, kv_len = problem.arrays()
    want = product.decode(problem, num_splits=2)
    fused = np.full((*q.shape[:1], 3, *q.shape[1:]), np.nan, q.dtype)
    fused[:, 1] = q
    interleaved = np.stack((k_cache, v_cache), axis=2)
    head_major = np.ascontiguousarray(v_cache.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    backwards = np.ascontiguousarray(head_major[::-1, :, ::-1])[::-1, :, ::-1]
    lens = np.zeros(6, np.int32)
    lens[::3] = kv_len
    got = product.decode_arrays(
        fused[:, 1], interleaved[:, :, 0], backwards, lens[::3], num_splits=2, **problem.options()
    )
    for a, b in zip(got, want, strict=True):
        assert a[:, 0].tobytes() == b.tobytes()


@given(
    num_parts=st.sampled_from((1, 2, 3, 4, 5, 9)),
    shape=st.sampled_from(((3,), (2, 3), (2, 2, 3))),
    head_dim=st.sampled_from((64, 192)),
    dtypes=st.sampled_from(
        (("float32", "float32"), ("float32", "bfloat16"), ("float16", "float16"), ("bfloat16", "bfloat16"))
    ),
    spread=st.sampled_from((1.0, 100.0)),
    empty=st.lists(st.booleans(), min_size=9, max_size=9),
    seed=st.integers(0, 2**32 - 1),
)
def test_merge_obeys_the_error_law_and_never_reads_an_empty_part(
    num_parts, shape, head_dim, dtypes, spread, empty, seed
):
    rng = np.random.default_rng(seed)
    in_dtype, out_dtype = (DTYPES[name] for name in dtypes)
    # Views: heads before the parts in memory, gaps between rows, lse backwards.
    store = np.full((shape[-1], num_parts, *shape[:-1], head_dim + 16), np.nan, in_dtype)
    parts = np.moveaxis(store, 0, -2)[..., 8:-8]
    parts[...] = rng.standard_normal(parts.shape)
    lse_parts = (spread * rng.standard_normal(parts.shape[:-1])).astype(np.float32)[..., ::-1]
    for part in range(num_parts):
        if empty[part]:
            lse_parts[part], parts[part] = -np.inf, np.nan
    out = np.full(parts.shape[1:], np.nan, out_dtype)
    lse = np.full(lse_parts.shape[1:], np.nan, np.float32)
    product.merge_arrays(parts, lse_parts, out, lse, seed=seed % 4)
    assert_merge((parts, lse_parts), out, lse, context=seed)


@pytest.mark.skipif(bool(os.environ.get("CUATTN_SIMT_SANITIZE")), reason="this is the sanitizer run itself")
def test_the_kernels_are_clean_under_address_and_undefined_behavior_sanitizers():
    tests = Path(__file__).with_name("sanitized.py")
    run = harness.run_with_sanitizers([str(tests)])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "11 problems and 3 of append" in run.stdout


@pytest.mark.skipif(bool(os.environ.get("CUATTN_SIMT_SANITIZE")), reason="this is the sanitizer run itself")
def test_address_sanitizer_sees_a_read_past_the_end_of_the_page_table():
    run = harness.run_with_sanitizers([str(Path(__file__).with_name("sanitized.py")), "overrun"])
    assert run.returncode != 0
    assert "AddressSanitizer: heap-" in run.stderr  # an overflow, or what lay behind the table before
    assert "paging.cuh" in run.stderr
