"""prefill_mma.cu, the very file that a GPU runs, on the CPU harness."""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from itertools import product as combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from simt import harness, product
from strategies import DTYPES, PrefillProblem, Problem, prefill_problems, with_unused
from tolerance import assert_decode, assert_prefill, assert_prefill_call

from cuattn import Tbq4Array, _plan, reference

SEEDS = st.integers(0, 5)
RAW, FLOATS, TBQ4 = ("raw16", "raw16"), ("raw32", "raw32"), ("tbq4", "tbq4")


def config(tile_q: int, tile_kv: int, num_stages: int, num_warps: int, dim_splits: int = 1) -> dict[str, int]:
    return {
        "tile_q": tile_q, "tile_kv": tile_kv, "num_stages": num_stages, "num_warps": num_warps, "dim_splits": dim_splits
    }  # fmt: skip


# By formats of K and V, dtype, head_dim and value_dim: small tiles, so that short sequences have edges, and one build
# each. Warps have 16 rows or 32.
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
KEYS = strategies.lengths(16) | strategies.lengths(32)
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


# Against the reference


@given(problem=prefill_problems(choices=tuple(SMALL), lengths=KEYS), seed=SEEDS)
def test_any_problem_obeys_the_error_law_under_any_schedule(problem: PrefillProblem, seed: int) -> None:
    check(problem, seed=seed)


@given(problem=prefill_problems(choices=tuple(SMALL_TBQ4), lengths=KEYS), seed=SEEDS)
def test_any_problem_in_tbq4_obeys_the_error_law_under_any_schedule(problem: PrefillProblem, seed: int) -> None:
    check(problem, seed=seed)


@pytest.mark.parametrize(
    ("dtype", "formats", "dims", "arch"),
    [
        *((("float16", "bfloat16")[i % 2], RAW, dims, "sm_90a") for i, dims in enumerate(_plan.PREFILL_DIMS)),
        *((("bfloat16", "float16")[i % 2], TBQ4, (dim, dim), "sm_90a") for i, dim in enumerate((64, 128, 256, 512))),
        ("float16", ("tbq4", "raw16"), (256, 256), "sm_90a"),
        ("bfloat16", ("raw16", "tbq4"), (128, 128), "sm_90a"),
        ("float32", FLOATS, (96, 96), "sm_80"),
        ("float32", FLOATS, (128, 128), "sm_90a"),
        ("float32", FLOATS, (192, 128), "sm_90a"),
        ("float32", FLOATS, (512, 512), "sm_86"),
    ],
    ids=str,
)
def test_the_tiles_of_every_kernel_obey_the_error_law(
    dtype: str, formats: tuple[str, str], dims: tuple[int, int], arch: str
) -> None:
    problem = PrefillProblem(
        ((100, 140), (0, 9), (7, 0), (45, 45)), group=3, head_dim=dims[0], value_dim=dims[1], dtype=dtype, causal=True,
        kv_layout="paged", page_size=5, k_format=formats[0], v_format=formats[1], means="tbq4" in formats, sinks=True,
    )  # fmt: skip
    assert_prefill(problem, *product.prefill(problem, seed=2, device=_plan.DEVICES[arch]))


@pytest.mark.parametrize("causal", [False, True])
@every_format
def test_lengths_beside_the_edges_of_tiles_obey_the_error_law(base: PrefillProblem, *, causal: bool) -> None:
    """All together: a ragged sequence begins anywhere."""
    edges = tuple(combinations((0, 1, 31, 32, 33, 65), (0, 1, 15, 16, 17, 33)))
    check(replace(base, seqlens=edges, num_kv_heads=1, group=1, causal=causal))


