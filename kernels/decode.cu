// One persistent kernel that decodes greedy tokens of a Qwen3 model from its packed weights.
//
// BLOCKS blocks, one an SM, stay for all tokens of a draft. In each, one producer thread streams the
// block's share of the weights through a ring in shared memory by bulk copies, never waiting for an
// activation; 16 consumer warps decode them and multiply on the tensor cores. Between stages blocks
// hand over values as tagged words {value, epoch} in one 8-byte store: no fence, no counter.
//
// A chunk is 16 rows × 2,048 columns. Warp w has columns 128·w …: eight 16 × 16 tiles, two scale
// groups. One byte of codes is two neighbouring columns, which is one register of an
// m16n8k16 A fragment: a 256-entry table of half2 turns it into values. The activation is column 0
// of B, and what fp16 rounds off it, times 2^11, is column 1; so products keep 22 bits of it.
//
// Dimensions come as macros: HIDDEN, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY,
// BLOCKS, EPSILON, EXCHANGE_WORDS, SHARED_BYTES. The layout of the weights is kernels/layout.py's.

// Without headers, so that NVRTC needs nothing but this file.
typedef unsigned short u16;  // bits of a bf16 or fp16
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARPS = 16, CONSUMERS = WARPS * 32, THREADS = CONSUMERS + 32;
constexpr int CHUNK_ROWS = 16, CHUNK_COLUMNS = 2048, GROUP = 64;
constexpr int SCALE_BYTES = CHUNK_ROWS * (CHUNK_COLUMNS / GROUP) * 2;            // 1,024
constexpr int BODY_BYTES = CHUNK_ROWS * CHUNK_COLUMNS / 2 + SCALE_BYTES;         // 17,408
constexpr int HEAD_BYTES = CHUNK_ROWS * CHUNK_COLUMNS * 3 / 4 + SCALE_BYTES;     // 25,600
constexpr int BODY_SLOTS = 8, HEAD_SLOTS = 5, RING_BYTES = BODY_SLOTS * BODY_BYTES;
constexpr int SPLITS = BLOCKS / KV_HEADS, GROUP_HEADS = Q_HEADS / KV_HEADS;      // 16, 2
constexpr int QKV_ROWS = (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM / BLOCKS;           // 32
constexpr int OWN_ROWS = HIDDEN / BLOCKS, OWN_ACTS = INTERMEDIATE / BLOCKS;      // 16, 48
constexpr int QKV_CHUNKS = QKV_ROWS / CHUNK_ROWS, O_CHUNKS = OWN_ROWS / CHUNK_ROWS;
constexpr int GU_CHUNKS = 2 * OWN_ACTS / CHUNK_ROWS, SLICES = INTERMEDIATE / CHUNK_COLUMNS;
constexpr int LAYER_CHUNKS = QKV_CHUNKS + O_CHUNKS + GU_CHUNKS + SLICES;         // 12
constexpr int HEAD_CHUNKS = VOCABULARY / CHUNK_ROWS;
constexpr int HEAD_BATCH = 4;                  // chunks between two sums over the warps
constexpr int TILE = 8;                        // neighbouring positions that one split owns
constexpr int PARTIAL = HEAD_DIM + 2;          // a head's output, maximum and sum
constexpr float LOW = 1.0f / 2048.0f;          // what column 1 is worth
constexpr float SHRINK = 1.0f / 256.0f;        // of the down-projection's input, which can be huge

static_assert(HIDDEN == CHUNK_COLUMNS && INTERMEDIATE % CHUNK_COLUMNS == 0, "width");
static_assert(HEAD_DIM == 128 && SPLITS == 16 && GROUP_HEADS == 2, "heads");
static_assert(QKV_ROWS == 32 && OWN_ROWS == 16 && OWN_ACTS % 8 == 0 && VOCABULARY % 16 == 0, "rows");

struct Arguments {
  const unsigned char *body;       // (LAYERS, BLOCKS, LAYER_CHUNKS, BODY_BYTES)
  const unsigned char *head;       // (HEAD_CHUNKS, HEAD_BYTES)
  const float *norms;              // (2 LAYERS + 1, HIDDEN): before attention, before MLP, ..., last
  const float *head_norms;         // (LAYERS, 2, HEAD_DIM): of q, of k
  const float *rope;               // (positions, 2, HEAD_DIM / 2): cos, sin
  const float *codebook;           // (16,)
  u16 *keys, *values;    // (LAYERS, KV_HEADS, length, HEAD_DIM) bf16
  u64 *exchange;                   // EXCHANGE_WORDS tagged words
  const long long *given;          // (given_count,) tokens to begin with, one at least
  const long long *position;       // of the first of them
  long long *tokens;               // (count,) out: what follows the last given one
  float *probabilities;            // (count,) out
  long long *steps;                // out: how many steps ran
  int *error;                      // set where a wait took too long
  long long length;                // of the KV cache
  u32 epoch;                       // tags grow from here; never used before
  int given_count, count;
};

// Words of the exchange, by what they carry.
constexpr int X_QKV = 0, X_PART = X_QKV + KV_HEADS * 4 * HEAD_DIM;
constexpr int X_ATTENTION = X_PART + BLOCKS * GROUP_HEADS * PARTIAL;
constexpr int X_RESIDUAL = X_ATTENTION + Q_HEADS * HEAD_DIM;
constexpr int X_ACT = X_RESIDUAL + HIDDEN, X_BEST = X_ACT + INTERMEDIATE;
static_assert(X_BEST + 3 * BLOCKS <= EXCHANGE_WORDS, "the exchange is too small");

struct Shared {
  alignas(128) unsigned char ring[RING_BYTES];
  // Entry e at 256·e, a copy for each lane in its first half; the second halves hold the activation:
  // word i (column 0 | column 1 << 16) is at 256·(i / 32) + 128 + 4·(i % 32).
  alignas(256) unsigned char table[256 * 256];
  float partial[WARPS][GROUP_HEADS][PARTIAL];
  float sums[6 * CHUNK_ROWS][WARPS];
  float group[4][HEAD_DIM];        // q, q, k, v of this block's key head
  float residual[OWN_ROWS];        // this block's rows of it
  float warp_sums[2][WARPS];
  u64 best[WARPS];
  float best_sum[WARPS];
  alignas(8) u64 full[BODY_SLOTS], empty[BODY_SLOTS];
  int late;                        // a wait took too long: everybody hurries to the end
#ifdef CLOCKS
  long long clock, clocks[CLOCKS];  // where thread 0's time went
#endif
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the shared memory is too small");

// ------------------------------------------------------------------------------- small things

// Built with -DCLOCKS=16, thread 0 of each block adds up its clocks by what it did last.
#ifdef CLOCKS
extern "C" __device__ long long clocks_of[BLOCKS][CLOCKS];
__device__ __forceinline__ void mark(Shared &s, int what) {
  if (threadIdx.x == 0) {
    long long now = clock64();
    s.clocks[what] += now - s.clock;
    s.clock = now;
  }
}
#else
__device__ __forceinline__ void mark(Shared &, int) {}
#endif

#define NOTHING __int_as_float(0xff800000)  // -infinity

__device__ __forceinline__ float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ u16 to_bf16(float x) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ float from_half(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}

__device__ __forceinline__ u16 to_half(float x) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}

__device__ __forceinline__ u32 smem(const void *p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void consumers_meet() {
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
}

__device__ __forceinline__ void barrier_init(u64 *barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem(barrier)), "r"(count));
}

