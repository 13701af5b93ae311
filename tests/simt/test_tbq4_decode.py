"""decode.cu on the CPU harness with K, V or both in TBQ4, with means, first tokens and recent tokens."""

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product as combinations
from typing import Any

import numpy as np
import pytest
import strategies
from hypothesis import given, settings
from hypothesis import strategies as st
from simt import product
from simt.faults import every
from strategies import DTYPES, Problem, with_unused
from tolerance import assert_call, assert_decode, assert_rows, expected, ulp

from cuattn import Tbq4Array, _plan, plan_decode, reference

HEAD_DIMS = (64, 128, 256, 512)
FORMATS = (("tbq4", "tbq4"), ("tbq4", "raw16"), ("raw16", "tbq4"))
SEEDS = st.integers(0, 5)
SPLITS = st.integers(1, 5)
# A warp step is 16 or 32 keys, one of the CTA up to 256.
LENGTHS = strategies.lengths(16) | strategies.lengths(32) | st.sampled_from((255, 256, 257, 511, 513))
BOTH = Problem((131, 0, 37), num_kv_heads=2, group=3, head_dim=128, k_format="tbq4", v_format="tbq4", means=True)
of_formats = pytest.mark.parametrize("formats", FORMATS, ids="-".join)


def of(formats: tuple[str, str], problem: Problem = BOTH, **fields: Any) -> Problem:
    return replace(problem, k_format=formats[0], v_format=formats[1], **fields)


def changed(cache: Tbq4Array, **parts: Any) -> Tbq4Array:
    return Tbq4Array(**{name: getattr(cache, name) for name in ("codes", "norms", "mean")} | parts)


def assert_same_bits(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()


# Against the reference


@given(
    problem=strategies.tbq4_problems(lengths=LENGTHS, batch_max=2, groups=(1, 3, 4, 8), seqlens_q=(1, 2, 4)),
    num_splits=SPLITS,
    seed=SEEDS,
)
def test_any_problem_obeys_the_error_law_under_any_schedule(problem: Problem, num_splits: int, seed: int) -> None:
    assert_decode(problem, *product.decode(problem, num_splits=num_splits, seed=seed))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@of_formats
def test_every_head_dim_and_format_obeys_the_error_law(formats: tuple[str, str], head_dim: int, dtype: str) -> None:
    problem = of(formats, head_dim=head_dim, dtype=dtype, page_size=5, sinks=True, num_sink=2, num_recent=5)
    assert_decode(problem, *product.decode(problem, num_splits=2, seed=1))
    # The most rows of a CTA, and some of another: one dtype is enough.
    if (dtype == "float16") == (head_dim in (64, 256)):
        problem = replace(problem, seqlen_q=3, group=12, window=(60, None), values="late_max")
        assert_decode(problem, *product.decode(problem, num_splits=3, seed=2))


@pytest.mark.parametrize("group", every([1, 2, 64, 3, 12, 4, 16, 5, 8, 6, 7], 2))
@of_formats
def test_every_group_obeys_the_error_law(formats: tuple[str, str], group: int) -> None:
    problem = of(formats, kv_len=(0, 1, 97), num_kv_heads=2 if group < 16 else 1, group=group, page_size=16)
    assert_decode(problem, *product.decode(problem, seed=group % 6))


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "seqlen_q", "group", "together"),
    every(
        [
            (64, 4, 1, 1, 4), (64, 8, 1, 2, 4), (64, 4, 2, 1, 4), (64, 2, 1, 3, 2), (64, 6, 2, 2, 2),
            (128, 2, 1, 1, 2), (128, 4, 1, 3, 2), (128, 6, 1, 4, 2), (128, 2, 2, 2, 2), (128, 2, 4, 1, 2),
        ],
        3,
    ),
)  # fmt: skip
@pytest.mark.parametrize("page_size", [None, 5, 32])
def test_heads_side_by_side_in_a_tile_obey_the_error_law(
    head_dim: int, num_kv_heads: int, seqlen_q: int, group: int, together: int, page_size: int | None
) -> None:
    """Also for masks, sinks and tokens kept in 16 bits, whose launches have a head a tile."""
    shape = {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "seqlen_q": seqlen_q, "group": group}
    problem = replace(BOTH, kv_len=(0, 1, 70, 301), page_size=page_size, **shape)
    assert plan_decode(*problem.arrays(), page_table=problem.options().get("page_table")).config.tile_heads == together
    assert_decode(problem, *product.decode(problem, seed=1))
    problem = replace(problem, window=(200, None), sinks=True, num_sink=2, num_recent=5, dtype="bfloat16")
    assert_decode(problem, *product.decode(problem, num_splits=2, seed=2))


