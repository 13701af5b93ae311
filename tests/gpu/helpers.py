"""From problems to the GPU and back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import cupy
import numpy as np
from strategies import PrefillProblem, Problem
from tolerance import assert_decode, assert_prefill

import cuattn
from cuattn import _decode
from cuattn._plan import decode as plan_module

NAN16 = 0x7FFF  # in float16 and in bfloat16
BUSY_ELEMENTS = 1 << 26

# Name: shape of the array around one of shape s, and the view of it that has shape s.
VIEWS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "some of fused heads": (lambda s: (*s[:-2], s[-2] + 5, s[-1]), lambda x: x[..., 2:-3, :]),
    "one of two interleaved": (lambda s: (*s[:-2], 2, *s[-2:]), lambda x: x[..., 1, :, :]),
    "heads first": (lambda s: (*s[:-3], s[-2], s[-3], s[-1]), lambda x: x.swapaxes(-3, -2)),
    "batch after heads": (
        lambda s: (*s[1:-1], s[0], s[-1]),
        lambda x: x.transpose(x.ndim - 2, *range(x.ndim - 2), x.ndim - 1),
    ),
    "backwards in all but the rows": (lambda s: s, lambda x: x[(slice(None, None, -1),) * (x.ndim - 1)]),
    "every second of the batch": (lambda s: (2 * s[0], *s[1:]), lambda x: x[::2]),
    "every third, backwards": (lambda s: (s[0], 3 * s[1], *s[2:]), lambda x: x[:, ::-3]),
    "the first part of longer rows": (lambda s: (*s[:-1], s[-1] + 16), lambda x: x[..., :-16]),
    "the last part of longer rows": (lambda s: (*s[:-1], s[-1] + 32), lambda x: x[..., 32:]),
}


def to_device(x: Any) -> Any:
    """Copy a NumPy array, or rows in TBQ4 or fp8, to the GPU; return anything else."""
    if isinstance(x, cuattn.Fp8Array):
        return cuattn.Fp8Array(cupy.asarray(x.codes), to_device(x.scale))
    if isinstance(x, cuattn.Tbq4Array):
        return cuattn.Tbq4Array(*(to_device(part) for part in (x.codes, x.norms, x.mean)))
    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def nans(shape: tuple[int, ...], dtype: Any) -> cupy.ndarray:
    """Return an array on the GPU whose every element must be written."""
    return cupy.asarray(np.full(shape, np.nan, dtype))


def poison(*arrays: cupy.ndarray) -> None:
    """Make every element of contiguous arrays NaN, in the current stream."""
    for x in arrays:
        x.view(cupy.uint16).fill(NAN16) if x.itemsize == 2 else x.fill(np.nan)


def launch(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Decode on the GPU into NaN; arrays of the host are copied there first."""
    q, *others = map(to_device, arrays)
    out = nans(q.shape, q.dtype)
    options = {name: to_device(x) for name, x in options.items()}
    got, lse = cuattn.decode(q, *others, **options, return_lse=True, out=out)
    assert got is out
    return out, lse


def call(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Decode as `launch` does and return out and lse on the host."""
    return tuple(map(cupy.asnumpy, launch(arrays, options)))


def decode(problem: Problem, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """Decode a problem on the GPU and return out and lse on the host."""
    return call(problem.arrays(), {**problem.options(), **more})


@contextmanager
def asking_ahead() -> Iterator[None]:
    """Let calls with few bytes ask for keys before the kernel before them has ended, as those with many do."""
    before, plan_module._AHEAD_BYTES = plan_module._AHEAD_BYTES, -1
    _decode.forget_plans()
    try:
        yield
    finally:
        plan_module._AHEAD_BYTES = before
        _decode.forget_plans()


def check(problem: Problem, **more: Any) -> None:
    """Assert the error law of a problem on the GPU; every second one asks for keys ahead."""
    with asking_ahead() if (sum(problem.kv_len) + problem.head_dim // 32) % 2 else nullcontext():
        assert_decode(problem, *decode(problem, **more))


def is_tiled(arrays: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether such a call of prefill, of arrays on the GPU, is one for prefill_sm90.cu, which sums in another order."""
    return isinstance(cuattn.plan_prefill(*arrays, **on_device(options)), cuattn.TiledPrefillPlan)


def launch_prefill(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[cupy.ndarray, cupy.ndarray]:
    """Prefill on the GPU into NaN; arrays of the host are copied there first."""
    q, k, v = map(to_device, arrays)
    value_dim = 2 * v.codes.shape[-1] if isinstance(v, cuattn.Tbq4Array) else v.shape[-1]
    out = nans((*q.shape[:-1], value_dim), q.dtype)
    options = {name: to_device(x) for name, x in options.items()}
    got, lse = cuattn.prefill(q, k, v, **options, return_lse=True, out=out)
    assert got is out
    return out, lse


def call_prefill(arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Prefill as `launch_prefill` does and return out and lse on the host."""
    return tuple(map(cupy.asnumpy, launch_prefill(arrays, options)))


def prefill(problem: PrefillProblem, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """Prefill a problem on the GPU and return out and lse on the host."""
    return call_prefill(problem.arrays(), {**problem.options(), **more})


def check_prefill(problem: PrefillProblem, **more: Any) -> None:
    """Assert the error law of a problem on the GPU."""
    assert_prefill(problem, *prefill(problem, **more))


def assert_same_bits(got: tuple[np.ndarray, ...], want: tuple[np.ndarray, ...], context: object = "") -> None:
    """Assert that arrays on the host agree in every bit."""
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{name} of {context}"
        differs = a.view(f"u{a.itemsize}") != b.view(f"u{b.itemsize}")
        first = tuple(int(i) for i in np.argwhere(differs)[0]) if differs.any() else ()
        assert not differs.any(), f"{name} differs in {differs.sum()} of {a.size}, first at {first}: {context}"


def viewed(x: np.ndarray, shape: tuple[int, ...], view: Callable[[Any], Any], fill: float = np.nan) -> tuple[Any, Any]:
    """Return an array on the GPU that holds `fill` but for one view of it, which holds `x`; and that view."""
    base = np.full(shape, fill, x.dtype)
    view(base)[...] = x
    base = cupy.asarray(base)
    return base, view(base)


@contextmanager
def busy_gpu() -> Iterator[None]:
    """Keep memory and multiprocessors busy from another stream meanwhile."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        occupy(rounds=400)
    yield
    stream.synchronize()


def occupy(rounds: int) -> None:
    """Enqueue work in the current stream: about 0.1 ms a round."""
    x = cupy.zeros(BUSY_ELEMENTS, np.float32)
    for _ in range(rounds):
        cupy.add(x, x, out=x)


def on_device(options: dict[str, Any]) -> dict[str, Any]:
    return {name: to_device(x) for name, x in options.items()}


def planes(arrays: Any) -> list[Any]:
    def of(x: Any) -> tuple[Any, ...]:
        if isinstance(x, cuattn.Fp8Array):
            return (x.codes,)
        return (x.codes, x.norms) if isinstance(x, cuattn.Tbq4Array) else (x,)

    return [y for x in arrays for y in of(x)]
