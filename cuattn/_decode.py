"""`decode` and `plan_decode`: check, plan, allocate, launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays, _check, _dispatch, _plan, _segments, reference
from ._arrays import Array
from ._fp8 import Fp8Array
from ._quantize import Tbq4Array

_FORMS: _dispatch.Forms[_segments.DecodeLaunches] = _dispatch.Forms()


def decode(
    q: Array,
    k_cache: Array | Tbq4Array | Fp8Array,
    v_cache: Array | Tbq4Array | Fp8Array,
    kv_len: Array,
    *,
    page_table: Array | None = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    tree_mask: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    softmax_scale: float | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    balance: bool = False,
    k_sink: Array | None = None,
    v_sink: Array | None = None,
    k_recent: Array | None = None,
    v_recent: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    workspace: Array | None = None,
) -> Any:  # noqa: ANN401  an array, or a pair of arrays with return_lse
    """Attend from the newest tokens of each sequence to its cached keys and values.

    Computes ``softmax(softmax_scale * q @ k.T) @ v`` for every query head over the first ``kv_len[b]`` tokens of
    sequence ``b``. Query head ``h`` reads KV head ``h // group``, where ``group = num_qo_heads // num_kv_heads``. The
    new tokens' own keys and values are in the cache already: with several query tokens, token ``i`` stands at position
    ``p = kv_len[b] - seqlen_q + i``.

    Parameters
    ----------
    q : array, shape (batch, num_qo_heads, head_dim) or (batch, seqlen_q, num_qo_heads, head_dim)
        Queries of the newest token, or of up to 16 tokens, float16, bfloat16 or float32. head_dim is 64, 96, 128, 192,
        256 or 512; 1 to 64 query heads share a KV head. Rows (the last axis) are contiguous and start at multiples of
        16 bytes; other axes may have any stride, here and in the caches and `out`.
    k_cache, v_cache : array of the dtype of `q`, Tbq4Array or Fp8Array; shape (num_pages, page_size, num_kv_heads, \
head_dim)
        Keys and values. Without `page_table` page ``b`` is all of sequence ``b``: (batch, capacity, num_kv_heads,
        head_dim). What lies at or past `kv_len`, or in pages that are not used, may be anything, NaN included. Beside
        `q` in 16 bits each of the two may be rows in TBQ4, whatever the other is, for head_dim 64, 128, 256 and 512;
        rows of codes start at multiples of 16 bytes, and rows of norms at multiples of their size or of 8 bytes. The
        keys and values attended to are those of `dequantize`, the `mean` of a `Tbq4Array` included: scores and lse are
        those of keys with their mean, and out has the mean of the values times the keys' share of the weights. Likewise
        each may be rows in fp8, for every head_dim, whose codes start at multiples of 16 bytes.
    kv_len : array, shape (batch,), int32, or int, or sequence of int
        Valid tokens of each sequence, those of `q` included; 0 is allowed. A GPU array is read by the kernel, so a
        captured CUDA graph follows its contents; values there are limited to 0 .. capacity. Lengths on the host are
        checked and copied.
    page_table : array, shape (batch, max_pages), int32, optional
        Page ``page_table[b, i]`` holds tokens ``i * page_size`` and following of sequence ``b``. Any page size. Entries
        past the last used one are not read. Entries on a GPU are not checked.
    causal : bool, default True
        Whether token ``i`` sees only keys up to its own position ``p``. Makes no difference for one query token.
    window : tuple (left, right), optional
        Keys ``p - left`` to ``p + right`` are visible, both included; None or -1 is unbounded.
    tree_mask : array, shape (batch, seqlen_q, seqlen_q), bool or uint8, optional
        Whether token ``i`` sees the key of token ``j``, that at position ``kv_len[b] - seqlen_q + j``, if the other
        masks let it: for drafted tokens that are branches of a tree, where each sees its ancestors and itself. Does not
        concern earlier keys.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``, after scaling and before masks.
    sinks : array, shape (num_qo_heads,), float32 or dtype of `q`, optional
        Score of one more key of each query head whose value is zero. -inf is no sink. Not to be confused with `k_sink`,
        `v_sink`.
    softmax_scale : float, optional
        Default ``head_dim ** -0.5``.
    num_splits : int, optional
        Parts into which each sequence is cut to fill the GPU, 1 to 512. Default: chosen by `plan_decode`. The result
        depends on it by rounding only. NumPy arrays are not split.
    split_size : int, optional
        Tokens of a part, a multiple of 64, instead of `num_splits`: sequences are cut at its multiples, into up to 512
        parts. Then the bits of a sequence's result depend on nothing but the sequence: not on the batch, the others'
        lengths, the capacity or where its pages lie.
    balance : bool, default False
        Whether the GPU gives the parts of a batch to its sequences by their lengths, as it knows them, so that a call
        takes time by all their keys together, however unequal they are. Otherwise all have as many parts. Not with
        `num_splits`, `split_size` or rows kept in 16 bits. Changes the result by rounding only.
    k_sink, v_sink : array, shape (batch, num_sink, num_kv_heads, head_dim), dtype of `q`, optional
        Keys and values of the tokens at positions below num_sink (and below `kv_len`), read instead of those in the
        caches: the first tokens often have much of the weight and are unlike the others. They are tokens with rows,
        while `sinks` are scores without. One softmax goes over all tokens.
    k_recent, v_recent : array, shape (batch, num_recent, num_kv_heads, head_dim), dtype of `q`, optional
        Keys and values of the newest tokens, in rings: that of the token at position ``p`` is in slot
        ``p % num_recent`` if ``p >= kv_len - num_recent`` and ``p >= num_sink``, and is read instead of that in the
        caches. Slots of other tokens, and rows of the caches that `k_sink` or `k_recent` stand for, may be anything;
        pages that hold nothing else need no entry in `page_table`.
    return_lse : bool, default False
    out : array, shape and dtype of `q`, optional
        Receives the result, and is returned; as a CuPy or NumPy array over its memory if it is of another library.
    workspace : array, shape (num_bytes,), uint8, optional
        Memory for parts of the result, contiguous from a multiple of 16 bytes on: ``plan_decode(...).workspace_bytes``
        or more; rows kept in 16 bits take more, which the message says. What is in it does not matter, and may be
        anything afterwards; calls that may run at the same time need one each. Default: from CuPy's pool.

    Returns
    -------
    out : array, shape and dtype of `q`
        Zero for a row that sees no key.
    lse : array, shape of `q` without head_dim, float32
        Natural-log sum of exponentials of the scaled scores, -inf for a row that sees no key. Only if `return_lse`.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit; the message names it, its value and what would be accepted. Nothing is written
        then.
    CompileError
        If a kernel does not compile on this machine.

    See Also
    --------
    merge : combines results over disjoint parts of the keys.
    cuattn.reference.decode : the definition, in NumPy and float64.

    Notes
    -----
    NumPy arrays (float64 too) run the reference on the CPU. CuPy arrays, and GPU arrays that speak DLPack
    or ``__cuda_array_interface__``, run the kernels on the arrays' device and its current CuPy stream, without
    synchronizing, and come back as CuPy arrays. A workspace of ``plan_decode(...).workspace_bytes`` is taken from
    CuPy's pool if parts are merged, and a little more with rows kept in 16 bits, whose one or two launches
    give parts of their own. The same call gives the same bits every time.

    What follows from the form of a call (shapes, strides, dtypes, devices, options) is checked, planned and kept once;
    only lengths on the host are checked, and copied, at every call. For the least time on the host give `kv_len` on the
    GPU, and `out`.

    A CUDA graph may capture a call if the same call ran before (kernels are compiled and loaded by then), `kv_len` is
    on the GPU, and the graph's memory stays its own: results (`out`, the lse) are kept alive, and so is `workspace`, or
    it comes from a `cupy.cuda.MemoryPool` that is used for the capture only and kept as long as the graph.

    Arrays of other libraries are ordered by DLPack before the kernel: it waits for their producers. What reads `out`
    afterwards, or reuses the memory of an argument, on a stream of another library must wait for the current CuPy
    stream. `out` must not share memory with the caches, and must be writable memory, which CuPy does not check for
    others' arrays.

    Rows in TBQ4 are never written out in 16 bits: codes become float16 levels on their way into tensor cores, norms
    multiply scores and probabilities in float32, and `q` and `out` are rotated in the kernel (``docs/decode.md``). Nor
    are rows in fp8: codes become float16, exactly, and scales multiply scores and `out` in float32.

    The algorithm is FlashAttention's online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) split over the keys.

    Examples
    --------
    >>> out = cuattn.decode(q, k_cache, v_cache, kv_len, page_table=pages)
    """
    given = [  # in the order of _segments.ARRAYS
        q, *_dispatch.parts(k_cache), *_dispatch.parts(v_cache), page_table, k_sink, v_sink, k_recent, v_recent,
        tree_mask, sinks, kv_len, workspace, out,
    ]  # fmt: skip
    scales = (_dispatch.scale_of(k_cache), _dispatch.scale_of(v_cache))
    options = (causal, window, softcap, softmax_scale, num_splits, split_size, balance, return_lse, *scales)
    arrays, form, launches = _FORMS.look_up(_segments.ARRAYS, given, options)
    if launches is None:
        call = _check.decode(
            q, k_cache, v_cache, kv_len, page_table=page_table, causal=causal, window=window, tree_mask=tree_mask,
            softcap=softcap, sinks=sinks, softmax_scale=softmax_scale, num_splits=num_splits, split_size=split_size,
            balance=balance, k_sink=k_sink, v_sink=v_sink, k_recent=k_recent, v_recent=v_recent, out=out,
            workspace=workspace,
        )  # fmt: skip
        with_lse = _check.flag("return_lse", return_lse)
        if not _arrays.is_gpu(call.q):
            result, lse = _on_cpu(call, with_lse=with_lse)
            if call.one_token:
                result, lse = result[:, 0], None if lse is None else lse[:, 0]
            result = _arrays.given(out, result)
            return (result, lse) if with_lse else result
        launches = _FORMS.put(form, _segments.DecodeLaunches.of(call, with_lse=with_lse))
        arrays = _segments.arrays_of(call)
    result, lse = launches.run(arrays, kv_len)
    result = _arrays.given(out, result)
    return (result, lse) if launches.with_lse else result


def plan_decode(
    q: Array,
    k_cache: Array | Tbq4Array | Fp8Array,
    v_cache: Array | Tbq4Array | Fp8Array,
    kv_len: Array = 0,
    *,
    page_table: Array | None = None,
    num_splits: int | None = None,
    split_size: int | None = None,
    balance: bool = False,
    device: _plan.Device | str | None = None,
) -> _plan.DecodePlan:
    """Say what `decode` would run for these arrays, and why; ``print`` it.

    Parameters
    ----------
    q, k_cache, v_cache, kv_len, page_table, num_splits, split_size, balance
        As for `decode`. Contents are not read, so ``numpy.empty(shape, numpy.float16)`` will do, and takes no memory.
    device : Device or str, optional
        GPU to plan for, or the name of an architecture such as ``"sm_90a"``. Default: the arrays' GPU; for NumPy arrays
        an NVIDIA H200.

    Returns
    -------
    DecodePlan
        Config, grid, splits and their reason, workspace, bytes and FLOPs.

    Raises
    ------
    ValueError, TypeError
        As `decode`, and for an unknown device.
    """
    call = _check.decode(
        q, k_cache, v_cache, kv_len, page_table=page_table, num_splits=num_splits, split_size=split_size,
        balance=balance, contents=False,
    )  # fmt: skip
    on = _check.device(device, call.q)
    return _plan.decode_plan(call.problem, on, call.num_splits, call.split_size, balance=call.balance)


def forget_plans() -> None:
    """Plan every call anew, as the tables that plans follow were changed."""
    _plan.decode_plan.cache_clear()
    _FORMS.clear()


def _on_cpu(call: _check.DecodeCall, *, with_lse: bool) -> tuple[Array, Array | None]:
    k_sink, v_sink = call.sink or (None, None)
    k_recent, v_recent = call.recent or (None, None)
    result, lse = reference.decode(
        call.q, call.k_cache.given, call.v_cache.given, call.kv_len, page_table=call.page_table, causal=call.causal,
        window=call.window, tree_mask=call.tree_mask, softcap=call.softcap or None, sinks=call.sinks,
        softmax_scale=call.softmax_scale, k_sink=k_sink, v_sink=v_sink, k_recent=k_recent, v_recent=v_recent,
        return_lse=True,
    )  # fmt: skip
    out = np.empty(call.q.shape, call.q.dtype) if call.out is None else call.out
    with np.errstate(over="ignore"):  # a value too large for the dtype is infinite, as on the GPU
        out[...] = result.astype(out.dtype)
    return out, lse.astype(np.float32) if with_lse else None