@pytest.mark.parametrize(("head_dim", "num_kv_heads", "group", "together"), [(64, 8, 2, 4), (128, 4, 3, 2)])
def test_planes_of_heads_side_by_side_may_have_other_outer_strides(
    head_dim: int, num_kv_heads: int, group: int, together: int
) -> None:
    problem = replace(BOTH, kv_len=(700, 33), head_dim=head_dim, num_kv_heads=num_kv_heads, group=group, page_size=16)
    q, k, v, kv_len = problem.arrays()
    options = problem.options()
    caches = [
        changed(x, codes=x.codes.repeat(2, axis=1)[:, 1::2], norms=x.norms.repeat(3, axis=0)[1::3]) for x in (k, v)
    ]
    plan = plan_decode(q, *caches, kv_len, page_table=options["page_table"])
    assert plan.config.tile_heads == together
    want = product.decode_arrays(q, k, v, kv_len, **options)
    assert_same_bits(product.decode_arrays(q, *caches, kv_len, **options), want)


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize(("head_dim", "num_kv_heads", "group", "together"), [(64, 8, 2, 4), (128, 4, 3, 2)])
def test_what_is_not_finite_stays_in_its_head_of_a_tile(
    head_dim: int, num_kv_heads: int, group: int, together: int, value: float
) -> None:
    """A norm of K, a norm of V, a value of q, or of a mean, of the second head."""
    problem = replace(BOTH, kv_len=(300, 7), head_dim=head_dim, num_kv_heads=num_kv_heads, group=group)
    q, k, v, kv_len = problem.arrays()
    assert plan_decode(q, k, v, kv_len).config.tile_heads == together
    want = product.decode_arrays(q, k, v, kv_len)
    others = np.arange(num_kv_heads * group) // group != 1
    for which in ("k norms", "v norms", "q", "k mean", "v mean"):
        arrays = [q.copy(), k, v, kv_len]
        if which == "q":
            arrays[0][:, group : 2 * group, 5] = value
        else:
            index, part = 1 + "kv".index(which[0]), which[2:]
            spoiled = getattr(arrays[index], part).copy()
            spoiled[(0, 150, 1, 0) if part == "norms" else (1, 5)] = value
            arrays[index] = changed(arrays[index], **{part: spoiled})
        out, lse = product.decode_arrays(*arrays)
        assert not np.isfinite(out[0, 0, ~others]).all(), which
        assert_same_bits((out[:, :, others], lse[:, :, others]), (want[0][:, :, others], want[1][:, :, others]))


@pytest.mark.parametrize("plane", ["codes", "norms"])
@pytest.mark.parametrize("which", [1, 2])
def test_heads_that_are_apart_have_tiles_of_their_own(which: int, plane: str) -> None:
    problem = replace(BOTH, num_kv_heads=4, seqlen_q=1)
    arrays = list(problem.arrays())
    cache = arrays[which]
    arrays[which] = changed(cache, **{plane: getattr(cache, plane).repeat(2, axis=2)[:, :, ::2]})
    assert plan_decode(*problem.arrays()).config.tile_heads == 2
    assert plan_decode(*arrays).config.tile_heads == 1
    out, lse = product.decode_arrays(*arrays)
    assert_call(tuple(arrays), {}, (out[:, 0], lse[:, 0]))


@pytest.mark.parametrize("seqlen_q", [2, 5, 16])
@of_formats
def test_several_query_tokens_obey_the_error_law(formats: tuple[str, str], seqlen_q: int) -> None:
    """Also where a sequence is shorter than its queries, so that its first tokens see nothing."""
    problem = of(formats, kv_len=(1, seqlen_q - 1, seqlen_q, 70), head_dim=64, seqlen_q=seqlen_q)
    assert_decode(problem, *product.decode(problem, seed=3))
    problem = replace(problem, causal=False, window=(3, 1), sinks=True)
    assert_decode(problem, *product.decode(problem, num_splits=2))


def test_a_group_of_64_and_16_query_tokens_fill_several_row_blocks() -> None:
    problem = replace(BOTH, kv_len=(45,), seqlen_q=16, group=64, num_kv_heads=1, head_dim=64, window=(20, None))
    assert_decode(problem, *product.decode(problem, num_splits=2, seed=1))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@of_formats
def test_the_tiles_of_gpus_with_little_shared_memory_obey_the_error_law(
    formats: tuple[str, str], head_dim: int
) -> None:
    """Also another stride of the table of levels."""
    problem = of(formats, head_dim=head_dim, kv_len=(131, 1), page_size=16, values="late_max")
    assert_decode(problem, *product.decode(problem, num_splits=2, seed=3, device=_plan.DEVICES["sm_86"]))