__device__ __forceinline__ void barrier_arrive(u64 *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem(barrier)) : "memory");
}

__device__ __forceinline__ bool barrier_done(u64 *barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(smem(barrier)), "r"(parity)
      : "memory");
  return done;
}

// Waits give up after about a second and say so, instead of hanging the GPU.
constexpr long long PATIENCE = 2000000000ll;

__device__ void wait_barrier(u64 *barrier, u32 parity, Shared &s, int *error) {
  long long began = 0;
  while (!barrier_done(barrier, parity)) {
    if (*reinterpret_cast<volatile int *>(&s.late)) return;
    if (began == 0) began = clock64();
    if (clock64() - began > PATIENCE) {
      s.late = 1;
      *error = 1;
    }
  }
}

__device__ __forceinline__ void publish(u64 *word, float value, u32 epoch) {
  u64 both = static_cast<u64>(epoch) << 32 | __float_as_uint(value);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(both) : "memory");
}

__device__ float await(const u64 *word, u32 epoch, Shared &s, int *error) {
  long long began = 0;
  while (true) {
    u64 both;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(word) : "memory");
    if (static_cast<u32>(both >> 32) == epoch) return __uint_as_float(static_cast<u32>(both));
    if (*reinterpret_cast<volatile int *>(&s.late)) return 0.0f;
    if (began == 0) began = clock64();
    if (clock64() - began > PATIENCE) {
      s.late = 1;
      *error = 1;
    }
  }
}

template <int N>
__device__ void await_all(const u64 *words, int stride, u32 epoch, float (&values)[N], Shared &s,
                          int *error) {
  // All loads before the first look: a late word costs one more trip, not one a word.
  u64 both[N];
#pragma unroll
  for (int i = 0; i < N; i++)
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both[i]) : "l"(words + i * stride) : "memory");
#pragma unroll
  for (int i = 0; i < N; i++)
    values[i] = static_cast<u32>(both[i] >> 32) == epoch
                    ? __uint_as_float(static_cast<u32>(both[i]))
                    : await(words + i * stride, epoch, s, error);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

__device__ __forceinline__ u32 *activation_word(Shared &s, int i) {
  return reinterpret_cast<u32 *>(s.table + 256 * (i / 32) + 128 + 4 * (i % 32));
}

// Columns 0 and 1 of B for one value.
__device__ __forceinline__ u32 split(float x) {
  u16 high = to_half(x);
  return high | static_cast<u32>(to_half((x - from_half(high)) * 2048.0f)) << 16;
}

// ------------------------------------------------------------------------------------ products

struct Fragment {  // B of one warp's 128 columns: eight tiles
  u32 low[8], high[8];
};

// slice: which 2,048 of the activation. Lanes of B's column 0 take the values, of column 1 the rest.
__device__ void load_fragment(Fragment &b, Shared &s, int slice, int warp, int lane) {
  int column = lane >> 2, t = lane & 3, shift = column == 1 ? 16 : 0;
  u32 keep = column < 2 ? 0xffffu : 0u;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    int at = slice * CHUNK_COLUMNS + warp * 128 + k * 16 + 2 * t;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      uint2 pair = *reinterpret_cast<uint2 *>(activation_word(s, at + 8 * h));
      u32 value = (pair.x >> shift & keep) | (pair.y >> shift & keep) << 16;
      (h ? b.high[k] : b.low[k]) = value;
    }
  }
}

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// sum[0] and sum[1]: rows lane/4 and lane/4 + 8, true in lanes with lane % 4 == 0.
__device__ __forceinline__ void add_group(float (&sum)[2], const float (&c)[4],
                                          const unsigned char *scales, int group, int lane) {
  const u16 *s = reinterpret_cast<const u16 *>(scales) + group * CHUNK_ROWS;
  int row = lane >> 2;
  sum[0] += from_bf16(s[row]) * (c[0] + c[1] * LOW);
  sum[1] += from_bf16(s[row + 8]) * (c[2] + c[3] * LOW);
}

