// quantize.cu -- rows of fp32, fp16 or bf16 to TBQ4 codes and norms.
// SPDX-License-Identifier: Apache-2.0
//
//   grid   enough for all SMs, or fewer      block  NUM_WARPS * 32
//   warp   tiles of sixteen blocks of BLOCK values, until none is left
//
// Row r of x is [dim0, dim1, heads] index r; a row has HEAD_DIM / BLOCK blocks.
//
// Lane 4g + t reads elements 32c + 8t .. + 7 of blocks g and g + 8. It has their results 64h + 16t .. + 15, eight bytes
// of codes: bit 5 of the index takes the place of bit 3, as operands and results of an MMA may have different bits.
#include "common/params.cuh"
#include "common/ptx.cuh"
#include "kv/tbq4_codec.cuh"
#include "kv/tbq4_tile.cuh"

namespace {

using In = ElemOf<cfg::IN_DTYPE>::type;
// What is compiled for float32 elements too, and never used there.
using Pair16 = ElemOf<cfg::IN_DTYPE == Dtype::FP32 ? Dtype::FP16 : cfg::IN_DTYPE>::type;
using tbq4::CHUNKS;
using tbq4::PER_LANE;
using tbq4::STEPS;

// 16-bit elements are operands as they are. float32 is two tf32.
constexpr bool IS_OPERAND = sizeof(In) == 2;
constexpr int LOADS = CHUNKS * static_cast<int>(sizeof(In)) / 2;  // of 16 bytes of a block in a lane
// Elements of B operands. With 1/16 the squares of results overflow where those of x do, or later.
constexpr float UNIT = IS_OPERAND ? 1.f / 16.f : 1.f;
constexpr float SCALE = cfg::ROOT / UNIT;
constexpr float MAX_FLOAT = 3.402823466e38f;
// MMAs of a block, and the bits of the index whose stages they do.
constexpr int MMAS = 2 * STEPS, MMA_BITS = IS_OPERAND ? 0b111001 : 0b111000;
// Which MMA of a block has the results with the bits of `result`, but for those of lanes and of a lane's two results.
__device__ __forceinline__ constexpr int mma_of(int result) {
  return IS_OPERAND ? result / 64 * 8 + result / 2 % 4 * 2 + result / 8 % 2 : result / 64 * 8 + result % 8;
}
constexpr u32 ALL_BLOCKS = (1u << tbq4::TILE_BLOCKS) - 1;
static_assert(sizeof(QuantizeParams) == cfg::PARAMS_BYTES, "cuattn/_params.py and params.cuh disagree");

struct alignas(128) Tables {
  tbq4::Cells cells;
  float4 results[STEPS][4];  // signs of each four results of lanes t
  uint4 first[STEPS][WARP];  // two B operands of each lane, with the first signs
};
// The means of the blocks of a token, to be subtracted from rows in the midst of their rotation: the results of MMAs
// begin with the mean that has gone through the same stages, which takes no instruction but to load it. What is lost is
// a rounding of the mean, which is too much where little else is left: such blocks are encoded one by one
// (encode_blocks), and all are where MEAN_BLOCKS is 0, as means of so many heads have no place.
struct alignas(128) Means {
  static constexpr u32 BLOCKS = cfg::MEAN_BLOCKS > 0 ? cfg::MEAN_BLOCKS : 1;
  // Eight blocks are one token or several whole ones, so that blocks g and g + 8 of a tile have the mean in place g.
  static constexpr bool REPEAT = cfg::MEAN_BLOCKS > 0 && cfg::MEAN_BLOCKS <= tbq4::TILE_BLOCKS / 2;
  static_assert(!REPEAT || 2 * BLOCKS == tbq4::TILE_BLOCKS, "a place for each of eight blocks");
  // What lane t begins its two results of a block with, of each MMA. Blocks are 32 bytes apart modulo 128, so that
  // lanes of four successive blocks read from all banks at once.
  float2 start[BLOCKS][MMAS * 4 + 4];
  float energy[BLOCKS];  // sum of squares
};
// A block has at least this part of the energy of its mean, or else it is encoded by itself. Roundings that are 16
// times what they are without a mean, or 8 times what those of two tf32 are, move one block of 3000 over a boundary.
constexpr float LEAST_PART = IS_OPERAND ? 1.f / 256.f : 1.f / 64.f;
constexpr u32 MEANS_BYTES = cfg::MEAN_BLOCKS > 0 ? sizeof(Means) : 0;
constexpr u32 PIECES = 4 * LOADS;                 // of 16 bytes of a block
using Stage = uint4[tbq4::TILE_BLOCKS * PIECES];  // the next input of a warp
static_assert(sizeof(Tables) + MEANS_BYTES + cfg::NUM_WARPS * sizeof(Stage) == cfg::SMEM_BYTES,
              "plan and kernel disagree on shared memory");

// Elements k = 2t, 2t + 1 of the B operand of m16n8k16 for inputs `in` and `in` + 1, and results 8 * bit3 higher: the
// stages of bits 5, 4, 3 and 0.
__device__ __forceinline__ u32 pair_operand(u32 in, u32 bit3, u32 lane) {
  constexpr u32 SIXTEENTHS = cfg::IN_DTYPE == Dtype::BF16 ? 0x3d803d80 : 0x2c002c00;
  const u32 out = lane / 8 * 16 + 8 * bit3 + lane / 4 % 2;
  return SIXTEENTHS | tbq4::is_negative(cfg::SIGNS1, in, out) << 15 | tbq4::is_negative(cfg::SIGNS1, in + 1, out) << 31;
}
// Element k of the B operand of m16n8k8 for input 64h + 32k + 8t + j: the stages of bits 5, 4 and 3.
__device__ __forceinline__ u32 float_operand(u32 h, u32 k, u32 j, u32 lane) {
  const u32 in = 64 * h + 32 * k + 8 * (lane % 4) + j;
  return 0x3f800000u | tbq4::is_negative(cfg::SIGNS1, in, lane / 4 * 8) << 31;
}

__device__ __forceinline__ void fill(Tables& tables) {
  constexpr u32 THREADS = cfg::NUM_WARPS * WARP;
  tables.cells.fill(threadIdx.x, THREADS);
  for (u32 i = threadIdx.x; i < STEPS * 4; i += THREADS) {
    const u32 step = i / 4, t = i % 4, out = step / 4 * 64 + t * 16 + step % 4 * 4;
    const auto sign = [out](u32 j) { return tbq4::is_negative(cfg::SIGNS2, out + j, 0) ? -1.f : 1.f; };
    tables.results[step][t] = make_float4(sign(0), sign(1), sign(2), sign(3));
  }
  for (u32 i = threadIdx.x; i < STEPS * WARP; i += THREADS) {
    const u32 lane = i % WARP, h = i / WARP / 4, j = i / WARP % 4 * 2;
    if constexpr (IS_OPERAND) {
      const u32 in = 64 * h + 8 * (lane % 4) + j;
      tables.first[i / WARP][lane] = make_uint4(pair_operand(in, 0, lane), pair_operand(in + 32, 0, lane),
                                                pair_operand(in, 1, lane), pair_operand(in + 32, 1, lane));
    } else {
      tables.first[i / WARP][lane] = make_uint4(float_operand(h, 0, j, lane), float_operand(h, 1, j, lane),
                                                float_operand(h, 0, j + 1, lane), float_operand(h, 1, j + 1, lane));
    }
  }
}

// Where block `at` begins.
__device__ __forceinline__ i64 offset_of(const QuantizeParams& p, const tbq4::Place& at) {
  return at.i0 * p.x_stride_dim0 + at.i1 * p.x_stride_dim1 + at.head * p.x_stride_head +
         static_cast<i64>(at.part * cfg::BLOCK * sizeof(In));
}

// Element i of 16-byte loads.
template <class Elem>
__device__ __forceinline__ float element(const uint4 (&loads)[LOADS], int i, Elem) {
  return ptx::to_float(Elem{static_cast<u16>(tbq4::word_of(loads[i / 8], i % 8 / 2) >> i % 2 * 16)});
}
__device__ __forceinline__ float element(const uint4 (&loads)[LOADS], int i, float) {
  return __uint_as_float(tbq4::word_of(loads[i / 4], i % 4));
}

// Whether each block begins where the one before ends.
__device__ __forceinline__ bool is_contiguous(const QuantizeParams& p) {
  const i64 row = cfg::HEAD_DIM * sizeof(In), rows1 = p.heads, rows0 = rows1 * p.dim1;  // of a step of dim1, of dim0
  return (rows1 == 1 || p.x_stride_head == row) && (rows0 == rows1 || p.x_stride_dim1 == rows1 * row) &&
         (p.num_rows == rows0 || p.x_stride_dim0 == rows0 * row);
}

// Where the blocks of a tile are.
struct Source {
  const u8* x;
  bool in_line;          // one behind the other, from x on
  i64 offset;            // else, of block lane % 16; past the end the last block is repeated
  u32 mean[2] = {0, 0};  // which blocks of a token blocks g and g + 8 are, where they do not repeat

