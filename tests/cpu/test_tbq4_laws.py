"""Laws of the TBQ4 reference, each a sentence, and what the format does to attention."""

from dataclasses import dataclass
from importlib import resources

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tolerance import ulp

from cuattn import _tbq4, reference

HEAD_DIMS = (64, 128, 256, 512)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

# The numbers of docs/tbq4.md, not those of the code under test.
LEVELS = [0.011353, 0.034311, 0.058069, 0.083317, 0.111065, 0.143047, 0.182907, 0.241556]
BOUNDARIES = [0.022832, 0.046190, 0.070693, 0.097191, 0.127056, 0.162977, 0.212232]
MASKS = [bytes.fromhex("59036ae44959f842bb3bc6a4a950f249"), bytes.fromhex("90eeac16dc8f623f7a35a5b76265a5be")]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``[num_rows, head_dim]``, reproducible from their repr; `exponent` scales them by a power of two."""

    head_dim: int
    kind: str
    seed: int
    num_rows: int = 2
    exponent: int = 0
    dtype: str = "float32"

    # A large exponent may give infinity in float16; laws about finite rows say so.
    @np.errstate(over="ignore")
    def array(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        x = rng.standard_normal((self.num_rows, self.head_dim))
        place = rng.integers(0, self.head_dim, (self.num_rows, 3))
        rows = np.arange(self.num_rows)[:, None]
        if self.kind == "offset":
            x[rows, place] += 15
        elif self.kind == "outlier":
            x[rows, place] *= 50
        elif self.kind == "sparse":
            x = np.zeros_like(x)
            x[rows, place] = rng.integers(-3, 4, place.shape)
        elif self.kind == "constant":
            x[:] = x[:, :1]
        elif self.kind == "heavy":
            x **= 5
        return (x * 2.0**self.exponent).astype(DTYPES[self.dtype])


def rows(
    *,
    kinds: tuple[str, ...] = ("normal", "offset", "outlier", "sparse", "constant", "heavy"),
    exponents: tuple[int, int] = (0, 0),
    dtypes: tuple[str, ...] = ("float32",),
) -> st.SearchStrategy[Rows]:
    """Draw `Rows`; every argument restricts one of its fields."""
    return st.builds(
        Rows,
        head_dim=st.sampled_from(HEAD_DIMS),
        kind=st.sampled_from(kinds),
        seed=st.integers(0, 2**32 - 1),
        num_rows=st.integers(1, 3),
        exponent=st.integers(*exponents),
        dtype=st.sampled_from(dtypes),
    )


def nibbles(codes: np.ndarray) -> np.ndarray:
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def blocks_of(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, min(x.shape[-1], 128))


def norms_of(x: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x.astype(np.float64), axis=-1)


def round_trip(x: np.ndarray, *, mean: np.ndarray | None = None) -> np.ndarray:
    quantized = reference.quantize(x, mean=mean)
    return reference.dequantize(quantized.codes, quantized.norms, mean=mean)


def relative_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    return norms_of(got - want.astype(np.float64)) / norms_of(want)


def sign(table: int, j: int) -> int:
    return -1 if MASKS[table][j // 8] >> j % 8 & 1 else 1


def butterflies(x: np.ndarray) -> np.ndarray:
    """Return H x on the last axis in the dtype of `x`, by stages of sums and differences of pairs."""
    x, half = x.copy(), 1
    while half < x.shape[-1]:
        for start in range(0, x.shape[-1], 2 * half):
            low, high = x[..., start : start + half], x[..., start + half : start + 2 * half]
            x[..., start : start + half], x[..., start + half : start + 2 * half] = low + high, low - high
        half *= 2
    return x


def encode_by_hand(x: np.ndarray) -> tuple[list[int], np.float16]:
    """Encode one block by the numbered steps of the page: float32 scalars, sums one after the other."""
    f32 = np.float32
    scale = f32(2**0.5) if len(x) == 64 else f32(1)
    levels = [f32(v) * scale for v in [*(-v for v in LEVELS[::-1]), *LEVELS]]
    boundaries = [f32(v) * scale for v in [*(-v for v in BOUNDARIES[::-1]), 0, *BOUNDARIES]]
    total = f32(0)
    for value in x:
        total += value * value
    norm = np.sqrt(total)
    inverse = f32(1) / norm if norm > f32(1e-10) else f32(0)
    signed = np.array([value * inverse * f32(sign(0, j)) for j, value in enumerate(x)], f32)
    unit = butterflies(signed) * f32(len(x) ** -0.5)
    codes, total = [], f32(0)
    for j, value in enumerate(unit):
        code = 0
        while code < 15 and not value * f32(sign(1, j)) < boundaries[code]:
            code += 1
        codes.append(code)
        total += levels[code] * levels[code]
    return codes, np.float16(norm / np.sqrt(total))


# Encoder


@given(rows=rows(exponents=(-30, 12), dtypes=tuple(DTYPES)))
def test_the_encoder_agrees_with_scalar_float32_code_that_follows_the_page(rows: Rows) -> None:
    """Sums in another order move u by some 1e-7: only codes of values as close to a boundary may differ, by one."""
    x = rows.array()
    # Beyond, a stored norm may overflow float16, where only one of the two clamps.
    assume(norms_of(x).max() < 50000)
    quantized = reference.quantize(x)
    got_codes, got_norms = blocks_of(nibbles(quantized.codes)), quantized.norms.ravel()
    for block, got, got_norm in zip(blocks_of(x.astype(np.float32)), got_codes, got_norms, strict=True):
        want, want_norm = encode_by_hand(block)
        differ = np.flatnonzero(got != want)
        if len(differ):
            boundaries = np.array([*(-v for v in BOUNDARIES[::-1]), 0, *BOUNDARIES]) * (128 / len(block)) ** 0.5
            unit = rotate_by_hand(block.astype(float)) / norms_of(block)
            for j in differ:
                assert abs(int(got[j]) - want[j]) == 1, (j, got[j], want[j])
                assert abs(unit[j] - boundaries[min(got[j], want[j])]) < 1e-6, (j, unit[j])
        else:
            bits, want_bits = (int(np.float16(n).view(np.uint16)) for n in (got_norm, want_norm))
            assert abs(bits - want_bits) <= 1, (got_norm, want_norm)


def test_on_normal_rows_nearly_all_blocks_are_those_of_the_scalar_code() -> None:
    """The law above would hold for an encoder that is wrong near every boundary; this bounds how often it differs."""
    x = np.random.default_rng(0).standard_normal((1500, 128)).astype(np.float32)
    quantized = reference.quantize(x)
    same = 0
    for block, got, norm in zip(x, nibbles(quantized.codes), quantized.norms[:, 0], strict=True):
        codes, want_norm = encode_by_hand(block)
        same += codes == got.tolist() and norm == want_norm
    # One block in 4,000 differs between two orders of summation: three among 1,500 would happen once in 160 runs.
    assert same >= 1498


@given(rows=rows(), power=st.integers(-20, 8))
@example(rows=Rows(128, "normal", 0), power=-12)
def test_scaling_a_row_by_a_power_of_two_scales_its_norms_and_leaves_its_codes(rows: Rows, power: int) -> None:
    """Exact, while the norm is a normal float16."""
    x = rows.array()
    want = reference.quantize(x)
    scaled = want.norms.astype(float) * 2.0**power
    assume(((scaled == 0) | (scaled >= 2.0**-14)).all() and scaled.max() <= 65504)
    got = reference.quantize(x * np.float32(2.0**power))
    np.testing.assert_array_equal(got.codes, want.codes)
    np.testing.assert_array_equal(got.norms, scaled)


@given(rows=rows(kinds=("normal", "offset", "outlier")), factor=st.floats(0.01, 100))
def test_scaling_a_row_by_any_factor_changes_no_code_but_at_a_boundary(rows: Rows, factor: float) -> None:
    """Roundings of float32 move u by some 1e-7."""
    x = rows.array()
    got, want = (nibbles(reference.quantize(y).codes).astype(int) for y in (x * np.float32(factor), x))
    levels_apart = np.abs(got - want)
    assert levels_apart.max() <= 1
    unit = blocks_of(reference.rotate(x)) / norms_of(blocks_of(x))[:, None]
    distance = np.abs(unit[..., None] - _tbq4.midpoints(unit.shape[-1]).astype(float)).min(axis=-1)
    assert (distance.reshape(x.shape)[levels_apart > 0] < 1e-6).all()


@given(rows=rows())
def test_a_negated_row_has_the_mirrored_codes_but_at_a_boundary(rows: Rows) -> None:
    """Levels are odd; the tie rule is not, which shows for coordinates that are zero."""
    x = rows.array()
    plus, minus = (reference.quantize(y) for y in (x, -x))
    unit = blocks_of(reference.rotate(x)) / np.maximum(norms_of(blocks_of(x)), 1e-10)[:, None]
    distance = np.abs(unit[..., None] - _tbq4.midpoints(unit.shape[-1]).astype(float)).min(axis=-1).reshape(x.shape)
    inner = distance > 1e-6  # the roundings of float32 are some 1e-7
    np.testing.assert_array_equal((nibbles(plus.codes) + nibbles(minus.codes))[inner], 15)


@given(rows=rows(exponents=(-10, 8)))
def test_norms_are_kept_to_the_rounding_of_float16(rows: Rows) -> None:
    """Half an ulp of float16, relative, and a few roundings of float32; norms within the normal range of float16."""
    x = blocks_of(rows.array())
    norm = norms_of(x)
    assume(norm.max() < 57000)
    got = norms_of(blocks_of(round_trip(rows.array())))
    normal = norm > 2.0**-13
    np.testing.assert_allclose(got[normal], norm[normal], rtol=2.0**-11 + 1e-6)  # half an ulp, and float32
    # Below, float16 has a fixed step; a decoded block is at most 1.2 times as long as its stored norm.
    np.testing.assert_allclose(got[~normal], norm[~normal], rtol=0, atol=1.2 * 2.0**-25 + 1e-9)  # half a step


@given(
    head_dim=st.sampled_from(HEAD_DIMS),
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0.85, 1.15),
    bits=st.integers(1, 0x7BFF),
)
@example(head_dim=128, seed=0, spread=1.0, bits=1)
@example(head_dim=64, seed=0, spread=1.0, bits=0x7BFF)
def test_encoding_a_decoded_row_again_changes_no_byte_on_its_domain(
    head_dim: int, seed: int, spread: float, bits: int
) -> None:
    """A block whose levels have a length near 1 falls into its own bins again: each level, divided by the length.

    The closest boundaries are those of .143047, at a length of .8777, and of .182907, at 1.1223. All positive norms.
    """
    block = _tbq4.block_of(head_dim)
    unit = spread * np.random.default_rng(seed).standard_normal((3, head_dim)) * block**-0.5
    index = np.searchsorted(_tbq4.midpoints(block), unit, side="right")
    length = norms_of(blocks_of(_tbq4.codebook(block)[index]))
    assume(length.min() > 0.878 and length.max() < 1.122)
    codes = (index[:, 0::2] | index[:, 1::2] << 4).astype(np.uint8)
    norms = np.full((3, head_dim // block), bits, np.uint16).view(np.float16)
    again = reference.quantize(reference.dequantize(codes, norms))
    np.testing.assert_array_equal(again.codes, codes)
    np.testing.assert_array_equal(again.norms, norms)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_normal_rows_are_in_the_domain_of_idempotence(head_dim: int) -> None:
    x = np.random.default_rng(1).standard_normal((20000, head_dim)).astype(np.float32)
    first = reference.quantize(x)
    second = reference.quantize(reference.dequantize(first.codes, first.norms))
    np.testing.assert_array_equal(second.codes, first.codes)
    np.testing.assert_array_equal(second.norms, first.norms)


# Rotation


def rotate_by_hand(x: np.ndarray) -> np.ndarray:
    """Rotate one block with butterflies, in the dtype of `x`."""
    signed = np.array([value * sign(0, j) for j, value in enumerate(x)], x.dtype)
    return butterflies(signed) * [sign(1, j) for j in range(len(x))] * x.dtype.type(len(x) ** -0.5)


@given(rows=rows(exponents=(-8, 8)))
def test_rotation_equals_explicit_butterflies_block_by_block(rows: Rows) -> None:
    x = rows.array().astype(np.float64)
    want = np.array([rotate_by_hand(block) for block in blocks_of(x)]).reshape(x.shape)
    # A coordinate is a sum of at most 128 terms, whose roundings are relative to the row's norm.
    rounding = 128 * ulp(norms_of(x).max(), np.float64)
    np.testing.assert_allclose(reference.rotate(x), want, rtol=0, atol=rounding)  # one ulp of the norm for each term


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rotation_is_orthogonal_and_its_inverse_is_itself_with_the_signs_exchanged(head_dim: int) -> None:
    block, eye = min(head_dim, 128), np.eye(head_dim)
    matrix, inverse = reference.rotate(eye), reference.unrotate(eye)
    # Entries are 0 or block ** -0.5; sums of up to 128 products of them, in float64.
    np.testing.assert_allclose(matrix @ matrix.T, eye, rtol=0, atol=1e-14)  # 128 roundings of 2^-53 at most
    np.testing.assert_array_equal(inverse, matrix.T)
    signs1, signs2 = (np.array([sign(table, j % block) for j in range(head_dim)]) for table in (0, 1))
    exchanged = signs1 * reference.rotate(eye * signs1 * signs2) * signs2
    np.testing.assert_allclose(inverse, exchanged, rtol=0, atol=1e-16)  # products by 1 and -1 only
    assert not np.allclose(reference.rotate(matrix), eye)
    # Values of one block do not reach another.
    outside = ~np.kron(np.eye(head_dim // block), np.ones((block, block))).astype(bool)
    assert not matrix[outside].any()
    # An ulp for the two ways to write 1 / sqrt(128).
    np.testing.assert_allclose(np.abs(matrix[~outside]), block**-0.5, rtol=np.finfo(float).eps)  # that ulp


@given(rows=rows(exponents=(-20, 20)))
def test_unrotate_undoes_rotate_and_dot_products_survive(rows: Rows) -> None:
    """Roundings of sums of at most 128 terms of float64, relative to the norms."""
    x = rows.array().astype(np.float64)
    y = np.random.default_rng(rows.seed + 1).standard_normal(x.shape)
    rounding = 128 * ulp(norms_of(x).max(), np.float64)
    back = reference.unrotate(reference.rotate(x))
    np.testing.assert_allclose(back, x, rtol=0, atol=rounding)  # one ulp of the norm for each term
    dots = (reference.rotate(x) * reference.rotate(y)).sum(axis=-1)
    bound = 4 * rounding * norms_of(y).max()  # both rotations and both sums
    np.testing.assert_allclose(dots, (x * y).sum(axis=-1), rtol=0, atol=bound)  # as derived above


@given(rows=rows())
def test_decoding_to_the_rotated_domain_and_rotating_back_is_decoding(rows: Rows) -> None:
    quantized = reference.quantize(rows.array())
    rotated = reference.dequantize(quantized.codes, quantized.norms, rotated=True)
    back = reference.unrotate(rotated)
    np.testing.assert_array_equal(back, reference.dequantize(quantized.codes, quantized.norms))
    levels = _tbq4.codebook(_tbq4.block_of(rows.head_dim))[nibbles(quantized.codes)].astype(float)
    norms = np.repeat(quantized.norms.astype(float), min(rows.head_dim, 128), axis=-1)
    np.testing.assert_array_equal(rotated, levels * norms)


# Errors that docs/tbq4.md states


@pytest.mark.parametrize(
    ("head_dim", "error", "cosine"), [(64, 0.0936, 0.9956), (128, 0.0954, 0.9954), (256, 0.0956, 0.9954)]
)
def test_the_round_trip_of_normal_rows_has_the_error_of_the_page(head_dim: int, error: float, cosine: float) -> None:
    x = np.random.default_rng(11).standard_normal((20000, head_dim)).astype(np.float32)
    y = round_trip(x)
    # The deviation of the mean of 20,000 errors is 7e-5; the page rounds to 1e-4.
    assert relative_errors(y, x).mean() == pytest.approx(error, abs=4e-4)
    cosines = (x * y).sum(axis=-1) / norms_of(x) / norms_of(y)
    assert cosines.mean() == pytest.approx(cosine, abs=1e-4)
    if head_dim == 128:
        assert relative_errors(y, x).mean() == pytest.approx(0.0955, abs=0.001)
        # Scores shrink by half a percent; the deviation of this mean is 1e-5.
        assert ((x * y).sum(axis=-1) / norms_of(x) ** 2).mean() == pytest.approx(0.9954, abs=1e-4)


def test_the_error_hardly_depends_on_the_data_but_a_row_of_the_signs_is_the_worst() -> None:
    x = np.random.default_rng(0).standard_normal((5000, 128))
    outliers, offsets = x.copy(), x.copy()
    outliers[:, [5, 37, 70, 101]] *= 20
    offsets[:, [5, 37, 70, 101]] += [15, -15, 12, -18]
    # The page rounds to a tenth of a percent; the deviation of the mean of 5,000 errors is below 1e-4.
    assert relative_errors(round_trip(outliers), outliers).mean() == pytest.approx(0.090, abs=0.001)
    assert relative_errors(round_trip(offsets), offsets).mean() == pytest.approx(0.092, abs=0.001)
    worst = _tbq4.SIGNS1
    assert relative_errors(round_trip(worst), worst) == pytest.approx(0.482, abs=0.001)


@pytest.mark.parametrize(
    ("norm", "error"), [(1e-7, 0.214), (3e-7, 0.096), (1e-6, 0.097), (1e-5, 0.0953), (6e4, 0.0953)]
)
def test_small_and_large_rows_have_the_error_of_the_page(norm: float, error: float) -> None:
    """A stored norm of 1e-7 is one or two of the smallest float16; nothing is flushed to zero."""
    x = np.random.default_rng(1).standard_normal((4000, 128)).astype(np.float32)
    x *= np.float32(norm) / norms_of(x).astype(np.float32)[:, None]
    quantized = reference.quantize(x)
    assert quantized.clamped == 0
    errors = relative_errors(reference.dequantize(quantized.codes, quantized.norms), x)
    # The deviation of the mean of 4,000 errors is 2e-4; at 1e-7 they range wider, 5e-4.
    assert errors.mean() == pytest.approx(error, abs=0.002)


# Means


def test_a_mean_is_subtracted_in_float32_before_and_added_after() -> None:
    rng = np.random.default_rng(3)
    x, mean = rng.standard_normal((5, 3, 64)).astype(np.float32), rng.standard_normal((3, 64)).astype(np.float32)
    with_mean, without = reference.quantize(x, mean=mean), reference.quantize(x - mean)
    np.testing.assert_array_equal(with_mean.codes, without.codes)
    np.testing.assert_array_equal(with_mean.norms, without.norms)
    decoded = reference.dequantize(without.codes, without.norms)
    np.testing.assert_array_equal(reference.dequantize(with_mean.codes, with_mean.norms, mean=mean), decoded + mean)


@given(head_dim=st.sampled_from((64, 128)), seed=st.integers(0, 2**32 - 1), sink=st.sampled_from((None, 0.5)))
def test_a_k_mean_leaves_softmax_alone_and_moves_lse_by_its_own_score(
    head_dim: int, seed: int, sink: float | None
) -> None:
    """What a kernel does that never adds the mean to a key; a sink does not move along, so here it is moved."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, n, heads, head_dim)) for n, heads in ((1, 4), (9, 2), (9, 2)))
    mean = 3 * rng.standard_normal((2, head_dim))
    quantized = reference.quantize(k.astype(np.float32), mean=mean)
    keys = reference.dequantize(quantized.codes, quantized.norms, mean=mean)
    bare_keys = reference.dequantize(quantized.codes, quantized.norms)
    shift = np.einsum("hgd,hd->hg", q[0, 0].reshape(2, 2, head_dim), mean).ravel() * head_dim**-0.5
    sinks = None if sink is None else np.full(4, sink)
    out, lse = reference.attention(q, keys, v, sinks=sinks)
    bare_out, bare_lse = reference.attention(q, bare_keys, v, sinks=None if sink is None else sinks - shift)
    # float64 throughout: roundings of scores below 100.
    np.testing.assert_allclose(bare_out, out, rtol=0, atol=1e-12)  # ulp(100) = 1.4e-14
    np.testing.assert_allclose(bare_lse + shift, lse, rtol=0, atol=1e-12)  # the same