@pytest.mark.parametrize("tile", [16, 32, 128, 256])
@of_formats
def test_lengths_beside_the_edges_of_tiles_obey_the_error_law(formats: tuple[str, str], tile: int) -> None:
    problem = of(formats, kv_len=(tile - 1, tile, tile + 1, 2 * tile + 1), group=1, num_kv_heads=1, head_dim=64)
    for num_splits in (1, 2):
        assert_decode(problem, *product.decode(problem, num_splits=num_splits))
        assert_decode(problem, *product.decode(replace(problem, page_size=tile), num_splits=num_splits))


@pytest.mark.parametrize("values", ["normal", "late_max", "huge", "equal", "tiny_v"])
@of_formats
def test_unusual_values_obey_the_error_law(formats: tuple[str, str], values: str) -> None:
    """The three sequences of tiny_v have norms of three kinds."""
    problem = of(formats, kv_len=(300, 301, 302), values=values, dtype="bfloat16", head_dim=64)
    for num_splits in (1, 3):
        assert_decode(problem, *product.decode(problem, num_splits=num_splits))
    problem = replace(problem, seqlen_q=3, window=(250, None))
    assert_decode(problem, *product.decode(problem))


@pytest.mark.parametrize(("num_sink", "num_recent"), list(combinations((0, 1, 4, 20), (0, 1, 3, 20))))
def test_first_and_recent_tokens_meet_at_every_length(num_sink: int, num_recent: int) -> None:
    """Fewer tokens than are kept, just as many, overlapping, and rings that have gone round several times."""
    problem = Problem(
        kv_len=tuple(range(26)), group=2, seed=num_sink, num_sink=num_sink, num_recent=num_recent, k_format="tbq4",
        v_format="tbq4", means=True,
    )  # fmt: skip
    for fields in ({}, {"seqlen_q": 4, "window": (3, None)}, {"page_size": 5, "v_format": "raw16"}):
        variant = replace(problem, **fields)
        assert_decode(variant, *product.decode(variant, seed=num_recent % 6))


@of_formats
def test_any_number_of_splits_obeys_the_error_law(formats: tuple[str, str]) -> None:
    """Empty ones included; first and newest tokens are parts besides."""
    problem = of(formats, kv_len=(900, 3, 0), group=2, head_dim=64, sinks=True)
    for num_splits in (1, 2, 3, 4, 5, 9):
        assert_decode(problem, *product.decode(problem, num_splits=num_splits))
        kept = replace(problem, num_sink=4, num_recent=130)
        assert_decode(kept, *product.decode(kept, num_splits=num_splits))


@pytest.mark.parametrize("formats", [("tbq4", "tbq4"), ("raw16", "raw16")], ids="-".join)
def test_many_more_splits_than_keys_need_obey_the_error_law(formats: tuple[str, str]) -> None:
    """Beside and at powers of two: what a CTA of the merge takes at a time, once and several times."""
    problem = of(formats, kv_len=(100,), seqlen_q=4, num_kv_heads=1, group=6, head_dim=64)
    for num_splits in (7, 8, 16, 17, 33, 64, 128):
        assert_decode(problem, *product.decode(problem, num_splits=num_splits))


@given(seed=SEEDS, formats=st.sampled_from(FORMATS))
@settings(max_examples=9)
def test_the_schedule_does_not_change_a_bit(seed: int, formats: tuple[str, str]) -> None:
    problem = of(formats, sinks=True, num_sink=2, num_recent=3, page_size=16, values="late_max")
    first, other = product.decode(problem, num_splits=2), product.decode(problem, num_splits=2, seed=seed)
    assert_same_bits(other, first)


def test_a_merge_with_tokens_in_16_bits_is_one_call_with_recent_tokens() -> None:
    """Over their lse; the parts of out are rounded to the dtype once more, by half an ulp."""
    problem = replace(BOTH, kv_len=(150, 200), num_recent=40)
    q, k, v, kv_len = problem.arrays()
    options = problem.options()
    body = product.decode_arrays(q, k, v, kv_len - 40)
    slots = np.stack([np.arange(n - 40, n) % 40 for n in kv_len])
    rows = [np.take_along_axis(options[f"{x}_recent"], slots[:, :, None, None], axis=1) for x in "kv"]
    recent = product.decode_arrays(q, *rows, 40)
    parts, lse_parts = (np.stack(x) for x in zip(body, recent, strict=True))
    out, lse = np.full_like(parts[0], np.nan), np.full_like(lse_parts[0], np.nan)
    product.merge_arrays(parts, lse_parts, out, lse)
    want = expected(problem)
    for b, sizes in enumerate(want.sizes):
        slack = sizes.slack_of_out + ulp(float(np.abs(parts[:, b]).max()), out.dtype) / 2
        # Weights are exponentials of differences of lse, which are rounded to float32 once more.
        slack += 2 * ulp(float(np.abs(lse_parts[:, b]).max()), np.float32) * sizes.largest_value
        assert_rows(
            (out[b, 0], lse[b, 0]), *((x[0][b], x[1][b]) for x in (want.same, want.ref)), dtype=out.dtype,
            **asdict(sizes) | {"slack_of_out": slack},
        )  # fmt: skip


