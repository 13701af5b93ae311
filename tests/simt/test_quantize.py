"""quantize.cu and dequantize.cu on the CPU harness."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simt import product
from strategies import DTYPES
from tolerance import assert_blocks, ulp

from cuattn import _tbq4, reference

HEAD_DIMS = (64, 128, 256, 512)


@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(("float32", "float16", "bfloat16")),
    shape=st.sampled_from(((1,), (3,), (2, 3), (2, 5, 1), (1, 17, 2))),
    scale=st.sampled_from((1e-3, 1.0, 300.0)),
    with_mean=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_are_encoded_as_the_reference_does(head_dim, dtype, shape, scale, with_mean, seed):
    rng = np.random.default_rng(seed)
    x = (scale * rng.standard_normal((*shape, head_dim))).astype(DTYPES[dtype])
    mean = (scale * rng.standard_normal((shape[-1], head_dim))).astype(np.float32) if with_mean else None
    assert_blocks(x, *product.quantize(x, mean, seed=seed % 4), mean=mean)


@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(("float32", "float16", "bfloat16")),
    shape=st.sampled_from(((3,), (2, 3), (2, 5, 1))),
    with_mean=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_codes_are_decoded_as_the_reference_does(head_dim, dtype, shape, with_mean, seed):
    """All 256 bytes occur; codes and norms are slices of larger planes."""
    rng = np.random.default_rng(seed)
    block = _tbq4.block_of(head_dim)
    codes = rng.integers(0, 256, (*shape, head_dim // 2 + 8), np.uint8)[..., 4:-4]
    norms = rng.uniform(0, 100, (*shape, head_dim // block + 1)).astype(np.float16)[..., :-1]
    mean = rng.standard_normal((shape[-1], head_dim)).astype(np.float32) if with_mean else None
    got = product.dequantize(codes, norms, DTYPES[dtype], mean, seed=seed % 4)
    want = reference.dequantize(codes, norms, mean=mean)
    largest = float(np.abs(want).max())
    # Seven butterflies, two scalings and the mean in float32, then one rounding to the dtype.
    butterflies = 10 * 2.0**-24 * float(norms.max()) * 0.25 * np.sqrt(block)
    assert (
        np.abs(got.astype(np.float64) - want).max()
        <= butterflies + ulp(largest, DTYPES[dtype]) / 2 + 2.0**-24 * largest
    )


def test_golden_blocks_come_out_byte_for_byte():
    j = np.arange(128)
    one_hot = 3.0 * (j == 5)
    ramp = ((37 * j + 11) % 256 - 128) / 64
    rows = np.stack([one_hot, ramp])[:, None].astype(np.float32)
    codes, norms, _ = product.quantize(rows)
    blocks = _tbq4.to_blocks(codes, norms)
    assert blocks[0, 0, :8].tobytes().hex() == "5d424b4bbb44bbb4"
    assert blocks[1, 0, :8].tobytes().hex() == "924a754c7744635c"
    assert blocks.tobytes() == _tbq4.to_blocks(*reference.quantize(rows)[:2]).tobytes()


@pytest.mark.parametrize(
    ("row", "norm_bits", "clamped"),
    [
        (np.zeros(128), 0x0000, 0),
        (np.full(128, -0.0), 0x0000, 0),
        (np.full(128, 1e-12), 0x0000, 0),
        (np.full(128, 5000.0), 0x7B6F, 0),
        (np.full(128, 5800.0), 0x7BFF, 1),
        (np.r_[np.inf, np.zeros(127)], 0x7C00, 0),
        (np.r_[np.zeros(127), np.nan], 0x7E00, 0),
        (np.full(128, 1e19), 0x7C00, 0),
    ],
    ids=["zero", "minus zero", "tiny", "large", "too large", "infinite", "NaN", "squares overflow"],
)
def test_rows_at_the_ends_of_the_format_follow_its_rules(row, norm_bits, clamped):
    x = row.astype(np.float32)[None]
    codes, norms, count = product.quantize(x)
    want = reference.quantize(x)
    assert (int(norms.view(np.uint16)[0, 0]), count) == (norm_bits, clamped)
    assert int(want.norms.view(np.uint16)[0, 0]) == norm_bits
    if norm_bits not in (0x7BFF, 0x7B6F):  # constant rows lie on boundaries, where the order of sums decides
        assert codes.tobytes() == want.codes.tobytes()


def test_views_are_read_in_place_and_the_last_warp_may_be_ragged():
    rng = np.random.default_rng(3)
    store = rng.standard_normal((2, 3, 7, 192)).astype(np.float16)
    x = store.transpose(2, 0, 1, 3)[::-1, ..., 32:160]
    assert_blocks(x, *product.quantize(x, seed=2))
