"""quantize.cu and dequantize.cu on the CPU harness."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simt import cases, faults, harness, product
from strategies import DTYPES
from tolerance import assert_blocks, ulp

from cuattn import _jit, _plan, _tbq4, reference

HEAD_DIMS = (64, 128, 256, 512)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
# There are 24 kernels of each kind, and what a row holds does not change what is done with it.
EXAMPLES = settings.default.max_examples // 2
with_and_without_mean = pytest.mark.parametrize("with_mean", [False, True], ids=["plain", "mean"])


@settings(max_examples=EXAMPLES)
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


@settings(max_examples=EXAMPLES)
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


@with_and_without_mean
@every_dtype
def test_golden_blocks_come_out_byte_for_byte(dtype, with_mean):
    """Of docs/tbq4.md. A mean of zeros changes nothing but the kernel; 64 values of two_hot are exact ties at 0."""
    j = np.arange(128)
    rows = [0.0 * j, 3.0 * (j == 5), 3.0 * ((j == 5) | (j == 70)), np.where(j == 64, 100, j % 7 - 3.0)]
    rows.append(((37 * j + 11) % 256 - 128) / 64)
    x = np.stack(rows)[:, None].astype(DTYPES[dtype])
    mean = np.zeros((1, 128), np.float32) if with_mean else None
    codes, norms, clamped = product.quantize(x, mean)
    blocks = _tbq4.to_blocks(codes, norms)
    starts = ["0000888888888888", "5d424b4bbb44bbb4", "c0448c388c388cc8", "5e5623454aa4b3bc", "924a754c7744635c"]
    assert [row.tobytes().hex() for row in blocks[:, 0, :8]] == starts
    assert blocks.tobytes() == _tbq4.to_blocks(*reference.quantize(x)[:2]).tobytes()
    assert clamped == 0


ENDS = {
    "zero": (np.zeros(128), 0x0000, 0),
    "minus zero": (np.full(128, -0.0), 0x0000, 0),
    "tiny": (np.full(128, 1e-12), 0x0000, 0),
    "large": (np.full(128, 5000.0), 0x7B6F, 0),
    "too large": (np.full(128, 5800.0), 0x7BFF, 1),
    "largest squares": (np.r_[2.0**63, 1.5 * 2.0**62, np.zeros(126)], 0x7BFF, 1),
    "infinite": (np.r_[np.inf, np.zeros(127)], 0x7C00, 0),
    "infinities": (np.r_[np.inf, np.zeros(64), -np.inf, np.zeros(62)], 0x7C00, 0),
    "NaN": (np.r_[np.zeros(127), np.nan], 0x7E00, 0),
    "infinity and NaN": (np.r_[np.inf, np.zeros(126), np.nan], 0x7E00, 0),
    "squares overflow": (np.full(128, 1e19), 0x7C00, 0),
    "sums overflow": (np.full(128, 2.0**127) * _tbq4.SIGNS1, 0x7C00, 0),
}


@with_and_without_mean
@every_dtype
@pytest.mark.parametrize("name", ENDS)
def test_rows_at_the_ends_of_the_format_follow_its_rules(name, dtype, with_mean):
    row, norm_bits, clamped = ENDS[name]
    if dtype == "float16" and np.isfinite(row).all() and np.abs(row).max() > 65504:
        pytest.skip(reason="float16 has no such value")
    # Among ordinary rows, which must not notice.
    x = np.random.default_rng(7).standard_normal((20, 1, 128)).astype(DTYPES[dtype])
    x[[3, 11, 19], 0] = row.astype(DTYPES[dtype])
    codes, norms, count = product.quantize(x, np.zeros((1, 128), np.float32) if with_mean else None)
    want = reference.quantize(x)
    if dtype == "float32":
        assert int(want.norms.view(np.uint16)[3, 0, 0]) == norm_bits
        assert count == 3 * clamped
    quiet = np.isnan(want.norms)
    np.testing.assert_array_equal(np.isnan(norms), quiet)
    np.testing.assert_array_equal(norms[~quiet], want.norms[~quiet])
    assert (norms.view(np.uint16)[quiet] == 0x7E00).all()
    assert count == want.clamped
    # Constant rows lie on boundaries, where the order of sums decides.
    same = [i for i in range(20) if "large" not in name or i not in (3, 11, 19) or name == "largest squares"]
    np.testing.assert_array_equal(codes[same], want.codes[same])


def test_views_are_read_in_place_and_the_last_warp_may_be_ragged():
    rng = np.random.default_rng(3)
    store = rng.standard_normal((2, 3, 7, 192)).astype(np.float16)
    x = store.transpose(2, 0, 1, 3)[::-1, ..., 32:160]
    assert_blocks(x, *product.quantize(x, seed=2))


@every_dtype
@pytest.mark.parametrize(
    ("head_dim", "heads", "mean_blocks"),
    faults.every(
        [
            *((64, 1, 8), (64, 3, 16), (64, 8, 8), (64, 17, 32), (128, 2, 8), (128, 5, 16), (128, 8, 8), (128, 16, 16)),
            *((128, 40, 64), (256, 4, 8), (256, 9, 32), (512, 2, 8), (512, 3, 16)),
        ],
        3,
    ),
)
def test_every_head_has_its_mean(head_dim, heads, mean_blocks, dtype):
    rng = np.random.default_rng(heads)
    mean = (3 * rng.standard_normal((heads, head_dim))).astype(np.float32)
    x = (rng.standard_normal((7, heads, head_dim)) + mean).astype(DTYPES[dtype])
    assert product.config_of(x, encode=True, with_mean=True).mean_blocks == mean_blocks
    assert_blocks(x, *product.quantize(x, mean), mean=mean)


def test_means_of_more_heads_than_shared_memory_holds():
    rng = np.random.default_rng(1)
    mean = (3 * rng.standard_normal((600, 128))).astype(np.float32)
    x = (rng.standard_normal((2, 600, 128)) + mean).astype(np.float16)
    assert product.config_of(x, encode=True, with_mean=True).mean_blocks == 0
    assert_blocks(x, *product.quantize(x, mean), mean=mean)


@every_dtype
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mean_may_be_any_multiple_of_what_is_left(head_dim, dtype):
    """Where it is much larger, its rotation is not exact enough; next to blocks where it is."""
    rng = np.random.default_rng(head_dim)
    sizes = np.array([0, 1e-30, 0.1, 1, 3, 7, 9, 15, 17, 40, 1e3, 3e4, 1e10, 3e38], np.float32)
    sizes = sizes[: 12 if dtype == "float16" else None]
    mean = (sizes[:, None] * rng.uniform(0.5, 1, (len(sizes), head_dim))).astype(np.float32)
    left = rng.standard_normal((30, len(sizes), head_dim)).astype(np.float32)
    x = (left + mean).astype(DTYPES[dtype])
    assert_blocks(x, *product.quantize(x, mean), mean=mean)


def test_a_block_that_is_encoded_by_itself_is_clamped_once():
    rng = np.random.default_rng(4)
    mean = (1e8 * rng.standard_normal((2, 128))).astype(np.float32)
    x = (1e5 * rng.standard_normal((9, 2, 128)) + mean).astype(np.float32)
    assert product.quantize(x, mean)[2] == 18
    assert_blocks(x, *product.quantize(x, mean), mean=mean)


@every_dtype
def test_rows_equal_to_their_mean_are_zeros(dtype):
    mean = np.random.default_rng(1).standard_normal((3, 128)).astype(DTYPES[dtype]).astype(np.float32)
    codes, norms, clamped = product.quantize(np.tile(mean, (11, 1, 1)).astype(DTYPES[dtype]), mean)
    assert (codes == 0x88).all()
    assert (norms.view(np.uint16) == 0).all()
    assert clamped == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
@every_dtype
def test_a_mean_that_is_not_finite_is_one_of_its_block(dtype, value):
    rng = np.random.default_rng(2)
    mean = rng.standard_normal((3, 256)).astype(np.float32)
    x = rng.standard_normal((40, 3, 256)).astype(DTYPES[dtype])
    want = product.quantize(x, mean)
    mean[1, 200] = value
    got = product.quantize(x, mean)
    others = np.ones((3, 2), bool)
    others[1, 1] = False
    np.testing.assert_array_equal(got[0].reshape(40, 3, 2, 64)[:, others], want[0].reshape(40, 3, 2, 64)[:, others])
    np.testing.assert_array_equal(got[1][:, others], want[1][:, others])
    assert (np.isnan(got[1][:, 1, 1]) if np.isnan(value) else np.isinf(got[1][:, 1, 1])).all()


# ---- the parts of the encoder ------------------------------------------------------------------------------------


def parts(head_dim):
    config = _plan.codec_config(_plan.Dtype.FP32, head_dim, product.TWO_SMS, encode=True, with_mean=False)
    source = cases.KERNELS / "tbq4_ops.cu"
    return harness.build(source, prelude=_jit.prelude(config), kernels=["search", "lengths", "encode"])


def around(x, count):
    """Every float32 within `count` of x."""
    bits = x.astype(np.float32).view(np.int32).astype(np.int64)
    order = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)[:, None] + np.arange(-count, count + 1)
    return np.where(order < 0, -order | 0x80000000, order).astype(np.uint32).view(np.float32).ravel()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_search_gives_the_code_of_the_format_at_and_between_all_boundaries(head_dim):
    block = _tbq4.block_of(head_dim)
    boundaries = _tbq4.midpoints(block)
    edges = (np.arange(-48, 49) + 0.5).astype(np.float32) / _tbq4.cells_per_unit(block)
    u = np.concatenate([around(boundaries, 64), around(edges, 64), np.linspace(-1, 1, 200_001, dtype=np.float32)])
    u = np.concatenate([u, np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38], np.float32)])
    u = np.concatenate([u, np.zeros(-len(u) % 8, np.float32)])
    words = np.zeros((2, len(u) // 8), np.uint32)
    parts(head_dim).launch("search", 1, 64, (u, *words, np.int32(words.shape[1])), smem=8 * _tbq4.NUM_CELLS)
    got = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(2, -1)
    np.testing.assert_array_equal(got[0], np.searchsorted(boundaries, u, side="right"))
    np.testing.assert_array_equal(got[1], np.searchsorted(boundaries, -u, side="right"))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_length_of_any_codes_is_that_of_their_levels(head_dim):
    codes = np.random.default_rng(1).integers(0, 2**32, (2000, 4), np.uint32)
    codes[:16] = np.arange(16, dtype=np.uint32)[:, None] * np.uint32(0x11111111)
    got = np.zeros((len(codes), 3), np.float32)
    parts(head_dim).launch("lengths", 1, 64, (codes, got, np.int32(len(codes))))
    nibbles = codes[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    squares = np.square(_tbq4.codebook(_tbq4.block_of(head_dim)).astype(np.float64))[nibbles].sum(axis=-1)
    want = np.cumsum(squares, axis=1)[:, [0, 1, 3]]
    # Squares are rounded to 2^-30, and their sum to float32.
    steps = 2.0**-31 * np.array([8, 16, 32]) + 2.0**-24 * want
    assert (np.abs(got - want) <= steps).all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_block_in_eight_lanes_is_encoded_as_the_reference_does(head_dim):
    x = np.random.default_rng(2).standard_normal((400, head_dim)).astype(np.float32)
    ends = np.stack([row[:head_dim] for row, _, _ in ENDS.values()]).astype(np.float32)
    for rows in (x, np.concatenate([ends, x[: -len(ends) % 4]])):
        codes = np.zeros((len(rows), head_dim // 2), np.uint8)
        norms, clamped = np.zeros((len(rows), 1), np.float16), np.zeros(1, np.int32)
        args = (rows, codes, norms, clamped, np.int32(len(rows)))
        parts(head_dim).launch("encode", 1, 64, args, smem=8 * _tbq4.NUM_CELLS, seed=2)
        want = reference.quantize(rows)
        if rows is x:
            assert_blocks(x, codes, norms, int(clamped[0]))
        else:
            np.testing.assert_array_equal(np.isnan(norms), np.isnan(want.norms))
            np.testing.assert_array_equal(np.nan_to_num(norms), np.nan_to_num(want.norms))
            assert clamped[0] == want.clamped
            exact = [i for i, name in enumerate(ENDS) if name not in ("large", "too large")]
            np.testing.assert_array_equal(codes[exact], want.codes[exact])
