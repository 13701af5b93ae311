"""The bytes of TBQ4: constants, golden blocks, layouts, special values. All expectations are written down here."""

import re
import struct
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import _tbq4, reference

PAGE = (Path(__file__).parents[2] / "docs" / "tbq4.md").read_text(encoding="utf-8")
HEAD_DIMS = (64, 128, 256, 512)

# The norm, then the codes: computed in exact arithmetic, apart from all code of the project.
GOLDEN = {
    "zeros": "0000" + 64 * "88",
    "one_hot": "5d42"
    "4b4bbb44bbb4444b4bb44444bb44bbb44bb4bb4bb4b4b444bb4b44bbb4b44bb4"
    "bbbb4bbb44444bb444444444b4444b44bb4b44bb444444bb44444444bbb44b44",
    "two_hot": "c044"
    "8c388c388cc883388cc883388c388cc88cc88c3883c883388c3883c883c88cc8"
    "c88c388c3883388338833883c8833883c88c388c3883388c38833883c8833883",
    "outlier": "5e56"
    "23454aa4b3bcc5cb34bba5c4b43b3b4444cb5bababbb43b4a345a54ccc9bab45"
    "4c4c44b6d4b324cbb3b44b4b54b5334b3cbc4ac4a4a35aa4c5c34b3b4b44442b",
    "lcg": "c34a"
    "41b5c57acdeca5b56b6515bcb8b5ad668593c64965a7c7672b5ec3d9b7ad962f"
    "a5a76367678d3724788325762a774685ca8bf87629b8cd368567649abe6ac772",
    "ramp": "924a"
    "754c7744635c4945164439917b3b74a99a91f7578a9392873abc4989eb5842ba"
    "dc5ba5bbe784344385a98dcdba6c88576596b5bba449c358ce827a134215994a",
    "ramp_64": "9b483a6d553314682b7938474cc7a84d75b99883c94a67b551a723ae5adbbd1664cb",
    "ramp_256": "924a"
    "754c7744635c4945164439917b3b74a99a91f7578a9392873abc4989eb5842ba"
    "dc5ba5bbe784344385a98dcdba6c88576596b5bba449c358ce827a134215994a"
    "a04a"
    "b697aee77c80a53aeae8b75a65ba8a92074d36d899898c7b645483b71c67b757"
    "19d534836295d85b9b887856565679b977aa373898959c71c33529f4caa98ad6",
}
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}


def golden_input(name: str) -> np.ndarray:
    """Return the row of a golden block, by the formula on the page."""
    head_dim = {"ramp_64": 64, "ramp_256": 256}.get(name, 128)
    j = np.arange(head_dim)
    if name == "lcg":
        state, values = 12345, []
        for _ in j:
            state = (1103515245 * state + 12345) % 2**31
            values.append((state >> 8) % 2001 / 500 - 2)
        x = np.array(values)
    else:
        x = {
            "zeros": np.zeros(head_dim),
            "one_hot": 3.0 * (j == 5),
            "two_hot": 3.0 * ((j == 5) | (j == 70)),
            "outlier": np.where(j == 64, 100, j % 7 - 3),
        }.get(name, ((37 * j + 11) % 256 - 128) / 64)
    return x.astype(np.float32)


def as_blocks(quantized: reference.Quantized) -> np.ndarray:
    return _tbq4.to_blocks(quantized.codes, quantized.norms)


def table(header: str) -> list[list[str]]:
    """Return the cells of the table of the page whose header line begins like this."""
    (start,) = re.finditer(r"^\| " + re.escape(header) + r".*\n\|[-|]+\n", PAGE, re.MULTILINE)
    lines = PAGE[start.end() :].split("\n\n")[0].splitlines()
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def one_row(values: dict[int, float], head_dim: int = 128, fill: float = 0.0) -> np.ndarray:
    x = np.full(head_dim, fill, np.float32)
    for j, value in values.items():
        x[j] = value
    return x


# Constants


def test_signs_are_the_draws_of_numpys_generator_with_seed_42() -> None:
    rng = np.random.default_rng(42)
    np.testing.assert_array_equal(_tbq4.SIGNS1, rng.choice([-1.0, 1.0], 128))
    np.testing.assert_array_equal(_tbq4.SIGNS2, rng.choice([-1.0, 1.0], 128))