__device__ void nf4_chunk(float (&sum)[2], const unsigned char *chunk, const Fragment &b, u32 table,
                          int warp, int lane) {
  const unsigned char *scales = chunk + CHUNK_ROWS * CHUNK_COLUMNS / 2;
  u32 offset = lane * 4;
#pragma unroll
  for (int g = 0; g < 2; g++) {
    uint4 codes = *reinterpret_cast<const uint4 *>(chunk + warp * 1024 + g * 512 + lane * 16);
    u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < 4; k++) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // byte i of the word, times 256, plus the lane's copy: one byte-permute.
        u32 address = __byte_perm(words[k], offset, 0x7704 | i << 4);
        asm("ld.shared.u32 %0, [%1];" : "=r"(a[i]) : "r"(table + address));
      }
      multiply(c, a, b.low[4 * g + k], b.high[4 * g + k]);
    }
    add_group(sum, c, scales, 2 * warp + g, lane);
  }
}

__device__ __forceinline__ u32 six(u32 codes) {  // two codes at bits 0 and 16 → half2 of code - 32
  u32 value;                                     // 0x6400: 1,024; 0x6420: 1,056, both exact
  asm("sub.f16x2 %0, %1, %2;" : "=r"(value) : "r"(codes | 0x64006400u), "r"(0x64206420u));
  return value;
}

// Three words hold 16 codes: two tiles' A registers (kernels/layout.py).
__device__ __forceinline__ void unpack_sixes(const u32 (&w)[3], u32 (&a)[8]) {
#pragma unroll
  for (int i = 0; i < 3; i++) {
    a[2 * i] = six(w[i] & 0x003f003fu);
    a[2 * i + 1] = six(w[i] >> 6 & 0x003f003fu);
  }
  a[6] = six((w[0] >> 12 & 0x000f000fu) | (w[1] >> 8 & 0x00300030u));
  a[7] = six((w[2] >> 12 & 0x000f000fu) | (w[1] >> 10 & 0x00300030u));
}

__device__ void int6_chunk(float (&sum)[2], const unsigned char *chunk, const Fragment &b, int warp,
                           int lane) {
  const unsigned char *scales = chunk + CHUNK_ROWS * CHUNK_COLUMNS * 3 / 4;
#pragma unroll
  for (int g = 0; g < 2; g++) {
    float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const u32 *from = reinterpret_cast<const u32 *>(chunk + warp * 1536) + (g * 2 + h) * 96 + lane;
      u32 words[3] = {from[0], from[32], from[64]}, a[8];
      unpack_sixes(words, a);
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 tile[4] = {a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3]};
        int at = 4 * g + 2 * h + k;
        multiply(c, tile, b.low[at], b.high[at]);
      }
    }
    add_group(sum, c, scales, 2 * warp + g, lane);
  }
}

// ---------------------------------------------------------------------------------------- ring

struct Ring {  // the consumers' place in it; the producer keeps the same count
  u32 body = 0, head = 0;
};

__device__ const unsigned char *next_chunk(Shared &s, u32 count, int slots, int bytes, int *error) {
  int slot = count % slots;
  wait_barrier(&s.full[slot], count / slots & 1, s, error);
  return s.ring + slot * bytes;
}

__device__ void release_chunk(Shared &s, u32 count, int slots, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(&s.empty[count % slots]);
}

__device__ void copy_chunk(Shared &s, const unsigned char *from, u32 count, int slots, int bytes,
                           int *error) {
  int slot = count % slots;
  if (count >= static_cast<u32>(slots)) wait_barrier(&s.empty[slot], (count / slots - 1) & 1, s, error);
  if (s.late) return;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem(&s.full[slot])),
               "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          smem(s.ring + slot * bytes)),
      "l"(from), "r"(bytes), "r"(smem(&s.full[slot]))
      : "memory");
}

// Both kinds of chunks share the memory and the barriers, so everything is consumed, and everybody
// meets, before the kind changes: then all barriers are made new.
__device__ void change_kind(Shared &s) {
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 0; i < BODY_SLOTS; i++) {
      asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem(&s.full[i])));
      asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(smem(&s.empty[i])));
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
}

__device__ int head_first(int block) {
  return static_cast<int>(static_cast<long long>(HEAD_CHUNKS) * block / BLOCKS);
}

// A given token but the last needs no logits: the next one is known.
__device__ __forceinline__ int all_steps(const Arguments &a) { return a.given_count + max(a.count, 1) - 1; }

__device__ __forceinline__ bool chooses(const Arguments &a, int step) {
  return a.count > 0 && step + 1 >= a.given_count;
}

__device__ void produce(const Arguments &a, Shared &s) {
  int block = blockIdx.x;
  for (int step = 0; step < all_steps(a); step++) {
    if (threadIdx.x == CONSUMERS) {
      u32 count = 0;
      for (int layer = 0; layer < LAYERS; layer++)
        for (int c = 0; c < LAYER_CHUNKS; c++, count++) {
          long long at = (static_cast<long long>(layer) * BLOCKS + block) * LAYER_CHUNKS + c;
          copy_chunk(s, a.body + at * BODY_BYTES, count, BODY_SLOTS, BODY_BYTES, a.error);
        }
    }
    __syncwarp();
    change_kind(s);
    if (!chooses(a, step)) continue;
    if (threadIdx.x == CONSUMERS) {
      u32 count = 0;
      for (int c = head_first(block); c < head_first(block + 1); c++, count++)
        copy_chunk(s, a.head + static_cast<long long>(c) * HEAD_BYTES, count, HEAD_SLOTS, HEAD_BYTES, a.error);
    }
    __syncwarp();
    change_kind(s);
  }
}