# What must not matter


@pytest.mark.parametrize("page_size", [None, 16, 5])
@pytest.mark.parametrize("head_dim", [64, 256])
@of_formats
def test_codes_and_norms_without_a_token_do_not_matter(
    formats: tuple[str, str], head_dim: int, page_size: int | None
) -> None:
    """Tails of sequences, pages that no table names, and tokens that are kept elsewhere."""
    for fields in ({}, {"seqlen_q": 3}, {"num_sink": 3, "num_recent": 20}):
        problem = of(formats, head_dim=head_dim, page_size=page_size, **fields)
        q, k, v, kv_len = problem.arrays()
        results = []
        for code, norm in ((0, 0), (0xFF, 0x7C00), (0xFF, 0x7E00), (0xFF, 0xFC00), (0x80, 0x7BFF)):
            caches = [with_unused(x, code, norm) for x in (k, v)]
            results.append(product.decode_arrays(q, *caches, kv_len, **problem.options(), num_splits=2))
        for result in results[1:]:
            assert_same_bits(result, results[0])


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "heads first": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1],
    "some of more heads": lambda x: np.concatenate([x[:, :, :1], x, x[:, :, :1]], axis=2)[:, :, 1:-1],
    "parts of longer rows": lambda x: np.concatenate([x, x, x, x], axis=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "every second token": lambda x: x.repeat(2, axis=1)[:, 1::2],
}


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("which", ["codes", "norms", "both"])
@pytest.mark.parametrize("view", every(list(VIEWS), 2))
@pytest.mark.parametrize("head_dim", [128, 512])
def test_planes_with_any_outer_strides_are_read_in_place(
    head_dim: int, view: str, which: str, page_size: int | None
) -> None:
    problem = replace(BOTH, page_size=page_size, head_dim=head_dim)
    q, k, v, kv_len = problem.arrays()
    want = product.decode_arrays(q, k, v, kv_len, **problem.options())
    caches = []
    for cache in (k, v):
        parts = {x: VIEWS[view](getattr(cache, x)) for x in ("codes", "norms") if which in (x, "both")}
        caches.append(changed(cache, **parts))
    assert_same_bits(product.decode_arrays(q, *caches, kv_len, **problem.options()), want)


def test_planes_of_k_and_v_may_be_interleaved() -> None:
    q, k, v, kv_len = replace(BOTH, head_dim=256).arrays()
    planes = [np.stack([getattr(x, name) for x in (k, v)], axis=2) for name in ("codes", "norms")]
    caches = [Tbq4Array(*(plane[:, :, i] for plane in planes), x.mean) for i, x in enumerate((k, v))]
    assert_same_bits(product.decode_arrays(q, *caches, kv_len), product.decode_arrays(q, k, v, kv_len))


@pytest.mark.parametrize(("given_len", "used_len"), [(99, 60), (2**31 - 1, 60), (-3, 0), (-(2**31), 0)])
def test_a_device_length_outside_of_the_cache_is_limited_to_it(given_len: int, used_len: int) -> None:
    """Also where rings and first tokens are told by it."""
    problem = replace(BOTH, kv_len=(60,), num_sink=3, num_recent=9)
    q, *caches, _ = problem.arrays()
    caches = [changed(x, codes=x.codes[:, :60], norms=x.norms[:, :60]) for x in caches]
    want = product.decode_arrays(q, *caches, np.array([used_len], np.int32), **problem.options())
    got = product.decode_arrays(
        q, *caches, [20], device_kv_len=np.array([given_len], np.int32), **problem.options()
    )  # fmt: skip
    assert_same_bits(got, want)


