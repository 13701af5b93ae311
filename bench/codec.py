"""Arrays of the cases of quantize, dequantize and append on the GPU, and their checks."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import cuattn
from cuattn import _arrays, _tbq4, reference

from .cases import DTYPES, AppendCase, CodecCase
from .checks import WrongResultError
from .inputs import normal, to_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuattn._arrays import Array

# First and as many last tokens that a check compares.
_SAMPLE = 512


def check_blocks(x: np.ndarray[Any, Any], codes: np.ndarray[Any, Any], norms: np.ndarray[Any, Any]) -> None:
    """Raise `WrongResultError` unless rows were encoded as ``docs/tbq4.md`` says.

    Parameters
    ----------
    x : ndarray, shape (..., head_dim)
        Without the mean.
    codes : ndarray, shape (..., head_dim / 2), uint8
    norms : ndarray, shape (..., head_dim / block), float16
    """
    want = reference.quantize(x)
    block = _tbq4.block_of(x.shape[-1])
    got, wanted = (np.stack((c & 15, c >> 4), -1).reshape(-1, block).astype(int) for c in (codes, want.codes))
    if np.abs(got - wanted).max() > 1:
        msg = f"a code is off by {np.abs(got - wanted).max()}"
        raise WrongResultError(msg)
    differs = (got != wanted).any(axis=1)
    # 0.05 % of many blocks may differ, and of a sample as much more as chance may give: four deviations of a count.
    expected = 5e-4 * len(differs)
    allowed = 1 + expected + 4 * math.sqrt(expected)
    if differs.sum() > allowed:
        msg = f"{differs.sum()} of {len(differs)} blocks differ from the reference, allowed {allowed:.0f}"
        raise WrongResultError(msg)
    steps = np.abs(norms.view(np.int16).astype(int) - want.norms.view(np.int16)).reshape(-1)[~differs]
    # A rounding of float32 may carry over to float16.
    if steps.max(initial=0) > 1:
        msg = f"a norm is off by {steps.max()} steps of float16"
        raise WrongResultError(msg)


def check_rows(codes: np.ndarray[Any, Any], norms: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
    """Raise `WrongResultError` unless `rows` are what the reference decodes."""
    want = reference.dequantize(codes, norms)
    blocks = want.reshape(*norms.shape, -1)
    # Seven additions and the scaling in float32, each relative to the length of the block at most, and one rounding.
    allowed = 16 * 2.0**-24 * np.linalg.norm(blocks, axis=-1, keepdims=True)
    allowed = allowed + float(np.spacing(rows.dtype.type(1))) / 2 * np.abs(blocks)
    error = np.abs(rows.astype(np.float64).reshape(blocks.shape) - blocks)
    if not (error <= allowed).all():
        msg = f"a value differs by {error.max():.3g} from the reference"
        raise WrongResultError(msg)


def _ends(x: Array) -> np.ndarray[Any, Any]:
    """First and last tokens, on the host."""
    return np.concatenate([to_host(x[:_SAMPLE]), to_host(x[-_SAMPLE:])])


class CodecInputs:
    """Arrays of a case of quantize or dequantize on the GPU.

    Parameters
    ----------
    case : CodecCase
    """

    def __init__(self, case: CodecCase) -> None:
        self.case = case
        self._dtype = np.dtype(np.float32) if case.dtype == "float32" else DTYPES[case.dtype]
        self._x = normal(math.prod(case.shape), self._dtype).reshape(case.shape)
        self._mean = None
        if case.has_mean:
            size = case.num_kv_heads * case.head_dim
            self._mean = normal(size, np.dtype(np.float32), seed=2**40).reshape(case.num_kv_heads, case.head_dim)
        self._encoded = None
        if case.op == "dequantize":
            self._encoded, self._x = cuattn.quantize(self._x), None

    def call(self) -> Any:  # noqa: ANN401  a Tbq4Array or an array
        """Run the operation into new arrays."""
        if self._encoded is None:
            return cuattn.quantize(self._x, mean=self._mean)
        return cuattn.dequantize(self._encoded, dtype=self._dtype)

    def check(self) -> None:
        """Raise `WrongResultError` unless first and last tokens of a result are right."""
        result = self.call()
        if self._encoded is not None:
            check_rows(_ends(self._encoded.codes), _ends(self._encoded.norms), _ends(result))
            return
        x = _ends(self._x).astype(np.float32)
        x = x if self._mean is None else x - to_host(self._mean)
        check_blocks(x, _ends(result.codes), _ends(result.norms))


class AppendInputs:
    """Arrays of a case of append on the GPU: one pair of caches, which the calls fill one after the other.

    Parameters
    ----------
    case : AppendCase
    sets : int
        Calls, each with new rows of its own.
    """

    def __init__(self, case: AppendCase, sets: int) -> None:
        cupy = _arrays.import_cupy()
        self.case = case
        shape = (sets, 2, *case.new_shape)
        self._new = normal(math.prod(shape), DTYPES[case.dtype]).reshape(shape)
        ends = np.arange(1, sets + 1, dtype=np.int32)[:, None] * case.seqlen_new
        self._kv_len = cupy.asarray(np.broadcast_to(ends, (sets, case.batch)).copy())
        axes = (case.batch, sets * case.seqlen_new, case.num_kv_heads)
        self.capacity = axes[1]
        block = _tbq4.block_of(case.head_dim)

        def cache() -> Any:  # noqa: ANN401  an array or a Tbq4Array
            if case.formats == "raw16":
                return cupy.zeros((*axes, case.head_dim), DTYPES[case.dtype])
            codes = cupy.zeros((*axes, case.head_dim // 2), np.uint8)
            norms = cupy.zeros((*axes, case.head_dim // block), np.float16)
            return cuattn.Tbq4Array(codes, norms, clamped=cupy.zeros(1, np.int32))

        self._caches = cache(), cache()

    def calls(self) -> list[Callable[[], None]]:
        """Return one call of `cuattn.append` for each set."""
        return [
            partial(cuattn.append, k_new, v_new, *self._caches, kv_len)
            for (k_new, v_new), kv_len in zip(self._new, self._kv_len, strict=True)
        ]

    def check(self) -> None:
        """Raise `WrongResultError` unless the last call's rows are right, those of the last tokens of each sequence."""
        self.calls()[-1]()
        tokens = slice(-min(_SAMPLE, self.case.seqlen_new), None)
        for new, cache in zip(self._new[-1], self._caches, strict=True):
            rows = to_host(new[:, tokens])
            if isinstance(cache, cuattn.Tbq4Array):
                check_blocks(rows.astype(np.float32), to_host(cache.codes[:, tokens]), to_host(cache.norms[:, tokens]))
            elif to_host(cache[:, tokens]).tobytes() != rows.tobytes():
                msg = "a row is not that which was appended"
                raise WrongResultError(msg)
