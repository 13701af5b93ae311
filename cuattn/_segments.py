"""Which launches of ``decode.cu`` a call makes, and their parameters.

One launch attends to the caches. Tokens that are kept in 16 bits beside them, the first and the newest of a sequence,
are keys of launches of their own: the same kernel, with a range of positions as another limit. All parts are merged by
the one rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from . import _arrays, _check, _dispatch, _jit, _merge, _params, _plan
from ._arrays import Array
from ._cache import Cache

# Arrays of a call; those after "out" are not the caller's.
ARRAYS = (
    "q", "k_cache", "k_cache_norms", "k_cache_mean", "k_cache_scales", "v_cache", "v_cache_norms", "v_cache_mean",
    "v_cache_scales", "page_table", "k_sink", "v_sink", "k_recent", "v_recent", "tree_mask", "sinks", "kv_len",
    "workspace", "out",
    "lse", "parts", "states", "shares",
)  # fmt: skip
_SINKS, _KV_LEN, _WORKSPACE, _OUT = map(ARRAYS.index, ("sinks", "kv_len", "workspace", "out"))

# Beyond every position: a limit that leaves no key out.
_ALL = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Segment:
    """Keys ``max(first_key, kv_len - last_keys)`` up to ``min(end_key, kv_len - skip_last)`` of every sequence.

    Attributes
    ----------
    plan : DecodePlan
        Of the launch that attends to them.
    k, v : Cache
        Where they lie. Without `page_table`, position p is in row ``p % page_size`` of page b.
    page_table : array or None
    first_key, last_keys, end_key, skip_last : int
    """

    plan: _plan.DecodePlan
    k: Cache
    v: Cache
    page_table: Array | None = None
    first_key: int = 0
    last_keys: int = _ALL
    end_key: int = _ALL
    skip_last: int = 0


def segments(call: _check.DecodeCall, device: _plan.Device) -> tuple[Segment, ...]:
    """Return the launches of a call: the caches, then the first tokens, then the newest."""
    problem = call.problem
    num_sink, num_recent = (0 if pair is None else pair[0].shape[1] for pair in (call.sink, call.recent))
    body = _plan.decode_plan(problem, device, call.num_splits, call.split_size, balance=call.balance)
    found = [Segment(body, call.k_cache, call.v_cache, call.page_table, first_key=num_sink, skip_last=num_recent)]

    def kept(pair: tuple[Array, Array], **limits: int) -> Segment:
        k, v = map(Cache.of_elements, pair)
        part = replace(problem, k_format=k.kv_format, v_format=v.kv_format, max_kv_len=k.page_size)
        # Their number is the call's own, and so may be that of their splits, which are cut where they begin and end.
        splits = None if call.split_size is None else _plan.ceil_div(k.page_size, call.split_size)
        return Segment(_plan.decode_plan(part, device, splits), k, v, **limits)

    if call.sink is not None:
        found.append(kept(call.sink, end_key=num_sink))
    if call.recent is not None:
        found.append(kept(call.recent, first_key=num_sink, last_keys=num_recent))
    return tuple(found)


def partial_shape(found: tuple[Segment, ...]) -> tuple[int, ...] | None:
    """Shape of the float32 partial outputs of all launches; None if there is one part, which is the result."""
    num_parts = sum(s.plan.num_splits for s in found)
    merges = num_parts > 1 or found[0].plan.merges
    return (num_parts, *found[0].plan.out_partial_shape[1:]) if merges else None


def launches(
    call: _check.DecodeCall,
    found: tuple[Segment, ...],
    *,
    out: Array,
    lse: Array | None,
    parts: Array | None,
    states: Array | None,
    shares: Array | None = None,
    kv_len: Array,
    sinks: Array | None,
) -> Iterator[tuple[_plan.DecodePlan, np.ndarray[Any, Any]]]:
    """Yield plan and parameters of each launch; `lse` and the parts are contiguous, and sinks count in the first.

    Parts of the caches come last: how many they are must not move the others, for they are summed in their order.
    """
    first = sum(s.plan.num_splits for s in found[1:])
    for segment in found:
        of_segment = slice(first, first + segment.plan.num_splits)
        yield (
            segment.plan,
            _params_of(
                call, segment, out=out, lse=lse, parts=None if parts is None else parts[of_segment],
                states=None if states is None else states[of_segment], shares=shares, kv_len=kv_len,
                sinks=sinks if segment is found[0] else None,
            ),
        )  # fmt: skip
        first = 0 if segment is found[0] else of_segment.stop


def _params_of(
    call: _check.DecodeCall,
    segment: Segment,
    *,
    out: Array,
    lse: Array | None,
    parts: Array | None,
    states: Array | None,
    shares: Array | None,
    kv_len: Array,
    sinks: Array | None,
) -> np.ndarray[Any, Any]:
    left, right = call.window
    log2_e = math.log2(math.e)
    k, v = segment.k, segment.v
    values: dict[str, float] = {
        "seqlen_q": call.q.shape[1],
        "num_qo_heads": call.q.shape[2],
        "group": segment.plan.problem.group,
        "page_size": k.page_size,
        "page_reciprocal": _params.reciprocal(k.page_size),
        "capacity": call.problem.max_kv_len,
        "num_splits": segment.plan.num_splits,
        "split_size": segment.plan.split_size,
        "batch": call.q.shape[0],
        "asks_ahead": int(segment.plan.asks_ahead and segment.page_table is None),
        "first_key": segment.first_key,
        "last_keys": segment.last_keys,
        "end_key": segment.end_key,
        "skip_last": segment.skip_last,
        "window_left": left,
        "window_right": 0 if call.causal else right,  # causal is a window that ends at the query's own position
        "softmax_scale_log2": call.softmax_scale * log2_e,
        "softcap_log2": call.softcap * log2_e,
        "scale_over_softcap": call.softmax_scale / call.softcap if call.softcap else 0.0,
        "kv_len_stride": kv_len.strides[0],
    }
    arrays = {
        "q": call.q, "k": k.rows, "v": v.rows, "k_norms": k.norms, "v_norms": v.norms, "k_mean": k.mean,
        "v_mean": v.mean, "out": out, "lse": lse, "out_partial": parts, "state_partial": states, "kv_len": kv_len,
        "page_table": segment.page_table, "sinks": sinks, "shares": shares,
        "tree_mask": call.tree_mask,
    }  # fmt: skip
    values.update((name, _arrays.pointer(array)) for name, array in arrays.items())
    values |= _params.strides(arrays)
    for name, scale in (("k_scale", k.scale), ("v_scale", v.scale)):
        values |= {name: scale} if isinstance(scale, float) else {f"{name}s": _arrays.pointer(scale)}
    # From a step of a warp to its next one.
    for name in ("k", "v", "k_norms", "v_norms"):
        values[f"{name}_stride_step"] = values[f"{name}_stride_token"] * segment.plan.config.keys_per_step
    return _params.fill(_params.DECODE, values)


def arrays_of(call: _check.DecodeCall) -> list[Array | None]:
    """Arrays of a checked call, in the order of `ARRAYS`; without an axis of query tokens if the caller has none."""
    q, out = call.q, call.out
    if call.one_token:
        q, out = q[:, 0], None if out is None else out[:, 0]
    k, v = call.k_cache, call.v_cache
    kept = (*(call.sink or (None, None)), *(call.recent or (None, None)))
    lengths = call.kv_len if _arrays.is_gpu(call.kv_len) else None
    return [
        q, k.rows, k.norms, k.mean, k.scales, v.rows, v.norms, v.mean, v.scales, call.page_table, *kept,
        call.tree_mask, call.sinks, lengths, call.workspace, out,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeLaunches:
    """What a checked call on a GPU runs, and what it allocates for that.

    Attributes
    ----------
    ordinal : int
        Of the device.
    launches : Launches or None
        None where no row of q is.
    batch, capacity : int
        Sequences, and tokens that the caches hold of one.
    with_lse : bool
    parts_end, states_end, workspace_bytes : int
        Where partial results in float32, their states, and the shares of sequences in them end in the workspace; 0
        where there is one part.
    """

    ordinal: int
    launches: _dispatch.Launches | None
    batch: int
    capacity: int
    with_lse: bool
    parts_end: int
    states_end: int
    workspace_bytes: int

    @classmethod
    def of(cls, call: _check.DecodeCall, *, with_lse: bool) -> Self:
        """Plan the launches of a call, and compile and load their kernels."""
        cupy = _arrays.import_cupy()
        ordinal, batch, capacity = call.q.device.id, call.q.shape[0], call.problem.max_kv_len
        if call.q.size == 0:
            return cls(ordinal, None, batch, capacity, with_lse, 0, 0, 0)
        made = _dispatch.StandIns(ARRAYS, ordinal)

        def pair(name: str, arrays: tuple[Array, Array] | None) -> tuple[Array, Array] | None:
            return None if arrays is None else (made.of(f"k_{name}", arrays[0]), made.of(f"v_{name}", arrays[1]))

        call = replace(
            call,
            q=made.of("q", call.q),
            k_cache=call.k_cache.map(made.of, "k_cache"),
            v_cache=call.v_cache.map(made.of, "v_cache"),
            page_table=made.of("page_table", call.page_table),
            sink=pair("sink", call.sink),
            recent=pair("recent", call.recent),
            tree_mask=made.of("tree_mask", call.tree_mask),
            out=made.of("out", call.out),
        )
        with cupy.cuda.Device(ordinal):
            device = _arrays.device(ordinal)
            found = segments(call, device)
            out = made.contiguous("out", call.q.shape, call.q.dtype) if call.out is None else call.out
            lse = made.contiguous("lse", call.q.shape[:-1], np.float32) if with_lse else None
            shape, parts, states, shares = partial_shape(found), None, None, None
            if shape is not None:
                parts = made.contiguous("parts", shape, np.float32)
                states = made.contiguous("states", (*shape[:-1], 2), np.float32)
            if found[0].plan.balanced:
                shares = made.contiguous("shares", (batch, 2), np.int32)
            on_host = not _arrays.is_gpu(call.kv_len)
            lengths = made.contiguous("kv_len", (batch,), np.int32) if on_host else made.of("kv_len", call.kv_len)
            sinks = None if call.sinks is None else made.contiguous("sinks", call.sinks.shape, np.float32)
            all_launches = [
                _dispatch.Launch(_jit.kernel(plan.config, ordinal, device.arch), plan.grid, plan.block, params)
                for plan, params in launches(
                    call,
                    found,
                    out=out,
                    lse=lse,
                    parts=parts,
                    states=states,
                    shares=shares,
                    kv_len=lengths,
                    sinks=sinks,
                )
            ]
            if parts is not None:
                fixed = call.split_size is not None
                all_launches.append(_merge.launch_of(parts, states, out, lse, shares=shares, fixed=fixed))
        sizes = [0 if x is None else 4 * x.size for x in (parts, states, shares)]
        ends = (sizes[0], sizes[0] + sizes[1], sum(sizes))
        _check.workspace_of(call.workspace, sum(sizes))
        return cls(ordinal, _dispatch.Launches(made, all_launches), batch, capacity, with_lse, *ends)

    @_dispatch.on_own_device
    def run(self, arrays: list[Array], kv_len: object) -> tuple[Array, Array | None]:
        """Run the launches on arrays of the form that they were made for.

        Parameters
        ----------
        arrays : list of array or None
            Those of `ARRAYS` up to "out"; "kv_len" is None where the lengths are not on the GPU. Is changed.
        kv_len : object
            The caller's.

        Returns
        -------
        out : array, shape of q
        lse : array, shape of q without head_dim, or None
        """
        cupy, q = _arrays.import_cupy(), arrays[0]
        if arrays[_OUT] is None:
            arrays[_OUT] = cupy.ndarray(q.shape, q.dtype)
        lse = cupy.ndarray(q.shape[:-1], np.float32) if self.with_lse else None
        if arrays[_KV_LEN] is None:
            lengths = _check.lengths_of(kv_len, self.batch, self.capacity, gpu=True, of="q")
            arrays[_KV_LEN] = cupy.asarray(lengths)
        if arrays[_SINKS] is not None:
            arrays[_SINKS] = cupy.ascontiguousarray(arrays[_SINKS], dtype=np.float32)
        if self.launches is not None:
            pointers = [0, *_dispatch.addresses((*arrays, lse))]
            if self.workspace_bytes:
                given = arrays[_WORKSPACE]
                workspace = cupy.cuda.alloc(self.workspace_bytes) if given is None else given.data
                pointers += [workspace.ptr, workspace.ptr + self.parts_end, workspace.ptr + self.states_end]
            else:
                pointers += [0, 0, 0]
            self.launches.run(pointers)
        return arrays[_OUT], lse