// -------------------------------------------------------------------------------------- stages

struct Place {  // of a consumer thread
  int warp, lane, thread, block, head, split;
};

// Rows' partial products → s.sums, [row][warp].
__device__ __forceinline__ void store_sums(Shared &s, int first, const float (&sum)[2], const Place &p) {
  if ((p.lane & 3) == 0) {
    s.sums[first + (p.lane >> 2)][p.warp] = sum[0];
    s.sums[first + (p.lane >> 2) + 8][p.warp] = sum[1];
  }
}

// The sum over the warps of row (thread / 16), in every lane of its 16; rows above `rows` are junk.
__device__ __forceinline__ float row_sum(Shared &s, int first, const Place &p) {
  float x = s.sums[first + p.thread / 16][p.thread % 16];
#pragma unroll
  for (int d = 8; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// `chunks` chunks of 16 rows each over one slice; leaves s.sums filled and everybody met.
template <int CHUNKS>
__device__ void multiply_rows(const Arguments &a, Shared &s, Ring &ring, u32 table, const Place &p) {
  Fragment b;
  load_fragment(b, s, 0, p.warp, p.lane);
#pragma unroll 1
  for (int c = 0; c < CHUNKS; c++) {
    float sum[2] = {0.0f, 0.0f};
    const unsigned char *chunk = next_chunk(s, ring.body, BODY_SLOTS, BODY_BYTES, a.error);
    nf4_chunk(sum, chunk, b, table, p.warp, p.lane);
    release_chunk(s, ring.body++, BODY_SLOTS, p.lane);
    store_sums(s, c * CHUNK_ROWS, sum, p);
  }
  consumers_meet();
}

// x of this thread's four columns → the activation, normalised and scaled; everybody meets twice.
__device__ void normalise(const Arguments &a, Shared &s, const float (&x)[4], const float *weight,
                          int turn, const Place &p) {
  float square = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
  if (p.lane == 0) s.warp_sums[turn][p.warp] = square;
  float4 w = reinterpret_cast<const float4 *>(weight)[p.thread];
  consumers_meet();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += s.warp_sums[turn][i];
  float r = rsqrtf(total / HIDDEN + EPSILON);
  uint4 words = {split(x[0] * r * w.x), split(x[1] * r * w.y), split(x[2] * r * w.z), split(x[3] * r * w.w)};
  *reinterpret_cast<uint4 *>(activation_word(s, 4 * p.thread)) = words;
  consumers_meet();
}

// Everybody's residual, this thread's four columns of it.
__device__ __forceinline__ void gather_residual(const Arguments &a, Shared &s, float (&x)[4], u32 epoch,
                                                const Place &p) {
  await_all<4>(a.exchange + X_RESIDUAL + 4 * p.thread, 1, epoch, x, s, a.error);
}

// This block's rows of a product added to its rows of the residual, and handed to everybody.
__device__ void add_to_residual(const Arguments &a, Shared &s, float sum, u32 epoch, const Place &p) {
  if (p.thread < OWN_ROWS * 16 && p.thread % 16 == 0) {
    int row = p.thread / 16;
    float x = s.residual[row] + sum;
    s.residual[row] = x;
    publish(a.exchange + X_RESIDUAL + p.block * OWN_ROWS + row, x, epoch);
  }
}

// RMS norm of one head and rotation by its position, in registers: lane has columns lane + 32·i.
__device__ void norm_and_rotate(float *x, const float *weight, const float *rope, int lane) {
  float v[4], square = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[i] = x[lane + 32 * i];
    square += v[i] * v[i];
  }
  float r = rsqrtf(warp_sum(square) / HEAD_DIM + EPSILON);
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] *= r * weight[lane + 32 * i];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float cosine = rope[lane + 32 * i], sine = rope[HEAD_DIM / 2 + lane + 32 * i];
    x[lane + 32 * i] = v[i] * cosine - v[i + 2] * sine;
    x[lane + 32 * i + 64] = v[i + 2] * cosine + v[i] * sine;
  }
}

__device__ __forceinline__ bool owns(int position, int split) { return (position / TILE) % SPLITS == split; }

// q, k and v of this block's key head from its group; the owner of the position writes the cache.
__device__ void collect_heads(const Arguments &a, Shared &s, int layer, long long position, u32 epoch,
                              const Place &p) {
  float *flat = &s.group[0][0];
  flat[p.thread] = await(a.exchange + X_QKV + p.head * 4 * HEAD_DIM + p.thread, epoch, s, a.error);
  consumers_meet();
  if (p.warp < 3) {
    const float *norm = a.head_norms + (layer * 2 + (p.warp == 2)) * HEAD_DIM;
    norm_and_rotate(s.group[p.warp], norm, a.rope + position * HEAD_DIM, p.lane);
  }
  consumers_meet();
  if (owns(position, p.split) && p.thread < 2 * HEAD_DIM) {
    int column = p.thread % HEAD_DIM;
    long long at = ((static_cast<long long>(layer) * KV_HEADS + p.head) * a.length + position) * HEAD_DIM + column;
    (p.thread < HEAD_DIM ? a.keys : a.values)[at] = to_bf16(s.group[2 + p.thread / HEAD_DIM][column]);
  }
  consumers_meet();  // the block that writes a position is the one that reads it
}