# Norms at the ends of their range


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_largest_norms_of_values_do_not_overflow(dtype: str, num_splits: int) -> None:
    """Scores that grow by less than the softmax follows: weights of up to 2^7, times 65504, in float16 operands."""
    kv_len = 700
    q, k, v, lengths = (replace(BOTH, kv_len=(kv_len,), num_kv_heads=1, dtype=dtype, means=False)).arrays()
    v = changed(v, norms=np.full_like(v.norms, 65504), codes=np.where(v.codes == 0xFF, 0x88, v.codes).astype(np.uint8))
    k_rows = np.zeros((*k.codes.shape[:-1], 128), q.dtype)
    k_rows[..., 0] = (np.arange(k_rows.shape[1]) / kv_len)[:, None]
    q[..., 0] = 50  # times head_dim ** -0.5 * log2 e: 6.4 in base-2 units
    arrays = (q, k_rows, v, lengths)
    out, lse = product.decode_arrays(*arrays, num_splits=num_splits)
    assert np.isfinite(out.astype(np.float64)).all()
    assert_call(arrays, {}, (out[:, 0], lse[:, 0]))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_norm_that_is_not_finite_is_seen_by_the_rows_that_see_its_token(
    num_splits: int, head_dim: int, value: float
) -> None:
    """In K by all of a row, whatever the sign of the sum that it multiplies; in V by its block."""
    problem = replace(BOTH, kv_len=(300, 300, 7), seqlen_q=3, head_dim=head_dim)
    q, k, v, kv_len = problem.arrays()
    options = {"num_splits": num_splits}
    clean = product.decode_arrays(q, k, v, kv_len, **options)
    block = head_dim // k.norms.shape[-1]
    for token, which in combinations((0, 15, 150, 297, 298, 299), "kv"):
        norms = (k if which == "k" else v).norms.copy()
        norms[1, token, 1, -1] = value
        caches = (changed(k, norms=norms), v) if which == "k" else (k, changed(v, norms=norms))
        out, lse = product.decode_arrays(q, *caches, kv_len, **options)
        sees = np.zeros(out.shape, bool)
        sees[1, max(0, token - 297) :, 3:, 0 if which == "k" else head_dim - block :] = True
        np.testing.assert_array_equal(~np.isfinite(out), sees)
        np.testing.assert_array_equal(np.isnan(lse), sees[..., 0] & (which == "k"))
        assert_call((q, *caches, kv_len), {}, (out, lse))
        elsewhere = ~sees.any(axis=-1)
        assert_same_bits((out[elsewhere], lse[elsewhere]), (clean[0][elsewhere], clean[1][elsewhere]))


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("left", [0, 1, 10, 31])
def test_a_norm_beside_a_window_is_not_seen(left: int, value: float) -> None:
    """It is in one tile with tokens that are visible."""
    problem = replace(BOTH, kv_len=(300, 0, 101), window=(left, None))
    q, k, v, kv_len = problem.arrays()
    want = product.decode_arrays(q, k, v, kv_len, **problem.options())
    caches = []
    for cache in (k, v):
        norms = cache.norms.copy()
        for b, n in enumerate(problem.kv_len):
            norms[b, : max(0, n - 1 - left)] = value
        caches.append(changed(cache, norms=norms))
    assert_same_bits(product.decode_arrays(q, *caches, kv_len, **problem.options()), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-16, 6e-8, 1e-4, 6e4, 1e16])
def test_queries_of_any_size_are_rotated_without_loss(scale: float, dtype: str) -> None:
    q, k, v, kv_len = replace(BOTH, dtype=dtype).arrays()
    with np.errstate(over="ignore"):
        q = (np.sign(q.astype(np.float32)) * scale).astype(DTYPES[dtype])
    if not np.isfinite(q.astype(np.float32)).all() or not q.any():
        pytest.skip(reason=f"{dtype} has no {scale}")
    arrays, options = (q, k, v, kv_len), {"softmax_scale": 128**-0.5 / scale}
    out, lse = product.decode_arrays(*arrays, **options)
    assert_call(arrays, options, (out[:, 0], lse[:, 0]))


def test_zero_queries_give_the_mean_of_the_values() -> None:
    q, k, v, kv_len = replace(BOTH, kv_len=(64, 7, 0), means=False).arrays()
    out, lse = product.decode_arrays(np.zeros_like(q), k, v, kv_len)
    for b, n in enumerate((64, 7)):
        values = reference.dequantize(v.codes[b, :n], v.norms[b, :n]).mean(axis=0).repeat(3, axis=0)
        np.testing.assert_allclose(out[b, 0], values, rtol=2.0**-10, atol=2.0**-12)  # float16 weights and result
        np.testing.assert_allclose(lse[b, 0], np.log(n), rtol=2.0**-22)  # an ulp of float32 and one of log2