@pytest.mark.parametrize("group", [1, 2, 4, 5, 6, 7, 8, 12, 33, 64])
def test_every_group_obeys_the_error_law(group: int) -> None:
    """Also heads of one token in several tiles."""
    check(replace(BASE, group=group, seqlens=((7, 20), (0, 1), (1, 3)), causal=True, sinks=True), seed=group % 6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_windows_obey_the_error_law(dtype: str, *, causal: bool) -> None:
    for left, right in combinations((None, -1, 0, 5, 40, 2**31 - 1), (None, 0, 7, 2**31 - 1)):
        check(replace(BASE, num_kv_heads=1, causal=causal, window=(left, right), sinks=left == 5, dtype=dtype))


@pytest.mark.parametrize("softcap", [None, 0.5, 20.0])
@pytest.mark.parametrize("values", ["normal", "late_max", "rising", "huge", "equal"])
@every_format
def test_unusual_scores_obey_the_error_law(base: PrefillProblem, values: str, softcap: float | None) -> None:
    """Maxima that grow by less than a softmax need follow, and by more, in tiles that some rows see in part."""
    problem = replace(base, num_kv_heads=1, values=values, softcap=softcap, sinks=True)
    check(problem)
    check(replace(problem, causal=True, window=(30, None), seqlens=((20, 150), (70, 70))))


@pytest.mark.parametrize("softmax_scale", [0.0, -0.3, 1.0, 1e-6])
@every_format
def test_scales_obey_the_error_law(base: PrefillProblem, softmax_scale: float) -> None:
    arrays = base.arrays()
    for more in ({}, {"causal": True, "softcap": 3.0}):
        options = {**base.options(), **more, "softmax_scale": softmax_scale}
        assert_prefill_call(arrays, options, run(base, arrays, **options))


def test_a_scale_of_zero_gives_the_mean_of_the_values() -> None:
    problem = replace(BASE, causal=True, seqlens=((40, 41),))
    arrays = problem.arrays()
    arrays[2][...] = 3
    out, lse = run(problem, arrays, softmax_scale=0.0)
    assert (out == 3).all()
    # The sum of weights is a whole number, and exact. Its float32 log2 is good to an ulp (2^-23), the product with ln 2
    # to half of one, as is ln 2 itself: no more than 2^-22 together.
    np.testing.assert_allclose(lse, np.log(np.arange(2, 42))[:, None].repeat(6, axis=1), rtol=2.0**-22)


@pytest.mark.parametrize("values", ["normal", "rising"])
@every_format
def test_one_token_is_a_decode(base: PrefillProblem, values: str) -> None:
    decode = Problem((70, 0, 33, 1), num_kv_heads=2, group=3, sinks=True, values=values, window=(50, None),
                     k_format=base.k_format, v_format=base.v_format, means=base.means, page_size=16)  # fmt: skip
    q, k, v, kv_len = decode.arrays()
    out, lse = product.prefill_arrays(q[:, None], k, v, kv_len=kv_len, **decode.options(), changes=small(base))
    assert_decode(decode, out[:, 0], lse[:, 0])


@pytest.mark.parametrize("edges", [(0, 100), (0, 1, 37, 64, 100), (0, 32, 64, 96, 100)])
@every_format
def test_chunks_against_a_cache_are_a_prompt_at_once(base: PrefillProblem, edges: tuple[int, ...]) -> None:
    problem = replace(base, seqlens=((100, 100),), causal=True, q_layout="dense", kv_layout="paged", sinks=True)
    q, k, v = problem.arrays()
    parts = [run(problem, (q[:, a:b], k, v), kv_len=[b]) for a, b in pairwise(edges)]
    assert_prefill(problem, *(np.concatenate(x, axis=1) for x in zip(*parts, strict=True)))


# What must not matter


@given(seed=SEEDS, base=st.sampled_from((BASE, CODES)))
@settings(max_examples=8)
def test_the_schedule_does_not_change_a_bit(seed: int, base: PrefillProblem) -> None:
    problem = replace(base, sinks=True, causal=True, kv_layout="paged", values="rising")
    assert_same_bits(run(problem, seed=seed), run(problem))


@every_format
def test_the_layout_does_not_change_a_bit(base: PrefillProblem) -> None:
    problem = replace(base, seqlens=((37, 70),) * 3, causal=True)
    want = run(problem)
    assert_prefill(problem, *want)
    for q_layout, (kv_layout, size) in combinations(
        ("ragged", "dense"),
        (("ragged", 1), ("dense", 1), ("padded", 1), *(("paged", size) for size in (1, 3, 16, 64, 100))),
    ):
        got = run(replace(problem, q_layout=q_layout, kv_layout=kv_layout, page_size=size))
        got = tuple(x.reshape(y.shape) for x, y in zip(got, want, strict=True))
        assert_same_bits(got, want, (q_layout, kv_layout, size))


def test_ragged_keys_lie_as_ragged_queries_by_default() -> None:
    problem = replace(BASE, seqlens=((40, 40), (0, 0), (7, 7)))
    assert_same_bits(run(problem, cu_seqlens_k=None), run(problem))


@every_format
def test_a_sequence_does_not_depend_on_the_others_of_its_batch(base: PrefillProblem) -> None:
    problem = replace(base, seqlens=tuple((21, n) for n in (70, 0, 33)), q_layout="dense", kv_layout="paged")
    q, k, v = problem.arrays()
    options = problem.options()
    want = run(problem)
    for order in ([0], [1], [2], [2, 0, 1]):
        lengths = {name: options[name][order] for name in ("kv_len", "page_table")}
        assert_same_bits(run(problem, (q[order], k, v), **lengths), tuple(x[order] for x in want))


def test_sequences_may_share_pages() -> None:
    """Two continuations of one prefix of two pages."""
    problem = replace(BASE, seqlens=((10, 40), (10, 43)), q_layout="dense", kv_layout="paged", causal=True)
    arrays, options = problem.arrays(), problem.options()
    table = options["page_table"].copy()
    table[1, :2] = table[0, :2]
    options["page_table"] = table
    assert_prefill_call(arrays, options, run(problem, arrays, page_table=table))


@pytest.mark.parametrize("kv_layout", ["padded", "paged"])
@pytest.mark.parametrize("choice", SMALL_TBQ4, ids=str)
def test_codes_and_norms_without_a_token_do_not_matter(choice: tuple[Any, ...], kv_layout: str) -> None:
    names = ("k_format", "v_format", "dtype", "head_dim", "value_dim")
    problem = replace(CODES, kv_layout=kv_layout, seqlens=MIXED[:3], **dict(zip(names, choice, strict=True)))
    q, k, v = problem.arrays()
    unused = ((0, 0), (0xFF, 0x7C00), (0xFF, 0x7E00), (0xFF, 0xFC00), (0x80, 0x7BFF))
    want, *others = (run(problem, (q, *(with_unused(x, *bits) for x in (k, v)))) for bits in unused)
    for other in others:
        assert_same_bits(other, want)


@pytest.mark.parametrize("bits", [0x0000, 0x7C00, 0xFF80, 0x7BFF], ids=hex)
@pytest.mark.parametrize("kv_layout", ["padded", "paged"])
def test_unused_bytes_of_the_caches_do_not_matter(kv_layout: str, bits: int) -> None:
    problem = replace(BASE, kv_layout=kv_layout)
    arrays = problem.arrays()
    want = run(problem, arrays)
    for cache in arrays[1:]:
        cache.view(np.uint16)[np.isnan(cache)] = bits
    assert_same_bits(run(problem, arrays), want)


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "some of fused heads": lambda x: np.concatenate([x[..., :1, :], x, x[..., :2, :]], axis=-2)[..., 1:-2, :],
    "heads first": lambda x: np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2),
    "backwards": lambda x: np.ascontiguousarray(x[..., ::-1, ::-1, :])[..., ::-1, ::-1, :],
    "every second token": lambda x: x.repeat(2, axis=-3)[..., 1::2, :, :],
    "parts of longer rows": lambda x: np.concatenate([x, x, x, x], axis=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "batch last": lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -2)), -2, 0),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layout", ["ragged", "dense", "paged"])
