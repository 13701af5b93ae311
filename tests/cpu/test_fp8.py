"""fp8 on NumPy arrays: the format, the definition of attention to it, plans, and what is refused."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import strategies
from fp8_codes import NANS, NUMBERS, values_to_encode
from hypothesis import given
from strategies import DTYPES, Problem
from tolerance import assert_decode, expected
from zeros import half, single

import cuattn
from cuattn import Fp8Array, _arrays, _fp8, _plan, reference
from cuattn._plan import DecodeProblem, Dtype, KvFormat

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
ACCEPTED = "a positive finite number, or a float32 array of one for each KV head"
problems = partial(
    strategies.fp8_problems,
    lengths=strategies.lengths(6),
    groups=(1, 3),
    kv_heads=(1, 2),
    page_sizes=(None, 4),
    nums_sink=(0, 1, 20),
    nums_recent=(0, 3, 20),
)


def fp8(*shape: int, scale: Any = 1.0) -> Fp8Array:
    """Rows of ones."""
    return Fp8Array(np.full(shape, 0x38, np.uint8), scale)


# The format


def test_codes_are_those_of_the_words() -> None:
    """A sign, four bits of exponent with a bias of 7, three of mantissa; all ones is NaN, and there is no infinity."""
    for code, got in enumerate(reference.dequantize_fp8(np.arange(256, dtype=np.uint8)[None], 1.0)[0]):
        sign, exponent, mantissa = (-1) ** (code >> 7), code >> 3 & 15, code & 7
        want = sign * (2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else 2.0**-6 * mantissa / 8)
        assert np.isnan(got) if code & 0x7F == 0x7F else got == want
    assert np.nanmax(NUMBERS) == reference.fp8.LARGEST == 448


@pytest.mark.parametrize("scale", [1.0, 2.0**-5, 3.0])
def test_values_become_the_nearest_code_of_two_the_even_one(scale: float) -> None:
    with np.errstate(over="ignore"):
        x = values_to_encode() * np.float32(scale)
    got = reference.quantize_fp8(np.resize(x, (1, len(x))), scale=scale).codes[0]
    numbers = np.where(np.isnan(NUMBERS), np.inf, NUMBERS).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        quotient = np.clip((x / np.float32(scale)).astype(np.float64), -448, 448)
    for value, code in zip(quotient, got, strict=True):
        if np.isnan(value):
            assert code in NANS
            continue
        distance = np.abs(numbers - value)
        nearest = np.flatnonzero(distance == distance.min())
        nearest = nearest[np.signbit(NUMBERS[nearest]) == np.signbit(value)]
        assert code == (nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0])


def test_every_code_comes_back() -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 2, 64)
    t = Fp8Array(codes, np.array([0.5, 8], np.float32))
    x = cuattn.dequantize(t)
    back = cuattn.quantize_fp8(x, scale=t.scale).codes
    np.testing.assert_array_equal(back[~np.isnan(x)], codes[~np.isnan(x)])
    assert np.isin(back[np.isnan(x)], NANS).all()


def test_the_scale_takes_the_largest_finite_value_of_a_head_to_the_largest_code() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5, 4, 64)).astype(np.float32)
    x[0, 0, 0, 0], x[1, 1, 0, 1] = np.inf, np.nan
    x[:, :, 2] = 0
    x[:, :, 3] *= 1e-45
    t = cuattn.quantize_fp8(x)
    largest = np.where(np.isfinite(x), np.abs(x), 0).max(axis=(0, 1, 3))
    np.testing.assert_allclose(t.scale[:2], largest[:2] / 448, rtol=2.0**-23)  # a rounding of each quotient
    assert t.scale[2] == 1
    assert t.scale[3] > 0
    assert (
        np.abs(NUMBERS[t.codes[:, :, :2]]).max(axis=(0, 1, 3), initial=0, where=~np.isnan(x[:, :, :2])) == 448
    ).all()
    assert NUMBERS[t.codes[0, 0, 0, 0]] == 448
    assert t.codes[1, 1, 0, 1] in NANS
    assert not t.codes[:, :, 2:].any() or np.isin(t.codes[:, :, 2:], (0, 0x80)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_an_array_of_the_type_is_taken_over_without_a_copy(dtype: str) -> None:
    codes = np.random.default_rng(0).standard_normal((2, 3, 64)).astype(E4M3)
    t = Fp8Array(codes, 2)
    assert t.codes.dtype == np.uint8
    assert np.shares_memory(t.codes, codes)
    assert (t.head_dim, t.shape, t.nbytes, t.scale) == (64, (2, 3, 64), 384, 2.0)
    wanted = DTYPES.get(dtype, np.dtype(np.float64))
    got = cuattn.dequantize(t, dtype=wanted)
    assert got.tobytes() == (codes.astype(np.float64) * 2).astype(wanted).tobytes()


def test_scales_are_found_on_a_gpu_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NumPy in CuPy's place."""
    monkeypatch.setattr(_arrays, "import_cupy", lambda: np)
    x = np.random.default_rng(0).standard_normal((3, 5, 4, 64)).astype(np.float32)
    x[0, 0, 0, 0], x[1, 1, 0, 1], x[:, :, 2] = np.inf, np.nan, 0
    for dtype in DTYPES.values():
        for rows in (x.astype(dtype), x[0].astype(dtype), x[0, 0].astype(dtype), x[:, :0].astype(dtype)):
            got = reference.fp8.scale_of(_fp8._largest_sizes(rows), np)
            np.testing.assert_array_equal(got, reference.quantize_fp8(rows).scale)