@pytest.mark.parametrize("block", [64, 128])
def test_constants_are_float32_ascend_are_odd_and_boundaries_lie_between_levels(block: int) -> None:
    levels, boundaries = _tbq4.codebook(block), _tbq4.midpoints(block)
    assert levels.shape == (16,)
    assert boundaries.shape == (15,)
    for x in (levels, boundaries, _tbq4.SIGNS1, _tbq4.SIGNS2):
        assert x.dtype == np.float32
    for x in (levels, boundaries):
        np.testing.assert_array_equal(x, -x[::-1])
    for boundary, (low, high) in zip(boundaries, pairwise(levels), strict=True):
        assert low < boundary < high
        # Levels and boundaries are rounded to six decimals, each by up to half of the last one.
        assert abs(boundary - (low + high) / 2) <= 1.01e-6 * (128 / block) ** 0.5


def test_boundaries_are_not_the_means_of_levels() -> None:
    """Whoever computes them in float32 gets four others."""
    means = (_tbq4.CODEBOOK[1:] + _tbq4.CODEBOOK[:-1]) / np.float32(2)
    assert np.count_nonzero(means != _tbq4.MIDPOINTS) == 4


def test_levels_are_the_lloyd_max_quantizer_of_a_normal_value() -> None:
    from scipy.stats import norm

    levels = _tbq4.CODEBOOK.astype(float) * 128**0.5
    for _ in range(300):
        edges = np.concatenate([[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]])
        share = np.diff(norm.cdf(edges))
        levels = -np.diff(norm.pdf(edges)) / share
    # The table in circulation is off the optimum by 3.5e-4 standard deviations at most.
    published = _tbq4.CODEBOOK * 128**0.5
    np.testing.assert_allclose(published, levels, rtol=0, atol=4e-4)  # six decimals times sqrt(128), and that
    # The mean square error of the optimum, whose root the page states.
    assert 1 - share @ levels**2 == pytest.approx(0.0095010, abs=1e-7)


@pytest.mark.parametrize(("head_dim", "block"), [(64, 64), (128, 128), (256, 128), (512, 128)])
def test_blocks_have_128_values_but_64_for_head_dim_64(head_dim: int, block: int) -> None:
    assert _tbq4.block_of(head_dim) == block


@pytest.mark.parametrize("head_dim", [0, 32, 80, 96, 192, 384, 576, 1024])
def test_other_head_dims_are_errors_that_name_the_value(head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"\b{head_dim}\b"):
        _tbq4.block_of(head_dim)
    if head_dim:
        with pytest.raises(ValueError, match=rf"\b{head_dim}\b"):
            reference.quantize(np.zeros((2, head_dim), np.float32))
        with pytest.raises(ValueError, match=rf"\b{head_dim}\b"):
            reference.rotate(np.zeros((2, head_dim)))


# The page


def test_the_table_of_levels_and_boundaries_on_the_page_is_that_of_the_code() -> None:
    rows = table("code | level")
    assert [int(row[0]) for row in rows] == list(range(16))
    for column, constants in (
        (1, _tbq4.CODEBOOK),
        (1, _tbq4.codebook(128)),
        (2, _tbq4.codebook(64)),
        (3, _tbq4.MIDPOINTS),
        (3, _tbq4.midpoints(128)),
        (4, _tbq4.midpoints(64)),
    ):
        cells = [row[column] for row in rows[: len(constants)]]
        np.testing.assert_array_equal(np.array(cells, np.float32), constants)
    assert rows[15][3:] == ["none", "none"]


