"""The error law, and with it every tolerance for a kernel.

With `ref` in float64 and `same` a NumPy attention that rounds where a kernel rounds,

    max|got - ref| <= 2 max|same - ref| + 1 ulp(max|ref|)

The factor 2 pays for another order of summation and for approximate exponentials; the ulp is that of the output's
dtype and pays for one rounding that falls the other way where `same` happens to be exact. Maxima are taken over one
sequence, never over a batch: outputs shrink as the number of keys grows, and a short sequence beside a long one must
not set its tolerance. So it is with the query tokens of a prefill, the first of which may see one key and the last all:
maxima are taken over those of a sequence that see as many keys, to a factor of two.

For lse the law is the same with another ulp. An lse is ``ln 2 * (m + log2 l)``: m is a float32 in base-2 units, the
result of float32 sums over head_dim, and it may cancel against log2 l. So a relative error of lse says nothing; what
is rounded are the partial sums of a score, one for every 16 products, and none of those exceeds the sum of the
products' magnitudes. Few rows have few maxima, and the roundings of `same` may cancel in all of them, so the roundings
of one score count as a random walk: the ulp is taken at the largest sum of magnitudes among the visible keys times
the square root of the number of its roundings, or at lse itself in base-2 units if that is larger. A softcap has a
slope of at most 1 and shrinks that error. Of scores near zero that may be nothing, and `same` exact: l still has the
relative error 2^-22 of the weights, by ex2.approx, and lse as much.

The same error of the scores, e in base-2 units, changes weights by the factor 2^e and out by up to 2 e ln 2 max|v|.
`same` has its share of it, but where scores are huge and two of them nearly tie it may be lucky there: so out has this
term too, which is far below an ulp of a 16-bit out for scores of ordinary size.

Floats, the same law. A score is a sum of 8 products at a time, cut off to float32, and float32 sums of those: one
rounding for every 8. Each product is that of two parts of each factor but for the smaller ones: 2^-24 of it or so, as
its rounding to float32 would be, which sums of magnitudes are far above. As out has 24 bits, a relative error of 2^-22
of each weight shows, which ex2.approx has: it may change out by twice that of max|v|. A product without one of the
small parts has errors of 2^-12 of it, above all of these (`tests/simt/test_prefill_faults.py`).

Keys in TBQ4 are multiplied in the rotated domain, with a query that is rotated in float32 and rounded to float16.

- The magnitudes are then those of the rotated query and the rotated key, and of the query and the mean of K. To the
  roundings of a score come those of a rotated value, one for each of its log2(block) stages, and two for the norm and
  the mean.
- The kernel's rotated query differs from that of `same` by roundings of float32, so that its rounding to float16 falls
  the other way in one value of some thousand: in few rows seldom, but then for all keys of the row. One such flip by
  u = ulp_float16(q_j) changes the score of every key k by d_k = softmax_scale u k_j, at most by D. Along the way from
  the one to the other weights p change by the factor exp(2 D) at most, lse by the mean of d, and out by the covariance
  of d and v under p: by less than exp(2 D) times the product of the deviations of d and v, and never by more than
  2 max|v|. A softcap makes d smaller. These are terms of lse and of out, for the worst of rows, j and elements; the
  moments under p are attention with k, v and their squares for values.

Values in TBQ4: `same` rounds the products of weights and norms as it rounds weights else. The sums are rotated back in
float32, log2(block) stages and the addition of the mean, whose errors are relative to the length of a block, at most
that of the longest value: a random walk of that many roundings is a term of out.

Keys and values in fp8: codes are exact as float16. A query becomes float16 with a power of two of its row, as in `same`
and without a rounding unless it is bfloat16 of sizes that are 2^29 apart. A score has one more rounding, for its scale;
that of an element of out for the scale of values is far below an ulp of 16 bits.

A prefill may keep products of weight and norm in range, rather than weights, or write the values of a tile as float16,
times a power of two that takes their largest norm to 2^15.

- Its m is the largest score plus the logarithm of that, which cancels against log2 l. So lse counts as large as log2 of
  a norm, over 1 or over 2^15.
- A value that is far smaller than another of its tile, which its query may not even see, is a subnormal float16, with
  roundings of up to 2^-25, or 2^-40 of that norm. Rotated back they are a term of out as those of the rotation are, of
  values of that size.

First and recent tokens in 16 bits have the terms of 16-bit rows; the larger ones count.

A merge adds weighted parts and weights in float32, each sum a random walk of one rounding a part. The error of the sum
of weights is common to a row, so that a row of `same` may be lucky in all its elements, which a float32 result shows:
hence a term of two such walks.
"""