struct Running {  // of one query head over the positions of half a warp: 8 columns a lane
  float most = NOTHING, sum = 0.0f, out[8] = {};
};

__device__ __forceinline__ void unpack8(const uint4 &from, float (&to)[8]) {
  u32 pairs[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    to[2 * i] = __uint_as_float(pairs[i] << 16);
    to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void merge(Running &r, float most, float sum, const float (&out)[8]) {
  float both = fmaxf(r.most, most);
  if (both == NOTHING) return;
  float mine = __expf(r.most - both), his = __expf(most - both);
  r.sum = r.sum * mine + sum * his;
#pragma unroll
  for (int i = 0; i < 8; i++) r.out[i] = r.out[i] * mine + out[i] * his;
  r.most = both;
}

// Half-warps take this split's positions in turn; q is scaled by 1/√d already.
__device__ void attend_own(const Arguments &a, Shared &s, int layer, int position, Running (&r)[GROUP_HEADS],
                           const Place &p) {
  int column = (p.lane & 15) * 8, half = p.warp * 2 + (p.lane >> 4);
  float q[GROUP_HEADS][8];
#pragma unroll
  for (int h = 0; h < GROUP_HEADS; h++)
#pragma unroll
    for (int i = 0; i < 8; i++) q[h][i] = s.group[h][column + i] * rsqrtf(static_cast<float>(HEAD_DIM));
  long long base = (static_cast<long long>(layer) * KV_HEADS + p.head) * a.length * HEAD_DIM + column;
  int tiles = position / TILE + 1;                        // of all splits
  int own = (tiles - p.split + SPLITS - 1) / SPLITS;      // of this one; not above 0 where none
  for (int i = half; i < own * TILE; i += 2 * WARPS) {
    int at = ((i / TILE) * SPLITS + p.split) * TILE + i % TILE;
    if (at > position) continue;  // the last tile's rest; a half-warp goes together
    float k[8], v[8];
    // Written by this block, also in this launch: not through the read-only path.
    unpack8(*reinterpret_cast<const uint4 *>(a.keys + base + static_cast<long long>(at) * HEAD_DIM), k);
    unpack8(*reinterpret_cast<const uint4 *>(a.values + base + static_cast<long long>(at) * HEAD_DIM), v);
#pragma unroll
    for (int h = 0; h < GROUP_HEADS; h++) {
      float score = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; j++) score += q[h][j] * k[j];
      unsigned int mask = 0xffffu << (p.lane & 16);
#pragma unroll
      for (int d = 8; d; d >>= 1) score += __shfl_xor_sync(mask, score, d);
      merge(r[h], score, 1.0f, v);
    }
  }
}

// Over the two halves of a warp, then over the warps, in a fixed order; thread 0 … 255: its column.
__device__ void combine_block(Shared &s, Running (&r)[GROUP_HEADS], const Place &p) {
#pragma unroll
  for (int h = 0; h < GROUP_HEADS; h++) {
    float out[8];
    float most = __shfl_xor_sync(~0u, r[h].most, 16), sum = __shfl_xor_sync(~0u, r[h].sum, 16);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = __shfl_xor_sync(~0u, r[h].out[i], 16);
    if (p.lane < 16) {
      merge(r[h], most, sum, out);
#pragma unroll
      for (int i = 0; i < 8; i++) s.partial[p.warp][h][p.lane * 8 + i] = r[h].out[i];
      if (p.lane == 0) {
        s.partial[p.warp][h][HEAD_DIM] = r[h].most;
        s.partial[p.warp][h][HEAD_DIM + 1] = r[h].sum;
      }
    }
  }
  consumers_meet();
}

// Attention of this block's split, handed to its group; then 16 columns of the whole, to everybody.
__device__ void attention(const Arguments &a, Shared &s, int layer, int position, u32 epoch, const Place &p) {
  Running r[GROUP_HEADS];
  attend_own(a, s, layer, position, r, p);
  mark(s, 3);
  combine_block(s, r, p);
  mark(s, 4);
  u64 *parts = a.exchange + X_PART + p.head * SPLITS * GROUP_HEADS * PARTIAL;
  for (int i = p.thread; i < GROUP_HEADS * PARTIAL; i += CONSUMERS) {
    int h = i / PARTIAL, column = i % PARTIAL;
    float most = NOTHING, value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, s.partial[w][h][HEAD_DIM]);
    if (column == HEAD_DIM) {
      value = most;
    } else if (most != NOTHING) {
#pragma unroll
      for (int w = 0; w < WARPS; w++)
        value += __expf(s.partial[w][h][HEAD_DIM] - most) * s.partial[w][h][column];
    }
    publish(parts + (p.split * GROUP_HEADS + h) * PARTIAL + column, value, epoch);
  }
  // 256 columns of two heads over 16 blocks; thread: (column of 16, split of 16).
  if (p.thread < 256) {
    int h = p.split / (SPLITS / GROUP_HEADS), from = p.thread % 16;
    int column = (p.split % (SPLITS / GROUP_HEADS)) * 16 + p.thread / 16;
    const u64 *part = parts + (from * GROUP_HEADS + h) * PARTIAL;
    float most = await(part + HEAD_DIM, epoch, s, a.error), sum = await(part + HEAD_DIM + 1, epoch, s, a.error);
    float out = await(part + column, epoch, s, a.error), all = most;
#pragma unroll
    for (int d = 8; d; d >>= 1) all = fmaxf(all, __shfl_xor_sync(~0u, all, d));
    float weight = most == NOTHING ? 0.0f : __expf(most - all);
    sum *= weight;
    out *= weight;
#pragma unroll
    for (int d = 8; d; d >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, d);
      out += __shfl_xor_sync(~0u, out, d);
    }
    if (from == 0)
      publish(a.exchange + X_ATTENTION + (p.head * GROUP_HEADS + h) * HEAD_DIM + column, out / sum, epoch);
  }
}