  __device__ __forceinline__ Source(const QuantizeParams& p, const tbq4::Rows& shape, bool contiguous, u32 first,
                                    u32 num_blocks, u32 lane) {
    x = p.x;
    in_line = contiguous && first + tbq4::TILE_BLOCKS <= num_blocks;
    if (in_line) x += static_cast<i64>(first) * (cfg::BLOCK * sizeof(In));
    const u32 block = min(first + lane % tbq4::TILE_BLOCKS, num_blocks - 1);
    if (!in_line) offset = offset_of(p, tbq4::Place(block, shape));
    if constexpr (cfg::MEAN_BLOCKS > 0 && !Means::REPEAT) {
      u32 head;
      shape.heads.divide(block / tbq4::BLOCKS_PER_ROW, head);
      const u32 in_token = head * tbq4::BLOCKS_PER_ROW + block % tbq4::BLOCKS_PER_ROW;
#pragma unroll
      for (int r = 0; r < 2; ++r) mean[r] = __shfl_sync(FULL_MASK, in_token, static_cast<int>(lane / 4) + 8 * r);
    }
  }
};

// What a lane reads. It goes through shared memory, so that it is on its way while the tile before is encoded, and
// takes no registers until then. Eight lanes copy a line of 128 bytes to a line: pieces of a line that go to several
// are asked for one by one, and L2 has no time for that. In every second block pieces are exchanged, so that the lanes
// of two blocks read from all banks at once.
struct Input {
  static constexpr u32 PER_CHUNK = sizeof(In) / 2;  // neighboring pieces of one lane
  uint4 raw[2][LOADS];

