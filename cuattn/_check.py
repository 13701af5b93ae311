"""Argument checks and their messages; the only module that raises for bad arguments. Writes nothing."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import _arrays, _plan
from ._arrays import Array, as_array, dtype_name, is_gpu, place

_GPU_DTYPES = ("float16", "bfloat16")
_CPU_DTYPES = (*_GPU_DTYPES, "float32", "float64")
# A row of K, V, q or out is moved in pieces of 16 bytes.
_ROW_ALIGNMENT = 16
_UNBOUNDED = -1
# Sizes of softmax_scale and softcap: their products and quotients stay in the range of float32.
_SMALLEST, _LARGEST = 1e-18, 1e18
_PAIR = 2


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """Checked arguments of `decode`. Arrays are NumPy arrays or CuPy arrays, all in one place but `kv_len`.

    Attributes
    ----------
    q, out : array, shape (batch, seqlen_q, num_qo_heads, head_dim)
        `out` is None if it must be allocated.
    k_cache, v_cache : array, shape (num_pages, page_size, num_kv_heads, head_dim)
    kv_len : array, shape (batch,), int32
        A NumPy array also where the others are on a GPU, if the caller had the lengths on the host.
    page_table : array, shape (batch, max_pages), int32, or None
        None: page b is all of sequence b.
    sinks : array, shape (num_qo_heads,), float, or None
    window : tuple of int
        Left and right, -1 for unbounded; not yet narrowed by `causal`.
    causal, softcap, softmax_scale, num_splits
        As in `decode`; `softcap` 0 means none.
    one_token : bool
        Whether the caller's q has no axis of query tokens.
    """

    q: Array
    k_cache: Array
    v_cache: Array
    kv_len: Array
    page_table: Array | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    sinks: Array | None
    softmax_scale: float
    num_splits: int | None
    out: Array | None
    one_token: bool

    @property
    def problem(self) -> _plan.DecodeProblem:
        """Sizes for the plan; 16-bit dtypes only."""
        batch, seqlen_q, num_qo_heads, head_dim = self.q.shape
        return _plan.DecodeProblem(
            dtype=_plan.Dtype(dtype_name(self.q)),
            kv_format=_plan.KvFormat.RAW16,
            batch=batch,
            seqlen_q=seqlen_q,
            num_qo_heads=num_qo_heads,
            num_kv_heads=self.k_cache.shape[2],
            head_dim=head_dim,
            max_kv_len=self.max_pages * self.k_cache.shape[1],
        )

    @property
    def max_pages(self) -> int:
        """Pages of a sequence."""
        return 1 if self.page_table is None else int(self.page_table.shape[1])


def require_rank(name: str, x: Array, ranks: tuple[int, ...], shape: str) -> None:
    """Refuse an array of another number of axes."""
    if x.ndim not in ranks:
        msg = f"{name} must have shape {shape}, got {x.ndim} axes: {x.shape}"
        raise ValueError(msg)


def _shape(name: str, x: Array, shape: tuple[int, ...], of: str) -> None:
    if x.shape != shape:
        msg = f"{name} must have shape {shape} ({of}), got {x.shape}"
        raise ValueError(msg)


def require_dtype(name: str, x: Array, accepted: Sequence[str], why: str = "") -> None:
    """Refuse an array of another dtype."""
    if dtype_name(x) not in accepted:
        msg = f"{name} must be {' or '.join(accepted)}{why}, got {dtype_name(x)}"
        raise TypeError(msg)


def _one_place(arrays: dict[str, Array | None]) -> None:
    given = [(name, x) for name, x in arrays.items() if x is not None]
    first, reference = given[0]
    if not any(is_gpu(x) for _, x in given):
        return
    for name, x in given[1:]:
        if place(x) != place(reference):
            msg = f"{name} is on {place(x)}, {first} on {place(reference)}; all arrays must be on one device"
            raise ValueError(msg)


def require_rows(name: str, x: Array) -> None:
    """Refuse rows that are not contiguous or, in dtypes that a GPU takes, do not start at multiples of 16 bytes."""
    if x.size == 0:
        return
    if x.shape[-1] > 1 and x.strides[-1] != x.itemsize:
        msg = (
            f"{name} must be contiguous along its last axis (stride {x.itemsize} bytes), got {x.strides[-1]}; "
            "the other axes may have any stride"
        )
        raise ValueError(msg)
    if dtype_name(x) == "float64":  # for the reference alone
        return
    offsets = [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
    if is_gpu(x):
        offsets.append(x.data.ptr)
    if any(o % _ROW_ALIGNMENT for o in offsets):
        msg = f"{name} must have rows that start at multiples of {_ROW_ALIGNMENT} bytes, got strides {x.strides}" + (
            f" from address {x.data.ptr:#x}" if is_gpu(x) else ""
        )
        raise ValueError(msg)


def _out(out: Array, shape: tuple[int, ...], dtypes: Sequence[str], of: str) -> None:
    _shape("out", out, shape, of)
    require_dtype("out", out, dtypes, f" (the dtype of {of.rsplit(' of ', maxsplit=1)[-1]})")
    require_rows("out", out)
    if not is_gpu(out) and not out.flags.writeable:
        msg = "out must be writeable, got a read-only array"
        raise ValueError(msg)
    extent = out.itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(out.strides, out.shape, strict=True) if n > 1):
        if stride < extent and out.size:
            msg = f"out must not have elements that share memory, got strides {out.strides} for shape {out.shape}"
            raise ValueError(msg)
        extent += stride * (n - 1)


def _head_dim(name: str, head_dim: int) -> None:
    if head_dim not in _plan.HEAD_DIMS:
        msg = f"{name} has head_dim {head_dim}; supported: {_listed(_plan.HEAD_DIMS)}"
        raise ValueError(msg)


def _words(name: str, x: Array) -> None:
    """Elements that a kernel reads one by one lie at multiples of their size."""
    if is_gpu(x) and any(o % x.itemsize for o in (x.data.ptr, *x.strides)):
        msg = f"{name} must lie at multiples of {x.itemsize} bytes, got strides {x.strides} from {x.data.ptr:#x}"
        raise ValueError(msg)


def _integer(name: str, value: object, low: int, high: int) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # the point of the test
    except TypeError:
        msg = f"{name} must be an integer, got {value!r}"
        raise TypeError(msg) from None
    if isinstance(value, bool) or not low <= number <= high:
        msg = f"{name} must be {low} to {high}, got {value!r}"
        raise ValueError(msg)
    return number


def _number(name: str, value: object, accepted: str, *, positive: bool) -> float:
    if not isinstance(value, (int, float, np.integer, np.floating)) or isinstance(value, bool):
        msg = f"{name} must be {accepted}, got {value!r}"
        raise TypeError(msg)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or (positive and number <= 0):
        msg = f"{name} must be {accepted}, got {value!r}"
        raise ValueError(msg)
    return number


def _in_float32(scale: float, cap: float) -> None:
    """Kernels hold both in float32, times log2(e), and their quotient."""
    for name, value in (("softmax_scale", scale), ("softcap", cap)):
        if abs(value) > _LARGEST or 0 < abs(value) < _SMALLEST:
            msg = f"{name} must be 0 or have a size of {_SMALLEST:.0e} to {_LARGEST:.0e}, got {value!r}"
            raise ValueError(msg)


def flag(name: str, value: object) -> bool:
    """Return a boolean argument."""
    if not isinstance(value, (bool, np.bool_)):
        msg = f"{name} must be True or False, got {value!r}"
        raise TypeError(msg)
    return bool(value)


def dtype_16bit(name: str, x: Array) -> None:
    """Refuse what only the reference takes."""
    require_dtype(name, x, _GPU_DTYPES)


def device(device: object, array: Array) -> _plan.Device:
    """Return the `device` argument of a plan for `array`."""
    if isinstance(device, _plan.Device):
        return device
    if device is None:
        return _arrays.device(array.device.id) if is_gpu(array) else _plan.DEVICES["sm_90a"]
    if not isinstance(device, str) or device not in _plan.DEVICES:
        msg = f"device must be a Device, None or one of {_listed(tuple(_plan.DEVICES))}, got {device!r}"
        raise ValueError(msg)
    return _plan.DEVICES[device]


def window_of(window: object) -> tuple[int, int]:
    """Return (left, right) of a `window` argument, -1 where it is unbounded."""
    if window is None:
        return _UNBOUNDED, _UNBOUNDED
    if not isinstance(window, Sequence) or isinstance(window, str) or len(window) != _PAIR:
        msg = f"window must be None or (left, right), got {window!r}"
        raise TypeError(msg)
    left, right = (
        _UNBOUNDED if side is None else _integer(f"window {name}", side, _UNBOUNDED, 2**63 - 1)
        for name, side in zip(("left", "right"), window, strict=True)
    )
    # Wider than any cache is unbounded; position + window stays an int32.
    return tuple(_UNBOUNDED if side >= _plan.MAX_KV_LEN else side for side in (left, right))  # type: ignore[return-value]


def _kv_len(kv_len: object, batch: int, capacity: int, *, gpu: bool, contents: bool) -> Array:
    if kv_len is None or isinstance(kv_len, (bool, str, bytes, float, np.floating)):
        msg = f"kv_len must be an int, a sequence of int or an integer array, got {kv_len!r} ({type(kv_len).__name__})"
        raise TypeError(msg)
    if isinstance(kv_len, (int, np.integer)):
        high = capacity if contents else 2**63 - 1
        lengths = np.full(batch, _integer("kv_len", kv_len, 0 if contents else -(2**63), high), np.int64)
    elif isinstance(kv_len, Sequence):
        try:
            lengths = np.asarray(kv_len) if kv_len else np.zeros(0, np.int32)
        except ValueError:
            msg = f"kv_len must be an int, a sequence of int or an integer array, got {kv_len!r}"
            raise ValueError(msg) from None
    else:
        lengths = as_array("kv_len", kv_len)
    _shape("kv_len", lengths, (batch,), "one length a sequence")
    if is_gpu(lengths):
        if not gpu:
            msg = f"kv_len is on {place(lengths)}, q on cpu; all arrays must be on one device"
            raise ValueError(msg)
        require_dtype("kv_len", lengths, ("int32",))
        _words("kv_len", lengths)
        return lengths
    if lengths.dtype.kind not in "iu":
        msg = f"kv_len must be of an integer dtype, got {dtype_name(lengths)}"
        raise TypeError(msg)
    bad = np.flatnonzero((lengths < 0) | (lengths > capacity))
    if contents and bad.size:
        msg = f"kv_len[{bad[0]}] must be 0 to {capacity}, what the cache holds of a sequence, got {lengths[bad[0]]}"
        raise ValueError(msg)
    return lengths.astype(np.int32)


def _page_table(
    page_table: Array, kv_len: Array, batch: int, num_pages: int, page_size: int, *, contents: bool
) -> None:
    require_rank("page_table", page_table, (2,), "(batch, max_pages)")
    if page_table.shape[0] != batch:
        msg = f"page_table must have shape ({batch}, max_pages), batch as in q, got {page_table.shape}"
        raise ValueError(msg)
    require_dtype("page_table", page_table, ("int32",))
    _words("page_table", page_table)
    if is_gpu(page_table) or not contents:
        return
    used = np.arange(page_table.shape[1]) * page_size < np.asarray(kv_len)[:, None]
    bad = np.argwhere(used & ((page_table < 0) | (page_table >= num_pages)))
    if bad.size:
        row, column = bad[0]
        msg = f"page_table[{row}, {column}] must be 0 to {num_pages - 1}, the pages of k_cache, got "
        raise ValueError(msg + str(page_table[row, column]))


def _sinks(sinks: Array, num_qo_heads: int, q_dtype: str) -> None:
    _shape("sinks", sinks, (num_qo_heads,), "one per query head")
    require_dtype("sinks", sinks, tuple(dict.fromkeys(("float32", q_dtype))))


def _queries(q: Array) -> None:
    require_rank("q", q, (3, 4), "(batch, num_qo_heads, head_dim) or (batch, seqlen_q, num_qo_heads, head_dim)")
    require_dtype("q", q, _GPU_DTYPES if is_gpu(q) else _CPU_DTYPES)
    _head_dim("q", q.shape[-1])
    require_rows("q", q)
    if q.ndim == 4:  # noqa: PLR2004  with the axis of query tokens
        _integer("seqlen_q, the second axis of q,", q.shape[1], 1, _plan.MAX_SEQLEN_Q)


def _caches(k_cache: Array, v_cache: Array, q: Array, *, paged: bool) -> None:
    batch, num_qo_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    leading = "(num_pages, page_size" if paged else "(batch, capacity"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_rank(name, cache, (4,), f"{leading}, num_kv_heads, head_dim)")
        require_dtype(name, cache, (dtype_name(q),), " (the dtype of q)")
        if cache.shape[-1] != head_dim:
            msg = f"{name} must have head_dim {head_dim} as q, got {cache.shape[-1]} in shape {cache.shape}"
            raise ValueError(msg)
        require_rows(name, cache)
    _shape("v_cache", v_cache, k_cache.shape, "the shape of k_cache")
    num_kv_heads = k_cache.shape[2]
    if num_kv_heads == 0 or num_qo_heads % num_kv_heads or not 1 <= num_qo_heads // num_kv_heads <= _plan.MAX_GROUP:
        msg = (
            f"q must have 1 to {_plan.MAX_GROUP} query heads per KV head, a whole number, "
            f"got {num_qo_heads} query heads and {num_kv_heads} KV heads of k_cache"
        )
        raise ValueError(msg)
    for name, what, n in (("q", "batch", batch), ("k_cache", "number of KV heads", num_kv_heads)):
        if n > _plan.MAX_GRID_YZ:
            msg = f"{name} must have a {what} of at most {_plan.MAX_GRID_YZ}, the limit of a CUDA grid, got {n}"
            raise ValueError(msg)
    if not paged and k_cache.shape[0] != batch:
        msg = f"k_cache must have batch {batch} as q (it is dense: page_table is None), got shape {k_cache.shape}"
        raise ValueError(msg)


def decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    kv_len: object,
    *,
    page_table: Array | None = None,
    causal: object = True,
    window: object = None,
    softcap: object = None,
    sinks: Array | None = None,
    softmax_scale: object = None,
    num_splits: object = None,
    out: Array | None = None,
    contents: bool = True,
) -> DecodeCall:
    """Check the arguments of `decode`; parameters and errors are documented there.

    Without `contents`, lengths and page-table entries may have any value.
    """
    arrays: dict[str, Array | None] = {
        "q": as_array("q", q),
        "k_cache": as_array("k_cache", k_cache),
        "v_cache": as_array("v_cache", v_cache),
    }
    for name, x in (("page_table", page_table), ("sinks", sinks), ("out", out)):
        arrays[name] = None if x is None else as_array(name, x)
    _one_place(arrays)
    q, k_cache, v_cache, out = arrays["q"], arrays["k_cache"], arrays["v_cache"], arrays["out"]
    page_table, sinks = arrays["page_table"], arrays["sinks"]
    _queries(q)
    batch, num_qo_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    _caches(k_cache, v_cache, q, paged=page_table is not None)
    num_pages, page_size = k_cache.shape[:2]
    capacity = page_size * (1 if page_table is None else page_table.shape[-1])
    if capacity > _plan.MAX_KV_LEN:
        msg = f"k_cache must hold at most {_plan.MAX_KV_LEN} tokens a sequence, got {capacity}"
        raise ValueError(msg)
    lengths = _kv_len(kv_len, batch, capacity, gpu=is_gpu(q), contents=contents)
    _one_place({"q": q, "kv_len": lengths if is_gpu(lengths) else q})
    if page_table is not None:
        _page_table(page_table, lengths, batch, num_pages, page_size, contents=contents)
    if sinks is not None:
        _sinks(sinks, num_qo_heads, dtype_name(q))
    if out is not None:
        _out(out, q.shape, (dtype_name(q),), "the shape of q")
    scale = head_dim**-0.5
    if softmax_scale is not None:
        scale = _number("softmax_scale", softmax_scale, "a finite number or None", positive=False)
    cap = 0.0 if softcap is None else _number("softcap", softcap, "a positive finite number or None", positive=True)
    _in_float32(scale, cap)
    if num_splits is not None:
        num_splits = _integer("num_splits", num_splits, 1, _plan.MAX_SPLITS)

    def with_tokens(x: Array | None) -> Array | None:
        return x if x is None or x.ndim == 4 else x[:, None]  # noqa: PLR2004

    return DecodeCall(
        q=with_tokens(q),
        k_cache=k_cache,
        v_cache=v_cache,
        kv_len=lengths,
        page_table=page_table,
        causal=flag("causal", causal),
        window=window_of(window),
        softcap=cap,
        sinks=sinks,
        softmax_scale=scale,
        num_splits=num_splits,
        out=with_tokens(out),
        one_token=q.ndim == 3,  # noqa: PLR2004
    )


_MERGE_RANKS = (3, 4, 5)


def merge(out_partial: Array, lse_partial: Array, out: Array | None) -> tuple[Array, Array, Array | None]:
    """Check the arguments of `merge` and return them as arrays; parameters and errors are documented there."""
    out_partial, lse_partial = as_array("out_partial", out_partial), as_array("lse_partial", lse_partial)
    out = None if out is None else as_array("out", out)
    _one_place({"out_partial": out_partial, "lse_partial": lse_partial, "out": out})
    shape = "(num_parts, [batch, [seqlen_q,]] num_qo_heads, head_dim)"
    require_rank("out_partial", out_partial, _MERGE_RANKS, shape)
    gpu = is_gpu(out_partial)
    require_dtype("out_partial", out_partial, (*_GPU_DTYPES, "float32") if gpu else _CPU_DTYPES)
    if out_partial.shape[0] == 0:
        msg = f"out_partial must have at least one part, got shape {out_partial.shape}"
        raise ValueError(msg)
    _head_dim("out_partial", out_partial.shape[-1])
    require_rows("out_partial", out_partial)
    _shape("lse_partial", lse_partial, out_partial.shape[:-1], "the shape of out_partial without head_dim")
    require_dtype("lse_partial", lse_partial, ("float32",) if gpu else ("float32", "float64"))
    _words("lse_partial", lse_partial)
    if out is not None:
        dtype = dtype_name(out_partial)
        accepted = (dtype, *_GPU_DTYPES) if dtype == "float32" else (dtype,)
        _out(out, out_partial.shape[1:], accepted, "one part of out_partial")
    return out_partial, lse_partial, out