__device__ void layer_attention(const Arguments &a, Shared &s, Ring &ring, int layer, long long position,
                                u32 epoch, float (&x)[4], u32 table, const Place &p) {
  normalise(a, s, x, a.norms + 2 * layer * HIDDEN, 0, p);
  mark(s, 0);
  multiply_rows<QKV_CHUNKS>(a, s, ring, table, p);
  mark(s, 1);
  float value = row_sum(s, 0, p);
  if (p.thread % 16 == 0)
    publish(a.exchange + X_QKV + p.head * 4 * HEAD_DIM + p.split * QKV_ROWS + p.thread / 16, value, epoch);
  collect_heads(a, s, layer, position, epoch, p);
  mark(s, 2);
  attention(a, s, layer, static_cast<int>(position), epoch, p);
  float mixed[4];
  await_all<4>(a.exchange + X_ATTENTION + 4 * p.thread, 1, epoch, mixed, s, a.error);
  mark(s, 5);
  uint4 words = {split(mixed[0]), split(mixed[1]), split(mixed[2]), split(mixed[3])};
  *reinterpret_cast<uint4 *>(activation_word(s, 4 * p.thread)) = words;
  consumers_meet();
  multiply_rows<O_CHUNKS>(a, s, ring, table, p);
  mark(s, 6);
  add_to_residual(a, s, row_sum(s, 0, p), epoch, p);
}

// Rows 0 … 7 of a chunk are gates, 8 … 15 the matching ups.
__device__ void publish_acts(const Arguments &a, Shared &s, u32 epoch, const Place &p) {
  for (int first = 0; first < GU_CHUNKS * CHUNK_ROWS; first += CONSUMERS / 16) {
    float sum = row_sum(s, first, p);
    // Row r + 8 is 8 · 16 threads further: in shared memory, not in this warp.
    if (p.thread % 16 == 0) s.sums[first + p.thread / 16][0] = sum;
  }
  consumers_meet();
  if (p.thread < OWN_ACTS) {
    int row = p.thread / 8 * CHUNK_ROWS + p.thread % 8;
    float gate = s.sums[row][0], up = s.sums[row + 8][0];
    publish(a.exchange + X_ACT + p.block * OWN_ACTS + p.thread, gate / (1.0f + __expf(-gate)) * up, epoch);
  }
}

__device__ void layer_mlp(const Arguments &a, Shared &s, Ring &ring, int layer, u32 epoch, u32 table,
                          const Place &p) {
  float x[4];
  gather_residual(a, s, x, epoch, p);
  mark(s, 7);
  normalise(a, s, x, a.norms + (2 * layer + 1) * HIDDEN, 1, p);
  mark(s, 8);
  multiply_rows<GU_CHUNKS>(a, s, ring, table, p);
  mark(s, 9);
  publish_acts(a, s, epoch, p);
  constexpr int EACH = INTERMEDIATE / CONSUMERS;
  float acts[EACH];
  await_all<EACH>(a.exchange + X_ACT + p.thread, CONSUMERS, epoch, acts, s, a.error);
  mark(s, 10);
#pragma unroll
  for (int i = 0; i < EACH; i++) *activation_word(s, p.thread + i * CONSUMERS) = split(acts[i] * SHRINK);
  consumers_meet();
  float sum[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int slice = 0; slice < SLICES; slice++) {
    Fragment b;
    load_fragment(b, s, slice, p.warp, p.lane);
    const unsigned char *chunk = next_chunk(s, ring.body, BODY_SLOTS, BODY_BYTES, a.error);
    nf4_chunk(sum, chunk, b, table, p.warp, p.lane);
    release_chunk(s, ring.body++, BODY_SLOTS, p.lane);
  }
  store_sums(s, 0, sum, p);
  consumers_meet();
  add_to_residual(a, s, row_sum(s, 0, p) / SHRINK, epoch + 1, p);
  mark(s, 11);
}

// ---------------------------------------------------------------------------------------- head

struct Best {  // the largest logit so far, its lowest id, and Σ exp(logit - largest)
  float most = NOTHING, sum = 0.0f;
  int id = 0x7fffffff;
};

__device__ __forceinline__ void add_best(Best &b, float most, float sum, int id) {
  if (most == NOTHING) return;
  float both = fmaxf(b.most, most);
  b.sum = b.sum * __expf(b.most - both) + sum * __expf(most - both);
  if (most > b.most || (most == b.most && id < b.id)) b.id = id;
  b.most = both;
}

__device__ void best_of_warp(Best &b) {
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    float most = __shfl_xor_sync(~0u, b.most, d), sum = __shfl_xor_sync(~0u, b.sum, d);
    int id = __shfl_xor_sync(~0u, b.id, d);
    add_best(b, most, sum, id);
  }
}