  static __device__ __forceinline__ u32 place(u32 block, u32 piece) {
    return block * PIECES + (piece ^ block % 2 * (PER_CHUNK == 1 ? 4 : 1));
  }
  static constexpr u32 BLOCKS_AT_ONCE = WARP / PIECES;  // of a copy of the warp
  // Where this lane copies to, but for what is the same in all lanes: WARP pieces a copy.
  struct Targets {
    u32 even, odd;  // in such copies

    __device__ __forceinline__ explicit Targets(u32 lane)
        : even(place(lane / PIECES, lane % PIECES)),
          odd(BLOCKS_AT_ONCE % 2 == 0 ? even : place(1, lane % PIECES) - PIECES) {}
    __device__ __forceinline__ u32 of(int copy) const { return (copy % 2 == 0 ? even : odd) + copy * WARP; }
  };
  static __device__ __forceinline__ void prefetch(const Source& source, Stage& stage, u32 lane) {
    const Targets targets(lane);
    if (source.in_line) {
      const u8* from = source.x + lane * 16;
#pragma unroll
      for (int copy = 0; copy < 2 * LOADS; ++copy) {
        ptx::cp_async16(&stage[targets.of(copy)], from + copy * WARP * 16, true);
      }
    } else {
#pragma unroll
      for (int copy = 0; copy < 2 * LOADS; ++copy) {
        const u32 block = (copy * WARP + lane) / PIECES, piece = (copy * WARP + lane) % PIECES;
        const i64 offset = __shfl_sync(FULL_MASK, source.offset, static_cast<int>(block));
        ptx::cp_async16(&stage[targets.of(copy)], source.x + offset + piece * 16, true);
      }
    }
    ptx::cp_async_commit();
  }

