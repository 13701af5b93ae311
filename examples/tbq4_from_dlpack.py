"""A TBQ4 cache from the arrays of another library, which DLPack hands over without a copy, and its result back.

JAX or PyTorch make the arrays if one of them is installed; else NumPy does, through nothing but its DLPack methods.
"""

from typing import Any

import numpy as np

import cuattn

TOKENS, Q_HEADS, KV_HEADS, HEAD_DIM = 300, 8, 2, 128


class OnlyDlpack:
    """An array that offers DLPack and nothing else: all that cuattn asks of a library."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:  # noqa: ANN401  a capsule
        """Hand the array over."""
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Say where it lies."""
        return self._array.__dlpack_device__()


def library() -> tuple[str, Any, Any]:
    """Return a library's name, what makes its array of a NumPy array, and what takes a result over."""
    try:
        import jax
    except ImportError:
        pass
    else:
        return "JAX", jax.numpy.asarray, jax.dlpack.from_dlpack
    try:
        import torch
    except ImportError:
        return "NumPy (neither JAX nor PyTorch is installed)", OnlyDlpack, np.from_dlpack
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return "PyTorch", lambda x: torch.from_numpy(x).to(device), torch.from_dlpack


def main() -> None:
    """Decode on a TBQ4 cache and on the rows that it was made of."""
    name, make, take = library()
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 1, TOKENS, KV_HEADS, HEAD_DIM))
    rows[0, ..., :4] += 12  # channels of keys that are large in every token, as many models have them
    q = make(rng.standard_normal((1, Q_HEADS, HEAD_DIM)).astype(np.float16))
    k, v = (make(x.astype(np.float16)) for x in rows)

    k_mean = cuattn.channel_mean(k)  # taken out before encoding; attention stays exact in it
    k_cache, v_cache = cuattn.quantize(k, mean=k_mean), cuattn.quantize(v)
    out = take(cuattn.decode(q, k_cache, v_cache, TOKENS))
    exact = take(cuattn.decode(q, k, v, TOKENS))

    got, want = (np.asarray(x if not hasattr(x, "cpu") else x.cpu()).astype(np.float64) for x in (out, exact))
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    small, large = k_cache.nbytes + v_cache.nbytes, 2 * 2 * TOKENS * KV_HEADS * HEAD_DIM
    print(f"arrays of {name}; cache of {small:,} bytes in place of {large:,}; error of the output {100 * error:.1f} %")
    np.testing.assert_array_less(error, 0.2)  # docs/tbq4.md: about 14 % for normal rows, 26 % without the mean


if __name__ == "__main__":
    main()