__device__ void all_logits(const Arguments &a, Shared &s, Best &best, const Place &p) {
  Fragment b;
  load_fragment(b, s, 0, p.warp, p.lane);
  u32 count = 0;
  int last = head_first(p.block + 1);
  for (int first = head_first(p.block); first < last; first += HEAD_BATCH) {
    int batch = min(HEAD_BATCH, last - first);
    for (int c = 0; c < batch; c++) {
      float sum[2] = {0.0f, 0.0f};
      const unsigned char *chunk = next_chunk(s, count, HEAD_SLOTS, HEAD_BYTES, a.error);
      int6_chunk(sum, chunk, b, p.warp, p.lane);
      release_chunk(s, count++, HEAD_SLOTS, p.lane);
      store_sums(s, c * CHUNK_ROWS, sum, p);
    }
    consumers_meet();
    for (int row = 0; row < batch * CHUNK_ROWS; row += CONSUMERS / 16) {
      float logit = row_sum(s, row, p);
      if (p.thread % 16 == 0 && row + p.thread / 16 < batch * CHUNK_ROWS)
        add_best(best, logit, 1.0f, first * CHUNK_ROWS + row + p.thread / 16);
    }
    consumers_meet();
  }
}

// Everybody's best, hence the token and its probability: the same in every block.
__device__ int choose(const Arguments &a, Shared &s, Best best, u32 epoch, int step, const Place &p) {
  best_of_warp(best);
  if (p.lane == 0) {
    s.best[p.warp] = static_cast<u64>(__float_as_uint(best.most)) << 32 | static_cast<u32>(best.id);
    s.best_sum[p.warp] = best.sum;
  }
  consumers_meet();
  Best all;
#pragma unroll 1
  for (int w = 0; w < WARPS; w++)
    add_best(all, __uint_as_float(static_cast<u32>(s.best[w] >> 32)), s.best_sum[w], static_cast<int>(s.best[w]));
  u64 *words = a.exchange + X_BEST;
  if (p.thread == 0) {
    publish(words + 3 * p.block, all.most, epoch);
    publish(words + 3 * p.block + 1, __int_as_float(all.id), epoch);
    publish(words + 3 * p.block + 2, all.sum, epoch);
  }
  consumers_meet();
  Best mine;
  if (p.warp < BLOCKS / 32) {
    float found[3];
    await_all<3>(words + 3 * p.thread, 1, epoch, found, s, a.error);
    add_best(mine, found[0], found[2], __float_as_int(found[1]));
    best_of_warp(mine);
    if (p.lane == 0) {
      s.best[p.warp] = static_cast<u64>(__float_as_uint(mine.most)) << 32 | static_cast<u32>(mine.id);
      s.best_sum[p.warp] = mine.sum;
    }
  }
  consumers_meet();
  Best chosen;
#pragma unroll
  for (int w = 0; w < BLOCKS / 32; w++)
    add_best(chosen, __uint_as_float(static_cast<u32>(s.best[w] >> 32)), s.best_sum[w], static_cast<int>(s.best[w]));
  if (p.block == 0 && p.thread == 0) {
    a.tokens[step] = chosen.id;
    a.probabilities[step] = 1.0f / chosen.sum;
  }
  consumers_meet();
  return chosen.id < VOCABULARY ? chosen.id : 0;  // junk only after a wait that took too long
}

// Columns 4·thread … of a token's embedding, from the chunk that the head reads.
__device__ void embedding_columns(const unsigned char *head, int token, int thread, float (&x)[4]) {
  const unsigned char *chunk = head + static_cast<long long>(token / CHUNK_ROWS) * HEAD_BYTES;
  const u16 *scales = reinterpret_cast<const u16 *>(chunk + CHUNK_ROWS * CHUNK_COLUMNS * 3 / 4);
  int row = token % CHUNK_ROWS;
  float scale = from_bf16(scales[4 * thread / GROUP * CHUNK_ROWS + row]);
#pragma unroll
  for (int pair = 0; pair < 2; pair++) {
    int column = 4 * thread + 2 * pair, inside = column % 16;
    int warp = column / 128, tile = column % 128 / 16, lane = row % 8 * 4 + inside % 8 / 2;
    const u32 *from = reinterpret_cast<const u32 *>(chunk + warp * 1536) + tile / 2 * 96 + lane;
    u32 words[3] = {from[0], from[32], from[64]}, values[8];
    unpack_sixes(words, values);
    int at = tile % 2 * 4 + inside / 8 * 2 + row / 8;
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) found = i == at ? values[i] : found;
    x[2 * pair] = from_half(found & 0xffff) * scale;
    x[2 * pair + 1] = from_half(found >> 16) * scale;
  }
}

// The residual begins as the embedding: everybody's own four columns, and the block's own rows.
__device__ void embed(const Arguments &a, Shared &s, int token, float (&x)[4], const Place &p) {
  embedding_columns(a.head, token, p.thread, x);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int own = 4 * p.thread + i - p.block * OWN_ROWS;
    if (own >= 0 && own < OWN_ROWS) s.residual[own] = x[i];
  }
}

