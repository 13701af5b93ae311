"""`append`: check, launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Self

import numpy as np

from . import _arrays, _check, _dispatch, _jit, _params, _plan, reference
from ._arrays import Array
from ._cache import Cache
from ._fp8 import Fp8Array
from ._quantize import Tbq4Array

# Arrays of a call.
_OF_SIDE = ("new", "cache", "cache_norms", "cache_mean", "cache_scales", "cache.clamped", "sink", "recent")
_ARRAYS = (*(f"{side}_{name}" for side in "kv" for name in _OF_SIDE), "page_table", "kv_len")
_written = itemgetter(*(_ARRAYS.index(f"{a}_{b}") for a in "kv" for b in ("cache", "cache_norms", "sink", "recent")))


def append(
    k_new: Array,
    v_new: Array,
    k_cache: Array | Tbq4Array | Fp8Array,
    v_cache: Array | Tbq4Array | Fp8Array,
    kv_len: Array,
    *,
    page_table: Array | None = None,
    k_sink: Array | None = None,
    v_sink: Array | None = None,
    k_recent: Array | None = None,
    v_recent: Array | None = None,
) -> None:
    """Write the newest tokens of each sequence into its cached keys and values, in place.

    Token ``i`` of sequence ``b`` goes to position ``p = kv_len[b] - seqlen_new + i``: with `kv_len` as the following
    `decode` takes it. A token at a negative position is left out, so that sequences with fewer new tokens than others
    have them at the end of the axis; so is one at or past what the cache holds of a sequence.

    Parameters
    ----------
    k_new, v_new : array, shape (batch, num_kv_heads, head_dim) or (batch, seqlen_new, num_kv_heads, head_dim)
        Keys and values of the newest token, or of any number of them, such as a prompt; float16, bfloat16 or float32,
        both alike. head_dim is 64, 96, 128, 192, 256 or 512, and of these 64, 128, 256 or 512 for a TBQ4 cache. Rows
        (the last axis) are contiguous and start at multiples of 16 bytes; other axes may have any stride, here and in
        all other arrays.
    k_cache, v_cache : array, Tbq4Array or Fp8Array, shape (num_pages, page_size, num_kv_heads, head_dim)
        Written where the new tokens belong and nowhere else. Without `page_table` page ``b`` is all of sequence ``b``:
        (batch, capacity, num_kv_heads, head_dim). An array is float16 or bfloat16; values are rounded to nearest, ties
        to even, and infinite if they are too large. In a `Tbq4Array` `mean` is subtracted, rows are encoded, and norms
        that float16 cannot hold are counted if `clamped` is an array of one int32 on the same device, else not. In an
        `Fp8Array` values become codes as those of `quantize_fp8` do with its `scale`, which stays as it is. K and V may
        differ in format. Rows start at multiples of 16 bytes, those of `codes` too.
    kv_len : array, shape (batch,), int32, or int, or sequence of int
        Valid tokens of each sequence, the new ones included. A GPU array is read by the kernel, so a captured CUDA
        graph follows its contents. Lengths on the host are checked and copied.
    page_table : array, shape (batch, max_pages), int32, optional
        Page ``page_table[b, i]`` holds tokens ``i * page_size`` and following of sequence ``b``. Any page size. Entries
        of pages without a new token are not read. Entries on a GPU are not checked.
    k_sink, v_sink : array, shape (batch, num_sink, num_kv_heads, head_dim), float16 or bfloat16, optional
        Receive the tokens at positions below num_sink as well, without `mean` and unencoded. Both or neither.
    k_recent, v_recent : array, shape (batch, num_recent, num_kv_heads, head_dim), float16 or bfloat16, optional
        Receive the last num_recent tokens as well: rings in which token ``p`` has slot ``p % num_recent``. Both or
        neither. All arrays of 16 bits but `k_new` and `v_new` have one dtype.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it, its value and what would be accepted. Nothing is written
        then.
    CompileError
        If a kernel does not compile on this machine.

    See Also
    --------
    decode : attends to what was written.
    quantize, quantize_fp8 : encode rows by themselves.
    cuattn.reference.append : the definition, in NumPy.

    Notes
    -----
    NumPy arrays (`k_new` and `v_new` of float64 too) run the reference on the CPU. CuPy arrays, and GPU arrays that
    speak DLPack or ``__cuda_array_interface__``, run one kernel on the arrays' device and its current CuPy stream,
    without synchronizing. The same call gives the same bytes every time. Rows that are encoded differ from the
    reference as those of `quantize` do.

    A CUDA graph may capture a call if the same call ran before (the kernel is compiled and loaded by then), `kv_len` is
    on the GPU, and a `mean` is contiguous.

    Arrays of other libraries are ordered by DLPack before the kernel: it waits for their producers. What reads the
    caches afterwards on a stream of another library must wait for the current CuPy stream. Arrays that are written must
    not share memory with each other or with the new rows, and no two sequences may have their new tokens in one page
    slot; neither is checked but for arrays that begin at the same address.

    Examples
    --------
    >>> cuattn.append(k_new, v_new, k_cache, v_cache, kv_len, page_table=pages)
    >>> out = cuattn.decode(q, k_cache, v_cache, kv_len, page_table=pages)
    """
    given = [  # in the order of _ARRAYS
        k_new, *_dispatch.parts(k_cache), _dispatch.counter(k_cache), k_sink, k_recent,
        v_new, *_dispatch.parts(v_cache), _dispatch.counter(v_cache), v_sink, v_recent,
        page_table, kv_len,
    ]  # fmt: skip
    scales = (_dispatch.scale_of(k_cache), _dispatch.scale_of(v_cache))
    arrays, form, launches = _FORMS.look_up(_ARRAYS, given, scales)
    if launches is None or not launches.are_apart(arrays):
        call = _check.append(
            k_new, v_new, k_cache, v_cache, kv_len, page_table=page_table, k_sink=k_sink, v_sink=v_sink,
            k_recent=k_recent, v_recent=v_recent,
        )  # fmt: skip
        if call.num_rows == 0:
            return
        if not _arrays.is_gpu(call.k.rows):
            reference.append(
                call.k.rows, call.v.rows, call.k.target, call.v.target, call.kv_len, page_table=call.page_table,
                k_sink=call.k.sink, v_sink=call.v.sink, k_recent=call.k.recent, v_recent=call.v.recent,
            )  # fmt: skip
            return
        launches, arrays = _FORMS.put(form, _AppendLaunches.of(call)), _arrays_of(call)
    launches.run(arrays, kv_len)


def _arrays_of(call: _check.AppendCall) -> list[Array | None]:
    """Arrays of a checked call, in the order of `_ARRAYS`."""
    found: list[Array | None] = []
    for side in (call.k, call.v):
        cache = side.cache
        found += [side.rows, cache.rows, cache.norms, cache.mean, cache.scales, side.clamped, side.sink, side.recent]
    return [*found, call.page_table, call.kv_len if _arrays.is_gpu(call.kv_len) else None]


@dataclass(frozen=True, slots=True)
class _AppendLaunches:
    """What a checked call on a GPU runs.

    Attributes
    ----------
    ordinal : int
        Of the device.
    launches : Launches
    batch, capacity : int
        Sequences, and tokens that the caches hold of one.
    """

    ordinal: int
    launches: _dispatch.Launches
    batch: int
    capacity: int

    @classmethod
    def of(cls, call: _check.AppendCall) -> Self:
        """Plan the launch of a call, and compile and load its kernel."""
        ordinal, batch = call.k.rows.device.id, call.k.rows.shape[0]
        made = _dispatch.StandIns(_ARRAYS, ordinal)

        def side(side: _check.AppendSide, name: str) -> _check.AppendSide:
            return replace(
                side,
                rows=made.of(f"{name}_new", side.rows),
                cache=side.cache.map(made.of, f"{name}_cache"),
                clamped=made.of(f"{name}_cache.clamped", side.clamped),
                sink=made.of(f"{name}_sink", side.sink),
                recent=made.of(f"{name}_recent", side.recent),
            )

        call = replace(
            call, k=side(call.k, "k"), v=side(call.v, "v"), page_table=made.of("page_table", call.page_table)
        )
        on_host = not _arrays.is_gpu(call.kv_len)
        lengths = made.contiguous("kv_len", (batch,), np.int32) if on_host else made.of("kv_len", call.kv_len)
        config = append_config(call)
        with _arrays.import_cupy().cuda.Device(ordinal):
            device = _arrays.device(ordinal)
            kernel, threads = _jit.kernel(config, ordinal, device.arch), (config.num_warps * _plan.WARP, 1, 1)
            launch = _dispatch.Launch(kernel, config.grid(call.num_rows, device), threads, append_params(call, lengths))
            return cls(ordinal, _dispatch.Launches(made, [launch]), batch, call.capacity)

    @staticmethod
    def are_apart(arrays: Sequence[Array | None]) -> bool:
        """Whether arrays that are written begin at different addresses; if not, the checks say which."""
        begins = [x.data.ptr for x in _written(arrays) if x is not None]
        return len(set(begins)) == len(begins)

    @_dispatch.on_own_device
    def run(self, arrays: list[Array], kv_len: object) -> None:
        """Launch on arrays of the form that this was made for: those of `_ARRAYS`, of which it may change "kv_len"."""
        if arrays[-1] is None:
            lengths = _check.lengths_of(kv_len, self.batch, self.capacity, gpu=True, of="k_new")
            arrays[-1] = _arrays.import_cupy().asarray(lengths)
        self.launches.run([0, *_dispatch.addresses(arrays)])


def encode_call(x: Array, target: Fp8Array, full: Callable[..., Array]) -> _check.AppendCall:
    """Return the call that writes rows, of two to four axes, into all of an `Fp8Array`, as keys and as values.

    `full` is that of the module of the arrays.
    """
    rows, codes = (array[(None,) * (4 - array.ndim)] for array in (x, target.codes))
    scale = target.scale if isinstance(target.scale, float) else _arrays.contiguous(target.scale)
    cache = Cache(codes, kv_format=_plan.KvFormat.FP8, scale=scale)
    side = _check.AppendSide(rows, cache, clamped=None, sink=None, recent=None, given=target)
    batch, tokens = rows.shape[:2]
    return _check.AppendCall(side, side, full(batch, tokens, np.int32), page_table=None, capacity=tokens)


def encode(x: Array, target: Fp8Array) -> None:
    """Make `encode_call` on a GPU, for its keys alone."""
    if x.size == 0:
        return
    call, ordinal = encode_call(x, target, _arrays.import_cupy().full), x.device.id
    device, config = _arrays.device(ordinal), append_config(call)
    grid = (config.grid(call.num_rows, device)[0], 1, 1)
    threads = (config.num_warps * _plan.WARP, 1, 1)
    _jit.kernel(config, ordinal, device.arch).launch(grid, threads, append_params(call, call.kv_len))


def append_config(call: _check.AppendCall) -> _plan.AppendConfig:
    """Config of append.cu for a checked call."""
    in_dtype, dtype = _plan.Dtype(_arrays.dtype_name(call.k.rows)), _plan.Dtype(call.dtype)
    return _plan.AppendConfig(in_dtype, dtype, call.k.cache.kv_format, call.v.cache.kv_format, call.k.rows.shape[-1])


def _side(side: _check.AppendSide) -> np.void:
    values: dict[str, Any] = {"mean": _arrays.pointer(side.cache.mean), "clamped": _arrays.pointer(side.clamped)}
    scale = side.cache.scale
    values |= {"scale": scale} if isinstance(scale, float) else {"scales": _arrays.pointer(scale)}
    for name, array, first in (
        ("rows", side.rows, "batch"), ("cache", side.cache.rows, "page"), ("norms", side.cache.norms, "page"),
        ("sink", side.sink, "batch"), ("recent", side.recent, "batch"),
    ):  # fmt: skip
        values[name] = _arrays.pointer(array)
        strides = (0, 0, 0) if array is None else array.strides[:-1]
        axes = (first, "token", "head")
        values.update((f"{name}_stride_{axis}", stride) for axis, stride in zip(axes, strides, strict=True))
    filled: np.void = _params.fill(_params.APPEND_SIDE, values)[0]
    return filled


def append_params(call: _check.AppendCall, kv_len: Array) -> np.ndarray[Any, Any]:
    """Fill the parameters of append.cu from arrays in one place."""
    table = call.page_table
    values: dict[str, Any] = {
        "k": _side(call.k),
        "v": _side(call.v),
        "kv_len": _arrays.pointer(kv_len),
        "page_table": _arrays.pointer(table),
        "kv_len_stride": kv_len.strides[0],
        "num_rows": call.num_rows,
        "seqlen_new": call.k.rows.shape[1],
        "num_kv_heads": call.k.rows.shape[2],
        "page_size": call.k.cache.page_size,
        "capacity": call.capacity,
        "num_sink": 0 if call.k.sink is None else call.k.sink.shape[1],
        "num_recent": 0 if call.k.recent is None else call.k.recent.shape[1],
    }
    if table is not None:
        values |= {"page_table_stride_batch": table.strides[0], "page_table_stride_page": table.strides[1]}
    return _params.fill(_params.APPEND, values)


_FORMS: _dispatch.Forms[_AppendLaunches] = _dispatch.Forms()