  __device__ __forceinline__ Input(const Stage& stage, u32 lane) {
    ptx::cp_async_wait<0>();
    __syncwarp();  // what all lanes have copied is there
    // Pieces of two loads lie in eight successive ones, as those of the next two do.
    const auto piece = [lane](u32 load) {
      return load / PER_CHUNK * 4 * PER_CHUNK + lane % 4 * PER_CHUNK + load % PER_CHUNK;
    };
    const u32 first[2] = {place(lane / 4, piece(0)), place(lane / 4, piece(1))};
#pragma unroll
    for (int i = 0; i < 2 * LOADS; ++i) {
      const int load = i % LOADS;
      raw[i / LOADS][load] = stage[first[load % 2] + load / 2 * 8 + i / LOADS * 8 * PIECES];
    }
  }

  // Elements 32c + 8t .. + 7 of block r.
  __device__ __forceinline__ void chunk(float (&values)[8], int r, int c) const {
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = element(raw[r], 8 * c + j, In{});
  }
};

// Sum over the four lanes of a block, the same in each.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(FULL_MASK, x, 1);
  return x + __shfl_xor_sync(FULL_MASK, x, 2);
}
// Sums over the four lanes of a block: of x in those with an even t, of y in the others.
__device__ __forceinline__ float quad_sums(float x, float y, u32 t) {
  const float own = t % 2 != 0 ? y : x, other = t % 2 != 0 ? x : y;
  const float two = own + __shfl_xor_sync(FULL_MASK, other, 1);
  return two + __shfl_xor_sync(FULL_MASK, two, 2);
}

// What the results of MMAs of a tile begin with.
struct Start {
  const float2* of[2];  // of the means of blocks g and g + 8

  __device__ __forceinline__ Start(const Means* means, const u32 (&places)[2], u32 t)
      : of{means->start[places[0]] + t, means->start[places[1]] + t} {}
  // d <- a b, minus the mean if there is one; this is the MMA with this index of those of a block.
  template <class Elem>
  __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], int mma) const {
    if constexpr (cfg::WITH_MEAN) {
      const float2 low = of[0][4 * mma], high = Means::REPEAT ? low : of[1][4 * mma];
      d[0] = low.x, d[1] = low.y, d[2] = high.x, d[3] = high.y;
      if constexpr (SAME<Elem, float>) {
        ptx::mma_m16n8k8_tf32(d, a, b);
      } else {
        ptx::mma_m16n8k16<Elem>(d, a, b);
      }
    } else if constexpr (SAME<Elem, float>) {
      ptx::mul_m16n8k8_tf32(d, a, b);
    } else {
      ptx::mul_m16n8k16<Elem>(d, a, b);
    }
  }
};

// The sum of the squares of x from those of y = UNIT H x: H only turns x and makes it longer.
__device__ __forceinline__ float sum_of_squares(const float (&y)[PER_LANE]) {
  float squares[2] = {};
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) squares[i % 2] += y[i] * y[i];
  return quad_sum(squares[0] + squares[1]) * (1.f / (UNIT * UNIT * cfg::BLOCK));
}

