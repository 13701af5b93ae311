"""decode, append, quantize_fp8 and dequantize on a GPU with rows in fp8, against the reference."""

from dataclasses import replace
from itertools import product
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest
import strategies
from fp8_codes import NUMBERS, TOKENS, all_codes, all_pairs, assert_codes, values_to_encode, without_nan
from gpu.helpers import (
    assert_same_bits,
    busy_gpu,
    call,
    check,
    decode,
    launch,
    nans,
    on_device,
    planes,
    to_device,
    viewed,
)
from hypothesis import given
from hypothesis import strategies as st
from strategies import DTYPES, Problem, with_unused
from tolerance import assert_call, assert_decode

import cuattn
from cuattn import Fp8Array, _plan, reference

DTYPE_NAMES = ("float16", "bfloat16")
FORMATS = (("fp8", "fp8"), ("fp8", "raw16"), ("raw16", "fp8"), ("fp8", "tbq4"), ("tbq4", "fp8"))
TBQ4_DIMS = (64, 128, 256, 512)
of_formats = pytest.mark.parametrize("formats", FORMATS, ids="-".join)
BOTH = {"k_format": "fp8", "v_format": "fp8"}
PAGED = Problem((0, 1, 40, 700), num_kv_heads=2, group=6, page_size=16, dtype="bfloat16", head_dim=128, seed=11, **BOTH)
DENSE = Problem((3, 0, 515, 64), seqlen_q=4, num_kv_heads=2, group=4, head_dim=256, seed=12, **BOTH)
KEPT = replace(PAGED, num_sink=4, num_recent=64, sinks=True)
all_layouts = pytest.mark.parametrize("problem", [PAGED, DENSE, KEPT], ids=["paged", "dense", "kept"])


def of(formats: tuple[str, str], **fields: Any) -> Problem:
    return Problem(**{"num_kv_heads": 2, "group": 4, "head_dim": 128, **fields}, k_format=formats[0],
                   v_format=formats[1])  # fmt: skip


# --- Against the reference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formats", "dtype", "head_dim"),
    [
        case
        for case in product(FORMATS, DTYPE_NAMES, _plan.HEAD_DIMS)
        if "tbq4" not in case[0] or case[2] in TBQ4_DIMS
    ],
)  # fmt: skip
def test_every_kernel_obeys_the_error_law(formats: tuple[str, str], dtype: str, head_dim: int) -> None:
    """All numbers of row tiles, whole tiles and rows that are left over."""
    problem = of(formats, kv_len=(0, 1, 37, 700), head_dim=head_dim, dtype=dtype, seed=head_dim)
    for num_splits in (None, 1, 3):
        check(problem, num_splits=num_splits)
    check(replace(problem, page_size=16, group=12, kv_len=(300, 33)))
    check(replace(problem, page_size=5, seqlen_q=4, group=7, kv_len=(129, 2), sinks=True))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 12, 16, 24, 64])
@of_formats
def test_every_group_obeys_the_error_law(formats: tuple[str, str], group: int) -> None:
    check(of(formats, kv_len=(0, 1, 37, 300), num_kv_heads=2 if group < 16 else 1, group=group, seed=group))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("seqlen_q", [2, 4, 16])
@of_formats
def test_several_query_tokens_obey_the_error_law(formats: tuple[str, str], seqlen_q: int, *, causal: bool) -> None:
    problem = of(formats, kv_len=(0, 1, seqlen_q - 1, seqlen_q, 40, 300), seqlen_q=seqlen_q, group=3, causal=causal)
    check(problem)
    check(replace(problem, head_dim=64, page_size=16, dtype="bfloat16", window=(33, 1)), num_splits=2)


@pytest.mark.parametrize("num_splits", [None, 1, 7, 64])
@of_formats
def test_long_sequences_of_unequal_lengths_obey_the_error_law(formats: tuple[str, str], num_splits: int | None) -> None:
    problem = of(formats, kv_len=(5000, 1, 3001, 0, 130), num_kv_heads=1, page_size=16, dtype="bfloat16", sinks=True)
    check(problem, num_splits=num_splits)


@pytest.mark.parametrize("head_dim", _plan.HEAD_DIMS)
def test_lengths_beside_every_power_of_two_obey_the_error_law(head_dim: int) -> None:
    lengths = tuple(sorted({max(0, 2**n + step) for n in range(10) for step in (-1, 0, 1)}))
    for page_size in (None, 32):
        check(of(FORMATS[0], kv_len=lengths, num_kv_heads=1, group=2, head_dim=head_dim, page_size=page_size))