# Attention


@given(problem=problems())
def test_decode_attends_to_the_rows_that_dequantize_gives(problem: Problem) -> None:
    q, *caches, kv_len = problem.arrays()
    decoded = [
        reference.dequantize_fp8(x.codes, x.scale)
        if isinstance(x, Fp8Array)
        else reference.dequantize(x.codes, x.norms, mean=x.mean)
        if isinstance(x, cuattn.Tbq4Array)
        else x
        for x in caches
    ]
    got = reference.decode(q, *caches, kv_len, **problem.options(), return_lse=True)
    want = reference.decode(q, *decoded, kv_len, **problem.options(), return_lse=True)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@given(problem=problems())
def test_the_roundings_of_a_kernel_obey_the_law(problem: Problem) -> None:
    """Those of the queries too: `same` may be as bad as the law allows, and no worse than 16 bits are."""
    want = expected(problem)
    assert_decode(problem, *want.same)


def test_decode_on_numpy_is_the_reference() -> None:
    q, k, v, kv_len = Problem((7, 3), num_kv_heads=2, group=2, k_format="fp8", v_format="fp8").arrays()
    out, lse = cuattn.decode(q, k, v, kv_len, return_lse=True)
    want = reference.decode(q, k, v, kv_len, return_lse=True)
    np.testing.assert_array_equal(out, want[0].astype(np.float16))
    np.testing.assert_array_equal(lse, want[1].astype(np.float32))
    wide = cuattn.decode(q.astype(np.float64), k, SimpleNamespace(codes=v.codes, scale=v.scale), kv_len)
    np.testing.assert_array_equal(wide, want[0])


# Plans


@pytest.mark.parametrize("arch", list(_plan.DEVICES))
def test_a_plan_counts_a_byte_a_value(arch: str) -> None:
    sizes = (1, 1, 24, 4, 256, 131072)
    fp8_format, raw = KvFormat.FP8, KvFormat.RAW16
    both = _plan.decode_plan(DecodeProblem(Dtype.BF16, fp8_format, fp8_format, *sizes), _plan.DEVICES[arch])
    wide = _plan.decode_plan(DecodeProblem(Dtype.BF16, raw, raw, *sizes), _plan.DEVICES[arch])
    assert both.problem.kv_bytes == 2 * 131072 * 4 * 256 == wide.problem.kv_bytes // 2
    assert "K fp8, V fp8" in str(both)
    assert "268.4 MB" in str(both)
    assert not both.config.uses_tbq4


