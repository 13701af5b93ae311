"""quantize, dequantize and Tbq4Array on NumPy arrays, and what they refuse."""

import inspect

import numpy as np
import pytest
from strategies import DTYPES

import cuattn
from cuattn import reference


def rows(*shape, dtype="float16", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("shape", [(2, 64), (5, 2, 128), (2, 5, 2, 512)])
def test_numpy_rows_are_encoded_and_decoded_by_the_reference(shape, dtype):
    x, mean = rows(*shape, dtype=dtype), rows(*shape[-2:], dtype="float32", seed=1)
    t = cuattn.quantize(x, mean=mean)
    want = reference.quantize(x, mean=mean)
    assert t.codes.tobytes() == want.codes.tobytes()
    assert t.norms.tobytes() == want.norms.tobytes()
    assert (t.shape, t.head_dim, t.clamped) == (x.shape, shape[-1], 0)
    assert t.nbytes == x.size // 2 + 2 * x.size // min(128, shape[-1])
    got = cuattn.dequantize(t, dtype=DTYPES[dtype])
    assert got.dtype == DTYPES[dtype]
    assert got.tobytes() == reference.dequantize(*want[:2], mean=mean).astype(DTYPES[dtype]).tobytes()
    assert cuattn.dequantize(t).dtype == np.float32


def test_blocks_and_planes_hold_the_same():
    t = cuattn.quantize(rows(3, 2, 256))
    blocks = t.to_blocks()
    assert (blocks.shape, blocks.dtype) == ((3, 2, 132), np.uint8)
    again = cuattn.Tbq4Array.from_blocks(blocks, 256)
    assert again.codes.tobytes() == t.codes.tobytes()
    assert again.norms.tobytes() == t.norms.tobytes()


def test_too_large_norms_are_counted_or_refused():
    x = np.full((2, 1, 128), 6000, np.float16)
    x[0] = 1
    assert cuattn.quantize(x).clamped == 1
    with pytest.raises(ValueError, match=r"x must have norms of at most 65504 per block, got \d+\.\d+ at \(1, 0, 0\)"):
        cuattn.quantize(x, strict=True)


def test_options_are_keyword_only():
    for function in (cuattn.quantize, cuattn.dequantize):
        first, *rest = inspect.signature(function).parameters.values()
        assert first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in rest)


X = rows(3, 2, 128)
T = cuattn.quantize(X)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: cuattn.quantize(X[0, 0]), ValueError, ("x", "(128,)", "num_kv_heads")),
        (lambda: cuattn.quantize(X[..., :96]), ValueError, ("x has head_dim 96", "64, 128, 256, 512")),
        (lambda: cuattn.quantize(X.astype(np.int8)), TypeError, ("x", "int8", "float16")),
        (lambda: cuattn.quantize(rows(3, 2, 256)[..., ::2]), ValueError, ("x", "contiguous", "4")),
        (lambda: cuattn.quantize([1.0]), TypeError, ("x", "list")),
        (lambda: cuattn.quantize(X, mean=np.zeros(128, np.float32)), ValueError, ("mean", "(2, 128)", "(128,)")),
        (lambda: cuattn.quantize(X, mean=np.zeros((2, 128))), TypeError, ("mean", "float32", "float64")),
        (lambda: cuattn.dequantize(T.codes), TypeError, ("t", "Tbq4Array", "ndarray")),
        (lambda: cuattn.dequantize(T, dtype=np.int32), TypeError, ("dtype", "int32", "float16")),
        (lambda: cuattn.Tbq4Array(T.codes[..., :40], T.norms), ValueError, ("codes", "40", "32, 64, 128, 256")),
        (lambda: cuattn.Tbq4Array(T.codes, T.norms[:1]), ValueError, ("norms", "(3, 2, 1)", "(1, 2, 1)")),
        (lambda: cuattn.Tbq4Array(T.codes, T.norms.astype(np.float32)), TypeError, ("norms", "float16", "float32")),
        (lambda: cuattn.Tbq4Array.from_blocks(T.to_blocks(), 256), ValueError, ("blocks", "132", "256")),
        (lambda: cuattn.Tbq4Array.from_blocks(T.to_blocks(), 96), ValueError, ("head_dim", "96", "64, 128, 256, 512")),
    ],
    ids=range(14),
)
def test_bad_input_is_named_with_its_value_and_what_is_accepted(call, error, words):
    with pytest.raises(error) as caught:
        call()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, caught.value
