"""The yardstick of the error law adds as the tensor cores do: `reference.tensor_core` bit for bit."""

import cupy
import numpy as np
import pytest
from strategies import DTYPES

from cuattn import _arrays, _jit, _nvrtc, reference

# c = a b for tiles a [tiles, 16, depth], b [tiles, 8, depth] (columns of b), c [tiles, 16, 8]; one warp a tile.
KERNEL = """
#include "common/ptx.cuh"
extern "C" __global__ void __launch_bounds__(32) product(const u32* a, const u32* b, float* c, int depth) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4, words = depth / 2;
  a += blockIdx.x * 16 * words;
  b += blockIdx.x * 8 * words;
  c += blockIdx.x * 128;
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  for (int k = 0; k < words; k += 8) {
    const u32 left[4] = {a[g * words + k + t], a[(g + 8) * words + k + t], a[g * words + k + t + 4],
                         a[(g + 8) * words + k + t + 4]};
    const u32 right[2] = {b[g * words + k + t], b[g * words + k + t + 4]};
    ptx::mma_m16n8k16<ELEM>(d, left, right);
  }
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}
"""
ELEMENTS = {"float16": "Half", "bfloat16": "Bfloat16"}
TILES, DEPTH = 40, 256


def draw(kind, shape, rng):
    x = rng.standard_normal(shape)
    if kind == "positive":  # every truncation goes the same way
        return np.abs(x)
    return x * 2.0 ** rng.integers(-8, 8, shape) if kind == "wide" else x


@pytest.mark.parametrize("kind", ["normal", "positive", "wide"])
@pytest.mark.parametrize("dtype", list(ELEMENTS))
def test_the_yardstick_adds_bit_for_bit_as_the_tensor_cores_of_an_h200(dtype, kind, tmp_path):
    device = _arrays.device(cupy.cuda.Device().id)
    if device.arch != "sm_90a":
        pytest.skip(reason=f"the yardstick is that of sm_90a, the device is {device.arch}")
    text = KERNEL.replace("ELEM", ELEMENTS[dtype])
    path = tmp_path / "product.cubin"
    path.write_bytes(_nvrtc.compile_cubin(text, name="product", arch=device.arch, include=_jit.CUDA_SRC).cubin)
    rng = np.random.default_rng(5)
    a, b = (draw(kind, (TILES, rows, DEPTH), rng).astype(DTYPES[dtype]) for rows in (16, 8))
    got = cupy.full((TILES, 16, 8), cupy.nan, cupy.float32)
    words = [cupy.asarray(x.view(np.uint32)) for x in (a, b)]
    cupy.RawModule(path=str(path)).get_function("product")((TILES,), (32,), (*words, got, np.int32(DEPTH)))
    want = np.stack([reference.tensor_core(x, y.T) for x, y in zip(a, b, strict=True)])
    np.testing.assert_array_equal(got.get(), want)