def test_tiles_of_fp8_have_even_rings_where_the_other_format_differs() -> None:
    for device in _plan.DEVICES.values():
        for other in (KvFormat.RAW16, KvFormat.TBQ4):
            for pair in ((KvFormat.FP8, other), (other, KvFormat.FP8)):
                tiles = _plan.decode_tiles(device, *pair)
                assert all(tile.num_stages % 2 == 0 for tile in tiles.values())
                assert {dim for dim, _ in tiles} == set(
                    _plan.HEAD_DIMS if other is KvFormat.RAW16 else (64, 128, 256, 512)
                )


# What is refused

BAD_ARRAYS = {
    "codes of float16": ({"codes": half(2, 3, 64)}, TypeError, "codes must be uint8 or float8_e4m3fn, got float16"),
    "codes of one axis": ({"codes": np.zeros(64, np.uint8)}, ValueError, "codes must have shape .* got 1 axes: (64,)"),
    "a head_dim of 80": ({"codes": np.zeros((2, 3, 80), np.uint8)}, ValueError,
                         "codes must have 64, 96, 128, 192, 256, 512 bytes in the last axis, .*, got (2, 3, 80)"),
    "gaps": ({"codes": np.zeros((2, 3, 128), np.uint8)[..., ::2]}, ValueError, "codes must be contiguous along"),
    "a list": ({"codes": [1]}, TypeError, "codes must be a NumPy array, .* got list"),
    "a scale of zero": ({"scale": 0.0}, ValueError, f"scale must be {ACCEPTED}, got 0.0"),
    "a negative scale": ({"scale": -1}, ValueError, f"scale must be {ACCEPTED}, got -1"),
    "an infinite scale": ({"scale": np.inf}, ValueError, f"scale must be {ACCEPTED}, got inf"),
    "a scale of NaN": ({"scale": np.float32("nan")}, ValueError, f"scale must be {ACCEPTED}, got .*nan"),
    "a scale beyond float32": ({"scale": 1e39}, ValueError, f"scale must be {ACCEPTED}, got 1e+39"),
    "a scale that float32 makes zero": ({"scale": 1e-50}, ValueError, f"scale must be {ACCEPTED}, got 1e-50"),
    "a huge integer": ({"scale": 10**400}, ValueError, f"scale must be {ACCEPTED}, got 1000"),
    "no scale": ({"scale": None}, TypeError, f"scale must be {ACCEPTED}, got None"),
    "a list of scales": ({"scale": [1.0, 1.0, 1.0]}, TypeError, f"scale must be {ACCEPTED}, got [1.0, 1.0, 1.0]"),
    "True": ({"scale": True}, TypeError, f"scale must be {ACCEPTED}, got True"),
    "scales of other heads": ({"scale": single(2)}, ValueError,
                              "scale must have shape (3,) (one for each KV head), got (2,)"),
    "scales of float64": ({"scale": np.ones(3)}, TypeError, "scale must be float32, got float64"),
    "a scale of zero among others": ({"scale": np.array([1, 0, 1], np.float32)}, ValueError,
                                     f"scale must be {ACCEPTED}, got [1. 0. 1.]"),
}  # fmt: skip


def pattern(message: str) -> str:
    return re.escape(message).replace(r"\.\*", ".*")


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ARRAYS.values(), ids=BAD_ARRAYS.keys())
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    parts = {"codes": np.zeros((2, 3, 64), np.uint8), "scale": 1.0, **changes}
    with pytest.raises(error, match=pattern(message)):
        Fp8Array(**parts)
    call = {"q": half(2, 3, 64), "k_cache": half(2, 4, 3, 64), "v_cache": SimpleNamespace(**parts), "kv_len": 4}
    with pytest.raises(error, match=pattern("v_cache." + message)):
        cuattn.decode(**call)