from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from strategies import DTYPES, AppendProblem, PrefillProblem, Problem

from cuattn import _tbq4, reference
from cuattn.reference.sequences import Fp8Rows, Kept, Options, Part, Tbq4Rows, attend_each, exact_rows

LOG2_E = float(np.log2(np.e))
LN_2 = float(np.log(2))
PRODUCTS_PER_ROUNDING, FLOATS_PER_ROUNDING = 16, 8
# Relative, of ex2.approx.
EXPONENTIAL_ERROR = 2.0**-22
# Of the largest float16.
FLOAT16_EXPONENT = 15
# Of float64, so that exp is finite.
MAX_EXPONENT = 700.0


# Relative error of an lse whose sum of weights is a whole number, and exact: its float32 log2 is good to an ulp
# (2^-23), the product with ln 2 to half of one, as is ln 2 itself.
LSE_OF_A_WHOLE_SUM = 2.0**-22
# Relative difference of two lse in float32 whose scores of 64 products are summed in two orders: eight roundings of
# each order, half an ulp (2^-24) each of a sum of magnitudes that lse is not far below.
LSE_OF_TWO_ORDERS = 16 * 2.0**-24


def of_positive_sums(num_keys: int) -> float:
    """Relative error of out and lse in float32 where all values and weights are positive.

    At most `num_keys` addends come one after the other, at half an ulp (2^-24) each; a weight, its product with a value
    and the division are good to 2^-21 together.
    """
    return num_keys * 2.0**-24 + 2.0**-21


def ulp(x: float, dtype: npt.DTypeLike) -> float:
    """Return the distance between numbers of `dtype` at the size of `x`."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.frexp(abs(float(x)))[1] - 1 if x else info.minexp
    return float(2.0 ** (max(exponent, int(info.minexp)) - info.nmant))


def score_magnitudes(
    q: np.ndarray,
    k: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    roundings: float | None = None,
) -> np.ndarray:
    """Return the sizes of what is rounded on the way to the lse of each query token of one sequence.

    That is the largest ``softmax_scale * log2 e * sum(|q k|)`` of a visible key, times the square root of the number
    of partial sums.

    Parameters
    ----------
    q : ndarray, shape (seqlen_q, num_qo_heads, head_dim)
    k : ndarray, shape (kv_len, num_kv_heads, head_dim)
    causal, window, softmax_scale
        As in `cuattn.reference.attention`.
    roundings : float, optional
        Of a score. Default: one for 16 products, or for 8 of floats.

    Returns
    -------
    ndarray, shape (seqlen_q,)
        Zero if no key is visible, and keys with NaN do not count.
    """
    seqlen_q, num_qo_heads, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    rows = np.abs(q.astype(np.float64)).reshape(seqlen_q, k.shape[1], num_qo_heads // k.shape[1], head_dim)
    keys = np.nan_to_num(np.abs(k.astype(np.float64)), nan=0)
    largest = np.zeros(seqlen_q)
    for i, row in enumerate(rows):
        start, stop = reference.visible_keys(i, seqlen_q, len(k), causal=causal, window=window)
        with np.errstate(over="ignore"):  # of infinite keys
            largest[i] = (row @ keys[start:stop].transpose(1, 2, 0)).max(initial=0)
    products = FLOATS_PER_ROUNDING if q.dtype == np.float32 else PRODUCTS_PER_ROUNDING
    count = head_dim / products if roundings is None else roundings
    return largest * abs(scale) * LOG2_E * np.sqrt(max(1, count))


def score_magnitude(q: np.ndarray, k: np.ndarray, **options: Any) -> float:
    """Return the largest of `score_magnitudes`."""
    return float(score_magnitudes(q, k, **options).max(initial=0))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the tolerances of some rows of a sequence are made of; see the top of the file.

    Attributes
    ----------
    magnitude : float
        See `score_magnitude`.
    largest_value : float
        The largest |v|.
    slack_of_out, slack_of_lse : float
        Further terms of rows in TBQ4.
    """

    magnitude: float
    largest_value: float
    slack_of_out: float = 0.0
    slack_of_lse: float = 0.0