__device__ void consume(const Arguments &a, Shared &s) {
  Place p{static_cast<int>(threadIdx.x) / 32, static_cast<int>(threadIdx.x) % 32,
          static_cast<int>(threadIdx.x), static_cast<int>(blockIdx.x),
          static_cast<int>(blockIdx.x) / SPLITS, static_cast<int>(blockIdx.x) % SPLITS};
  u32 table = smem(s.table), epoch = a.epoch;
  int token = 0;
  long long position = *a.position;
  for (int step = 0; step < all_steps(a); step++, position++) {
    if (step < a.given_count) token = static_cast<int>(a.given[step]);
    float x[4];
    Ring ring;
    embed(a, s, token, x, p);
    for (int layer = 0; layer < LAYERS; layer++, epoch += 2) {
      layer_attention(a, s, ring, layer, position, epoch, x, table, p);
      layer_mlp(a, s, ring, layer, epoch, table, p);
      gather_residual(a, s, x, epoch + 1, p);
      mark(s, 12);
    }
    change_kind(s);
    mark(s, 13);
    if (!chooses(a, step)) continue;
    normalise(a, s, x, a.norms + 2 * LAYERS * HIDDEN, 0, p);
    Best best;
    all_logits(a, s, best, p);
    mark(s, 14);
    token = choose(a, s, best, epoch, step + 1 - a.given_count, p);
    mark(s, 15);
    epoch += 2;
    change_kind(s);
  }
  if (p.block == 0 && p.thread == 0) *a.steps = all_steps(a);
#ifdef CLOCKS
  for (int i = 0; p.thread == 0 && i < CLOCKS; i++) clocks_of[p.block][i] = s.clocks[i];
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode(const __grid_constant__ Arguments a) {
  extern __shared__ unsigned char raw[];
  Shared &s = *reinterpret_cast<Shared *>(raw);
  for (int i = threadIdx.x; i < 256 * 32; i += THREADS) {
    int entry = i / 32, copy = i % 32;
    u32 pair = to_half(a.codebook[entry >> 4]) | static_cast<u32>(to_half(a.codebook[entry & 15])) << 16;
    *reinterpret_cast<u32 *>(s.table + 256 * entry + 4 * copy) = pair;
  }
  if (threadIdx.x == 0) {
    s.late = 0;
#ifdef CLOCKS
    for (int i = 0; i < CLOCKS; i++) s.clocks[i] = 0;
    s.clock = clock64();
#endif
    for (int i = 0; i < BODY_SLOTS; i++) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMERS)
    produce(a, s);
  else
    consume(a, s);
}

// -------------------------------------------------------------------------- for the prefill

// Where row `row` of a block's chunk c lies in the layer's matrices; which: qkv, o, gate and up, down.
__device__ int matrix_row(int block, int c, int row, int &which) {
  if (c < QKV_CHUNKS) {
    which = 0;
    int head = block / SPLITS, i = block % SPLITS * QKV_ROWS + c * CHUNK_ROWS + row;
    if (i < GROUP_HEADS * HEAD_DIM) return head * GROUP_HEADS * HEAD_DIM + i;
    i -= GROUP_HEADS * HEAD_DIM;  // a key's row, or a value's, which are KV_HEADS · HEAD_DIM below
    return (Q_HEADS + head) * HEAD_DIM + i % HEAD_DIM + i / HEAD_DIM * KV_HEADS * HEAD_DIM;
  }
  c -= QKV_CHUNKS;
  which = c < O_CHUNKS ? 1 : c < O_CHUNKS + GU_CHUNKS ? 2 : 3;
  if (which != 2) return block * OWN_ROWS + row;
  return block * OWN_ACTS + (c - O_CHUNKS) * 8 + row % 8 + row / 8 * INTERMEDIATE;
}

// One layer → bf16 matrices (rows, columns). A block of threads takes one chunk.
extern "C" __global__ void __launch_bounds__(CONSUMERS) unpack_layer(const unsigned char *body,
                                                                     const float *codebook, int layer,
                                                                     u16 *qkv, u16 *o, u16 *gate_up, u16 *down) {
  int block = blockIdx.x / LAYER_CHUNKS, c = blockIdx.x % LAYER_CHUNKS;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned char *chunk = body + (static_cast<long long>(layer) * gridDim.x + blockIdx.x) * BODY_BYTES;
  const u16 *scales = reinterpret_cast<const u16 *>(chunk + CHUNK_ROWS * CHUNK_COLUMNS / 2);
  u16 *matrices[4] = {qkv, o, gate_up, down};
  for (int g = 0; g < 2; g++) {
    uint4 codes = *reinterpret_cast<const uint4 *>(chunk + warp * 1024 + g * 512 + lane * 16);
    u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    for (int half = 0; half < 2; half++) {
      int row = lane / 4 + 8 * half, which, at = matrix_row(block, c, row, which);
      float scale = from_bf16(scales[(2 * warp + g) * CHUNK_ROWS + row]);
      long long columns = which == 3 ? INTERMEDIATE : HIDDEN;
      int first = which == 3 ? (c - (LAYER_CHUNKS - SLICES)) * CHUNK_COLUMNS : 0;
      u16 *out = matrices[which] + at * columns + first + warp * 128 + g * 64 + 2 * (lane % 4);
      for (int k = 0; k < 4; k++)
        for (int right = 0; right < 2; right++) {
          u32 byte = words[k] >> 8 * (2 * right + half) & 255;
          u32 pair = to_bf16(codebook[byte >> 4] * scale) | static_cast<u32>(to_bf16(codebook[byte & 15] * scale)) << 16;
          *reinterpret_cast<u32 *>(out + 16 * k + 8 * right) = pair;
        }
    }
  }
}

// Embeddings of tokens → (count, HIDDEN) float32; a block of threads takes one token.
extern "C" __global__ void __launch_bounds__(CONSUMERS) embed_rows(const unsigned char *head,
                                                                   const long long *tokens, float *out) {
  float x[4];
  embedding_columns(head, static_cast<int>(tokens[blockIdx.x]), threadIdx.x, x);
  reinterpret_cast<float4 *>(out + static_cast<long long>(blockIdx.x) * HIDDEN)[threadIdx.x] =
      make_float4(x[0], x[1], x[2], x[3]);
}
