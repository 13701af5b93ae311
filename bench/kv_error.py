"""What each KV format costs in accuracy on real data: error of the attention output against bits a value."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import cuattn
from cuattn import reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    Array = npt.NDArray[Any]

LAYERS = (0, 15, 29)
# Query tokens, each against its own prefix; the mean is that of the keys before them, as a prompt would give it.
QUERIES = 64
KEPT = 1
_E4M3 = ml_dtypes.float8_e4m3fn


def layer(number: int) -> tuple[Array, Array, Array]:
    """Return q, k and v of a layer of SmolLM2, ``[tokens, heads, head_dim]`` in float16."""
    with resources.files("cuattn.examples").joinpath("smollm2_qkv.npz").open("rb") as file, np.load(file) as data:
        q, k, v = (data[f"l{number:02}_{name}"] for name in "qkv")
    return q, k, v


def _fp8(x: Array) -> tuple[Array, int]:
    """Round rows to fp8 e4m3 with one float32 scale a KV head that makes its largest value the largest of e4m3."""
    scale = np.abs(x).max(axis=(0, 2), keepdims=True).astype(np.float32) / np.float32(ml_dtypes.finfo(_E4M3).max)
    rounded = (x / scale).astype(_E4M3)
    return rounded.astype(np.float32) * scale, rounded.nbytes + scale.nbytes


def _tbq4(x: Array, mean: Array | None = None) -> tuple[Array, int]:
    rows = cuattn.quantize(x, mean=mean)
    return cuattn.dequantize(rows), rows.nbytes + (0 if mean is None else mean.nbytes)


def stored(k: Array, v: Array) -> Iterator[tuple[str, Array, Array, int]]:
    """Yield name, keys and values as attention sees them, and bytes of both, of every format."""
    yield "fp16", k, v, k.nbytes + v.nbytes
    bf16 = [x.astype(ml_dtypes.bfloat16) for x in (k, v)]
    yield "bf16", *(x.astype(np.float32) for x in bf16), sum(x.nbytes for x in bf16)
    (keys, k_bytes), (values, v_bytes) = map(_fp8, (k, v))
    yield "fp8", keys, values, k_bytes + v_bytes
    (keys, k_bytes), (values, v_bytes) = map(_tbq4, (k, v))
    yield "tbq4", keys, values, k_bytes + v_bytes
    keys, k_bytes = _tbq4(k, cuattn.channel_mean(k[:-QUERIES]))
    yield "tbq4, mean", keys, values, k_bytes + v_bytes
    keys, values = (np.concatenate((exact[:KEPT], x[KEPT:])) for exact, x in ((k, keys), (v, values)))
    yield "tbq4, mean, sink", keys, values, k_bytes + v_bytes + k[:KEPT].nbytes + v[:KEPT].nbytes


def errors() -> dict[str, list[tuple[int, float, float]]]:
    """Return (layer, bits a value, error) of each format.

    The error of an output is its distance from that of the exact keys and values, relative to it; mean over the last
    tokens and all heads. Attention itself is in float64, so that the format alone counts.
    """
    found: dict[str, list[tuple[int, float, float]]] = {}
    for number in LAYERS:
        q, k, v = layer(number)

        def attend(keys: Array, values: Array, q: Array = q) -> Array:
            out: Array = reference.attention(q[None, -QUERIES:], keys[None], values[None], causal=True)[0]
            return out

        exact = attend(k, v)
        for name, keys, values, nbytes in stored(k, v):
            distance = np.linalg.norm(attend(keys, values) - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
            found.setdefault(name, []).append((number, 8 * nbytes / (k.size + v.size), float(distance.mean())))
    return found