@dataclass(frozen=True, slots=True)
class Flips:
    """What one rounding of a rotated query to float16 may change, of each query token ``[seqlen_q]``.

    In a score at most; and in lse and in out as long as weights stay as they are.
    """

    score: np.ndarray
    lse: np.ndarray
    out: np.ndarray


@dataclass(frozen=True, slots=True)
class SequenceSizes:
    """Sizes of one sequence.

    Attributes
    ----------
    ranges : ndarray, shape (seqlen_q, 2), int
        Keys that each query token sees.
    magnitudes : ndarray, shape (seqlen_q,)
        See `score_magnitudes`.
    flips : Flips
    largest_values, slacks_of_values : ndarray, shape (kv_len,)
        Of each value: the largest element, and a term of values in TBQ4, else zero.
    log2_norm, slack_of_tiles : float
        Of a prefill with values in TBQ4: the largest size of log2 of a norm, over 1 or over 2^15, and a term of out.
    """

    ranges: np.ndarray
    magnitudes: np.ndarray
    flips: Flips
    largest_values: np.ndarray
    slacks_of_values: np.ndarray
    log2_norm: float
    slack_of_tiles: float

    def of(self, tokens: np.ndarray | None = None) -> Sizes:
        """Return what holds for all of some query tokens, with the values that they see; by default for all."""
        rows, seen = slice(None), slice(None)
        if tokens is not None:
            rows, seen = tokens, slice(self.ranges[tokens, 0].min(), self.ranges[tokens, 1].max())
        score, lse, out = (float(x[rows].max(initial=0)) for x in (self.flips.score, self.flips.lse, self.flips.out))
        growth = float(np.exp(min(2 * score, MAX_EXPONENT)))
        largest, slack = (float(x[seen].max(initial=0)) for x in (self.largest_values, self.slacks_of_values))
        return Sizes(
            float(self.magnitudes[rows].max(initial=0)),
            largest,
            min(growth * out, 2 * largest) + slack,
            min(growth * lse, score),
        )

    def groups(self) -> list[np.ndarray]:
        """Return query tokens that see as many keys, to a factor of two."""
        octave = np.frexp(self.ranges[:, 1] - self.ranges[:, 0])[1]
        return [np.flatnonzero(octave == x) for x in np.unique(octave)]


def _ulps_of_float16(x: np.ndarray) -> np.ndarray:
    """Return the ulps of rows that are brought to float16's upper range first, as rotated queries are."""
    info = ml_dtypes.finfo(np.float16)
    exponent = np.frexp(np.where(x == 0, 1, np.abs(x)))[1] - 1
    lowest = np.frexp(np.abs(x).max(axis=-1, keepdims=True))[1] - 1 - (14 - int(info.minexp))
    return 2.0 ** (np.maximum(exponent, lowest) - info.nmant)