@given(seed=st.integers(0, 2**32 - 1), sink=st.sampled_from((None, 0.5)), num_keys=st.sampled_from((0, 1, 9)))
def test_a_v_mean_is_added_to_out_times_the_weights_of_the_keys(seed: int, sink: float | None, num_keys: int) -> None:
    """Their sum is 1 without a sink, and 0 for a row that sees no key."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((1, n, 1, 64)) for n in (1, num_keys, num_keys))
    mean = 3 * rng.standard_normal(64)
    values = v + mean
    sinks = None if sink is None else np.array([sink])
    want, lse = reference.attention(q, k, values, sinks=sinks)
    bare, _ = reference.attention(q, k, v, sinks=sinks)
    weight = 1 - (0 if sink is None else np.exp(sink - lse[..., None])) if num_keys else 0
    # float64 throughout: roundings of sums of values below 20.
    np.testing.assert_allclose(bare + weight * mean, want, rtol=0, atol=1e-13)  # ulp(20) = 3.6e-15


def attention_errors(q: np.ndarray, k: np.ndarray, v: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the relative errors of single-head attention with stored keys and values."""
    q, k, v, keys, values = (x[None, :, None] for x in (q, k, v, keys, values))
    want, got = reference.attention(q, k, v)[0], reference.attention(q, keys, values)[0]
    return relative_errors(got, want).ravel()


