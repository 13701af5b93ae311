"""decode on a GPU with K, V or both in TBQ4, with means, first tokens and recent tokens, against the reference."""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import resources
from itertools import cycle, product
from typing import Any

import cupy
import numpy as np
import pytest
import strategies
from gpu.helpers import (
    VIEWS,
    assert_same_bits,
    busy_gpu,
    call,
    check,
    decode,
    launch,
    nans,
    occupy,
    on_device,
    planes,
    poison,
    to_device,
    viewed,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Problem, with_unused
from tbq4_codes import TOKENS, codes_of_all_bytes, codes_of_all_pairs, levels_of, powers, rotated_one_hots
from tolerance import assert_blocks, assert_call, assert_decode, assert_rows, expected, ulp

import cuattn
from cuattn import Tbq4Array, _tbq4, reference

GIB = 1 << 30
DTYPE_NAMES = ("float16", "bfloat16")
HEAD_DIMS = (64, 128, 256, 512)
FORMATS = (("tbq4", "tbq4"), ("tbq4", "raw16"), ("raw16", "tbq4"))
GROUPS = (*range(1, 9), 12, 16, 24, 64)
of_formats = pytest.mark.parametrize("formats", FORMATS, ids="-".join)
every_kernel = pytest.mark.parametrize(("dtype", "head_dim"), list(product(DTYPE_NAMES, HEAD_DIMS)))
BOTH = {"k_format": "tbq4", "v_format": "tbq4", "means": True}
# Few rows with pages, many rows without; with first and recent tokens.
PAGED = Problem((0, 1, 40, 700), num_kv_heads=2, group=6, page_size=16, dtype="bfloat16", head_dim=128, seed=11, **BOTH)
DENSE = Problem((3, 0, 515, 64), seqlen_q=4, num_kv_heads=2, group=4, head_dim=256, seed=12, **BOTH)
KEPT = replace(PAGED, num_sink=4, num_recent=64, sinks=True)
all_layouts = pytest.mark.parametrize("problem", [PAGED, DENSE, KEPT], ids=["paged", "dense", "kept"])


def of(formats: tuple[str, str], **fields: Any) -> Problem:
    return Problem(**{"num_kv_heads": 2, "group": 4, "head_dim": 128, "means": True, **fields}, k_format=formats[0],
                   v_format=formats[1])  # fmt: skip


def changed(cache: Tbq4Array, **parts: Any) -> Tbq4Array:
    return Tbq4Array(**{name: getattr(cache, name) for name in ("codes", "norms", "mean")} | parts)


# --- Against the reference ------------------------------------------------------------------------------------------


@every_kernel
@of_formats
def test_every_kernel_obeys_the_error_law(formats: tuple[str, str], dtype: str, head_dim: int) -> None:
    """All numbers of row tiles, whole tiles and rows that are left over."""
    problem = of(formats, kv_len=(0, 1, 37, 700), head_dim=head_dim, dtype=dtype)
    for num_splits in (None, 1, 3):
        check(problem, num_splits=num_splits)
    check(replace(problem, page_size=16, group=12, kv_len=(300, 33)))
    check(replace(problem, page_size=5, seqlen_q=4, group=7, kv_len=(129, 2), sinks=True))


@pytest.mark.parametrize(
    ("formats", "group", "page_size"),
    [(*case, page) for case, page in zip(product(FORMATS, GROUPS), cycle((None, 16, 64, 5, 1)), strict=False)],
    ids=str,
)
def test_every_group_obeys_the_error_law(formats: tuple[str, str], group: int, page_size: int | None) -> None:
    heads = 2 if group < 16 else 1
    check(of(formats, kv_len=(0, 1, 37, 300), num_kv_heads=heads, group=group, page_size=page_size, seed=group))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4, 16])