def _flips(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, rotated_k: np.ndarray, scale: float, masks: dict[str, object]
) -> Flips:
    """Return what roundings of rotated queries to float16 may change."""
    if len(k) == 0 or len(q) == 0:
        return _no_flips(len(q))
    rows = reference.rotate(q)
    steps = abs(scale) * _ulps_of_float16(rows)  # [seqlen_q, num_qo_heads, head_dim]
    moments, _ = reference.attention(
        *(x[None] for x in (q, k, np.concatenate([rotated_k, rotated_k**2, v, v**2], axis=-1))), **masks
    )
    # Rows that see a NaN have no tolerance: only its place counts.
    moments = np.nan_to_num(moments[0], posinf=0, neginf=0)
    mean_k, square_k, mean_v, square_v = np.split(moments, (q.shape[-1], 2 * q.shape[-1], -v.shape[-1]), axis=-1)
    deviation_k, deviation_v = (np.sqrt(np.maximum(s - m**2, 0)) for s, m in ((square_k, mean_k), (square_v, mean_v)))
    top_k = np.abs(rotated_k).max(axis=0, initial=0, where=np.isfinite(rotated_k))
    return Flips(
        score=(steps * top_k.repeat(q.shape[1] // k.shape[1], axis=0)).max(axis=(1, 2)),
        lse=(steps * np.sqrt(square_k)).max(axis=(1, 2)),
        out=((steps * deviation_k).max(axis=-1) * deviation_v.max(axis=-1)).max(axis=1),
    )


def _no_flips(seqlen_q: int) -> Flips:
    return Flips(*np.zeros((3, seqlen_q)))


def _sizes_of(q: np.ndarray, parts: list[Part], masks: dict[str, object]) -> SequenceSizes:
    parts = sorted(parts, key=lambda part: part.start)
    k, v = (np.concatenate([exact_rows(getattr(part, x), np.float64) for part in parts]) for x in "kv")
    largest = np.abs(v).max(axis=(1, 2), initial=0, where=np.isfinite(v))
    score_masks = {name: x for name, x in masks.items() if name in {"causal", "window", "softmax_scale"}}
    # A scale is one more factor of a score.
    factors = any(isinstance(part.k, Fp8Rows) for part in parts)
    roundings = q.shape[-1] / PRODUCTS_PER_ROUNDING + 1 if factors else None
    magnitudes = score_magnitudes(q, k, **score_masks, roundings=roundings)
    flips, slacks, log2_norm = _no_flips(len(q)), np.zeros(len(v)), 0.0
    slack_of_tiles = 0.0
    head_dim = q.shape[-1]
    stages = np.log2(min(head_dim, _tbq4.BLOCK))  # of a rotation
    if any(isinstance(part.k, Tbq4Rows) for part in parts):
        rotated_k = np.concatenate(
            [
                reference.dequantize(part.k.codes, part.k.norms, rotated=True)
                if isinstance(part.k, Tbq4Rows)
                else np.zeros(part.k.shape)
                for part in parts
            ]
        )
        # What is left of a key beside its rotated part: a mean, or all of a key in 16 bits.
        rest = k - reference.unrotate(rotated_k)
        q = q.astype(np.float64)
        scale = head_dim**-0.5 if masks.get("softmax_scale") is None else masks["softmax_scale"]
        roundings = head_dim / PRODUCTS_PER_ROUNDING + stages + 2
        operands = (np.concatenate(x, axis=-1) for x in ((reference.rotate(q), q), (rotated_k, rest)))
        magnitudes = score_magnitudes(*operands, **{**score_masks, "softmax_scale": scale}, roundings=roundings)
        flips = _flips(q, k, v, rotated_k, scale, masks)
    codes = [part.v for part in parts if isinstance(part.v, Tbq4Rows)]
    if codes:
        norms = np.concatenate([rows.norms.ravel() for rows in codes]).astype(np.float64)
        norms = np.abs(norms[np.isfinite(norms) & (norms != 0)])
        log2_norm = float(np.abs(np.log2(norms)[:, None] - (0, FLOAT16_EXPONENT)).max(initial=0))
        slack_of_tiles = float(np.sqrt(stages + 1) * 2.0**-40 * norms.max(initial=0))
        block = _tbq4.block_of(v.shape[-1])
        blocks = v.reshape(*v.shape[:-1], v.shape[-1] // block, block)
        length = np.sqrt((np.where(np.isfinite(blocks), blocks, 0) ** 2).sum(axis=-1)).max(axis=(1, 2), initial=0.0)
        slacks = np.sqrt(stages + 1) * 2.0**-24 * length
    hidden = {"causal": bool(masks.get("causal")), "window": masks.get("window")}
    ranges = np.array([reference.visible_keys(i, len(q), len(k), **hidden) for i in range(len(q))], int).reshape(-1, 2)
    return SequenceSizes(ranges, magnitudes, flips, largest, slacks, log2_norm, slack_of_tiles)


def _sizes_of_each(
    q: np.ndarray, k: Any, v: Any, options: dict[str, object], masks: dict[str, object], **where: Any
) -> list[SequenceSizes]:
    """Return the sizes of each sequence of a call with keyword arguments `options`; `masks` are defaults."""
    names = ("causal", "window", "softcap", "sinks", "softmax_scale")
    masks = masks | {name: options[name] for name in names if name in options}
    sizes = []

    def note(tokens: np.ndarray, parts: list[Part], _: Options) -> tuple[float, float]:
        sizes.append(_sizes_of(tokens, parts, masks))
        return 0.0, 0.0

    nothing = Options(causal=True, window=None, softcap=None, sinks=None, softmax_scale=None)
    where |= {name: options[name] for name in ("page_table", "cu_seqlens_q", "cu_seqlens_k") if name in options}
    attend_each(note, q, k, v, nothing, **where)
    return sizes


def sizes_of(arrays: tuple[np.ndarray, ...], options: dict[str, object]) -> list[Sizes]:
    """Return the sizes of each sequence of a call of decode; `options` are its keyword arguments."""
    q, k_cache, v_cache, kv_len = arrays
    kept = Kept.of(*(options.get(name) for name in ("k_sink", "v_sink", "k_recent", "v_recent")))
    q = q if q.ndim == 4 else q[:, None]
    sizes = _sizes_of_each(q, k_cache, v_cache, options, {"causal": True}, kv_len=kv_len, kept=kept)
    return [of_sequence.of() for of_sequence in sizes]


def _assert_same_places(got: np.ndarray, ref: np.ndarray, context: object) -> None:
    for name, is_special in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(is_special(got) != is_special(ref))
        if len(wrong):
            index = tuple(int(i) for i in wrong[0])
            raise AssertionError(
                f"{name} in other places than the reference, {len(wrong)} of {ref.size}; "
                f"first at {index}: got {got[index]}, reference {ref[index]}\n{context}"
            )


def assert_law(
    got: np.ndarray,
    same: np.ndarray,
    ref: np.ndarray,
    *,
    dtype: npt.DTypeLike,
    magnitude: float = 0.0,
    conditioning: float = 0.0,
    context: object = "",
) -> None:
    """Assert the error law; positions of inf and NaN must be those of the reference.

    Parameters
    ----------
    got, same, ref : ndarray, all of one shape
        The result under test, the same-precision result, and the float64 reference.
    dtype : dtype
        Its ulp counts: that of `got` as it came.
    magnitude : float, default 0
        Size of what was rounded on the way, if larger than the result; see `score_magnitude`.
    conditioning : float, default 0
        What errors of the scores may change.
    context : object
        Printed on failure; a `Problem` reproduces it.
    """
    shapes = (got.shape, same.shape, ref.shape)
    if len(set(shapes)) != 1:
        raise AssertionError(f"shapes differ: got {shapes[0]}, same {shapes[1]}, reference {shapes[2]}\n{context}")
    got, same, ref = (np.asarray(x).astype(np.float64) for x in (got, same, ref))
    _assert_same_places(got, ref, context)
    # The fill is the same in all three, so that places without a number add no error.
    finite = np.isfinite(ref)
    got, same, ref = (np.where(finite, x, 0.0) for x in (got, same, ref))
    same_error = np.abs(same - ref).max(initial=0.0, where=np.isfinite(same))
    step = ulp(max(np.abs(ref).max(initial=0.0), magnitude), dtype)
    allowed = 2 * same_error + step + conditioning
    error = np.abs(got - ref)
    if error.max(initial=0.0) > allowed:
        index = tuple(int(i) for i in np.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"error {error[index]:.3e} ({error[index] / step:.1f} ulp) exceeds {allowed:.3e} "
            f"({allowed / step:.1f} ulp, same precision {same_error / step:.1f} ulp) at {index}: "
            f"got {got[index]!r}, same precision {same[index]!r}, reference {ref[index]!r}; "
            f"{(error > allowed).sum()} of {error.size} values\n{context}"
        )


def assert_rows(
    got: tuple[np.ndarray, np.ndarray | None],
    same: tuple[np.ndarray, np.ndarray],
    ref: tuple[np.ndarray, np.ndarray],
    *,
    dtype: npt.DTypeLike,
    magnitude: float,
    largest_value: float = 0.0,
    slack_of_out: float = 0.0,
    slack_of_lse: float = 0.0,
    context: object = "",
) -> None:
    """Assert the error law for out and, unless None, lse of the rows of one sequence.

    Parameters
    ----------
    got, same, ref : tuple of ndarray
        out ``[..., value_dim]`` and lse ``[...]``.
    dtype : dtype
        That of out; lse is float32.
    magnitude : float
        See `score_magnitude`.
    largest_value : float
        The largest finite |v| of a visible key.
    slack_of_out, slack_of_lse : float
        See `Sizes`.
    context : object
        Printed on failure.
    """
    out, lse = got
    conditioning = (2 * ulp(magnitude, np.float32) * LN_2 * largest_value if magnitude else 0.0) + slack_of_out
    if dtype == np.float32:
        conditioning += 2 * EXPONENTIAL_ERROR * largest_value
    assert_law(out, same[0], ref[0], dtype=dtype, conditioning=conditioning, context=f"out of {context}")
    is_empty = np.isneginf(ref[1])
    if np.any(np.asarray(out)[is_empty]):
        raise AssertionError(f"out of a row without keys must be zero\n{context}")
    if lse is not None:
        finite = np.abs(ref[1]).max(initial=0.0, where=np.isfinite(ref[1]))
        size = max(magnitude, finite * LOG2_E)
        assert_law(
            lse,
            same[1],
            ref[1],
            dtype=np.float32,
            magnitude=size,
            conditioning=slack_of_lse + EXPONENTIAL_ERROR,
            context=f"lse of {context}",
        )


@dataclass(frozen=True, slots=True)
class Expected:
    """What a decode problem should give: (out, lse) twice, and the sizes of each sequence."""

    same: tuple[np.ndarray, np.ndarray]
    ref: tuple[np.ndarray, np.ndarray]
    sizes: tuple[Sizes, ...]

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """Sizes of each sequence's scores."""
        return tuple(size.magnitude for size in self.sizes)


@lru_cache(maxsize=64)
def expected(problem: Problem) -> Expected:
    """Return the reference and the same-precision result of a problem."""
    arrays, options = problem.arrays(), problem.options()
    return Expected(
        same=reference.decode_same_precision(*arrays, **options, return_lse=True),
        ref=reference.decode(*arrays, **options, return_lse=True),
        sizes=tuple(sizes_of(arrays, options)),
    )


def assert_decode(problem: Problem, got_out: np.ndarray, got_lse: np.ndarray | None = None) -> None:
    """Assert that a result of `problem` obeys the error law, each sequence by itself.

    Parameters
    ----------
    problem : Problem
    got_out : ndarray, shape of q with value_dim for head_dim, dtype of the problem
    got_lse : ndarray, shape of q without head_dim, float32, optional
    """
    want, dtype = expected(problem), DTYPES[problem.dtype]
    for name, got, wanted, ref in (
        ("out", got_out, dtype, want.ref[0]),
        ("lse", got_lse, np.dtype(np.float32), want.ref[1]),
    ):
        if got is not None and (got.dtype != wanted or got.shape != ref.shape):
            raise AssertionError(f"{name} must be {wanted} {ref.shape}, got {got.dtype} {got.shape}\n{problem}")
    for b, sizes in enumerate(want.sizes):
        assert_rows(
            (got_out[b], None if got_lse is None else got_lse[b]),
            (want.same[0][b], want.same[1][b]),
            (want.ref[0][b], want.ref[1][b]),
            dtype=dtype,
            **asdict(sizes),
            context=f"sequence {b} of {problem}",
        )


def assert_call(arrays: tuple[Any, ...], options: dict[str, Any], got: tuple[np.ndarray, np.ndarray]) -> None:
    """Assert the error law of a call of decode that no `Problem` describes, each sequence by itself."""
    q, *_, kv_len = arrays
    same = reference.decode_same_precision(*arrays, **options, return_lse=True)
    ref = reference.decode(*arrays, **options, return_lse=True)
    for b, sizes in enumerate(sizes_of(arrays, options)):
        assert_rows(
            *(tuple(x[b] for x in pair) for pair in (got, same, ref)),
            dtype=q.dtype,
            **asdict(sizes),
            context=f"sequence {b} with {kv_len[b]} keys, q {q.shape} {q.dtype}, {sorted(options)}",
        )


@dataclass(frozen=True, slots=True)
class ExpectedPrefill:
    """What a call of prefill should give: (out, lse) twice, and the rows and sizes of each sequence."""

    same: tuple[np.ndarray, np.ndarray]
    ref: tuple[np.ndarray, np.ndarray]
    rows: tuple[Any, ...]
    sizes: tuple[SequenceSizes, ...]


def _expected_of_prefill(arrays: tuple[Any, ...], options: dict[str, Any]) -> ExpectedPrefill:
    begin = options.get("cu_seqlens_q")
    return ExpectedPrefill(
        same=reference.attention_same_precision(*arrays, **options),
        ref=reference.prefill(*arrays, **options, return_lse=True),
        rows=tuple(range(len(arrays[0])) if begin is None else (slice(*map(int, pair)) for pair in pairwise(begin))),
        sizes=tuple(_sizes_of_each(*arrays, options, {}, kv_len=options.get("kv_len"))),
    )


@lru_cache(maxsize=16)
def expected_prefill(problem: PrefillProblem) -> ExpectedPrefill:
    """Return the reference and the same-precision result of a problem."""
    return _expected_of_prefill(problem.arrays(), problem.options())


def _assert_prefill(
    want: ExpectedPrefill, dtype: np.dtype, got_out: np.ndarray, got_lse: np.ndarray | None, context: object
) -> None:
    for name, got, wanted, ref in (
        ("out", got_out, dtype, want.ref[0]),
        ("lse", got_lse, np.dtype(np.float32), want.ref[1]),
    ):
        if got is not None and (got.dtype != wanted or got.shape != ref.shape):
            raise AssertionError(f"{name} must be {wanted} {ref.shape}, got {got.dtype} {got.shape}\n{context}")
    for b, (rows, sizes) in enumerate(zip(want.rows, want.sizes, strict=True)):
        for tokens in sizes.groups():
            of_tokens = asdict(sizes.of(tokens))
            of_tokens["magnitude"] = max(of_tokens["magnitude"], sizes.log2_norm)
            of_tokens["slack_of_out"] += sizes.slack_of_tiles
            assert_rows(
                (got_out[rows][tokens], None if got_lse is None else got_lse[rows][tokens]),
                *(tuple(x[rows][tokens] for x in pair) for pair in (want.same, want.ref)),
                dtype=dtype,
                **of_tokens,
                context=f"query tokens {tokens[0]} .. {tokens[-1]}, {len(tokens)} in all, of sequence {b} of {context}",
            )


def assert_prefill(problem: PrefillProblem, got_out: np.ndarray, got_lse: np.ndarray | None = None) -> None:
    """Assert that a result of `problem` obeys the error law, see the top of the file.

    Parameters
    ----------
    problem : PrefillProblem
    got_out : ndarray, shape of q with value_dim for head_dim, dtype of the problem
    got_lse : ndarray, shape of q without head_dim, float32, optional
    """
    _assert_prefill(expected_prefill(problem), DTYPES[problem.dtype], got_out, got_lse, problem)


def assert_prefill_call(
    arrays: tuple[Any, ...], options: dict[str, Any], got: tuple[np.ndarray, np.ndarray | None]
) -> None:
    """Assert the error law of a call of prefill that no `PrefillProblem` describes."""
    context = f"q {arrays[0].shape} {arrays[0].dtype}, {sorted(options)}"
    _assert_prefill(_expected_of_prefill(arrays, options), arrays[0].dtype, *got, context)


def assert_merge(
    parts: tuple[np.ndarray, np.ndarray], got_out: np.ndarray, got_lse: np.ndarray, context: object = ""
) -> None:
    """Assert that a merge obeys the error law, each row by itself.

    Parameters
    ----------
    parts : tuple of ndarray
        out_partial ``[num_parts, ..., heads, head_dim]`` and lse_partial ``[num_parts, ..., heads]``.
    got_out, got_lse : ndarray
        The result under test; the dtype of out counts.
    context : object
        Printed on failure.
    """
    same_out, same_lse = reference.merge(*parts, dtype=np.float32)
    ref_out, ref_lse = reference.merge(*parts)
    same_out = same_out.astype(got_out.dtype)
    for row in np.ndindex(got_lse.shape):
        values, weights = (x[(slice(None), *row)].astype(np.float64) for x in parts)
        largest = np.abs(values).max(initial=0.0, where=np.isfinite(values))
        walk = np.sqrt(len(values)) * 2.0**-24  # of a sum of weights, relative
        where = f"row {row} of {context}"
        assert_law(
            got_out[row],
            same_out[row],
            ref_out[row],
            dtype=got_out.dtype,
            conditioning=2 * walk * largest,
            context=f"out, {where}",
        )
        # The largest lse and the logarithm of the sum of weights are added, and may cancel.
        size = float(np.abs(weights.max()))
        assert_law(
            got_lse[row],
            same_lse[row],
            ref_lse[row],
            dtype=np.float32,
            magnitude=size if np.isfinite(size) else 0.0,
            conditioning=2 * walk,
            context=f"lse, {where}",
        )


def assert_blocks(
    x: np.ndarray, codes: np.ndarray, norms: np.ndarray, clamped: int, *, mean: np.ndarray | None = None
) -> None:
    """Assert that rows were encoded as TBQ4 by the rules of ``docs/tbq4.md``, in float32 sums of any order.

    Codes are the reference's, but for values so near to a boundary that such sums may fall on its other side; those are
    off by one, and rare. Norms agree to one rounding where the codes do.

    Parameters
    ----------
    x : ndarray, shape (..., num_kv_heads, head_dim)
    codes, norms, clamped
        The result under test.
    mean : ndarray, optional
    """
    want = reference.quantize(x, mean=mean)
    block = _tbq4.block_of(x.shape[-1])
    nibbles, wanted = (np.stack((c & 15, c >> 4), -1).reshape(-1, block).astype(int) for c in (codes, want.codes))
    rows = (np.asarray(x, np.float32) - (0 if mean is None else mean)).reshape(-1, block)
    length = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    unit = reference.rotate(np.divide(rows, length, out=np.zeros_like(rows, np.float64), where=length > 0))
    differs = nibbles != wanted
    assert (np.abs(nibbles - wanted)[differs] == 1).all()
    distance = np.abs(unit[..., None] - _tbq4.midpoints(block).astype(np.float64)).min(-1)
    # Seven additions, the scaling and the normalization: some ulp of the largest partial sum, below sqrt(block).
    assert (distance[differs] < 16 * 2.0**-24 * np.sqrt(block)).all()
    # Values lie within 1e-6 of a boundary with a probability of some 1e-5 each; one block of a small draw may.
    assert differs.any(axis=1).sum() <= max(1, 5e-4 * len(differs))
    same = ~differs.any(axis=1).reshape(want.norms.shape)
    bits, wanted_bits = (n.view(np.int16).astype(int)[same] for n in (norms, want.norms))
    assert (np.abs(bits - wanted_bits) <= 1).all()  # a rounding of float32 may carry over to float16
    assert clamped == want.clamped


def assert_append(problem: AppendProblem, got: dict[str, np.ndarray]) -> None:
    """Assert what append made of `problem.bases()`.

    Rows that were encoded obey the rules of `assert_blocks`; of everything else, every byte is the reference's.

    Parameters
    ----------
    problem : AppendProblem
    got : dict of ndarray
        The arrays of `problem.bases()` after the call; encoded rows are replaced by the reference's.
    """
    want = problem.bases()
    arguments, options = problem.arguments(want)
    reference.append(*arguments, **options)
    pages, slots = problem.slots()
    tokens = np.array([(b, i) for b, i, _ in problem.places()], int).reshape(-1, 2)
    for side in "kv":
        if f"{side}_norms" not in want or not len(tokens):
            continue
        rows = problem.view(f"{side}_new", want[f"{side}_new"])[tokens[:, 0], tokens[:, 1]]
        codes, norms = (problem.view(f"{side}_{x}", got[f"{side}_{x}"]) for x in ("codes", "norms"))
        mean = problem.view(f"{side}_mean", want[f"{side}_mean"]) if f"{side}_mean" in want else None
        clamped = int(got[f"{side}_clamped"][0] - problem.bases()[f"{side}_clamped"][0])
        assert_blocks(rows, codes[pages, slots], norms[pages, slots], clamped, mean=mean)
        for name, x in (("codes", codes), ("norms", norms)):
            x[pages, slots] = problem.view(f"{side}_{name}", want[f"{side}_{name}"])[pages, slots]
    for name, array in want.items():
        differs = np.argwhere(got[name].view(np.uint8) != array.view(np.uint8))
        where = f"{name} at byte {differs[0].tolist()}" if len(differs) else ""
        assert not where, f"{where}, {len(differs)} bytes in all, differ from the reference\n{problem}"