def diffuse_problem(seed: int, offset: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return 64 queries and 1024 keys and values whose scores have deviation 1, with offsets in 4 channels of K."""
    rng = np.random.default_rng(seed)
    k, v, q = (rng.standard_normal((n, 128)) for n in (1024, 1024, 64))
    scores = q @ (k - k.mean(axis=0)).T * 128**-0.5
    k[:, [5, 37, 70, 101]] += offset * np.array([15, -15, 12, -18])
    return q / scores.std(axis=1, keepdims=True), k, v


def test_offsets_of_k_cost_a_quarter_of_the_attention_output_unless_their_mean_is_removed() -> None:
    without, with_mean = [], []
    for seed in range(8):
        q, k, v = diffuse_problem(seed, offset=1)
        mean = k[:512].mean(axis=0)
        without.append(attention_errors(q, k, v, round_trip(k), v).mean())
        with_mean.append(attention_errors(q, k, v, round_trip(k, mean=mean), v).mean())
    # One seed ranges over .25 to .28 and .089 to .098; the mean of eight has a deviation of .004 and .001.
    assert np.mean(without) == pytest.approx(0.264, abs=0.012)
    assert np.mean(with_mean) == pytest.approx(0.094, abs=0.004)


def test_diffuse_attention_over_normal_keys_and_values_errs_by_14_percent() -> None:
    both = []
    for seed in range(8):
        q, k, v = diffuse_problem(seed, offset=0)
        both.append(attention_errors(q, k, v, round_trip(k), round_trip(v)).mean())
    # The errors of K and of V, about 10 percent each, add in squares; the deviation over seeds is .001.
    assert np.mean(both) == pytest.approx(0.14, abs=0.01)


def test_the_mean_of_many_values_keeps_a_bias_that_a_removed_mean_takes_away() -> None:
    """The quantizer is deterministic, so that what values have in common errs the same way in all of them."""
    biases = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        x = (rng.standard_normal(128) + rng.standard_normal((8192, 128))).astype(np.float32)
        average = x.astype(float).mean(axis=0)
        decoded = round_trip(x), round_trip(x, mean=x[:512].mean(axis=0))
        biases.append([relative_errors(y.mean(axis=0), average) for y in decoded])
    plain, removed = np.transpose(biases)
    # Of 8,192 independent errors of 9.5 percent would remain .0015, by the size of noise and mean: far below.
    assert plain.min() > 0.004
    assert removed.max() < 0.002


# Real data


@pytest.mark.parametrize(
    ("layer", "plain", "with_mean_and_sink"), [("00", 0.057, 0.050), ("15", 0.139, 0.083), ("29", 0.133, 0.081)]
)
def test_attention_of_a_real_model_has_the_measured_error(layer: str, plain: float, with_mean_and_sink: float) -> None:
    """Keys and values in TBQ4: relative error of the output, mean over the heads of the last 64 of 512 tokens.

    First as they are, then with token 0 in 16 bits and the mean of the 448 tokens before those removed from K.
    """
    with resources.files("cuattn.examples").joinpath("smollm2_qkv.npz").open("rb") as file, np.load(file) as data:
        q, k, v = (data[f"l{layer}_{name}"] for name in "qkv")

    def attend(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        return reference.attention(q[None, -64:], keys[None], values[None], causal=True)[0]

    want = attend(k, v)
    k_mean = k[:448].astype(np.float32).mean(axis=0)
    keys, values = round_trip(k, mean=k_mean), round_trip(v)
    keys[0], values[0] = k[0], v[0]
    # Data and encoder are fixed. A few codes at boundaries may differ, and the figures have three digits.
    assert relative_errors(attend(round_trip(k), round_trip(v)), want).mean() == pytest.approx(plain, abs=0.003)
    assert relative_errors(attend(keys, values), want).mean() == pytest.approx(with_mean_and_sink, abs=0.003)