def test_scales_of_quantize_fp8_that_do_not_fit_are_refused() -> None:
    x = half(2, 3, 64)
    for scale, message in ((0.0, f"scale must be {ACCEPTED}, got 0.0"), (single(2), "scale must have shape (3,)")):
        with pytest.raises(ValueError, match=pattern(message)):
            cuattn.quantize_fp8(x, scale=scale)
    for bad, error, message in (
        (half(64), ValueError, "x must have shape"),
        (half(2, 80), ValueError, "x has head_dim 80; supported: 64, 96"),
        (x.astype(np.int32), TypeError, "x must be float16 or bfloat16 or float32 or float64, got int32"),
        (half(2, 3, 128)[..., ::2], ValueError, "x must be contiguous along its last axis"),
    ):
        with pytest.raises(error, match=message):
            cuattn.quantize_fp8(bad)
    with pytest.raises(TypeError, match="t must be a Tbq4Array or an Fp8Array, got ndarray"):
        cuattn.dequantize(x)


BAD_CALLS = {
    "float32 queries": ({"q": single(2, 4, 64), "v_cache": fp8(2, 10, 2, 64)}, TypeError,
                        "q must be float16 or bfloat16 with k_cache in fp8, got float32"),
    "another head_dim": ({"k_cache": fp8(2, 10, 2, 128)}, ValueError, "k_cache must have head_dim 64 as q, got 128"),
    "three axes": ({"k_cache": fp8(2, 10, 64)}, ValueError, "k_cache must have shape (batch, capacity, num_kv_heads"),
    "other tokens": ({"v_cache": fp8(2, 11, 2, 64)}, ValueError, "v_cache must have shape (2, 10, 2, 64)"),
    "rows at 8 bytes": ({"k_cache": Fp8Array(np.zeros((2, 10, 2, 72), np.uint8)[..., :64])}, ValueError,
                        "k_cache.codes must have rows that start at multiples of 16 bytes"),
    "a set": ({"k_cache": {1}}, TypeError, "or a GPU array that speaks DLPack, a Tbq4Array or an Fp8Array, got set"),
    "fp8 first tokens": ({"k_sink": fp8(2, 1, 2, 64), "v_sink": half(2, 1, 2, 64)}, TypeError,
                         "k_sink must be a NumPy array, .* got Fp8Array"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS.keys())
def test_calls_of_decode_that_do_not_fit_are_refused(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    call = {"q": half(2, 4, 64), "k_cache": fp8(2, 10, 2, 64), "v_cache": half(2, 10, 2, 64), "kv_len": 4}
    with pytest.raises(error, match=pattern(message)):
        (cuattn.plan_decode if "q" in changes else cuattn.decode)(**{**call, **changes})


@pytest.mark.parametrize("name", ["k", "v"])
def test_prefill_refuses_fp8_and_says_what_it_takes(name: str) -> None:
    call = {"q": half(2, 4, 2, 64), "k": half(2, 4, 2, 64), "v": half(2, 4, 2, 64), name: fp8(2, 4, 2, 64)}
    message = f"{name} must be a NumPy array, .*, or a Tbq4Array, got Fp8Array: fp8 is for decode and append"
    with pytest.raises(TypeError, match=pattern(message)):
        cuattn.prefill(**call)
    with pytest.raises(TypeError, match=pattern(message)):
        cuattn.plan_prefill(**call)


def test_append_refuses_codes_that_cannot_be_written_or_do_not_fit() -> None:
    new, cache = half(2, 2, 64), fp8(2, 10, 2, 64)
    read_only = np.zeros((2, 10, 2, 64), np.uint8)
    read_only.flags.writeable = False
    for k_cache, message in (
        (Fp8Array(read_only), "k_cache.codes must be writeable"),
        (fp8(2, 10, 2, 96), "k_cache must have 2 KV heads and head_dim 64 as k_new"),
        (fp8(2, 10, 64), "k_cache.codes must have shape (batch, capacity, num_kv_heads, head_dim)"),
        (cache, "v_cache.codes must not be the memory of k_cache.codes"),
    ):
        with pytest.raises(ValueError, match=pattern(message)):
            cuattn.append(new, new, k_cache, cache, 3)
