"""What results of decode are compared with before every time, and by how much they may differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class WrongResultError(RuntimeError):
    """A result is not that of the reference."""


@dataclass(frozen=True, slots=True)
class ByReference:
    """Results of some rows of q, each with its place: same-precision, and float64.

    Attributes
    ----------
    parts : sequence of ((int, slice), ndarray, ndarray)
        Sequence and query heads; the result that rounds where a kernel rounds; the reference.
    dtype : dtype
        That of the output.
    ulps : int
        Of the law.
    """

    parts: Sequence[tuple[tuple[int, slice], np.ndarray[Any, Any], np.ndarray[Any, Any]]]
    dtype: np.dtype[Any]
    ulps: int = 1

    def check(self, out: np.ndarray[Any, Any]) -> None:
        """Raise `WrongResultError` unless ``max|out - ref| <= 2 max|same - ref| + ulps ulp(max|ref|)`` everywhere."""
        for (sequence, heads), same, ref in self.parts:
            got = out[sequence, ..., heads, :].astype(np.float64)
            error = np.abs(got - ref).max()
            ulp = float(np.spacing(self.dtype.type(np.abs(ref).max())))
            allowed = 2 * np.abs(same.astype(np.float64) - ref).max() + self.ulps * ulp
            # In this form a NaN fails, too.
            if not error <= allowed:
                place = f"sequence {sequence}, query heads {heads.start} to {heads.stop - 1}"
                msg = f"{place}: error {error:.3g}, allowed {allowed:.3g}"
                raise WrongResultError(msg)


@dataclass(frozen=True, slots=True)
class ByRaw16:
    """Results of `decode` on the dequantized caches in float16, for all rows of q.

    Attributes
    ----------
    ref : ndarray, shape of the output
    dtype : {"bfloat16", "float16"}
        That of the output.
    """

    ref: np.ndarray[Any, Any]
    dtype: str

    @property
    def relative(self) -> float:
        """What is allowed, relative to the largest value of a sequence.

        With u the half of an ulp at 1, a rounding errs by 0.6 u in the mean. Those of weights, of keys and of values
        are independent, and the output is a sum of as many independent terms: each kind gives it an error of 0.6 u of
        its deviation, three kinds 1 u. Of some 10^5 such errors the largest is 5 deviations, and a sequence's largest
        output is 4. So three kinds in the dtype of q make up to 1.3 u of that, and the output's own rounding up to 1 u,
        hardly both at once: 2 u. As much of float16 pays for the rotated query and for what else is rounded to that.
        """
        half_ulp = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
        return 2 * half_ulp[self.dtype] + 2 * half_ulp["float16"]

    def check(self, out: np.ndarray[Any, Any]) -> None:
        """Raise `WrongResultError` unless every sequence is within the bound."""
        for sequence, (got, ref) in enumerate(zip(out.astype(np.float64), self.ref, strict=True)):
            error, allowed = np.abs(got - ref).max(), self.relative * np.abs(ref).max()
            if not error <= allowed:
                msg = f"sequence {sequence}: differs by {error:.3g} from decode in 16 bits, allowed {allowed:.3g}"
                raise WrongResultError(msg)


@dataclass(frozen=True, slots=True)
class ByExact:
    """Results in float64 for some rows of q, each with its place.

    Attributes
    ----------
    parts : sequence of ((int, int, slice), ndarray)
        Sequence, token and query heads; the result.
    dtype : {"bfloat16", "float16"}
        That of the output.
    """

    parts: Sequence[tuple[tuple[int, int, slice], np.ndarray[Any, Any]]]
    dtype: str

    def check(self, out: np.ndarray[Any, Any]) -> None:
        """Raise `WrongResultError` unless every row is within the bound of `ByRaw16`, which has more roundings."""
        tokens = out.reshape(len(out), -1, *out.shape[-2:])
        for (sequence, token, heads), ref in self.parts:
            error = np.abs(tokens[sequence, token, heads].astype(np.float64) - ref).max()
            allowed = ByRaw16(ref, self.dtype).relative * np.abs(ref).max()
            if not error <= allowed:
                place = f"sequence {sequence}, token {token}, query heads {heads.start} to {heads.stop - 1}"
                msg = f"{place}: error {error:.3g}, allowed {allowed:.3g}"
                raise WrongResultError(msg)


# What a check compares with.
Expected = ByReference | ByExact | ByRaw16