@every_format
def test_views_with_any_outer_strides_are_read_and_written_in_place(
    base: PrefillProblem, layout: str, view: str
) -> None:
    q_layout = "ragged" if layout == "ragged" else "dense"
    problem = replace(base, seqlens=((20, 40),) * 2, q_layout=q_layout, kv_layout=layout, causal=True)
    arrays, look = problem.arrays(), VIEWS[view]
    want = run(problem, arrays)
    viewed = [
        changed(x, codes=look(x.codes), norms=look(x.norms)) if isinstance(x, Tbq4Array) else look(x) for x in arrays
    ]
    out = look(np.full(arrays[0].shape, np.nan, arrays[0].dtype))
    base_of_out = out
    while base_of_out.base is not None:
        base_of_out = base_of_out.base
    assert_same_bits(run(problem, tuple(viewed), out=out), want)
    # Nothing beside out has been written.
    assert np.isfinite(base_of_out).sum() == out.size


def test_queries_keys_and_values_may_be_slices_of_one_array() -> None:
    """As a projection gives them: of each token first the heads of q, then those of k, then those of v."""
    problem = replace(BASE, seqlens=((37, 37),) * 2, q_layout="dense", kv_layout="dense", causal=True)
    arrays = problem.arrays()
    fused = np.concatenate(arrays, axis=2)
    slices = np.split(fused, (6, 8), axis=2)
    assert all(x.base is not None for x in slices)
    assert_same_bits(run(problem, tuple(slices)), run(problem, arrays))