// y <- UNIT H s1 x of 16-bit elements. One MMA for the stages of bits 5, 4, 3 and 0, two operands for the values of bit
// 3 of the result; products and their sums are exact but for elements of very different size.
template <class Elem>
__device__ __forceinline__ void rotate_operands(float (&y)[2][PER_LANE], float (&sums)[2], const Input& x,
                                                const Tables& tables, const Start& start, u32 lane) {
#pragma unroll
  for (int h = 0; h < STEPS / 4; ++h) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const u32 a[4] = {tbq4::word_of(x.raw[0][2 * h], q), tbq4::word_of(x.raw[1][2 * h], q),
                        tbq4::word_of(x.raw[0][2 * h + 1], q), tbq4::word_of(x.raw[1][2 * h + 1], q)};
      const uint4 b = tables.first[4 * h + q][lane];
      const u32 operands[2][2] = {{b.x, b.y}, {b.z, b.w}};
#pragma unroll
      for (int bit3 = 0; bit3 < 2; ++bit3) {
        float d[4];
        start.multiply<Elem>(d, a, operands[bit3], mma_of(64 * h + 8 * bit3 + 2 * q));
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i / 2][16 * h + 8 * bit3 + 2 * q + i % 2] = d[i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    tbq4::butterflies<0b10110>(y[r]);
    sums[r] = sum_of_squares(y[r]);
  }
}

// y <- H s1 x of float32 values, to about 2^-22. One MMA for the stages of bits 5, 4 and 3.
__device__ __forceinline__ void rotate_floats(float (&y)[2][PER_LANE], float (&sums)[2], const Input& x,
                                              const Tables& tables, const Start& start, u32 lane) {
  sums[0] = sums[1] = 0.f;
#pragma unroll
  for (int h = 0; h < STEPS / 4; ++h) {
    float values[4][8];  // in the order of an A operand
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x.chunk(values[i], i % 2, 2 * h + i / 2);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (!cfg::WITH_MEAN) sums[i % 2] += values[i][j] * values[i][j];
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint4 b = tables.first[4 * h + j / 2][lane];
      const u32 operand[2] = {j % 2 != 0 ? b.z : b.x, j % 2 != 0 ? b.w : b.y};
      u32 high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        high[i] = __float_as_uint(values[i][j]) & 0xffffe000u;  // what a tf32 has
        low[i] = __float_as_uint(values[i][j] - __uint_as_float(high[i]));
      }
      float d[4];
      start.multiply<float>(d, high, operand, mma_of(64 * h + j));
      ptx::mma_m16n8k8_tf32(d, low, operand);
#pragma unroll
      for (int i = 0; i < 4; ++i) y[i / 2][16 * h + 8 * (i % 2) + j] = d[i];
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    tbq4::butterflies<0b10111>(y[r]);
    sums[r] = cfg::WITH_MEAN ? sum_of_squares(y[r]) : quad_sum(sums[r]);
  }
}

// Fills the means; a barrier must follow.
__device__ __forceinline__ void fill(Means& means, const QuantizeParams& p) {
  using tbq4::LANES;
  const u32 of_token = static_cast<u32>(p.heads) * tbq4::BLOCKS_PER_ROW, sub = threadIdx.x % LANES;
  const u32 blocks = Means::REPEAT ? Means::BLOCKS : of_token;
  const tbq4::Signs<LANES> signs(cfg::SIGNS1, cfg::SIGNS2, static_cast<int>(sub));
#pragma unroll 1
  for (u32 first = threadIdx.x / WARP * (WARP / LANES); first < blocks; first += cfg::NUM_WARPS * (WARP / LANES)) {
    const u32 block = min(first + threadIdx.x % WARP / LANES, blocks - 1);
    const float* mean = p.mean + (Means::REPEAT ? block % of_token : block) * cfg::BLOCK + sub * tbq4::VALUES;
    float x[tbq4::VALUES], energy = 0.f;
#pragma unroll
    for (int j = 0; j < tbq4::VALUES; ++j) {
      x[j] = __ldg(mean + j) * signs.first[j];
      energy += x[j] * x[j];
      x[j] *= -UNIT;
    }
    tbq4::hadamard<LANES, MMA_BITS>(x, signs);
#pragma unroll
    for (int j = 0; j < tbq4::VALUES; ++j) {
      // Result `out` of the block is this one of the two of lane t.
      const int out = static_cast<int>(sub) * tbq4::VALUES + j, t = out / 16 % 4;
      float2& pair = means.start[block][mma_of(out) * 4 + t];
      ((IS_OPERAND ? out % 2 : out / 8 % 2) != 0 ? pair.y : pair.x) = x[j];
    }
    energy = tbq4::block_sum(energy);
    if (sub == 0) means.energy[block] = energy;
  }
}

