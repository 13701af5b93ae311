"""quantize and dequantize on a GPU against their definition."""

import cupy
import numpy as np
import pytest
from strategies import DTYPES
from tolerance import assert_blocks, ulp

import cuattn
from cuattn import reference

HEAD_DIMS = (64, 128, 256, 512)
every_dtype = pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
every_head_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def rows_of(dtype, head_dim, *shape, seed=0):
    rng = np.random.default_rng([seed, head_dim, *shape])
    scale = np.exp(rng.normal(0, 2, (*shape, 1)))
    return (scale * rng.standard_normal((*shape, head_dim))).astype(DTYPES[dtype])


def check(x, mean=None):
    t = cuattn.quantize(cupy.asarray(x), mean=None if mean is None else cupy.asarray(mean))
    assert_blocks(x, t.codes.get(), t.norms.get(), int(t.clamped[0]), mean=mean)
    return t


@every_dtype
@every_head_dim
def test_rows_are_encoded_as_the_reference_does(dtype, head_dim):
    for shape in ((1,), (5,), (33, 2), (3, 700, 4)):
        check(rows_of(dtype, head_dim, *shape))


@every_dtype
@every_head_dim
def test_a_mean_is_subtracted_and_added(dtype, head_dim):
    x = rows_of(dtype, head_dim, 50, 3)
    mean = rows_of("float32", head_dim, 3, seed=1)
    t = check(x, mean)
    got = cuattn.dequantize(t)
    want = reference.dequantize(t.codes.get(), t.norms.get(), mean=mean)
    assert np.abs(got.get() - want).max() <= 64 * ulp(np.abs(want).max(), np.float32)  # ten roundings of larger sums