@pytest.mark.parametrize(("given_len", "used_len"), [(99, 45), (2**31 - 1, 45), (-3, 0), (-(2**31), 0)])
@every_format
def test_a_device_length_outside_of_the_keys_is_limited_to_them(
    base: PrefillProblem, given_len: int, used_len: int
) -> None:
    problem = replace(base, seqlens=((20, 45),), q_layout="dense", kv_layout="dense", causal=True)
    want = run(problem, kv_len=[used_len])
    got = run(problem, kv_len=[20], device_lengths={"kv_len": np.array([given_len], np.int32)})
    assert_same_bits(got, want)


@pytest.mark.parametrize("bad", [(0, 50, 20, 60), (-7, 2**31 - 1, -(2**31), 12), (90, 91, 92, 93), (60, 40, 20, 0)])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_device_offsets_that_make_no_sense_reach_no_other_memory(name: str, bad: tuple[int, ...]) -> None:
    """The harness refuses reads outside of the arrays; what is around out is seen here."""
    problem = replace(BASE, seqlens=((20, 20),) * 3, causal=True)
    guarded = np.full((100, 6, 64), 77, np.float16)
    run(problem, out=guarded[20:80], device_lengths={name: np.array(bad, np.int32)})
    assert (guarded[:20] == 77).all()
    assert (guarded[80:] == 77).all()


def test_keys_that_no_row_of_a_call_sees_are_not_read() -> None:
    problem = replace(BASE, seqlens=((20, 200),), q_layout="dense", kv_layout="dense", causal=True, window=(30, None))
    q, k, v = problem.arrays()
    # The first token stands at 180 and sees 150, which is in the tile of 144.
    assert_prefill(problem, *run(problem, (q, k, v), memory=[q, k[:, 144:], v[:, 144:]]))


def test_keys_that_no_row_of_a_tile_sees_are_not_read() -> None:
    """Only half of the keys can be read: an order of blocks that takes the last rows last finishes the first before."""
    problem = replace(BASE, seqlens=((120, 120),), group=1, q_layout="dense", kv_layout="dense", causal=True)
    q, k, v = problem.arrays()
    want, finished = run(problem)[0], np.zeros(120, bool)
    for seed in (0, 1):
        out = np.full_like(q, np.nan)
        with pytest.raises(harness.KernelError):
            run(problem, (q, k, v), out=out, seed=seed, memory=[q, k[:, :64], v[:, :64]])
        rows = np.isfinite(out[0, :, 0]).all(axis=-1)
        np.testing.assert_array_equal(out[0, rows, 0], want[0, rows, 0])
        finished |= rows
    np.testing.assert_array_equal(np.flatnonzero(finished), np.arange(64))


# What is not finite


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
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_sums_of_many_keys_in_floats_do_not_drift() -> None:
    """As they would in accumulators that cut off. Without scores the law knows no other error."""
    problem = replace(SINGLE, seqlens=((3, 3000),), num_kv_heads=1, group=1, q_layout="dense", kv_layout="dense")
    q, k, v = problem.arrays()
    v = np.abs(v)
    options = problem.options() | {"softmax_scale": 0.0}
    assert_prefill_call((q, k, v), options, run(problem, (q, k, v), **options))
    patch = ("common/products32.cuh", "(sum[r], a.hi, b.hi)", "(o[r][d], a.hi, b.hi)")
    drifted = run(problem, (q, k, v), patches=(patch,), **options)
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


@pytest.mark.skipif(bool(os.environ.get("CUATTN_SIMT_SANITIZE")), reason="this is the sanitizer run itself")
def test_the_kernel_is_clean_under_address_and_undefined_behavior_sanitizers() -> None:
    run = harness.run_with_sanitizers([str(Path(__file__).with_name("sanitized.py")), "prefill"])
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 problems of prefill" in run.stdout