@of_formats
def test_several_query_tokens_obey_the_error_law(formats: tuple[str, str], seqlen_q: int, *, causal: bool) -> None:
    """Also where a sequence is shorter than its queries, so that its first tokens see nothing."""
    problem = of(formats, kv_len=(0, 1, seqlen_q - 1, seqlen_q, 40, 300), seqlen_q=seqlen_q, group=3, causal=causal)
    check(problem)
    check(replace(problem, head_dim=64, page_size=16, dtype="bfloat16", window=(33, 1)), num_splits=2)


@pytest.mark.parametrize("num_splits", [None, 1, 7, 64])
@of_formats
def test_long_sequences_of_unequal_lengths_obey_the_error_law(formats: tuple[str, str], num_splits: int | None) -> None:
    problem = of(formats, kv_len=(5000, 1, 3001, 0, 130), num_kv_heads=1, page_size=16, dtype="bfloat16", sinks=True)
    check(problem, num_splits=num_splits)


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "group", "together"),
    [(64, 4, 1, 4), (64, 8, 2, 4), (64, 8, 4, 2), (128, 2, 1, 2), (128, 8, 3, 2), (128, 8, 4, 2)],
)
@pytest.mark.parametrize("page_size", [None, 16])
def test_heads_side_by_side_in_a_tile_obey_the_error_law(
    head_dim: int, num_kv_heads: int, group: int, together: int, page_size: int | None
) -> None:
    shape = {"head_dim": head_dim, "num_kv_heads": num_kv_heads, "group": group, "page_size": page_size}
    problem = of(("tbq4", "tbq4"), kv_len=(0, 1, 255, 257, 4000), sinks=True, **shape)
    table = problem.options().get("page_table")
    assert cuattn.plan_decode(*problem.arrays(), page_table=table).config.tile_heads == together
    check(problem, num_splits=None)
    problem = replace(problem, values="tiny_v", dtype="bfloat16", window=(2000, None), num_sink=2, num_recent=5)
    check(problem, num_splits=3)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@of_formats
def test_lengths_beside_every_power_of_two_obey_the_error_law(formats: tuple[str, str], head_dim: int) -> None:
    lengths = tuple(sorted({max(0, 2**n + step) for n in range(10) for step in (-1, 0, 1)}))
    for page_size in (None, 32):
        check(of(formats, kv_len=lengths, num_kv_heads=1, group=2, head_dim=head_dim, page_size=page_size))


