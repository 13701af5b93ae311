"""Arrays of the prefill cases on the GPU, and the check that comes before every time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import cuattn
from cuattn import _arrays, _plan, reference

from . import exact
from .cases import DTYPES as DTYPES16
from .checks import ByRaw16, WrongResultError
from .inputs import normal, to_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from cuattn._arrays import Array

    from .prefill_cases import PrefillCase

DTYPES = DTYPES16 | {"float32": np.dtype(np.float32)}
# Of float32, relative to the largest value: scores of some 10 err by 2^-22 of their size or less, so weights do.
_FLOAT_ERROR = 2.0**-16
# Seeds of a set's q, K and V, further apart than an array has elements.
_SEED = 2**32
# Rounding to nearest in float32, relative.
_HALF_ULP = 2.0**-24


@dataclass(frozen=True, slots=True)
class Expected:
    """What some query tokens of a KV head should give, and by how much a result may differ.

    Attributes
    ----------
    sequence, token : int
    heads : slice
        Query heads.
    out : ndarray, shape (heads, value_dim)
    lse : ndarray, shape (heads,)
    allowed : float
        Of out.
    allowed_lse : float
    """

    sequence: int
    token: int
    heads: slice
    out: np.ndarray[Any, Any]
    lse: np.ndarray[Any, Any]
    allowed: float
    allowed_lse: float

    def check(self, out: np.ndarray[Any, Any], lse: np.ndarray[Any, Any] | None) -> None:
        """Raise `WrongResultError` unless a result of these heads is within the bounds; a NaN is not."""
        where = f"sequence {self.sequence}, token {self.token}, query heads {self.heads.start} to {self.heads.stop - 1}"
        for name, got, want, allowed in (
            ("out", out, self.out, self.allowed),
            ("lse", lse, self.lse, self.allowed_lse),
        ):
            error = 0.0 if got is None else float(np.abs(got.astype(np.float64) - want).max())
            if not error <= allowed:
                msg = f"{name} of {where}: error {error:.3g}, allowed {allowed:.3g}"
                raise WrongResultError(msg)


class PrefillInputs:
    """Arrays of a case, in several sets that rotate.

    Parameters
    ----------
    case : PrefillCase
    sets : int

    Attributes
    ----------
    rows : list of (array, keys, values)
        Of each set: q (batch, seqlen_q, num_qo_heads, head_dim), and K and V as arrays or `Tbq4Array`.
    """

    def __init__(self, case: PrefillCase, sets: int) -> None:
        cupy = _arrays.import_cupy()
        self.case = case
        dtype = DTYPES[case.dtype]

        def random(shape: tuple[int, ...], seed: int) -> Array:
            return normal(math.prod(shape), dtype, seed * _SEED).reshape(shape)

        def cache(dim: int, seed: int) -> Any:  # noqa: ANN401  an array or a Tbq4Array
            rows = random((*case.cache_axes, dim), seed)
            return rows if case.formats == "raw16" else cuattn.quantize(rows)

        self.rows = [
            (random(case.q_shape, 3 * i), cache(case.head_dim, 3 * i + 1), cache(case.value_dim, 3 * i + 2))
            for i in range(sets)
        ]
        self._out = cupy.empty((sets, *case.q_shape[:-1], case.value_dim), dtype)
        self._options: dict[str, Any] = {"causal": case.causal, "window": case.window}
        if case.page_size is not None:
            table = np.random.default_rng(0).permutation(case.batch * case.pages).astype(np.int32)
            self._options["page_table"] = cupy.asarray(table.reshape(case.batch, case.pages))
            self._options["kv_len"] = cupy.asarray(np.full(case.batch, case.kv_len, np.int32))

    def calls(self) -> list[Callable[[], Any]]:
        """Return one call of `cuattn.prefill` for each set, lse included; outputs are allocated already."""
        return [
            partial(cuattn.prefill, *rows, **self._options, return_lse=True, out=out)
            for rows, out in zip(self.rows, self._out, strict=True)
        ]

    def plan(self) -> _plan.PrefillPlan | _plan.TiledPrefillPlan:
        """Return what such a call runs."""
        return cuattn.plan_prefill(*self.rows[0], **self._options)

    def poison(self) -> None:
        """Make the output of the first set NaN."""
        self._out[0].view(np.uint16).fill(0xFFFF)

    def out(self) -> Array:
        """Return a copy of the output of the first set."""
        return self._out[0].copy()

    def is_out(self, before: Array) -> bool:
        """Whether the output of the first set has these bits."""
        return bool((self._out[0].view(np.uint16) == before.view(np.uint16)).all())

    def expected(self) -> list[Expected]:
        """Attend from some tokens of the first set, in float64: of the first and the last sequence and KV head.

        The tokens are the first two, which see least if the mask is causal, the last two, and some between, so that
        every part of a tile of a kernel has one.
        """
        case = self.case
        pairs = dict.fromkeys(((0, 0), (case.batch - 1, case.num_kv_heads - 1)))
        tokens = sorted({0, 1, *(case.seqlen_q * i // 7 + i for i in range(1, 7)), case.seqlen_q - 2})
        tokens = [*(token for token in tokens if 0 <= token < case.seqlen_q - 1), case.seqlen_q - 1]
        found = []
        for sequence, head in pairs:
            k, v = (self._rows_of(x, sequence, head) for x in self.rows[0][1:])
            found += [self._expected(sequence, head, token, k, v) for token in tokens]
        return found

    def _rows_of(self, x: Any, sequence: int, head: int) -> Array:  # noqa: ANN401  an array or a Tbq4Array
        """Keys or values of one head of one sequence, in order and exact: (kv_len, dim), float64."""
        case = self.case
        pages = slice(sequence, sequence + 1)
        if case.page_size is not None:
            pages = self._options["page_table"][sequence]
        if isinstance(x, cuattn.Tbq4Array):
            planes = (plane[:, :, head : head + 1][pages].copy() for plane in (x.codes, x.norms))
            rows = cuattn.dequantize(cuattn.Tbq4Array(*planes), dtype=np.float32)
        else:
            rows = x.view(np.uint16)[:, :, head][pages].view(x.dtype)
        return exact.as_float64(rows.reshape(-1, rows.shape[-1])[: case.kv_len])

    def _expected(self, sequence: int, head: int, token: int, k: Array, v: Array) -> Expected:
        case, cupy = self.case, _arrays.import_cupy()
        group = case.num_qo_heads // case.num_kv_heads
        heads = slice(head * group, (head + 1) * group)
        start, stop = reference.visible_keys(token, case.seqlen_q, case.kv_len, causal=case.causal, window=case.window)
        scale = case.head_dim**-0.5
        q = exact.as_float64(self.rows[0][0][sequence, token, heads])
        k, v = k[start:stop], v[start:stop]
        out, lse = map(to_host, exact.attend(q, k, v, scale))
        relative = _FLOAT_ERROR if case.dtype == "float32" else ByRaw16(out, case.dtype).relative
        # Of a score, and of every sum on the way to it.
        size = float(cupy.sqrt(((q * q).sum(axis=-1)).max() * (k * k).sum(axis=-1).max())) * scale
        # The sums of the tensor cores, 16 products at a time and truncated; that of the weights. With TBQ4 also the
        # rounding of the rotated query.
        allowed_lse = (case.head_dim // 16 + 2) * 2 * _HALF_ULP * size + (stop - start + 8) * _HALF_ULP
        if case.formats != "raw16":
            allowed_lse += relative * size
        return Expected(
            sequence, token, heads, out, lse,
            allowed=relative * float(np.abs(out).max()), allowed_lse=allowed_lse,
        )  # fmt: skip

    @staticmethod
    def check(expected: list[Expected], out: Array, lse: Array | None = None) -> None:
        """Compare a result of the first set.

        Parameters
        ----------
        expected : list of Expected
        out : array, shape (batch, seqlen_q, num_qo_heads, value_dim)
        lse : array, shape (batch, seqlen_q, num_qo_heads), optional

        Raises
        ------
        WrongResultError
            If the result is out of bounds.
        """
        for one in expected:
            place = (one.sequence, one.token, one.heads)
            one.check(to_host(out[place]), None if lse is None else to_host(lse[place]))
