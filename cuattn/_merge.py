"""`merge`: combine partial results over disjoint keys."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays, _check, _dispatch, _jit, _params, _plan, reference
from ._arrays import Array


def merge(out_partial: Array, lse_partial: Array, *, out: Array | None = None) -> tuple[Array, Array]:
    """Combine attention results over disjoint sets of keys into the result over all of them.

    Computes ``lse = log(sum(exp(lse_partial)))`` and ``out = sum(exp(lse_partial - lse) * out_partial)`` over the
    parts.

    Parameters
    ----------
    out_partial : array, shape (num_parts, ..., num_qo_heads, head_dim), float16, bfloat16 or float32
        Normalized result of each part; three to five axes. Rows (the last axis) are contiguous and start at multiples
        of 16 bytes.
    lse_partial : array, shape (num_parts, ..., num_qo_heads), float32
        Natural-log lse of each part. A part with -inf saw no key: its `out_partial` may hold anything, NaN included.
    out : array, shape (..., num_qo_heads, head_dim), optional
        Receives the result, and is returned as in `decode`; dtype of `out_partial`, or float16 or bfloat16 for float32
        parts.

    Returns
    -------
    out : array, shape (..., num_qo_heads, head_dim)
        Zero where every part is empty.
    lse : array, shape (..., num_qo_heads), float32
        Natural log; -inf where every part is empty.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it, its value and what would be accepted. Nothing is written
        then.

    See Also
    --------
    decode : with ``return_lse=True`` gives such parts.
    cuattn.reference.merge : the definition, in NumPy and float64.

    Notes
    -----
    A sink must be in one part only. The weight of a part is as exact as its lse, which float32 rounds: for scores far
    above 1000 the splits of one `decode` call, which pass more, are merged more exactly. NumPy arrays run the reference
    on the CPU; GPU arrays run the kernel on their device and its current CuPy stream. The parts are summed in a fixed
    order: the same call gives the same bits.

    Examples
    --------
    >>> prefix = cuattn.decode(q, k_prefix, v_prefix, prefix_len, causal=False, return_lse=True)
    >>> suffix = cuattn.decode(q, k_suffix, v_suffix, suffix_len, return_lse=True)
    >>> out, lse = cuattn.merge(*(cupy.stack(x) for x in zip(prefix, suffix)))
    """
    out_partial, lse_partial, target = _check.merge(out_partial, lse_partial, out)
    if not _arrays.is_gpu(out_partial):
        result, lse = reference.merge(out_partial, lse_partial)
        target = np.empty(result.shape, out_partial.dtype) if target is None else target
        with np.errstate(over="ignore"):  # a value too large for the dtype is infinite, as on the GPU
            target[...] = result.astype(target.dtype)
        return _arrays.given(out, target), lse.astype(np.float32)
    cupy = _arrays.import_cupy()
    with cupy.cuda.Device(out_partial.device.id):
        if target is None:
            target = cupy.empty(out_partial.shape[1:], out_partial.dtype)
        lse = cupy.empty(lse_partial.shape[1:], cupy.float32)
        launch(out_partial, lse_partial, target, lse)
    return _arrays.given(out, target), lse


def launch(out_partial: Array, lse_partial: Array, out: Array, lse: Array | None) -> None:
    """Launch merge.cu on checked CuPy arrays of the current device; see `launch_of`."""
    if out.size:
        launch = launch_of(out_partial, lse_partial, out, lse)
        launch.kernel.launch(launch.grid, launch.block, launch.params)


def launch_of(
    out_partial: Array,
    lse_partial: Array,
    out: Array,
    lse: Array | None,
    *,
    shares: Array | None = None,
    fixed: bool = False,
) -> _dispatch.Launch:
    """Return the launch of merge.cu on checked arrays of the current device, or their stand-ins.

    `lse` is contiguous or None. `lse_partial` may also hold softmax states, pairs (m, l) along a last axis of its own.
    `shares` are those of `params_of`, and `fixed` is that of `config_of`.
    """
    ordinal = out_partial.device.id
    config = config_of(out_partial, lse_partial, out, fixed=fixed)
    params = params_of(out_partial, lse_partial, out, lse, shares)
    kernel = _jit.kernel(config, ordinal, _arrays.device(ordinal).arch)
    rows = out.size // out.shape[-1]
    return _dispatch.Launch(kernel, (rows, 1, 1), (config.num_warps * _plan.WARP, 1, 1), params)


def config_of(out_partial: Array, lse_partial: Array, out: Array, *, fixed: bool = False) -> _plan.MergeConfig:
    """Config of merge.cu for these arrays; the same for any number of parts if it is `fixed`.

    With a fixed one, empty parts behind the others change no bit: a warp leaves them out of its sums.
    """
    in_dtype, out_dtype = (_plan.Dtype(_arrays.dtype_name(x)) for x in (out_partial, out))
    parts = _plan.Parts.STATE if lse_partial.ndim == out_partial.ndim else _plan.Parts.LSE
    num_parts = out_partial.shape[0]
    if fixed:
        num_parts = _plan.MAX_SPLITS
    elif out_partial.ndim == out.ndim:  # parts of all sequences; of each there are so many on average
        num_parts = _plan.ceil_div(num_parts, out.shape[0])
    return _plan.merge_config(in_dtype, out_dtype, out.shape[-1], parts, num_parts)


def params_of(
    out_partial: Array, lse_partial: Array, out: Array, lse: Array | None, shares: Array | None = None
) -> np.ndarray[Any, Any]:
    """Fill the parameters of merge.cu from arrays in one place.

    With `shares`, (batch, 2) of int32, sequence b has parts ``shares[b, 0]`` and following, ``shares[b, 1]`` in number,
    and the parts have no axis of sequences.
    """

    def padded(sizes: tuple[int, ...], fill: int) -> tuple[int, ...]:
        """Sizes or strides of (dim0, dim1, heads): missing leading axes are `fill`."""
        return (fill,) * (3 - len(sizes)) + sizes

    _, dim1, heads = padded(out.shape[:-1], 1)
    values = {
        "out_partial_stride_part": out_partial.strides[0],
        "lse_partial_stride_part": lse_partial.strides[0],
        "num_parts": out_partial.shape[0],
        "dim1": dim1,
        "heads": heads,
    }
    arrays = {"out_partial": out_partial, "lse_partial": lse_partial, "out": out, "lse": lse, "shares": shares}
    values.update((name, _arrays.pointer(array)) for name, array in arrays.items())
    sequences = () if shares is None else (0,)
    for name, strides in (
        ("out_partial", sequences + out_partial.strides[1:-1]),
        ("lse_partial", sequences + lse_partial.strides[1 : out_partial.ndim - 1]),
        ("out", out.strides[:-1]),
    ):
        for axis, stride in zip(("dim0", "dim1", "head"), padded(strides, 0), strict=True):
            values[f"{name}_stride_{axis}"] = stride
    return _params.fill(_params.MERGE, values)
