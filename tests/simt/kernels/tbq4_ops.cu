// tbq4_ops.cu -- the parts of kv/tbq4_codec.cuh by themselves; the prelude is that of a config of quantize.cu.
// SPDX-License-Identifier: Apache-2.0
//
//   search, lengths   grid (1), any block     encode   grid (1), block a multiple of 32
#include "kv/tbq4_codec.cuh"

// u [8 n]; same, opposite [n]: codes of u and of -u.
extern "C" __global__ void search(const float* u, u32* same, u32* opposite, int n) {
  tbq4::Cells& cells = *reinterpret_cast<tbq4::Cells*>(ptx::dynamic_smem());
  cells.fill(threadIdx.x, blockDim.x);
  __syncthreads();  // the table is there
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    float eight[8];
    for (int j = 0; j < 8; ++j) eight[j] = u[8 * i + j];
    same[i] = tbq4::eight_codes(eight, 1.f, ptx::smem_addr(cells.cells));
    opposite[i] = tbq4::eight_codes(eight, -1.f, ptx::smem_addr(cells.cells));
  }
}

// codes [n, 4]; lengths [n, 3]: squared, of the first, the first two and all four words.
extern "C" __global__ void lengths(const u32* codes, float* lengths, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const u32* c = codes + 4 * i;
    const u32 one[1] = {c[0]}, two[2] = {c[0], c[1]}, four[4] = {c[0], c[1], c[2], c[3]};
    lengths[3 * i] = tbq4::squared_length(one);
    lengths[3 * i + 1] = tbq4::squared_length(two);
    lengths[3 * i + 2] = tbq4::squared_length(four);
  }
}

// x [n, BLOCK] float32, n a multiple of 4; codes [n, BLOCK / 8], norms [n], clamped [1].
extern "C" __global__ void encode(const float* x, u32* codes, u16* norms, int* clamped, int n) {
  tbq4::Cells& cells = *reinterpret_cast<tbq4::Cells*>(ptx::dynamic_smem());
  cells.fill(threadIdx.x, blockDim.x);
  __syncthreads();  // the table is there
  const int sub = threadIdx.x % tbq4::LANES;
  const tbq4::Signs<tbq4::LANES> signs(cfg::SIGNS1, cfg::SIGNS2, sub);
  constexpr int WORDS = tbq4::CODE_BYTES / 4;
  for (int i = threadIdx.x / tbq4::LANES; i < n; i += blockDim.x / tbq4::LANES) {
    float values[tbq4::VALUES];
    for (int j = 0; j < tbq4::VALUES; ++j) values[j] = x[i * cfg::BLOCK + sub * tbq4::VALUES + j];
    u32 words[WORDS];
    const tbq4::Norms result = tbq4::encode(words, values, signs, cells);
    for (int j = 0; j < WORDS; ++j) codes[i * (cfg::BLOCK / 8) + sub * WORDS + j] = words[j];
    if (sub == 0) norms[i] = tbq4::stored_norm(result.sum, result.squared_length, clamped);
  }
}
