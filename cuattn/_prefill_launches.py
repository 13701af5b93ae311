"""What a checked call of prefill runs on a GPU: its launches, and what they allocate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from . import _arrays, _check, _dispatch, _jit, _merge, _plan, _prefill_params, _tiled
from ._arrays import Array

# Arrays of a call; those after "out" are not the caller's.
ARRAYS = (
    "q", "k", "k_norms", "k_mean", "v", "v_norms", "v_mean", "cu_seqlens_q", "cu_seqlens_k", "kv_len", "page_table",
    "sinks", "out", "lse", "parts", "states", "items_claimed",
)  # fmt: skip
_CU_SEQLENS_Q, _CU_SEQLENS_K, _KV_LEN, _SINKS, _OUT = map(
    ARRAYS.index, ("cu_seqlens_q", "cu_seqlens_k", "kv_len", "sinks", "out")
)


def arrays_of(call: _check.PrefillCall) -> list[Array | None]:
    """Arrays of a checked call, in the order of `ARRAYS`; ragged ones without an axis of sequences."""
    q, out = call.q, call.out
    if call.ragged:
        q, out = q[0], None if out is None else out[0]
    k, v = call.k, call.v
    return [
        q, k.rows, k.norms, k.mean, v.rows, v.norms, v.mean, call.cu_seqlens_q, call.cu_seqlens_k, call.kv_len,
        call.page_table, call.sinks, out,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefillLaunches:
    """What a checked call on a GPU runs, and what it allocates for that.

    Attributes
    ----------
    ordinal : int
        Of the device.
    launches : Launches or None
        None where the result has no elements.
    value_dim : int
        Of the result.
    with_lse : bool
    parts_bytes, workspace_bytes : int
        Of partial results in float32, and of these and their states; 0 where there is one part.
    counts_items : bool
        Whether CTAs count the tiles that they took.
    """

    ordinal: int
    launches: _dispatch.Launches | None
    value_dim: int
    with_lse: bool
    parts_bytes: int = 0
    workspace_bytes: int = 0
    counts_items: bool = False

    @classmethod
    def of(cls, call: _check.PrefillCall, *, with_lse: bool) -> Self:
        """Plan the launches of a call, and compile and load their kernels."""
        ordinal, value_dim = call.q.device.id, call.v.head_dim
        if call.q.size == 0:
            return cls(ordinal, None, value_dim, with_lse)
        made = _dispatch.StandIns(ARRAYS, ordinal)
        lengths: dict[str, Any] = {}
        for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_len"):
            x = getattr(call, name)
            as_it_is = x is None or (name == "kv_len" and _arrays.is_gpu(x))
            lengths[name] = made.of(name, x) if as_it_is else made.contiguous(name, x.shape, np.int32)
        sinks = None if call.sinks is None else made.contiguous("sinks", call.sinks.shape, np.float32)
        call = replace(
            call,
            q=made.of("q", call.q),
            k=call.k.map(made.of, "k"),
            v=call.v.map(made.of, "v"),
            page_table=made.of("page_table", call.page_table),
            out=made.of("out", call.out),
        )
        out = made.contiguous("out", call.out_shape, call.q.dtype) if call.out is None else call.out
        lse = made.contiguous("lse", call.out_shape[:-1], np.float32) if with_lse else None
        with _arrays.import_cupy().cuda.Device(ordinal):
            device = _arrays.device(ordinal)
            plan = _plan.choose_prefill(call.problem, device, call.beyond_tiles)
            kernel = _jit.kernel(plan.config, ordinal, device.arch)
            if isinstance(plan, _plan.TiledPrefillPlan):
                claimed = made.contiguous("items_claimed", (1,), np.int32) if plan.counts_items else None
                maps: list[_tiled.TensorTiles] = []

                def note(tiles: _tiled.TensorTiles) -> np.void:
                    maps.append(tiles)
                    return _tiled.NO_MAP

                tiled = _prefill_params.tiled_params_of(
                    call, plan, out=out, lse=lse, items_claimed=claimed, sinks=sinks, encode=note, **lengths
                )
                launch = _dispatch.Launch(kernel, plan.grid, plan.block, tiled, tuple(maps))
                launches = _dispatch.Launches(made, [launch])
                return cls(ordinal, launches, value_dim, with_lse, counts_items=plan.counts_items)
            parts = states = None
            if plan.num_splits > 1:
                parts = made.contiguous("parts", plan.out_partial_shape, np.float32)
                states = made.contiguous("states", (*plan.out_partial_shape[:-1], 2), np.float32)
            params = _prefill_params.params_of(
                call, plan, out=out, lse=lse, parts=parts, states=states, sinks=sinks, **lengths
            )
            all_launches = [_dispatch.Launch(kernel, plan.grid, plan.block, params)]
            if parts is not None:
                all_launches.append(_merge.launch_of(parts, states, out, lse))
        parts_bytes, states_bytes = (0 if x is None else 4 * x.size for x in (parts, states))
        launches = _dispatch.Launches(made, all_launches)
        return cls(ordinal, launches, value_dim, with_lse, parts_bytes, parts_bytes + states_bytes)

    @_dispatch.on_own_device
    def run(self, arrays: list[Array]) -> tuple[Array, Array | None]:
        """Run the launches on arrays of the form that they were made for.

        Parameters
        ----------
        arrays : list of array or None
            Those of `ARRAYS` up to "out", lengths also on the host. Is changed.

        Returns
        -------
        out : array, shape of q with value_dim for head_dim
        lse : array, shape of q without head_dim, or None
        """
        cupy, q = _arrays.import_cupy(), arrays[0]
        if arrays[_OUT] is None:
            arrays[_OUT] = cupy.ndarray((*q.shape[:-1], self.value_dim), q.dtype)
        lse = cupy.ndarray(q.shape[:-1], np.float32) if self.with_lse else None
        if self.launches is None:
            return arrays[_OUT], lse
        # The list keeps copies alive until the kernel is on its stream, after which their memory is reused in order.
        for index in (_CU_SEQLENS_Q, _CU_SEQLENS_K, _KV_LEN):
            if isinstance(arrays[index], np.ndarray):
                arrays[index] = cupy.asarray(arrays[index])
            elif arrays[index] is not None and index != _KV_LEN:  # of which the kernel takes any stride
                arrays[index] = _arrays.contiguous(arrays[index])
        if arrays[_SINKS] is not None:
            arrays[_SINKS] = cupy.ascontiguousarray(arrays[_SINKS], dtype=np.float32)
        pointers = [0, *_dispatch.addresses((*arrays, lse))]
        if self.workspace_bytes:
            workspace = cupy.cuda.alloc(self.workspace_bytes)
            pointers += [workspace.ptr, workspace.ptr + self.parts_bytes, 0]
        elif self.counts_items:
            claimed = cupy.zeros(1, np.int32)
            pointers += [0, 0, claimed.data.ptr]
        else:
            pointers += [0, 0, 0]
        self.launches.run(pointers)
        return arrays[_OUT], lse