// Encodes those of sixteen blocks whose bits in `which` are set, eight lanes a block, with exact differences from the
// mean, and by the rules where sums of squares are not finite.
__device__ __forceinline__ void encode_blocks(const QuantizeParams& p, const tbq4::Rows& shape,
                                              const tbq4::Cells& cells, u32 first, u32 which) {
  using tbq4::LANES;
  const u32 sub = threadIdx.x % LANES;
  const tbq4::Signs<LANES> signs(cfg::SIGNS1, cfg::SIGNS2, static_cast<int>(sub));
#pragma unroll 1
  for (u32 of_tile = threadIdx.x % WARP / LANES; of_tile < tbq4::TILE_BLOCKS; of_tile += WARP / LANES) {
    const bool wanted = (which >> of_tile & 1) != 0;
    if (!__any_sync(FULL_MASK, wanted)) continue;
    float x[tbq4::VALUES] = {};
    if (wanted) {
      const tbq4::Place at(first + of_tile, shape);
      const In* row = reinterpret_cast<const In*>(p.x + offset_of(p, at)) + sub * tbq4::VALUES;
      const float* mean = p.mean + at.head * cfg::HEAD_DIM + at.part * cfg::BLOCK + sub * tbq4::VALUES;
#pragma unroll
      for (int j = 0; j < tbq4::VALUES; ++j) {
        x[j] = ptx::to_float(row[j]);
        if constexpr (cfg::WITH_MEAN) x[j] -= __ldg(mean + j);
      }
    }
    u32 words[tbq4::CODE_BYTES / 4];
    const tbq4::Norms norms = tbq4::encode(words, x, signs, cells);
    if (!wanted) continue;
    const u32 block = first + of_tile;
    u32* codes = reinterpret_cast<u32*>(p.codes + static_cast<i64>(block) * (cfg::BLOCK / 2) + sub * tbq4::CODE_BYTES);
#pragma unroll
    for (int i = 0; i < tbq4::CODE_BYTES / 4; ++i) codes[i] = words[i];
    if (sub == 0) p.norms[block] = tbq4::stored_norm(norms.sum, norms.squared_length, p.clamped);
  }
}

