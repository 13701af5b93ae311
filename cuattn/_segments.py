"""Which launches of ``decode.cu`` a call makes, and their parameters.

One launch attends to the caches. Tokens that are kept in 16 bits beside them, the first and the newest of a sequence,
are keys of launches of their own: the same kernel, with a range of positions as another limit. All parts are merged by
the one rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import _arrays, _check, _params, _plan
from ._arrays import Array
from ._cache import Cache

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
    body = _plan.decode_plan(problem, device, call.num_splits)
    found = [Segment(body, call.k_cache, call.v_cache, call.page_table, first_key=num_sink, skip_last=num_recent)]

    def kept(pair: tuple[Array, Array], **limits: int) -> Segment:
        k, v = map(Cache.of_elements, pair)
        part = replace(problem, k_format=k.kv_format, v_format=v.kv_format, max_kv_len=k.page_size)
        return Segment(_plan.decode_plan(part, device), k, v, **limits)

    if call.sink is not None:
        found.append(kept(call.sink, end_key=num_sink))
    if call.recent is not None:
        found.append(kept(call.recent, first_key=num_sink, last_keys=num_recent))
    return tuple(found)


def partial_shape(found: tuple[Segment, ...]) -> tuple[int, ...] | None:
    """Shape of the float32 partial outputs of all launches; None if there is one part, which is the result."""
    num_parts = sum(s.plan.num_splits for s in found)
    return None if num_parts == 1 else (num_parts, *found[0].plan.out_partial_shape[1:])


def launches(
    call: _check.DecodeCall,
    found: tuple[Segment, ...],
    *,
    out: Array,
    lse: Array | None,
    parts: Array | None,
    states: Array | None,
    kv_len: Array,
    sinks: Array | None,
) -> Iterator[tuple[_plan.DecodePlan, np.ndarray[Any, Any]]]:
    """Yield plan and parameters of each launch; `lse` and the parts are contiguous, and sinks count in the first."""
    first = 0
    for segment in found:
        of_segment = slice(first, first + segment.plan.num_splits)
        yield (
            segment.plan,
            _params_of(
                call, segment, out=out, lse=lse, parts=None if parts is None else parts[of_segment],
                states=None if states is None else states[of_segment], kv_len=kv_len,
                sinks=None if first else sinks,
            ),
        )  # fmt: skip
        first = of_segment.stop


def _params_of(
    call: _check.DecodeCall,
    segment: Segment,
    *,
    out: Array,
    lse: Array | None,
    parts: Array | None,
    states: Array | None,
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
        "capacity": call.problem.max_kv_len,
        "num_splits": segment.plan.num_splits,
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
        "page_table": segment.page_table, "sinks": sinks,
    }  # fmt: skip
    values.update((name, _arrays.pointer(array)) for name, array in arrays.items())
    values |= _params.strides(arrays)
    for name, scale in (("k_scale", k.scale), ("v_scale", v.scale)):
        values |= {name: scale} if isinstance(scale, float) else {f"{name}s": _arrays.pointer(scale)}
    # From a step of a warp to its next one.
    for name in ("k", "v", "k_norms", "v_norms"):
        values[f"{name}_stride_step"] = values[f"{name}_stride_token"] * segment.plan.config.keys_per_step
    return _params.fill(_params.DECODE, values)