@pytest.mark.parametrize("values", ["normal", "late_max", "huge", "equal", "tiny_v"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@of_formats
def test_unusual_values_obey_the_error_law(formats: tuple[str, str], dtype: str, values: str) -> None:
    """The three sequences of tiny_v have norms of three kinds."""
    problem = of(formats, kv_len=(900, 301, 302), num_kv_heads=1, values=values, dtype=dtype)
    for num_splits in (None, 1, 3):
        check(problem, num_splits=num_splits)
    check(replace(problem, seqlen_q=3, window=(250, None), softcap=5.0))


@every_kernel
@settings(settings.get_profile("gpu"))
@given(data=st.data())
def test_any_problem_obeys_the_error_law(dtype: str, head_dim: int, data: st.DataObject) -> None:
    choices = [(*formats, dtype, head_dim) for formats in FORMATS]
    lengths = strategies.lengths(16) | strategies.lengths(64)
    problem = data.draw(
        strategies.tbq4_problems(choices, lengths=lengths, seqlens_q=(1, 2, 5, 16), groups=(1, 2, 3, 8, 20))
    )
    check(problem, num_splits=data.draw(st.sampled_from((None, 1, 2, 3, 7))))


@pytest.mark.parametrize(("num_sink", "num_recent"), list(product((0, 1, 4, 20), (0, 1, 3, 20))))
@of_formats
def test_first_and_recent_tokens_meet_at_every_length(formats: tuple[str, str], num_sink: int, num_recent: int) -> None:
    """Fewer tokens than are kept, just as many, overlapping, and rings that have gone round several times."""
    problem = of(formats, kv_len=tuple(range(26)), num_kv_heads=1, num_sink=num_sink, num_recent=num_recent)
    check(problem)
    check(replace(problem, seqlen_q=4, window=(3, None), page_size=5, head_dim=64), num_splits=2)


@pytest.mark.parametrize("num_splits", [None, 1, 4])
@of_formats
def test_long_rings_and_many_first_tokens_obey_the_error_law(formats: tuple[str, str], num_splits: int | None) -> None:
    """The recent tokens may take several splits themselves, or be all that there are."""
    problem = of(formats, kv_len=(2500, 700, 1030, 3), num_kv_heads=1, num_sink=128, num_recent=1024, sinks=True)
    check(problem, num_splits=num_splits)


NEWEST = {"window": (0, 0)}  # each query token sees its own key


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_of_one_hot_queries_are_the_levels_of_all_bytes(head_dim: int) -> None:
    """A level, times a float16, times a power of two: lse is that, but for the logarithm of 1."""
    codes, block = codes_of_all_bytes(head_dim), _tbq4.block_of(head_dim)
    cache = Tbq4Array(codes, powers(*codes.shape[:3], head_dim // block))
    hot = np.float64(np.float16(np.float32(block) * np.float32(block**-0.5)))
    want = levels_of(codes)[:, :, 0].astype(np.float64) * hot * cache.norms[:, :, 0].repeat(block, axis=-1)
    for first in range(0, head_dim, 64):
        q = np.tile(rotated_one_hots(head_dim)[first : first + 64], (len(codes), TOKENS, 1, 1))
        arrays = (q, cache, cache, np.full(len(codes), TOKENS, np.int32))
        lse = call(arrays, {**NEWEST, "softmax_scale": 1.0})[1]
        # An ulp each for the scale to base 2 and back; log2 is within 2^-22 near 1. Levels are farther apart.
        error = np.abs(lse - want[..., first : first + 64])
        assert (error <= 2.0**-22 * (1 + np.abs(want[..., first : first + 64]))).all()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_values_of_one_hot_weights_are_the_levels_of_all_pairs_of_bytes(head_dim: int) -> None:
    """Rotated again in float64 and divided by the norm, out is nearest to the level of the code that is stored."""
    codes, block = codes_of_all_pairs(head_dim), _tbq4.block_of(head_dim)
    norms = powers(*codes.shape[:3], head_dim // block)
    q = np.ones((len(codes), TOKENS, 1, head_dim), np.float16)
    zeros = Tbq4Array(np.zeros_like(codes), np.ones_like(norms))
    arrays = (q, zeros, Tbq4Array(codes, norms), np.full(len(codes), TOKENS, np.int32))
    out = call(arrays, NEWEST)[0][:, :, 0].astype(np.float64)
    got = reference.rotate(out) / norms[:, :, 0].repeat(block, axis=-1)
    distance = np.abs(got[..., None] - _tbq4.codebook(block).astype(np.float64))
    stored = np.stack([codes & 15, codes >> 4], axis=-1).reshape(got.shape)
    np.testing.assert_array_equal(distance.argmin(axis=-1), stored)


def quantized(*rows: np.ndarray, mean: np.ndarray | None = None) -> list[Tbq4Array]:
    return [cuattn.quantize(x, mean=mean) for x in rows]


@pytest.mark.parametrize("with_mean", [False, True])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_keys_with_large_offsets_obey_the_error_law(dtype: str, *, with_mean: bool) -> None:
    """15 deviations in four of 128 channels; what they cost is the format's, what the kernel adds is the law's."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((3, n, 2, 128)).astype(np.float32) for n in (4, 600, 600))
    k[..., [5, 37, 70, 101]] += [15, -15, 15, -15]
    q = q.reshape(3, 8, 128).astype(DTYPES[dtype])
    mean = cuattn.channel_mean(k) if with_mean else None
    arrays = (q, *quantized(k, mean=mean), *quantized(v), np.array([600, 1, 257], np.int32))
    for num_splits in (None, 1, 3):
        options = {"num_splits": num_splits}
        assert_call(arrays, options, call(arrays, options))


def test_one_hot_keys_and_values_obey_the_error_law() -> None:
    """Rows whose rotation has one size in all values, and queries that see one of them."""
    rows = 20 * np.eye(128, dtype=np.float32)[None, :, None]
    q = np.stack([np.eye(128)[[0, 1, 77, 127]], np.ones((4, 128))]).astype(np.float16)
    cache = quantized(np.concatenate([rows, rows]))[0]
    arrays = (q, cache, cache, np.array([128, 127], np.int32))
    for softmax_scale in (128**-0.5, 1.0):
        options = {"softmax_scale": softmax_scale}
        out, lse = call(arrays, options)
        assert_call(arrays, options, (out, lse))
    assert out[0].argmax(axis=-1).tolist() == [0, 1, 77, 127]


@pytest.mark.parametrize(("layer", "error"), [("00", 0.050), ("15", 0.083), ("29", 0.081)])
def test_decoding_a_real_text_has_the_error_of_the_reference(layer: str, error: float) -> None:
    """As in tests/cpu/test_tbq4_decode.py: mean of K, token 0 in 16 bits, the last 64 of 512 tokens."""
    with resources.files("cuattn.examples").joinpath("smollm2_qkv.npz").open("rb") as file, np.load(file) as data:
        q, k, v = (data[f"l{layer}_{name}"] for name in "qkv")
    kv_len = np.arange(449, 513, dtype=np.int32)
    shared = [cupy.broadcast_to(to_device(x), (64, *x.shape)) for x in (k, v)]
    exact = (np.broadcast_to(x.astype(np.float32), (64, *x.shape)) for x in (k, v))
    want = cuattn.decode(q[-64:].astype(np.float32), *exact, kv_len)
    mean = to_device(cuattn.channel_mean(k[:448].astype(np.float32)))
    caches = [cuattn.quantize(to_device(k), mean=mean), cuattn.quantize(to_device(v))]
    caches = [
        changed(x, **{n: cupy.broadcast_to(getattr(x, n), (64, *getattr(x, n).shape)) for n in ("codes", "norms")})
        for x in caches
    ]
    kept = {"k_sink": shared[0][:, :1], "v_sink": shared[1][:, :1]}
    for options in ({}, {"num_splits": 3}):
        got = cupy.asnumpy(cuattn.decode(to_device(q[-64:]), *caches, to_device(kv_len), **kept, **options))
        got = got.astype(np.float64)
        found = (np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)).mean()
        # Three digits were written down; weights and out in float16 add at most an ulp each.
        assert found == pytest.approx(error, abs=0.0006 + 2 * 2.0**-10)
    # By the law too, for the last four.
    host = []
    for x in caches:
        planes = (np.tile(cupy.asnumpy(plane[:1]), (4, 1, 1, 1)) for plane in (x.codes, x.norms))
        host.append(Tbq4Array(*planes, None if x.mean is None else cupy.asnumpy(x.mean)))
    arrays = (q[-4:], *host, kv_len[-4:])
    options = {name: np.tile(x[None, :1], (4, 1, 1, 1)) for name, x in (("k_sink", k), ("v_sink", v))}
    assert_call(arrays, options, call(arrays, options))


# --- Laws between calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_what_is_appended_is_encoded_by_the_rule_and_decode_sees_it(head_dim: int, *, means: bool) -> None:
    """Not the bytes of quantize: the two sum in other orders, and a value beside a boundary may fall on either side."""
    problem = Problem((70, 33), num_kv_heads=2, group=4, head_dim=head_dim, dtype="bfloat16")
    q, _, _, kv_len = problem.arrays()
    # All tokens have values of their own: many equal rows could lie on a boundary together.
    rng = np.random.default_rng(head_dim)
    rows = [rng.standard_normal((2, 70, 2, head_dim), np.float32).astype(DTYPES["bfloat16"]) for _ in "kv"]
    mean = np.ones((2, head_dim), np.float32) / 3 if means else None
    shape = (2, 70, 2)
    caches = [
        Tbq4Array(
            cupy.full((*shape, head_dim // 2), 0xFF, cupy.uint8),
            nans((*shape, head_dim // _tbq4.block_of(head_dim)), np.float16),
            to_device(mean),
            cupy.zeros(1, np.int32),
        )
        for _ in rows
    ]
    cuattn.append(*map(to_device, rows), *caches, cupy.array([70, 70], np.int32))
    host = [Tbq4Array(x.codes.get(), x.norms.get(), mean) for x in caches]
    for x, cache, t in zip(rows, caches, host, strict=True):
        assert_blocks(x, t.codes, t.norms, int(cache.clamped[0]), mean=mean)
    got = cuattn.decode(to_device(q), *caches, to_device(kv_len), return_lse=True)
    assert_call((q, *host, kv_len), {}, tuple(map(cupy.asnumpy, got)))


def test_a_merge_with_tokens_in_16_bits_is_one_call_with_recent_tokens() -> None:
    """Over their lse; the parts of out are rounded to the dtype once more, by half an ulp."""
    problem = replace(PAGED, page_size=None, kv_len=(150, 900), num_recent=40)
    q, k, v, kv_len = problem.arrays()
    options = problem.options()
    slots = np.stack([np.arange(n - 40, n) % 40 for n in kv_len])
    rows = [np.take_along_axis(options[f"{x}_recent"], slots[:, :, None, None], axis=1) for x in "kv"]
    results = launch((q, k, v, kv_len - 40), {}), launch((q, *rows, np.full(2, 40, np.int32)), {})
    parts, lse_parts = (cupy.stack(x) for x in zip(*results, strict=True))
    out, lse = map(cupy.asnumpy, cuattn.merge(parts, lse_parts))
    parts, lse_parts = (cupy.asnumpy(x).astype(np.float64) for x in (parts, lse_parts))
    want = expected(problem)
    for b, sizes in enumerate(want.sizes):
        slack = sizes.slack_of_out + ulp(float(np.abs(parts[:, b]).max()), out.dtype) / 2
        # Weights are exponentials of differences of lse, which are rounded to float32 once more.
        slack += 2 * ulp(float(np.abs(lse_parts[:, b]).max()), np.float32) * sizes.largest_value
        assert_rows(
            (out[b], lse[b]), *((x[0][b], x[1][b]) for x in (want.same, want.ref)), dtype=out.dtype,
            **asdict(sizes) | {"slack_of_out": slack},
        )  # fmt: skip


# --- What must not matter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "norm"), [(0xFF, 0x7C00), (0xFF, 0x7E00), (0xFF, 0xFFFF), (0x80, 0x7BFF)], ids=hex)
@pytest.mark.parametrize("num_splits", [None, 3])
@all_layouts
def test_codes_and_norms_without_a_token_do_not_matter(
    problem: Problem, num_splits: int | None, code: int, norm: int
) -> None:
    """Tails, pages that no table names, and tokens that are kept elsewhere."""
    q, k, v, kv_len = problem.arrays()
    options = {**problem.options(), "num_splits": num_splits}
    want, got = (
        call((q, *(with_unused(x, *unused) for x in (k, v)), kv_len), options) for unused in ((0, 0), (code, norm))
    )
    assert_same_bits(got, want)


@pytest.mark.parametrize("part", ["codes", "norms", "both", "out"])
@pytest.mark.parametrize("view", VIEWS)
@all_layouts
def test_strides_of_planes_are_honored(problem: Problem, view: str, part: str) -> None:
    around, select = VIEWS[view]
    q, k, v, kv_len = problem.arrays()
    want = call((q, k, v, kv_len), problem.options())
    caches = []
    for cache in (k, v):
        planes = {
            name: viewed(getattr(cache, name), around(getattr(cache, name).shape), select, fill)[1]
            for name, fill in (("codes", 0xFF), ("norms", np.nan))
            if part in (name, "both")
        }
        caches.append(changed(to_device(cache), **planes))
    out = viewed(np.full_like(q, np.nan), around(q.shape), select)[1] if part == "out" else nans(q.shape, q.dtype)
    got, lse = cuattn.decode(
        to_device(q), *caches, to_device(kv_len), **on_device(problem.options()), return_lse=True, out=out
    )
    assert got is out
    assert_same_bits((cupy.asnumpy(got), cupy.asnumpy(lse)), want)


def test_planes_of_k_and_v_may_be_interleaved() -> None:
    q, k, v, kv_len = PAGED.arrays()
    planes = [to_device(np.stack([getattr(x, name) for x in (k, v)], axis=2)) for name in ("codes", "norms")]
    caches = [Tbq4Array(*(plane[:, :, i] for plane in planes), to_device(x.mean)) for i, x in enumerate((k, v))]
    assert_same_bits(call((q, *caches, kv_len), PAGED.options()), decode(PAGED))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("token", [0, 15, 300, 511])
@pytest.mark.parametrize("which", "kv")
@pytest.mark.parametrize("num_splits", [1, 3, None])
def test_a_norm_that_is_not_finite_is_seen_by_the_rows_that_see_its_token(
    num_splits: int | None, which: str, token: int, value: float
) -> None:
    """In K by all of a row, in V by its block, and by no other sequence, head or row."""
    problem = replace(DENSE, kv_len=(512, 512, 7))
    q, k, v, kv_len = problem.arrays()
    options = {"num_splits": num_splits}
    clean = call((q, k, v, kv_len), options)
    norms = (k if which == "k" else v).norms.copy()
    norms[1, token, 1, 1] = value
    caches = (changed(k, norms=norms), v) if which == "k" else (k, changed(v, norms=norms))
    out, lse = call((q, *caches, kv_len), options)
    sees = np.zeros(out.shape, bool)
    sees[1, max(0, token - 508) :, 4:, 0 if which == "k" else 128 :] = True
    np.testing.assert_array_equal(~np.isfinite(out), sees)
    np.testing.assert_array_equal(np.isnan(lse), sees[..., 0] & (which == "k"))
    elsewhere = ~sees.any(axis=-1)
    assert_same_bits((out[elsewhere], lse[elsewhere]), (clean[0][elsewhere], clean[1][elsewhere]))


def test_lengths_on_the_device_are_limited_to_the_capacity() -> None:
    problem = replace(PAGED, kv_len=(64, 0, 64, 0), page_size=None, num_sink=3, num_recent=9)
    q, *caches, _ = problem.arrays()
    caches = [changed(x, codes=x.codes[:, :64].copy(), norms=x.norms[:, :64].copy()) for x in caches]
    want = call((q, *caches, np.array([64, 0, 64, 0], np.int32)), problem.options())
    for lengths in ((65, -1, 2**31 - 1, -(2**31)), (2**30, -7, 10**9, 0)):
        assert_same_bits(call((q, *caches, np.array(lengths, np.int32)), problem.options()), want, lengths)


# --- Repeats, streams, graphs ---------------------------------------------------------------------------------------


@all_layouts
def test_20_calls_on_a_busy_gpu_give_the_same_bits(problem: Problem) -> None:
    arrays = tuple(map(to_device, problem.arrays()))
    options = on_device(problem.options())
    first = call(arrays, options)
    assert_decode(problem, *first)
    with busy_gpu():
        results = [launch(arrays, options) for _ in range(20)]
    for i, result in enumerate(results):
        assert_same_bits(tuple(map(cupy.asnumpy, result)), first, f"repeat {i} of {problem}")


@all_layouts
def test_decode_runs_in_order_in_the_current_stream(problem: Problem) -> None:
    """The inputs are unusable until late in the stream, and nothing but the stream says when they are there."""
    host, options = problem.arrays(), problem.options()
    want = call(host, options)
    options = on_device(options)
    ready, late = (tuple(map(to_device, host)) for _ in range(2))
    for x in planes(late):
        x.view(cupy.uint8).fill(0xFF)
    late[3].fill(0)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        out = cupy.empty_like(late[0])
        poison(out)
        occupy(rounds=300)
        for x, y in zip(planes(late), planes(ready), strict=True):
            x.view(cupy.uint8)[...] = y.view(cupy.uint8)
        got, lse = cuattn.decode(*late, **options, return_lse=True, out=out)
        copies = got.copy(), lse.copy()
        for x in planes(late):
            x.view(cupy.uint8).fill(0xFF)
    stream.synchronize()
    assert_same_bits(tuple(map(cupy.asnumpy, copies)), want)


@pytest.mark.parametrize("num_splits", [1, 7])
@pytest.mark.parametrize("formats", [("tbq4", "tbq4"), ("raw16", "raw16")], ids="-".join)
def test_a_chain_of_calls_that_need_each_other_is_in_order(formats: tuple[str, str], num_splits: int) -> None:
    """Kernels may start while those before them end: each step appends and attends to what the step before gave."""
    problem = of(formats, kv_len=(900, 641, 333), page_size=16, means=False)
    (first, *caches, kv_len), options = tuple(map(to_device, problem.arrays())), on_device(problem.options())
    shape = 2, len(problem.kv_len), 1, problem.num_kv_heads, problem.head_dim

    def chain(wait: Callable[[], None]) -> list[tuple[np.ndarray, np.ndarray]]:
        q, results = first, []
        k, v = (Tbq4Array(x.codes.copy(), x.norms.copy()) if isinstance(x, Tbq4Array) else x.copy() for x in caches)
        for _ in range(30):
            rows = q.reshape(-1)[: math.prod(shape)].reshape(shape)
            cuattn.append(*rows, k, v, kv_len, page_table=options["page_table"])
            wait()
            out, lse = cuattn.decode(q, k, v, kv_len, **options, num_splits=num_splits, return_lse=True)
            wait()
            results.append((out, lse))
            twice, _ = cuattn.merge(cupy.stack([out, out]), cupy.stack([lse, lse]))
            wait()
            q = twice / cupy.abs(twice).max()  # by CuPy's kernels, which know nothing of this
        return [tuple(map(cupy.asnumpy, pair)) for pair in results]

    for i, (got, want) in enumerate(zip(chain(lambda: None), chain(cupy.cuda.Device().synchronize), strict=True)):
        assert_same_bits(got, want, f"step {i} of {problem}")


@pytest.mark.parametrize("num_splits", [None, 1, 16])
@pytest.mark.parametrize("fields", [{}, {"num_sink": 4, "num_recent": 64}], ids=["caches", "kept"])
def test_a_captured_graph_follows_the_lengths_on_the_device(fields: dict[str, int], num_splits: int | None) -> None:
    """Every row and slot holds a token, so that any length may come."""
    problem = replace(PAGED, kv_len=(2000, 2000, 2000), num_kv_heads=1, group=4, sinks=True)
    q, k, v, kv_len = problem.arrays()
    rng = np.random.default_rng(3)
    options = {**problem.options(), "num_splits": num_splits}
    for name, num in fields.items():
        shape = (3, num, 1, 128)
        options |= {f"{x}{name.removeprefix('num')}": rng.standard_normal(shape).astype(q.dtype) for x in "kv"}
    device, on_gpu = tuple(map(to_device, (q, k, v, kv_len))), on_device(options)
    launch(device, on_gpu)  # compiles and loads the kernels, which a capture must not do
    out = nans(q.shape, q.dtype)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    pool = cupy.cuda.MemoryPool()  # of the graph's own
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        _, lse = cuattn.decode(*device, **on_gpu, return_lse=True, out=out)
        graph = stream.end_capture()
    for lengths in ((0, 1, 3), (4, 5, 64), (65, 67, 68), (69, 1999, 0), (2000, 700, 130)):
        with stream:
            poison(out, lse)
            device[3].set(np.array(lengths, np.int32))
            graph.launch(stream)
        stream.synchronize()
        got = cupy.asnumpy(out), cupy.asnumpy(lse)
        arrays = (q, k, v, np.array(lengths, np.int32))
        assert_same_bits(got, call(arrays, options), lengths)
        assert_call(arrays, options, got)


# --- Offsets beyond 32 bits -----------------------------------------------------------------------------------------


def test_pages_at_both_ends_of_6_gib_of_codes_are_read() -> None:
    free = cupy.cuda.runtime.memGetInfo()[0]
    if free < 16 * GIB:
        pytest.skip(reason=f"needs 16 GiB of free GPU memory, there are {free / GIB:.0f}")
    problem = replace(PAGED, kv_len=(1000, 0, 333), group=4)
    q, k, v, kv_len = problem.arrays()
    table = problem.options()["page_table"]
    want = decode(problem)
    assert_decode(problem, *want)
    num_pages = 6 * GIB // k.codes[0].size
    where = np.linspace(0, num_pages - 1, len(k.codes)).astype(np.int64)
    used = np.arange(table.shape[1]) < -(-kv_len // 16)[:, None]
    table = np.where(used, where[np.where(used, table, 0)], table).astype(np.int32)
    caches = []
    for cache in (k, v):
        codes = cupy.full((num_pages, *cache.codes.shape[1:]), 0xFF, np.uint8)
        norms = cupy.full((num_pages, *cache.norms.shape[1:]), np.nan, np.float16)
        for i, page in enumerate(where):
            codes[page], norms[page] = cupy.asarray(cache.codes[i]), cupy.asarray(cache.norms[i])
        caches.append(Tbq4Array(codes, norms, to_device(cache.mean)))
    try:
        assert_same_bits(call((q, *caches, kv_len), {"page_table": table}), want)
    finally:
        caches.clear()
        del codes, norms
        cupy.get_default_memory_pool().free_all_blocks()


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: changed(x, codes=cupy.zeros((2, 20, 2, 72), np.uint8)[..., 4:68]), ("k_cache.codes", "16 bytes")),
        (lambda x: changed(x, codes=cupy.zeros((2, 20, 2, 72), np.uint8)[..., :64]), ("k_cache.codes", "16 bytes")),
        (lambda x: changed(x, codes=x.codes[:, :10], norms=x.norms[:, :10]), ("v_cache", "k_cache")),
        (lambda x: Tbq4Array(cupy.asnumpy(x.codes), cupy.asnumpy(x.norms)), ("k_cache", "cpu", "cuda:0")),
        (lambda x: changed(x, codes=x.codes[..., :32], norms=x.norms), ("k_cache", "head_dim")),
    ],
)
def test_caches_that_cannot_be_read_are_named_and_nothing_is_written(
    change: Callable[[Tbq4Array], Tbq4Array], words: tuple[str, ...]
) -> None:
    q, out = cupy.zeros((2, 4, 128), np.float16), cupy.full((2, 4, 128), 77, np.float16)
    cache = cuattn.quantize(cupy.zeros((2, 20, 2, 128), np.float16))
    with pytest.raises((TypeError, ValueError)) as caught:
        cuattn.decode(q, change(cache), cache, [3, 20], out=out)
    assert not [word for word in words if word not in str(caught.value)], str(caught.value)
    assert (out == 77).all()
