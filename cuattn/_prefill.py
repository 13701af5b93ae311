"""`prefill` and `plan_prefill`: check, plan, allocate, launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import _arrays, _check, _dispatch, _plan, _prefill_launches, reference
from ._arrays import Array
from ._cache import Cache, Planes
from ._quantize import Tbq4Array

_FORMS: _dispatch.Forms[_prefill_launches.PrefillLaunches] = _dispatch.Forms()


def prefill(
    q: Array,
    k: Array | Tbq4Array,
    v: Array | Tbq4Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    kv_len: Array | None = None,
    page_table: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Any:  # noqa: ANN401  an array, or a pair of arrays with return_lse
    """Attend from many tokens of each sequence to its keys and values: a prompt, or a chunk of one against a cache.

    Computes ``softmax(softmax_scale * q @ k.T) @ v`` for every query head of every sequence. Query head ``h`` reads KV
    head ``h // group``, where ``group = num_qo_heads // num_kv_heads``. The tokens of `q` are the last of a sequence:
    with ``seqlen_q`` of them and ``seqlen_k`` keys, token ``i`` stands at position ``p = seqlen_k - seqlen_q + i``, and
    before all keys if that is negative. Causal masks and windows go by it::

        seqlen_q = 2, seqlen_k = 4  full     causal   window (1, 0)
        token 0 (p = 2)             1 1 1 1  1 1 1 0  0 1 1 0
        token 1 (p = 3)             1 1 1 1  1 1 1 1  0 0 1 1

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, num_qo_heads, head_dim) or (total_q, num_qo_heads, head_dim)
        Queries, float16, bfloat16 or float32: dense, or with `cu_seqlens_q` ragged, the tokens of all sequences one
        after the other. head_dim is 64, 96, 128, 192, 256 or 512. Rows (the last axis) are contiguous and start at
        multiples of 16 bytes; other axes may have any stride, here and in `k`, `v` and `out`, but tokens of `k` and `v`
        are less than 2 GiB apart.
    k, v : array of the dtype of `q`, or Tbq4Array
        Keys of head_dim and values of value_dim elements: the same number, or 192 and 128. Both lie in the same way::

            dense    (batch, seqlen_k, num_kv_heads, dim)      `kv_len` may say how many keys of each sequence are valid
            ragged   (total_k, num_kv_heads, dim)              with `cu_seqlens_k`, or as ragged q
            paged    (num_pages, page_size, num_kv_heads, dim) with `page_table` and `kv_len`

        and each of these goes with dense and with ragged `q`. num_kv_heads divides num_qo_heads. Lengths and tables on
        the GPU must stay as they are until the call has ended on its stream. What lies at or past `kv_len`, or in pages
        that are not used, may be anything, NaN included. Beside `q` in 16 bits each of the two may be rows in TBQ4,
        whatever the other is, for head_dim 64, 128, 256 and 512; rows of codes start at multiples of 16 bytes, and rows
        of norms at multiples of their size or of 8 bytes. The keys and values attended to are those of `dequantize`,
        the `mean` of a `Tbq4Array` included: scores and lse are those of keys with their mean.
    causal : bool, default False
        Whether a token sees only keys up to its own position ``p``.
    window : tuple (left, right), optional
        Keys ``p - left`` to ``p + right`` are visible, both included; None or -1 is unbounded.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``, after scaling and before masks.
    sinks : array, shape (num_qo_heads,), float32 or dtype of `q`, optional
        Score of one more key of each query head whose value is zero. -inf is no sink.
    softmax_scale : float, optional
        Default ``head_dim ** -0.5``.
    cu_seqlens_q : array, shape (batch + 1,), int32, or sequence of int, optional
        Sequence ``b`` has the tokens ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1`` of ragged `q`; the first entry
        is 0, none is less than the one before it, and the last is total_q. A GPU array is read by the kernel, so a
        captured CUDA graph follows its contents, and is not checked: it is limited to what `q` holds, and rows of `q`
        past its last entry have no result, so that a buffer may be longer than its sequences. Entries on the host are
        checked and copied.
    cu_seqlens_k : array, shape (batch + 1,), int32, or sequence of int, optional
        The same for ragged `k` and `v` and their total_k tokens. Default, if `q` is ragged: `cu_seqlens_q`. Not with
        other keys.
    kv_len : array, shape (batch,), int32, or int, or sequence of int, optional
        Valid keys of each sequence in dense or paged `k` and `v`; 0 is allowed. Default: seqlen_k, all that are there.
        Needed with `page_table`, and not with ragged keys. A GPU array is read by the kernel; values there are limited
        to 0 .. what `k` holds of a sequence. Lengths on the host are checked and copied.
    page_table : array, shape (batch, max_pages), int32, optional
        Page ``page_table[b, i]`` holds keys ``i * page_size`` and following of sequence ``b``. Any page size. Entries
        past the last used one are not read. Entries on a GPU are not checked.
    return_lse : bool, default False
    out : array, shape of the result, dtype of `q`, optional
        Receives the result, and is returned; as a CuPy or NumPy array over its memory if it is of another library.

    Returns
    -------
    out : array, shape of `q` with value_dim for head_dim, dtype of `q`
        Zero for a row that sees no key.
    lse : array, shape of `q` without head_dim, float32
        Natural-log sum of exponentials of the scaled scores, -inf for a row that sees neither key nor sink. Only if
        `return_lse`.

    Raises
    ------
    ValueError, TypeError
        If an argument does not fit, or two do not go together; the message names it, its value and what would be
        accepted. Nothing is written then.
    CompileError
        If a kernel does not compile on this machine.

    See Also
    --------
    decode : the newest tokens, 16 at most, against long caches.
    append : writes keys and values into the caches that `prefill` and `decode` read.
    merge : combines results over disjoint parts of the keys.
    cuattn.reference.prefill : the definition, in NumPy and float64.

    Notes
    -----
    NumPy arrays (float64 too) run the reference on the CPU. CuPy arrays, and GPU arrays that speak DLPack
    or ``__cuda_array_interface__``, run on the arrays' device and its current CuPy stream, without synchronizing, and
    come back as CuPy arrays. That is one kernel, or two where dense `q` has few tokens for many keys: then keys are cut
    into splits. A workspace of ``plan_prefill(...).workspace_bytes`` comes from CuPy's pool: results of splits, or a
    counter. The same call gives the same bits every time.

    What follows from the form of a call (shapes, strides, dtypes, devices, options) is checked, planned and kept once,
    unless lengths are on the host, which are checked with all else at every call.

    A CUDA graph may capture a call if the same call ran before (kernels are compiled and loaded by then), lengths are
    contiguous and on the GPU, a `mean` is contiguous, `sinks` are contiguous float32, and the graph's memory stays its
    own: results are kept alive, and a workspace comes from a `cupy.cuda.MemoryPool` that is used for the capture only
    and kept as long as the graph.

    Arrays of other libraries are ordered by DLPack before the kernel: it waits for their producers. What reads `out`
    afterwards, or reuses the memory of an argument, on a stream of another library must wait for the current CuPy
    stream. `out` must not share memory with the other arrays, and must be writable memory, which CuPy does not check
    for others' arrays.

    float32 keeps float32 accuracy: tensor cores multiply each float in two parts, and infinities and NaN are met by
    ordinary sums, which take much longer. Values above some 2^110 may overflow where the result would not: sums go up
    to 2^8 times as far, and once for each key.

    Rows in TBQ4 are never written out in 16 bits. On their way into tensor cores levels times norms are rounded to
    float16 once, with a power of two for each tile of keys, where `decode` multiplies scores and probabilities by norms
    in float32: the two agree within the roundings of a 16-bit copy of the cache (``docs/prefill.md``).

    The algorithm is FlashAttention's online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).

    Examples
    --------
    >>> out = cuattn.prefill(q, k, v, causal=True)
    >>> out = cuattn.prefill(q, k, v, causal=True, cu_seqlens_q=[0, 900, 1024])
    >>> out = cuattn.prefill(chunk, k_cache, v_cache, causal=True, kv_len=kv_len, page_table=pages)
    """
    given = [  # in the order of _prefill_launches.ARRAYS
        q, *_dispatch.parts(k)[:3], *_dispatch.parts(v)[:3], cu_seqlens_q, cu_seqlens_k, kv_len, page_table, sinks, out,
    ]  # fmt: skip
    arrays, form, launches = given, None, None
    # Lengths on the host are checked against each other and the arrays, with all else.
    if not any(map(_dispatch.on_host, (cu_seqlens_q, cu_seqlens_k, kv_len))):
        options = (causal, window, softcap, softmax_scale, return_lse)
        arrays, form, launches = _FORMS.look_up(_prefill_launches.ARRAYS, given, options)
    if launches is None:
        call = _check.prefill(
            q, k, v, causal=causal, window=window, softcap=softcap, sinks=sinks, softmax_scale=softmax_scale,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, kv_len=kv_len, page_table=page_table, out=out,
        )  # fmt: skip
        with_lse = _check.flag("return_lse", return_lse)
        if not _arrays.is_gpu(call.q):
            result, lse = _on_cpu(call, with_lse=with_lse)
            if call.ragged:
                result, lse = result[0], None if lse is None else lse[0]
            result = _arrays.given(out, result)
            return (result, lse) if with_lse else result
        launches = _FORMS.put(form, _prefill_launches.PrefillLaunches.of(call, with_lse=with_lse))
        arrays = _prefill_launches.arrays_of(call)
    result, lse = launches.run(arrays)
    result = _arrays.given(out, result)
    return (result, lse) if launches.with_lse else result


def plan_prefill(
    q: Array,
    k: Array | Tbq4Array,
    v: Array | Tbq4Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    kv_len: Array | None = None,
    page_table: Array | None = None,
    device: _plan.Device | str | None = None,
) -> _plan.PrefillPlan | _plan.TiledPrefillPlan:
    """Say what `prefill` would run for these arrays, and why; ``print`` it.

    Parameters
    ----------
    q, k, v, causal, window, softcap, sinks, softmax_scale, cu_seqlens_q, cu_seqlens_k, kv_len, page_table
        As for `prefill`. Contents are not read, so ``numpy.empty(shape, numpy.float16)`` will do, and takes no memory.
        A `page_table` comes with a `kv_len` here too. A window counts for the number of splits.
    device : Device or str, optional
        GPU to plan for, or the name of an architecture such as ``"sm_90a"``. Default: the arrays' GPU; for NumPy arrays
        an NVIDIA H200.

    Returns
    -------
    PrefillPlan or TiledPrefillPlan
        Config, grid, order of work, splits, workspace and FLOPs; the latter for `prefill_sm90.cu`, which Hopper GPUs
        have for 16-bit queries without the options that it lacks.

    Raises
    ------
    ValueError, TypeError
        As `prefill`, and for an unknown device.
    """
    call = _check.prefill(
        q, k, v, causal=causal, window=window, softcap=softcap, sinks=sinks, softmax_scale=softmax_scale,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, kv_len=kv_len, page_table=page_table, contents=False,
    )  # fmt: skip
    return _plan.choose_prefill(call.problem, _check.device(device, call.q), call.beyond_tiles)


def _without_page(cache: Cache) -> Array | Planes:
    """Return ragged rows as the reference takes them."""
    if cache.norms is None:
        return cache.rows[0]
    return Planes(cache.rows[0], cache.norms[0], cache.mean)


def _on_cpu(call: _check.PrefillCall, *, with_lse: bool) -> tuple[Array, Array | None]:
    k, v = (x.given if call.cu_seqlens_k is None else _without_page(x) for x in (call.k, call.v))
    result, lse = reference.prefill(
        call.q[0] if call.ragged else call.q, k, v, causal=call.causal, window=call.window,
        softcap=call.softcap or None, sinks=call.sinks, softmax_scale=call.softmax_scale,
        cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k, kv_len=call.kv_len,
        page_table=call.page_table, return_lse=True,
    )  # fmt: skip
    out = np.empty(call.out_shape, call.q.dtype) if call.out is None else call.out
    with np.errstate(over="ignore"):  # a value too large for the dtype is infinite, as on the GPU
        out[...] = result.astype(out.dtype)
    return out, lse.astype(np.float32).reshape(out.shape[:-1]) if with_lse else None