@pytest.mark.parametrize("values", ["normal", "late_max", "huge", "equal", "tiny_v"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@of_formats
def test_unusual_values_obey_the_error_law(formats: tuple[str, str], dtype: str, values: str) -> None:
    problem = of(formats, kv_len=(900, 301, 302), num_kv_heads=1, values=values, dtype=dtype)
    for num_splits in (None, 3):
        check(problem, num_splits=num_splits)
    check(replace(problem, seqlen_q=3, window=(250, None), softcap=5.0))


@given(problem=strategies.fp8_problems(), num_splits=st.sampled_from((None, 1, 2, 5)))
def test_any_problem_obeys_the_error_law(problem: Problem, num_splits: int | None) -> None:
    assert_decode(problem, *decode(problem, num_splits=num_splits))


# --- Codes ----------------------------------------------------------------------------------------------------------


def newest(q: np.ndarray, k: Fp8Array, v: Fp8Array, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Each query token sees its own key."""
    return call((q, k, v, np.full(len(q), TOKENS, np.int32)), {"window": (0, 0), **options})


@pytest.mark.parametrize("head_dim", _plan.HEAD_DIMS)
def test_scores_of_one_hot_queries_are_the_numbers_of_all_codes(head_dim: int) -> None:
    """The lse is the score, of natural logarithms: a product with log2 e and one with ln 2 are rounded."""
    codes = without_nan(all_codes(head_dim))
    for first in range(0, head_dim, 64):
        hot = np.eye(head_dim, dtype=np.float16)[first : first + 64]
        q = np.tile(hot, (len(codes), TOKENS, 1, 1))
        _, lse = newest(q, Fp8Array(codes, 0.25), Fp8Array(np.zeros_like(codes)), softmax_scale=1.0)
        want = (NUMBERS[codes[:, :, 0]] * 0.25)[..., first : first + 64]
        np.testing.assert_allclose(lse, want, rtol=4 * 2.0**-24, atol=0)  # two products, of two rounded constants


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_values_of_one_hot_weights_are_the_numbers_of_all_pairs_of_codes(head_dim: int) -> None:
    codes = without_nan(all_pairs(head_dim))
    q = np.ones((len(codes), TOKENS, 1, head_dim), np.float16)
    out, _ = newest(q, Fp8Array(np.zeros_like(codes)), Fp8Array(codes, np.array([4], np.float32)))
    np.testing.assert_array_equal(out[:, :, 0], (NUMBERS[codes[:, :, 0]] * 4).astype(np.float16))


@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_nan_is_seen_by_the_rows_that_see_its_token(seqlen_q: int) -> None:
    problem = of(FORMATS[0], kv_len=(300, 300, 7), seqlen_q=seqlen_q)
    q, k, v, kv_len = problem.arrays()
    for token, code, which in ((0, 0x7F, "k"), (150, 0xFF, "v"), (298, 0x7F, "v"), (299, 0xFF, "k"), (299, 0xFF, "v")):
        spoiled = (k if which == "k" else v).codes.copy()
        spoiled[1, token, 1, 37] = code
        caches = (Fp8Array(spoiled, k.scale), v) if which == "k" else (k, Fp8Array(spoiled, v.scale))
        arrays = (q, *caches, kv_len)
        assert_call(arrays, {}, call(arrays, {}))


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float16", 6e-8), ("float16", 6e4), ("bfloat16", 1e-16), ("bfloat16", 1e16)]
)
def test_queries_of_any_size_keep_their_bits(dtype: str, scale: float) -> None:
    q, k, v, kv_len = of(FORMATS[0], kv_len=(131, 0, 37), dtype=dtype).arrays()
    q = (np.sign(q.astype(np.float32)) * scale).astype(DTYPES[dtype])
    arrays, options = (q, k, v, kv_len), {"softmax_scale": 128**-0.5 / scale}
    assert_call(arrays, options, call(arrays, options))


# --- Contract -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 0x7E, 0xFF])
@all_layouts
def test_what_lies_where_no_token_is_never_shows(problem: Problem, code: int) -> None:
    q, k, v, kv_len = problem.arrays()
    want = call((q, k, v, kv_len), problem.options())
    changed = [with_unused(x, code, 0) for x in (k, v)]
    assert_same_bits(call((q, *changed, kv_len), problem.options()), want)


@all_layouts
def test_the_same_call_gives_the_same_bits(problem: Problem) -> None:
    want = decode(problem)
    with busy_gpu():
        for _ in range(20):
            assert_same_bits(decode(problem), want)


@all_layouts
def test_a_captured_graph_follows_lengths_and_codes(problem: Problem) -> None:
    q, k, v, kv_len = map(to_device, problem.arrays())
    options = on_device(problem.options())
    out = nans(q.shape, q.dtype)
    cuattn.decode(q, k, v, kv_len, **options, out=out)
    want = out.copy()
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(pool.malloc):
        stream.begin_capture()
        cuattn.decode(q, k, v, kv_len, **options, out=out)
        graph = stream.end_capture()
    held = [x.copy() for x in planes((k, v))]
    for x in planes((k, v)):
        x.fill(0)
    lengths = kv_len.copy()
    kv_len.fill(0)
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (out.view(np.uint16) & 0x7FFF == 0).all()
    for x, copy in zip(planes((k, v)), held, strict=True):
        x[...] = copy
    kv_len[...] = lengths
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert (out.view(np.uint16) == want.view(np.uint16)).all()


def test_strides_of_codes_are_honored() -> None:
    problem = replace(PAGED, page_size=None)
    q, k, v, kv_len = problem.arrays()
    want = call((q, k, v, kv_len), {})
    for shape, view in (
        ((*k.shape[:-1], 160), lambda x: x[..., 16:-16]),
        ((k.shape[0], k.shape[2], k.shape[1], 128), lambda x: x.swapaxes(1, 2)),
        (k.shape, lambda x: x[::-1, ::-1, ::-1]),
    ):
        caches = [Fp8Array(viewed(x.codes, shape, view, fill=0xFF)[1], to_device(x.scale)) for x in (k, v)]
        out, lse = cuattn.decode(to_device(q), *caches, to_device(kv_len), return_lse=True)
        assert_same_bits((out.get(), lse.get()), want)


def test_codes_of_another_alignment_are_refused() -> None:
    memory = cupy.zeros(2 * 64 * 64 + 8, np.uint8)[8:].reshape(2, 64, 1, 64)
    q = cupy.zeros((2, 1, 64), np.float16)
    with pytest.raises(ValueError, match=r"k_cache\.codes must have rows that start at multiples of 16 bytes"):
        cuattn.decode(q, Fp8Array(memory), cupy.zeros((2, 64, 1, 64), np.float16), 3)
    with pytest.raises(ValueError, match="scale is on cpu, codes on cuda:0"):
        Fp8Array(memory, np.ones(1, np.float32))
    with pytest.raises(TypeError, match="q must be float16 or bfloat16 with k_cache in fp8, got float32"):
        cuattn.decode(q.astype(np.float32), Fp8Array(cupy.zeros((2, 64, 1, 64), np.uint8)),
                      cupy.zeros((2, 64, 1, 64), np.float32), 3)  # fmt: skip


# --- quantize_fp8, dequantize, append -------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", _plan.HEAD_DIMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_quantize_fp8_gives_the_codes_and_scales_of_the_reference(dtype: str, head_dim: int) -> None:
    x = (np.random.default_rng(head_dim).standard_normal((3, 37, 2, head_dim)) * [[1], [30]]).astype(DTYPES[dtype])
    device = cupy.asarray(x)
    for part in (lambda y: y, lambda y: y[0], lambda y: y[0, 0], lambda y: y[:, ::2], lambda y: y[:, :0]):
        want, got = reference.quantize_fp8(part(x)), cuattn.quantize_fp8(part(device))
        np.testing.assert_array_equal(got.scale.get(), want.scale)
        np.testing.assert_array_equal(got.codes.get(), want.codes)
        got = cuattn.quantize_fp8(part(device), scale=0.01)
        np.testing.assert_array_equal(got.codes.get(), reference.quantize_fp8(part(x), scale=0.01).codes)
        assert got.scale == np.float32(0.01)


def test_values_are_rounded_to_nearest_even_and_saturate() -> None:
    x = values_to_encode()
    x = np.resize(x, (-(-len(x) // 64), 1, 64))
    assert_codes(cuattn.quantize_fp8(cupy.asarray(x), scale=1.0).codes.get()[:, 0], x[:, 0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dequantize_gives_the_numbers_of_all_codes(dtype: str) -> None:
    codes = np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(4, 2, 64)
    scale = np.array([0.3, 2], np.float32)
    got = cuattn.dequantize(to_device(Fp8Array(codes, scale)), dtype=DTYPES[dtype])
    want = (NUMBERS[codes] * scale[:, None]).astype(DTYPES[dtype])
    bits = (got.view(np.uint16 if got.itemsize == 2 else np.uint32)).get()
    is_nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(bits.view(DTYPES[dtype]).astype(np.float32)), is_nan)
    np.testing.assert_array_equal(bits[~is_nan], want.view(bits.dtype)[~is_nan])


def test_decode_reads_what_append_writes() -> None:
    """A prompt and tokens one by one, into both caches."""
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((2, 2, 40, 3, 128)).astype(np.float16)
    scale = np.array([0.01, 0.02, 0.03], np.float32)
    caches = [Fp8Array(cupy.full((2, 48, 3, 128), 0xFF, np.uint8), cupy.asarray(scale)) for _ in "kv"]
    device = cupy.asarray(rows)
    cuattn.append(device[0, :, :30], device[1, :, :30], *caches, 30)
    for i in range(30, 40):
        cuattn.append(device[0, :, i], device[1, :, i], *caches, i + 1)
    want = [Fp8Array(*reference.quantize_fp8(x, scale=scale)) for x in rows]
    for cache, x in zip(caches, want, strict=True):
        np.testing.assert_array_equal(cache.codes.get()[:, :40], x.codes)
        assert (cache.codes[:, 40:] == 0xFF).all()
    q = rng.standard_normal((2, 6, 128)).astype(np.float16)
    got = launch((q, *caches, np.array([40, 17], np.int32)), {})
    assert_call((q, *want, np.array([40, 17])), {}, tuple(x.get() for x in got))


def test_codes_of_a_float8_type_on_the_host_are_copied_as_bytes() -> None:
    codes = np.ones((1, 16, 1, 64), ml_dtypes.float8_e4m3fn)
    t = Fp8Array(cupy.asarray(codes.view(np.uint8)), 2.0)
    assert (cuattn.dequantize(t) == 2).all()
