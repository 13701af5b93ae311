"""``python -m cuattn demo``: prefill, decode and merge on the Q, K and V of a language model, checked."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import _arrays, _info, decode, merge, plan_decode, prefill, reference
from ._arrays import Array

DATA = Path(__file__).with_name("examples") / "smollm2_qkv.npz"
LAYERS = ("l00", "l15", "l29")
# How often the text is repeated for the long row: 131,072 keys, 32 MB of K and V a layer.
_REPEATS = 256
_SAMPLES = 20
# Calls in the graph that is timed.
_CALLS = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `nbytes` 0 where bandwidth says nothing."""

    what: str
    shapes: str
    splits: str
    seconds: float
    nbytes: int
    error: float | None

    def __str__(self) -> str:
        rate = f"{self.nbytes / 1e6:>8.2f} MB {self.nbytes / self.seconds / 1e9:>7.1f} GB/s" if self.nbytes else ""
        what = f"{self.what:<28} {self.shapes:<24} {self.splits:>6}"
        error = "-" if self.error is None else f"{self.error:.1e}"
        return f"{what} {self.seconds * 1e6:>9.1f} us  {error:>8}  {rate}"


def _error(got: Array, want: np.ndarray[Any, Any]) -> float:
    host = got.get() if _arrays.is_gpu(got) else got
    return float(np.abs(host.astype(np.float64) - want).max())


def _timed(call: Callable[[], Any], *, gpu: bool) -> tuple[Any, float]:
    """Return the result of a call and its time: on a GPU without the time of Python, the best of several."""
    if not gpu:
        start = time.perf_counter()
        result = call()
        return result, time.perf_counter() - start
    cupy = _arrays.import_cupy()
    result = call()  # compiles and loads the kernels
    cupy.cuda.Device().synchronize()  # the arrays are there before another stream reads them
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        for _ in range(_CALLS):
            call()
        graph = stream.end_capture()
        times = []
        for _ in range(_SAMPLES):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(stream)
            graph.launch(stream)
            stop.record(stream)
            stop.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3 / _CALLS)
    return result, min(times)


def _rows(layer: str, data: dict[str, np.ndarray[Any, Any]], *, gpu: bool) -> list[Row]:
    q, k, v = (data[f"{layer}_{name}"] for name in "qkv")
    tokens, heads, head_dim = q.shape
    shape = f"{heads}/{k.shape[1]} heads, d {head_dim}"
    xp = _arrays.import_cupy() if gpu else np

    full = np.asarray(reference.prefill(q[None], k[None], v[None], causal=True))
    last = full[0, -1]  # what decode must give for the last token

    prompt, keys, values = (xp.asarray(x) for x in (q[None], k[None], v[None]))
    out, seconds = _timed(lambda: prefill(prompt, keys, values, causal=True), gpu=gpu)
    rows = [Row(f"{layer} prefill", f"{tokens} tokens, {shape}", "-", seconds, 0, _error(out, full))]
    queries = prompt[:, -1]

    def measured(what: str, keys: Array, values: Array) -> Row:
        length = xp.full(1, keys.shape[1], dtype=np.int32)
        splits = str(plan_decode(queries, keys, values, length).num_splits) if gpu else "-"
        out, seconds = _timed(lambda: decode(queries, keys, values, length), gpu=gpu)
        nbytes = keys.nbytes + values.nbytes if gpu else 0
        return Row(f"{layer} {what}", f"{keys.shape[1]} keys, {shape}", splits, seconds, nbytes, _error(out[0], last))

    rows.append(measured("decode", keys, values))
    if gpu:
        # Repeating all keys changes no output: each probability is shared by its copies.
        rows.append(measured(f"decode, text x {_REPEATS}", *(xp.tile(x, (1, _REPEATS, 1, 1)) for x in (keys, values))))

    cut = tokens // 3
    parts = [
        decode(queries, keys[:, a:b], values[:, a:b], b - a, return_lse=True) for a, b in ((0, cut), (cut, tokens))
    ]
    stacked = [xp.stack(x) for x in zip(*parts, strict=True)]
    (out, _), seconds = _timed(lambda: merge(*stacked), gpu=gpu)
    rows.append(
        Row(f"{layer} merge of two parts", f"{cut} + {tokens - cut} keys", "2", seconds, 0, _error(out[0], last))
    )
    return rows


def run() -> int:
    """Print the table and return the exit status: 1 if a result is wrong."""
    write = sys.stdout.write
    found, reason = _info.devices()
    gpu = bool(found)
    if gpu:
        ordinal, device = found[0]
        _arrays.import_cupy().cuda.Device(ordinal).use()
        write(f"device: {device.name} ({device.arch})\n")
    else:
        write(f"device: CPU ({reason}); prefill, decode and merge run the NumPy reference, no kernel runs\n")
    write("data: SmolLM2-135M, 512 tokens, float16; error is against float64 attention over the same values\n\n")
    write(f"{'':<28} {'shapes':<24} {'splits':>6} {'time':>12}  {'error':>8}  {'K and V' if gpu else ''}\n")
    failed = False
    with np.load(DATA) as archive:
        data = dict(archive)
    for layer in LAYERS:
        # Rounding of the result and of the probabilities to float16: 2^-11 each of the largest value, and once more for
        # the parts of a merge.
        limit = 3 * 2.0**-11 * float(np.abs(data[f"{layer}_v"]).max())
        for row in _rows(layer, data, gpu=gpu):
            wrong = row.error is not None and not row.error <= limit
            failed |= wrong
            write(f"{row}{'   WRONG' if wrong else ''}\n")
    write("\n" + ("some results are wrong\n" if failed else "all results agree with the reference\n"))
    return int(failed)