def test_the_sign_masks_on_the_page_are_those_of_the_code() -> None:
    rows = table("table | mask")
    assert [row[0] for row in rows] == ["s1", "s2"]
    for (_, mask, negative, first), signs in zip(rows, (_tbq4.SIGNS1, _tbq4.SIGNS2), strict=True):
        bits = bytes.fromhex(mask)
        read = [-1 if bits[j // 8] >> j % 8 & 1 else 1 for j in range(128)]
        np.testing.assert_array_equal(signs, read)
        assert read.count(-1) == int(negative)
        assert "".join("-+"[sign > 0] for sign in read[:8]) == first


def test_the_table_of_sizes_on_the_page_is_that_of_the_code() -> None:
    rows = table("head_dim | blocks a row")
    assert [int(row[0]) for row in rows] == list(HEAD_DIMS)
    for head_dim, blocks, block, code_bytes, norms, num_bytes, bits in (map(float, row) for row in rows):
        quantized = reference.quantize(np.zeros((1, int(head_dim)), np.float32))
        assert block == _tbq4.block_of(int(head_dim)) == head_dim / blocks
        assert quantized.codes.shape == (1, code_bytes)
        assert quantized.norms.shape == (1, norms)
        assert as_blocks(quantized).shape == (1, num_bytes)
        assert bits == 8 * num_bytes / head_dim


def test_the_golden_blocks_on_the_page_are_those_of_this_test() -> None:
    entries = re.findall(r"^([a-z]\w*)\n((?:  +[0-9a-f ]+\n)+)", PAGE, re.MULTILINE)
    assert {name: "".join(text.split()) for name, text in entries} == GOLDEN
    assert [row[0] for row in table("name | x[j]")] == list(GOLDEN)


# Golden blocks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_rows_encode_to_their_bytes(name: str, dtype: str) -> None:
    x = golden_input(name)
    if name != "lcg":
        np.testing.assert_array_equal(x.astype(DTYPES[dtype]).astype(np.float32), x)
        x = x.astype(DTYPES[dtype])
    quantized = reference.quantize(x)
    assert as_blocks(quantized).tobytes().hex() == GOLDEN[name]
    assert quantized.clamped == 0


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_are_what_python_integers_make_of_codes_and_norms(name: str) -> None:
    """The layout, once more without arrays."""
    quantized = reference.quantize(golden_input(name))
    per_block = len(quantized.codes) // len(quantized.norms)
    data = b"".join(
        struct.pack("<e", float(norm)) + bytes(quantized.codes[i * per_block : (i + 1) * per_block])
        for i, norm in enumerate(quantized.norms)
    )
    assert data.hex() == GOLDEN[name]


def test_element_2i_is_in_the_low_nibble_of_byte_i() -> None:
    """One code differs from the rest of the row, so that its place shows in the decoded values."""
    for element in (0, 1, 2, 63, 64, 127):
        codes = np.zeros(64, np.uint8)
        codes[element // 2] = 0x0F if element % 2 == 0 else 0xF0
        rotated = reference.dequantize(codes, np.ones(1, np.float16), rotated=True, dtype=np.float32)
        np.testing.assert_array_equal(rotated, one_row({element: 0.241556}, fill=-0.241556))


def test_blocks_of_a_row_are_independent() -> None:
    """A row of 512 is four rows of 128, each with its own norm."""
    x = np.stack([golden_input(name) for name in ("lcg", "zeros", "outlier", "one_hot")])
    whole, parts = reference.quantize(x.reshape(512)), reference.quantize(x)
    assert as_blocks(whole).tobytes() == as_blocks(parts).tobytes()
    decoded = reference.dequantize(*whole[:2], rotated=True)
    np.testing.assert_array_equal(decoded.reshape(4, 128), reference.dequantize(*parts[:2], rotated=True))


def test_leading_axes_and_views_do_not_matter() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4, 128)).astype(np.float32)
    want = reference.quantize(x)
    assert want.codes.shape == (2, 3, 4, 64)
    assert want.norms.shape == (2, 3, 4, 1)
    got = reference.quantize(np.repeat(x, 2, axis=1)[:, ::2].transpose(2, 0, 1, 3))
    np.testing.assert_array_equal(got.codes, want.codes.transpose(2, 0, 1, 3))
    np.testing.assert_array_equal(got.norms, want.norms.transpose(2, 0, 1, 3))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_rows_give_no_codes(head_dim: int) -> None:
    empty = reference.quantize(np.zeros((0, 3, head_dim), np.float32))
    assert (empty.codes.shape, empty.clamped) == ((0, 3, head_dim // 2), 0)
    assert empty.norms.shape == (0, 3, head_dim // _tbq4.block_of(head_dim))
    assert reference.dequantize(*empty[:2]).shape == (0, 3, head_dim)
    assert reference.rotate(np.zeros((0, head_dim))).shape == (0, head_dim)


# Interchange blocks


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_norm_survives_as_interchange_blocks_bit_by_bit(head_dim: int) -> None:
    """All 65,536 of them: NaN payloads, infinities, subnormals and both zeros among them."""
    count = head_dim // _tbq4.block_of(head_dim)
    norms = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, count)
    codes = np.random.default_rng(head_dim).integers(0, 256, (len(norms), head_dim // 2), dtype=np.uint8)
    blocks = _tbq4.to_blocks(codes, norms)
    np.testing.assert_array_equal(blocks.reshape(2**16, -1)[:, :2].copy().view("<u2")[:, 0], np.arange(2**16))
    got_codes, got_norms = _tbq4.from_blocks(blocks, head_dim)
    assert (got_codes.dtype, got_norms.dtype) == (np.uint8, np.float16)
    np.testing.assert_array_equal(got_codes, codes)
    np.testing.assert_array_equal(got_norms.view(np.uint16), norms.view(np.uint16))


@given(head_dim=st.sampled_from(HEAD_DIMS), shape=st.lists(st.integers(0, 3), max_size=3), seed=st.integers(0, 2**32))
def test_any_bytes_survive_being_taken_apart_and_put_together(head_dim: int, shape: list[int], seed: int) -> None:
    num_bytes = {64: 34, 128: 66, 256: 132, 512: 264}[head_dim]
    blocks = np.random.default_rng(seed).integers(0, 256, (*shape, num_bytes), dtype=np.uint8)
    codes, norms = _tbq4.from_blocks(blocks, head_dim)
    assert codes.shape == (*shape, head_dim // 2)
    assert norms.shape == (*shape, head_dim // _tbq4.block_of(head_dim))
    np.testing.assert_array_equal(_tbq4.to_blocks(codes, norms), blocks)


def test_layouts_reject_what_does_not_fit_and_name_it() -> None:
    codes, norms = np.zeros((3, 64), np.uint8), np.zeros((3, 1), np.float16)
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        _tbq4.to_blocks(codes, np.zeros((3, 2), np.float16))
    with pytest.raises(ValueError, match=r"\b96\b"):
        _tbq4.to_blocks(codes[:, :48], norms)
    with pytest.raises(TypeError, match="float32"):
        _tbq4.to_blocks(codes, norms.astype(np.float32))
    with pytest.raises(TypeError, match="int8"):
        _tbq4.to_blocks(codes.astype(np.int8), norms)
    with pytest.raises(ValueError, match=r"\b68\b"):
        _tbq4.from_blocks(np.zeros((3, 68), np.uint8), 128)
    with pytest.raises(ValueError, match=r"\b96\b"):
        _tbq4.from_blocks(np.zeros((3, 66), np.uint8), 96)
    with pytest.raises(TypeError, match="int16"):
        _tbq4.from_blocks(np.zeros((3, 66), np.int16), 128)


# Special values


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    "x", [one_row({}), -one_row({}), one_row({3: 9.9e-11}), one_row({3: 1e-30}), one_row({3: 1e-45})]
)
def test_zero_rows_and_rows_of_a_norm_of_at_most_1e_10_become_zero(x: np.ndarray, head_dim: int) -> None:
    x = np.resize(x, head_dim)
    quantized = reference.quantize(x)
    assert set(quantized.codes.tolist()) == {0x88}
    assert not quantized.norms.view(np.uint16).any()
    assert not reference.dequantize(*quantized[:2]).any()


@pytest.mark.parametrize(
    ("value", "bits"), [(1.1e-10, 0), (1e-9, 0), (2.7e-8, 0), (3e-8, 1), (1e-7, 2), (1e-6, 18), (1.0, 0x3C3E)]
)
def test_small_norms_round_to_float16_subnormals_and_keep_their_codes(value: float, bits: int) -> None:
    """A one-hot row has codes of one level only, .083317, so that its norm is value / (.083317 sqrt 128)."""
    quantized = reference.quantize(one_row({5: value}))
    assert quantized.norms.view(np.uint16).tolist() == [bits]
    assert quantized.codes.tobytes().hex() == GOLDEN["one_hot"][4:]
    assert bits == np.float16(value / (0.083317 * 128**0.5)).view(np.uint16)


def test_a_value_on_a_boundary_has_the_code_above_it_whatever_the_sign_of_zero() -> None:
    """Two equal values cancel exactly in half of the coordinates, which are then +0 or -0 by their signs."""
    x = golden_input("two_hot")
    for row in (x, -x):
        codes = reference.quantize(row).codes
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).ravel()
        np.testing.assert_array_equal(nibbles[reference.rotate(row) == 0], 8)
        assert np.count_nonzero(nibbles == 8) == 64


@pytest.mark.parametrize("value", [58000.0, 60000.0, 61700.0])
def test_norms_that_float16_holds_are_not_clamped(value: float) -> None:
    quantized = reference.quantize(one_row({5: value}), strict=True)
    assert quantized.norms.tolist() == [np.float16(value / (0.083317 * 128**0.5))]
    assert quantized.norms[0] < 65504
    assert quantized.clamped == 0


@pytest.mark.parametrize(
    "x", [one_row({5: 62000}), one_row({5: 1e6}), one_row({}, fill=5800), one_row({}, fill=65504), one_row({0: 1e19})]
)
def test_larger_norms_are_clamped_to_65504_and_counted(x: np.ndarray) -> None:
    """The direction stays; the decoded values are finite."""
    quantized = reference.quantize(x)
    assert quantized.norms.view(np.uint16).tolist() == [0x7BFF]
    assert quantized.norms[0] == _tbq4.MAX_NORM
    assert quantized.clamped == 1
    assert np.isfinite(reference.dequantize(*quantized[:2])).all()
    np.testing.assert_array_equal(quantized.codes, reference.quantize(x * np.float32(2**-20)).codes)


def test_rows_of_5000_are_within_range() -> None:
    """Their norm is 56,569, and the largest float16 is 65,504."""
    assert reference.quantize(one_row({}, fill=5000)).clamped == 0


def test_only_the_norms_that_are_too_large_are_clamped_and_strict_names_the_first() -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 256)).astype(np.float32)
    want = reference.quantize(x)
    x[1, 2, 128:] *= 1e5
    x[2, 0, :128] *= 1e6
    quantized = reference.quantize(x)
    assert quantized.clamped == 2
    assert np.argwhere(quantized.norms == 65504).tolist() == [[1, 2, 1], [2, 0, 0]]
    untouched = quantized.norms != 65504
    np.testing.assert_array_equal(quantized.norms[untouched], want.norms[untouched])
    np.testing.assert_array_equal(quantized.codes[0], want.codes[0])
    with pytest.raises(ValueError, match=r"65504.*\(1, 2, 1\)"):
        reference.quantize(x, strict=True)
    assert reference.quantize(x[0], strict=True).clamped == 0


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("x", "norm", "codes"),
    [
        (one_row({9: np.inf}, fill=1), np.inf, 0xFF),
        (one_row({9: -np.inf}, fill=1), np.inf, 0xFF),
        (one_row({9: np.inf, 70: -np.inf}), np.inf, 0xFF),
        (one_row({9: np.nan}, fill=1), np.nan, 0xFF),
        (one_row({9: np.nan, 70: np.inf}), np.nan, 0xFF),
        (one_row({}, fill=1e19), np.inf, 0x88),
    ],
)
def test_rows_that_are_not_finite_stay_so_and_are_not_clamped(
    x: np.ndarray, norm: float, codes: int, *, strict: bool
) -> None:
    """Also the row whose sum of squares is not; other blocks of the row do not notice."""
    row = np.concatenate([golden_input("ramp"), x])
    quantized = reference.quantize(row, strict=strict)
    assert as_blocks(quantized)[:66].tobytes().hex() == GOLDEN["ramp"]
    np.testing.assert_array_equal(quantized.norms[1], np.float16(norm))
    assert set(quantized.codes[64:].tolist()) == {codes}
    assert quantized.clamped == 0
    decoded = reference.dequantize(*quantized[:2])
    assert np.isfinite(decoded[:128]).all()
    assert not np.isfinite(decoded[128:]).any()


def test_rotated_values_have_no_mean() -> None:
    quantized = reference.quantize(golden_input("ramp"))
    with pytest.raises(ValueError, match="mean"):
        reference.dequantize(*quantized[:2], mean=np.ones(128), rotated=True)