__device__ __forceinline__ void quantize(const QuantizeParams& p, Tables& tables, Means* means, Stage* stages) {
  fill(tables);
  ptx::griddepcontrol_wait();
  if constexpr (cfg::MEAN_BLOCKS > 0) fill(*means, p);
  __syncthreads();  // the tables are there, and the means
  const u32 lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const tbq4::Rows shape(p.heads, p.dim1);
  const u32 num_blocks = static_cast<u32>(p.num_rows) * tbq4::BLOCKS_PER_ROW;
  const u32 step = gridDim.x * cfg::NUM_WARPS * tbq4::TILE_BLOCKS;
  u32 first = (blockIdx.x * cfg::NUM_WARPS + threadIdx.x / WARP) * tbq4::TILE_BLOCKS;
  const auto in_tile = [&] { return ALL_BLOCKS >> (tbq4::TILE_BLOCKS - min(tbq4::TILE_BLOCKS, num_blocks - first)); };
  if constexpr (cfg::WITH_MEAN && cfg::MEAN_BLOCKS == 0) {
    for (; first < num_blocks; first += step) encode_blocks(p, shape, tables.cells, first, in_tile());
    return;
  }
  if (first >= num_blocks) return;
  const bool contiguous = is_contiguous(p);
  Source source(p, shape, contiguous, first, num_blocks, lane);
  Stage& stage = stages[threadIdx.x / WARP];
  Input::prefetch(source, stage, lane);
  for (; first < num_blocks; first += step) {
    float y[2][PER_LANE], sums[2];
    const Input x(stage, lane);
    const u32 places[2] = {Means::REPEAT ? g : source.mean[0], Means::REPEAT ? g : source.mean[1]};
    const Start start(means, places, t);
    if constexpr (IS_OPERAND) {
      rotate_operands<Pair16>(y, sums, x, tables, start, lane);
    } else {
      rotate_floats(y, sums, x, tables, start, lane);
    }
    __syncwarp();  // all lanes have read the stage
    if (first + step < num_blocks) {
      source = Source(p, shape, contiguous, first + step, num_blocks, lane);
      Input::prefetch(source, stage, lane);
    }
    bool by_itself[2] = {};
    if constexpr (cfg::WITH_MEAN) {
#pragma unroll
      for (int r = 0; r < 2; ++r) by_itself[r] = sums[r] < LEAST_PART * means->energy[places[r]];
    }

    const float scales[2] = {SCALE * tbq4::inverse_norm(sums[0]), SCALE * tbq4::inverse_norm(sums[1])};
    const u32 cells = ptx::smem_addr(tables.cells.cells);
    u32 codes[2][PER_LANE / 8];
#pragma unroll
    for (int i = 0; i < PER_LANE / 8; ++i) {
      const float4 low = tables.results[2 * i][t], high = tables.results[2 * i + 1][t];
      const float signs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float u[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) u[j] = y[r][8 * i + j] * signs[j];
        codes[r][i] = tbq4::eight_codes(u, scales[r], cells);
      }
    }
    const float length = quad_sums(tbq4::squared_length(codes[0]), tbq4::squared_length(codes[1]), t);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      by_itself[r] = by_itself[r] || !(sums[r] <= MAX_FLOAT);
      const u32 block = first + g + 8 * r;
      if (block >= num_blocks || by_itself[r]) continue;
      u8* target = p.codes + static_cast<i64>(block) * (cfg::BLOCK / 2) + 8 * t;
#pragma unroll
      for (int h = 0; h < STEPS / 4; ++h) {
        *reinterpret_cast<uint2*>(target + 32 * h) = make_uint2(codes[r][2 * h], codes[r][2 * h + 1]);
      }
    }
    // Lane t = 0 has the norm of block g, and lane t = 1 that of block g + 8.
    const u32 block = first + g + 8 * t;
    if (t < 2 && block < num_blocks && !(t != 0 ? by_itself[1] : by_itself[0])) {
      p.norms[block] = tbq4::stored_norm(t != 0 ? sums[1] : sums[0], length, p.clamped);
    }
    if (__any_sync(FULL_MASK, by_itself[0] || by_itself[1])) {
      u32 which = 0;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const u32 lanes = __ballot_sync(FULL_MASK, by_itself[r]);
#pragma unroll
        for (int i = 0; i < 8; ++i) which |= (lanes >> 4 * i & 1) << (8 * r + i);
      }
      encode_blocks(p, shape, tables.cells, first, which & in_tile());
    }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(cfg::NUM_WARPS* WARP, cfg::CTAS_PER_SM)
    quantize_kernel(const __grid_constant__ QuantizeParams p) {
  u8* smem = ptx::dynamic_smem();
  u8* means = smem + sizeof(Tables);
  quantize(p, *reinterpret_cast<Tables*>(smem), reinterpret_cast<Means*>(means),
           reinterpret_cast<Stage*>(means + MEANS_BYTES));
}