@every_dtype
@pytest.mark.parametrize("heads", [1, 5, 8, 24, 600])
def test_every_head_has_its_mean(heads, dtype):
    """Up to 600 times what is left; 600 heads have no table of means."""
    rng = np.random.default_rng(heads)
    sizes = rng.choice((0, 0.5, 2, 5, 8, 12, 16, 20, 600), (heads, 1))
    mean = (sizes * rng.standard_normal((heads, 128))).astype(np.float32)
    x = (rng.standard_normal((12_000 // heads, heads, 128)) + mean).astype(DTYPES[dtype])
    check(x, mean)


@every_dtype
@every_head_dim
def test_any_codes_are_decoded_as_the_reference_does(dtype, head_dim):
    rng = np.random.default_rng(head_dim)
    block = min(head_dim, 128)
    codes = rng.integers(0, 256, (4, 100, 3, head_dim // 2), np.uint8)
    norms = rng.uniform(0, 60000, (4, 100, 3, head_dim // block)).astype(np.float16)
    t = cuattn.Tbq4Array(cupy.asarray(codes), cupy.asarray(norms))
    got = cuattn.dequantize(t, dtype=DTYPES[dtype]).get().astype(np.float64)
    want = reference.dequantize(codes, norms)
    largest = np.abs(want).max()
    # One rounding to the dtype, and ten of float32 on the way.
    assert np.abs(got - want).max() <= ulp(largest, DTYPES[dtype]) / 2 + 64 * ulp(largest, np.float32)


def test_a_mean_may_lie_anywhere():
    """The kernels read it 16 bytes at a time."""
    x = rows_of("float16", 128, 50, 3)
    store = rows_of("float32", 385, 1, seed=1).ravel()
    mean = cupy.asarray(store)[1:].reshape(3, 128)
    t = cuattn.quantize(cupy.asarray(x), mean=mean)
    assert_blocks(x, t.codes.get(), t.norms.get(), int(t.clamped[0]), mean=mean.get())
    want = reference.dequantize(t.codes.get(), t.norms.get(), mean=mean.get())
    assert np.abs(cuattn.dequantize(t).get() - want).max() <= 64 * ulp(np.abs(want).max(), np.float32)  # as above


@every_dtype
@pytest.mark.parametrize("with_mean", [False, True])
def test_blocks_that_are_not_finite_follow_the_rules_and_harm_no_other(dtype, with_mean):
    x = rows_of(dtype, 128, 40, 1)
    x[[3, 19], 0, 5] = np.inf
    x[7, 0, [5, 90]] = np.inf, -np.inf
    x[39, 0, 100] = np.nan
    mean = np.zeros((1, 128), np.float32) if with_mean else None
    t = check_finite(x, mean, [3, 7, 19, 39])
    assert (t.codes.get()[[3, 7, 19, 39]] == 0xFF).all()
    assert [hex(n) for n in t.norms.get().view(np.uint16)[[3, 7, 19, 39], 0, 0]] == ["0x7c00"] * 3 + ["0x7e00"]


def check_finite(x, mean, rest):
    t = cuattn.quantize(cupy.asarray(x), mean=None if mean is None else cupy.asarray(mean))
    kept = np.setdiff1d(np.arange(len(x)), rest)
    assert_blocks(x[kept], t.codes.get()[kept], t.norms.get()[kept], int(t.clamped[0]), mean=mean)
    return t


@every_dtype
def test_of_200_000_gaussian_blocks_almost_all_are_the_reference_byte_for_byte(dtype):
    x = np.random.default_rng(1).standard_normal((50_000, 4, 128), np.float32).astype(DTYPES[dtype])
    t = check(x)
    want = reference.quantize(x)
    same = (t.codes.get() == want.codes).all(axis=-1) & (t.norms.get() == want.norms)[..., 0]
    assert same.mean() >= 0.9995


def test_norms_beyond_float16_are_clamped_counted_and_refused_when_asked():
    x = cupy.full((3, 1, 128), 5800, cupy.float32)
    x[1] = 1
    t = cuattn.quantize(x)
    assert t.norms.get().ravel().tolist()[::2] == [65504, 65504]
    assert int(t.clamped[0]) == 2
    with pytest.raises(ValueError, match="x must have norms of at most 65504 per block, 2 are larger"):
        cuattn.quantize(x, strict=True)


def test_views_blocks_and_empty_arrays():
    store = rows_of("float16", 256, 3, 5, 4)
    device = cupy.asarray(store)
    view = device.transpose(1, 0, 2, 3)[::-1, :, 1:3, :128]
    t = cuattn.quantize(view)
    assert_blocks(view.get(), t.codes.get(), t.norms.get(), int(t.clamped[0]))
    again = cuattn.Tbq4Array.from_blocks(t.to_blocks(), 128)
    assert (again.codes == t.codes).all()
    assert (again.norms == t.norms).all()
    assert t.to_blocks().shape == (5, 3, 2, 66)
    part = cuattn.Tbq4Array(t.codes[:, 1:], t.norms[:, 1:])
    assert (cuattn.dequantize(part) == cuattn.dequantize(t)[:, 1:]).all()
    empty = cuattn.quantize(device[:0])
    assert empty.shape == (0, 5, 4, 256)
    assert cuattn.dequantize(empty).shape == (0, 5, 4, 256)


def test_the_same_call_gives_the_same_bytes_on_any_stream():
    x = cupy.asarray(rows_of("bfloat16", 128, 100, 8))
    first = cuattn.quantize(x)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):
            t = cuattn.quantize(x)
            assert (t.codes == first.codes).all()
            assert (t.norms == first.norms).all()
        stream.synchronize()


@every_dtype
def test_channel_mean_on_a_gpu_is_that_of_numpy(dtype):
    x = rows_of(dtype, 64, 3, 500, 2)
    device = cupy.asarray(x)
    for view in (np.s_[:], np.s_[1], np.s_[:, ::3, ::-1]):
        got, want = cuattn.channel_mean(device[view], skip=4), cuattn.channel_mean(x[view], skip=4)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        # Sums of float64 in another order, rounded to float32.
        np.testing.assert_allclose(got.get(), want, rtol=2.0**-23, atol=1e-12)  # an ulp, and what sums to nearly 0
