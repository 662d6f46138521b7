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

// Words of the exchange, by what they carry; a word is a pair of values, but for the last.
constexpr int PART_WORDS = 10;                 // 16 columns, maximum and sum; one is unused
constexpr int X_QKV = 0, X_PART = X_QKV + KV_HEADS * 2 * HEAD_DIM;
constexpr int X_ATTENTION = X_PART + BLOCKS * SPLITS * PART_WORDS;
constexpr int X_RESIDUAL = X_ATTENTION + Q_HEADS * HEAD_DIM / 2;
constexpr int X_ACT = X_RESIDUAL + HIDDEN / 2, X_BEST = X_ACT + INTERMEDIATE / 2;
static_assert(X_BEST + 3 * BLOCKS <= EXCHANGE_WORDS, "the exchange is too small");

struct Shared {
  alignas(128) unsigned char ring[RING_BYTES];
  // Entry e at 256·e, a copy for each lane in its first half; the second halves hold the activation:
  // word i (column 0 | column 1 << 16) is at 256·(i / 32) + 128 + 4·(i % 32).
  alignas(256) unsigned char table[256 * 256];
  alignas(8) float partial[WARPS][GROUP_HEADS][PARTIAL];
  float sums[6 * CHUNK_ROWS][WARPS + 1];  // one more, against bank conflicts
  alignas(16) float group[4][HEAD_DIM];  // q, q, k, v of this block's key head
  float residual[OWN_ROWS];        // this block's rows of it
  float warp_sums[2][WARPS];
  u64 best[WARPS];
  float best_sum[WARPS];
  alignas(8) u64 body_full[BODY_SLOTS], body_empty[BODY_SLOTS];
  u64 head_full[HEAD_SLOTS], head_empty[HEAD_SLOTS];
  int late;                        // a wait took too long: everybody hurries to the end
#ifdef CLOCKS
  long long clock, clocks[CLOCKS];  // where thread 0's time went
#endif
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "the shared memory is too small");

// ------------------------------------------------------------------------------- small things

// Built with -DCLOCKS=18, thread 0 of each block adds up its clocks by what it did last.
#ifdef CLOCKS
extern "C" {
__device__ long long clocks_of[BLOCKS][CLOCKS];
}
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

// A pair of values in one word: 16 bits of the epoch, and 24 of each float. What is cut off is below
// 2^-15 of a value. A tag may come again after 65,536 epochs: each word is written every other one.
__device__ __forceinline__ float shortened(float x) {
  return __uint_as_float(__float_as_uint(x) & 0xffffff00u);
}

__device__ __forceinline__ void publish_pair(u64 *word, float a, float b, u32 epoch) {
  u64 both = static_cast<u64>(epoch & 0xffffu) << 48 |
             static_cast<u64>(__float_as_uint(a) >> 8) << 24 | __float_as_uint(b) >> 8;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(both) : "memory");
}

__device__ __forceinline__ bool fresh(u64 word, u32 epoch) {
  return static_cast<u32>(word >> 48) == (epoch & 0xffffu);
}

__device__ __forceinline__ void open_pair(u64 word, float &a, float &b) {
  a = __uint_as_float(static_cast<u32>(word >> 16) & 0xffffff00u);
  b = __uint_as_float(static_cast<u32>(word) << 8);
}

// `words` to `words[1]`, both fresh.
__device__ void await_two(const u64 *words, u64 (&found)[2], u32 epoch, Shared &s, int *error) {
  long long began = 0;
  while (!fresh(found[0], epoch) || !fresh(found[1], epoch)) {
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(found[0]), "=l"(found[1])
                 : "l"(words)
                 : "memory");
    if (*reinterpret_cast<volatile int *>(&s.late)) return;
    if (began == 0) began = clock64();
    if (clock64() - began > PATIENCE) {
      s.late = 1;
      *error = 1;
    }
  }
}

// Four values from each of N times two words, `stride` words apart.
template <int N>
__device__ void await_pairs(const u64 *words, int stride, u32 epoch, float (&values)[4 * N], Shared &s,
                            int *error) {
  // All loads before the first look: a late word costs one more trip, not one a word.
  u64 found[N][2];
#pragma unroll
  for (int i = 0; i < N; i++)
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(found[i][0]), "=l"(found[i][1])
                 : "l"(words + i * stride)
                 : "memory");
#pragma unroll
  for (int i = 0; i < N; i++) {
    await_two(words + i * stride, found[i], epoch, s, error);
    open_pair(found[i][0], values[4 * i], values[4 * i + 1]);
    open_pair(found[i][1], values[4 * i + 2], values[4 * i + 3]);
  }
}

// Two pairs that lie anywhere.
__device__ void await_pairs_at(const u64 *first, const u64 *second, float (&values)[4], u32 epoch, Shared &s,
                               int *error) {
  long long began = 0;
  while (true) {
    u64 found[2];
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found[0]) : "l"(first) : "memory");
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(found[1]) : "l"(second) : "memory");
    open_pair(found[0], values[0], values[1]);
    open_pair(found[1], values[2], values[3]);
    if (fresh(found[0], epoch) && fresh(found[1], epoch)) return;
    if (*reinterpret_cast<volatile int *>(&s.late)) return;
    if (began == 0) began = clock64();
    if (clock64() - began > PATIENCE) {
      s.late = 1;
      *error = 1;
    }
  }
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
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
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

struct Codes {  // a lane's of one NF4 chunk: two groups of four tiles
  uint4 group[2];
};

__device__ __forceinline__ void load_codes(Codes &codes, const unsigned char *chunk, int warp, int lane) {
#pragma unroll
  for (int g = 0; g < 2; g++)
    codes.group[g] = *reinterpret_cast<const uint4 *>(chunk + warp * 1024 + g * 512 + lane * 16);
}

__device__ __forceinline__ void nf4_chunk(float (&sum)[2], const Codes &codes, const unsigned char *chunk,
                                          const Fragment &b, u32 table, int warp, int lane) {
  const unsigned char *scales = chunk + CHUNK_ROWS * CHUNK_COLUMNS / 2;
  u32 offset = lane * 4;
  float c[2][4] = {};
#pragma unroll
  for (int k = 0; k < 4; k++) {
#pragma unroll
    for (int g = 0; g < 2; g++) {  // two sums side by side: a product needn't wait for the last one
      const uint4 &four = codes.group[g];
      u32 word = k == 0 ? four.x : k == 1 ? four.y : k == 2 ? four.z : four.w, a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        // byte i of the word, times 256, plus the lane's copy: one byte-permute.
        u32 address = __byte_perm(word, offset, 0x7704 | i << 4);
        asm("ld.shared.u32 %0, [%1];" : "=r"(a[i]) : "r"(table + address));
      }
      multiply(c[g], a, b.low[4 * g + k], b.high[4 * g + k]);
    }
  }
#pragma unroll
  for (int g = 0; g < 2; g++) add_group(sum, c[g], scales, 2 * warp + g, lane);
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

// Chunks of the body and of the head take the same memory in turn, and each kind has its barriers.
template <bool HEAD>
struct Kind {
  static constexpr int SLOTS = HEAD ? HEAD_SLOTS : BODY_SLOTS, BYTES = HEAD ? HEAD_BYTES : BODY_BYTES;
  static __device__ __forceinline__ u64 *full(Shared &s, int slot) {
    return (HEAD ? s.head_full : s.body_full) + slot;
  }
  static __device__ __forceinline__ u64 *empty(Shared &s, int slot) {
    return (HEAD ? s.head_empty : s.body_empty) + slot;
  }
};
static_assert(HEAD_SLOTS * HEAD_BYTES <= RING_BYTES, "the ring is too small");

struct Ring {  // how many chunks of each kind were used since the launch
  u32 body = 0, head = 0;
};

template <bool HEAD>
__device__ __forceinline__ const unsigned char *next_chunk(Shared &s, u32 count, int *error) {
  using K = Kind<HEAD>;
  int slot = count % K::SLOTS;
  wait_barrier(K::full(s, slot), count / K::SLOTS & 1, s, error);
  return s.ring + slot * K::BYTES;
}

template <bool HEAD>
__device__ __forceinline__ void release_chunk(Shared &s, u32 count, int lane) {
  __syncwarp();
  if (lane == 0) barrier_arrive(Kind<HEAD>::empty(s, count % Kind<HEAD>::SLOTS));
}

// Until the last of `count` chunks of a kind that lay in `slot` has been used.
template <bool HEAD>
__device__ void wait_released(Shared &s, u32 count, u32 slot, int *error) {
  using K = Kind<HEAD>;
  if (count <= slot) return;
  u32 last = count - 1 - (count - 1 - slot) % K::SLOTS;
  wait_barrier(K::empty(s, slot), last / K::SLOTS & 1, s, error);
}

// others: chunks of the other kind so far, which this step's first ones may lie upon.
template <bool HEAD>
__device__ void copy_chunk(Shared &s, const unsigned char *from, u32 count, bool first, u32 others, int *error) {
  using K = Kind<HEAD>;
  using Other = Kind<!HEAD>;
  u32 slot = count % K::SLOTS;
  if (first)
    for (u32 o = slot * K::BYTES / Other::BYTES; o < Other::SLOTS && o * Other::BYTES < (slot + 1) * K::BYTES; o++)
      wait_released<!HEAD>(s, others, o, error);
  wait_released<HEAD>(s, count, slot, error);
  if (s.late) return;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem(K::full(s, slot))),
               "r"(K::BYTES)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          smem(s.ring + slot * K::BYTES)),
      "l"(from), "r"(K::BYTES), "r"(smem(K::full(s, slot)))
      : "memory");
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
  Ring ring;
  for (int step = 0; step < all_steps(a); step++) {
    for (int layer = 0; layer < LAYERS; layer++)
      for (int c = 0; c < LAYER_CHUNKS; c++, ring.body++) {
        long long at = (static_cast<long long>(layer) * BLOCKS + block) * LAYER_CHUNKS + c;
        bool first = layer * LAYER_CHUNKS + c < BODY_SLOTS;
        copy_chunk<false>(s, a.body + at * BODY_BYTES, ring.body, first, ring.head, a.error);
      }
    if (!chooses(a, step)) continue;
    int begin = head_first(block);
    for (int c = begin; c < head_first(block + 1); c++, ring.head++)
      copy_chunk<true>(s, a.head + static_cast<long long>(c) * HEAD_BYTES, ring.head, c < begin + HEAD_SLOTS,
                       ring.body, a.error);
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

// `CHUNKS` chunks of 16 rows each over one slice; leaves s.sums filled and everybody met.
template <int CHUNKS>
__device__ void multiply_rows(const Arguments &a, Shared &s, Ring &ring, u32 table, const Place &p) {
  Fragment b;
  load_fragment(b, s, 0, p.warp, p.lane);
  const unsigned char *chunk = next_chunk<false>(s, ring.body, a.error);
  Codes codes;
  load_codes(codes, chunk, p.warp, p.lane);
#pragma unroll 1
  for (int c = 0; c < CHUNKS; c++) {
    const unsigned char *next = chunk;
    Codes ahead = codes;
    if (c + 1 < CHUNKS) {  // the next chunk's codes come while this one's are multiplied
      next = next_chunk<false>(s, ring.body + 1, a.error);
      load_codes(ahead, next, p.warp, p.lane);
    }
    float sum[2] = {0.0f, 0.0f};
    nf4_chunk(sum, codes, chunk, b, table, p.warp, p.lane);
    release_chunk<false>(s, ring.body++, p.lane);
    store_sums(s, c * CHUNK_ROWS, sum, p);
    codes = ahead;
    chunk = next;
  }
  consumers_meet();
}

// x of this thread's four columns → the activation, normalised and scaled; everybody meets twice.
__device__ void normalise(Shared &s, const float (&x)[4], const float4 &w, int turn, const Place &p) {
  float square = warp_sum(x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3]);
  if (p.lane == 0) s.warp_sums[turn][p.warp] = square;
  consumers_meet();
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < WARPS; i++) total += s.warp_sums[turn][i];
  float r = rsqrtf(total / HIDDEN + EPSILON);
  uint4 words = {split(x[0] * r * w.x), split(x[1] * r * w.y), split(x[2] * r * w.z), split(x[3] * r * w.w)};
  *reinterpret_cast<uint4 *>(activation_word(s, 4 * p.thread)) = words;
  consumers_meet();
}

// Norm weights of this thread's four columns: asked for before the wait for what they scale.
__device__ __forceinline__ float4 norm_weights(const Arguments &a, int norm, const Place &p) {
  return reinterpret_cast<const float4 *>(a.norms + norm * HIDDEN)[p.thread];
}

// Everybody's residual, this thread's four columns of it.
__device__ __forceinline__ void gather_residual(const Arguments &a, Shared &s, float (&x)[4], u32 epoch,
                                                const Place &p) {
  await_pairs<1>(a.exchange + X_RESIDUAL + 2 * p.thread, 0, epoch, x, s, a.error);
}

// This block's rows of a product added to its rows of the residual, and handed to everybody.
__device__ void add_to_residual(const Arguments &a, Shared &s, float sum, u32 epoch, const Place &p) {
  if (p.warp >= OWN_ROWS / 2) return;
  int row = p.thread / 16;  // two a warp
  float x = s.residual[row] + sum, next = __shfl_xor_sync(~0u, x, 16);
  if (p.lane % 16 == 0) s.residual[row] = x;
  if (p.lane == 0) publish_pair(a.exchange + X_RESIDUAL + (p.block * OWN_ROWS + row) / 2, x, next, epoch);
}

__device__ __forceinline__ bool owns(int position, int split) { return (position / TILE) % SPLITS == split; }

// q, k and v of this block's key head from its group, a warp each: normed, rotated, q scaled by 1/√d.
// The block that owns the position writes the cache, and is the only one to read it.
__device__ void collect_heads(const Arguments &a, Shared &s, int layer, long long position, u32 epoch,
                              const Place &p) {
  if (p.warp < 4) {
    float4 weight = {}, cosine = {}, sine = {};
    if (p.warp < 3) {
      const float *norm = a.head_norms + (layer * 2 + (p.warp == 2)) * HEAD_DIM;
      const float *rope = a.rope + position * HEAD_DIM + p.lane % 16 * 4;
      weight = reinterpret_cast<const float4 *>(norm)[p.lane];
      cosine = *reinterpret_cast<const float4 *>(rope);
      sine = *reinterpret_cast<const float4 *>(rope + HEAD_DIM / 2);
    }
    float v[4];
    await_pairs<1>(a.exchange + X_QKV + (p.head * 4 + p.warp) * HEAD_DIM / 2 + 2 * p.lane, 0, epoch, v, s, a.error);
    if (p.warp < 3) {
      float square = warp_sum(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]);
      float r = rsqrtf(square / HEAD_DIM + EPSILON) * (p.warp < 2 ? rsqrtf(static_cast<float>(HEAD_DIM)) : 1.0f);
      float w[4] = {weight.x, weight.y, weight.z, weight.w}, c[4] = {cosine.x, cosine.y, cosine.z, cosine.w};
      float sign = p.lane < 16 ? -1.0f : 1.0f, n[4] = {sine.x, sine.y, sine.z, sine.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        v[i] *= r * w[i];
        float other = __shfl_xor_sync(~0u, v[i], 16);  // the column half a head away
        v[i] = v[i] * c[i] + sign * other * n[i];
      }
    }
    reinterpret_cast<float4 *>(s.group[p.warp])[p.lane] = make_float4(v[0], v[1], v[2], v[3]);
    if (p.warp >= 2 && owns(static_cast<int>(position), p.split)) {
      long long at = ((static_cast<long long>(layer) * KV_HEADS + p.head) * a.length + position) * HEAD_DIM;
      uint2 packed = {to_bf16(v[0]) | static_cast<u32>(to_bf16(v[1])) << 16,
                      to_bf16(v[2]) | static_cast<u32>(to_bf16(v[3])) << 16};
      reinterpret_cast<uint2 *>((p.warp == 2 ? a.keys : a.values) + at)[p.lane] = packed;
    }
  }
  consumers_meet();
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

// Tiles of the context that this split owns.
__device__ __forceinline__ int own_tiles(int position, int split) {
  return max(0, (position / TILE + SPLITS - split) / SPLITS);
}

__device__ __forceinline__ int own_position(int i, int split) {
  return ((i / TILE) * SPLITS + split) * TILE + i % TILE;
}

// Into the L2 cache while q is still being computed; as much as leaves room for everything else there.
__device__ void prefetch_own(const Arguments &a, int layer, int position, const Place &p) {
  constexpr int MOST = 512, LINES = HEAD_DIM * 2 / 128;
  int lines = min(own_tiles(position, p.split) * TILE, MOST) * 2 * LINES;
  for (int i = p.thread; i < lines; i += CONSUMERS) {
    long long row = (static_cast<long long>(layer) * KV_HEADS + p.head) * a.length + own_position(i / (2 * LINES), p.split);
    const u16 *from = (i & 1 ? a.values : a.keys) + row * HEAD_DIM + i / 2 % LINES * 64;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
}

// Half-warps take this split's positions in turn, two at a time.
__device__ void attend_own(const Arguments &a, Shared &s, int layer, int position, Running (&r)[GROUP_HEADS],
                           const Place &p) {
  constexpr int TOGETHER = 2;
  int column = (p.lane & 15) * 8, half = p.warp * 2 + (p.lane >> 4), own = own_tiles(position, p.split) * TILE;
  float q[GROUP_HEADS][8];
#pragma unroll
  for (int h = 0; h < GROUP_HEADS; h++)
#pragma unroll
    for (int i = 0; i < 8; i++) q[h][i] = s.group[h][column + i];
  long long base = (static_cast<long long>(layer) * KV_HEADS + p.head) * a.length * HEAD_DIM + column;
  for (int i = half; i < own; i += TOGETHER * 2 * WARPS) {
    uint4 k[TOGETHER], v[TOGETHER];
    bool there[TOGETHER];
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      int at = own_position(i + n * 2 * WARPS, p.split);
      there[n] = i + n * 2 * WARPS < own && at <= position;  // the same for a half-warp
      long long from = base + static_cast<long long>(there[n] ? at : 0) * HEAD_DIM;
      // Written by this block, also in this launch: not through the read-only path.
      k[n] = *reinterpret_cast<const uint4 *>(a.keys + from);
      v[n] = *reinterpret_cast<const uint4 *>(a.values + from);
    }
#pragma unroll
    for (int n = 0; n < TOGETHER; n++) {
      if (!there[n]) continue;
      float key[8], value[8];
      unpack8(k[n], key);
      unpack8(v[n], value);
#pragma unroll
      for (int h = 0; h < GROUP_HEADS; h++) {
        float score = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) score += q[h][j] * key[j];
        unsigned int mask = 0xffffu << (p.lane & 16);
#pragma unroll
        for (int d = 8; d; d >>= 1) score += __shfl_xor_sync(mask, score, d);
        merge(r[h], score, 1.0f, value);
      }
    }
  }
}

// Over the two halves of a warp → s.partial.
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
  mark(s, 4);
  combine_block(s, r, p);
  mark(s, 5);
  // Over the warps, in their order; a thread has two columns, and block c of the group gets 16.
  u64 *parts = a.exchange + X_PART + p.head * SPLITS * SPLITS * PART_WORDS;
  if (p.thread < GROUP_HEADS * HEAD_DIM / 2) {
    int h = p.thread / (HEAD_DIM / 2), pair = p.thread % (HEAD_DIM / 2);
    float most = NOTHING, sum = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, s.partial[w][h][HEAD_DIM]);
    most = shortened(most);  // as it is handed over, so that nothing is lost by it
    if (most != NOTHING) {
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        float weight = __expf(s.partial[w][h][HEAD_DIM] - most);
        float2 two = *reinterpret_cast<const float2 *>(&s.partial[w][h][2 * pair]);
        x += weight * two.x;
        y += weight * two.y;
        sum += weight * s.partial[w][h][HEAD_DIM + 1];
      }
    }
    u64 *to = parts + ((h * (SPLITS / GROUP_HEADS) + pair / 8) * SPLITS + p.split) * PART_WORDS;
    publish_pair(to + pair % 8, x, y, epoch);
    if (pair % 8 == 0) publish_pair(to + 8, most, sum, epoch);
  }
  // This block's 16 columns over the splits: a lane has one split's pair.
  if (p.warp < 4) {
    int from = p.lane % 16, pair = 2 * p.warp + p.lane / 16;
    const u64 *part = parts + (p.split * SPLITS + from) * PART_WORDS;
    float found[4];
    await_pairs_at(part + pair, part + 8, found, epoch, s, a.error);
    float x = found[0], y = found[1], most = found[2], sum = found[3], all = most;
#pragma unroll
    for (int d = 8; d; d >>= 1) all = fmaxf(all, __shfl_xor_sync(~0u, all, d));
    float weight = most == NOTHING ? 0.0f : __expf(most - all);
    sum *= weight;
    x *= weight;
    y *= weight;
#pragma unroll
    for (int d = 8; d; d >>= 1) {
      sum += __shfl_xor_sync(~0u, sum, d);
      x += __shfl_xor_sync(~0u, x, d);
      y += __shfl_xor_sync(~0u, y, d);
    }
    int at = (p.head * GROUP_HEADS + p.split / (SPLITS / GROUP_HEADS)) * (HEAD_DIM / 2) +
             p.split % (SPLITS / GROUP_HEADS) * 8 + pair;
    if (from == 0) publish_pair(a.exchange + X_ATTENTION + at, x / sum, y / sum, epoch);
  }
}

// x: the embedding before layer 0, else what the residual is afterwards.
__device__ void layer_attention(const Arguments &a, Shared &s, Ring &ring, int layer, long long position,
                                u32 epoch, float (&x)[4], u32 table, const Place &p) {
  float4 weight = norm_weights(a, 2 * layer, p);
  prefetch_own(a, layer, static_cast<int>(position), p);
  if (layer > 0) gather_residual(a, s, x, epoch - 1, p);
  mark(s, 0);
  normalise(s, x, weight, 0, p);
  mark(s, 1);
  multiply_rows<QKV_CHUNKS>(a, s, ring, table, p);
  mark(s, 2);
  float value = row_sum(s, 0, p), next = __shfl_xor_sync(~0u, value, 16);
  if (p.lane == 0)
    publish_pair(a.exchange + X_QKV + (p.head * 4 * HEAD_DIM + p.split * QKV_ROWS) / 2 + p.warp, value, next, epoch);
  collect_heads(a, s, layer, position, epoch, p);
  mark(s, 3);
  attention(a, s, layer, static_cast<int>(position), epoch, p);
  float mixed[4];
  await_pairs<1>(a.exchange + X_ATTENTION + 2 * p.thread, 0, epoch, mixed, s, a.error);
  mark(s, 7);
  uint4 words = {split(mixed[0]), split(mixed[1]), split(mixed[2]), split(mixed[3])};
  *reinterpret_cast<uint4 *>(activation_word(s, 4 * p.thread)) = words;
  consumers_meet();
  mark(s, 8);
  multiply_rows<O_CHUNKS>(a, s, ring, table, p);
  add_to_residual(a, s, row_sum(s, 0, p), epoch, p);
  mark(s, 9);
}

// Rows 0 … 7 of a chunk are gates, 8 … 15 the matching ups.
__device__ void publish_acts(const Arguments &a, Shared &s, u32 epoch, const Place &p) {
  for (int first = 0; first < GU_CHUNKS * CHUNK_ROWS; first += CONSUMERS / 16) {
    float sum = row_sum(s, first, p);
    // Row r + 8 is 8 · 16 threads further: in shared memory, not in this warp.
    if (p.thread % 16 == 0) s.sums[first + p.thread / 16][0] = sum;
  }
  consumers_meet();
  if (p.warp < (OWN_ACTS + 31) / 32) {
    int act = min(p.thread, OWN_ACTS - 1), row = act / 8 * CHUNK_ROWS + act % 8;
    float gate = s.sums[row][0], up = s.sums[row + 8][0];
    float value = gate / (1.0f + __expf(-gate)) * up, next = __shfl_xor_sync(~0u, value, 1);
    if (p.thread < OWN_ACTS && p.thread % 2 == 0)
      publish_pair(a.exchange + X_ACT + (p.block * OWN_ACTS + p.thread) / 2, value, next, epoch);
  }
}

__device__ void layer_mlp(const Arguments &a, Shared &s, Ring &ring, int layer, u32 epoch, u32 table,
                          const Place &p) {
  float4 weight = norm_weights(a, 2 * layer + 1, p);
  float x[4];
  gather_residual(a, s, x, epoch, p);
  mark(s, 10);
  normalise(s, x, weight, 1, p);
  mark(s, 11);
  multiply_rows<GU_CHUNKS>(a, s, ring, table, p);
  mark(s, 12);
  publish_acts(a, s, epoch, p);
  constexpr int EACH = INTERMEDIATE / CONSUMERS / 4;
  float acts[4 * EACH];
  await_pairs<EACH>(a.exchange + X_ACT + 2 * p.thread, 2 * CONSUMERS, epoch, acts, s, a.error);
  mark(s, 13);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    uint4 words = {split(acts[4 * i] * SHRINK), split(acts[4 * i + 1] * SHRINK), split(acts[4 * i + 2] * SHRINK),
                   split(acts[4 * i + 3] * SHRINK)};
    *reinterpret_cast<uint4 *>(activation_word(s, 4 * (p.thread + i * CONSUMERS))) = words;
  }
  consumers_meet();
  mark(s, 14);
  float sum[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int slice = 0; slice < SLICES; slice++) {
    Fragment b;
    load_fragment(b, s, slice, p.warp, p.lane);
    const unsigned char *chunk = next_chunk<false>(s, ring.body, a.error);
    Codes codes;
    load_codes(codes, chunk, p.warp, p.lane);
    nf4_chunk(sum, codes, chunk, b, table, p.warp, p.lane);
    release_chunk<false>(s, ring.body++, p.lane);
  }
  store_sums(s, 0, sum, p);
  consumers_meet();
  add_to_residual(a, s, row_sum(s, 0, p) / SHRINK, epoch + 1, p);
  mark(s, 15);
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

__device__ void all_logits(const Arguments &a, Shared &s, Ring &ring, Best &best, const Place &p) {
  Fragment b;
  load_fragment(b, s, 0, p.warp, p.lane);
  int last = head_first(p.block + 1);
  for (int first = head_first(p.block); first < last; first += HEAD_BATCH) {
    int batch = min(HEAD_BATCH, last - first);
    for (int c = 0; c < batch; c++) {
      float sum[2] = {0.0f, 0.0f};
      const unsigned char *chunk = next_chunk<true>(s, ring.head, a.error);
      int6_chunk(sum, chunk, b, p.warp, p.lane);
      release_chunk<true>(s, ring.head++, p.lane);
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

__device__ __forceinline__ void keep_best(Shared &s, const Best &b, int at) {
  s.best[at] = static_cast<u64>(__float_as_uint(b.most)) << 32 | static_cast<u32>(b.id);
  s.best_sum[at] = b.sum;
}

__device__ __forceinline__ Best kept_best(Shared &s, int at) {
  Best b;
  add_best(b, __uint_as_float(static_cast<u32>(s.best[at] >> 32)), s.best_sum[at], static_cast<int>(s.best[at]));
  return b;
}

// Everybody's best, hence the token and its probability: the same in every block.
__device__ int choose(const Arguments &a, Shared &s, Best best, u32 epoch, int step, const Place &p) {
  best_of_warp(best);
  if (p.lane == 0) keep_best(s, best, p.warp);
  consumers_meet();
  u64 *words = a.exchange + X_BEST;
  if (p.warp == 0) {
    Best block;
    if (p.lane < WARPS) block = kept_best(s, p.lane);
    best_of_warp(block);
    float three[3] = {block.most, __int_as_float(block.id), block.sum};
    if (p.lane < 3) publish(words + 3 * p.block + p.lane, p.lane == 0 ? three[0] : p.lane == 1 ? three[1] : three[2], epoch);
  }
  consumers_meet();
  if (p.warp < BLOCKS / 32) {
    Best mine;
    const u64 *from = words + 3 * p.thread;
    float most = await(from, epoch, s, a.error), id = await(from + 1, epoch, s, a.error);
    add_best(mine, most, await(from + 2, epoch, s, a.error), __float_as_int(id));
    best_of_warp(mine);
    if (p.lane == 0) keep_best(s, mine, p.warp);
  }
  consumers_meet();
  Best chosen;
#pragma unroll
  for (int w = 0; w < BLOCKS / 32; w++) {
    Best of = kept_best(s, w);
    add_best(chosen, of.most, of.sum, of.id);
  }
  if (p.block == 0 && p.thread == 0) {
    a.tokens[step] = chosen.id;
    a.probabilities[step] = 1.0f / chosen.sum;
  }
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
  Ring ring;
  for (int step = 0; step < all_steps(a); step++, position++) {
    if (step < a.given_count) token = static_cast<int>(a.given[step]);
    float x[4];
    consumers_meet();  // nobody needs the last step's residual and bests any more
    embed(a, s, token, x, p);
    for (int layer = 0; layer < LAYERS; layer++, epoch += 2) {
      layer_attention(a, s, ring, layer, position, epoch, x, table, p);
      layer_mlp(a, s, ring, layer, epoch, table, p);
    }
    if (!chooses(a, step)) continue;
    float4 weight = norm_weights(a, 2 * LAYERS, p);
    gather_residual(a, s, x, epoch - 1, p);
    normalise(s, x, weight, 0, p);
    Best best;
    all_logits(a, s, ring, best, p);
    mark(s, 16);
    token = choose(a, s, best, epoch, step + 1 - a.given_count, p);
    epoch += 2;
    mark(s, 17);
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
      barrier_init(&s.body_full[i], 1);
      barrier_init(&s.body_empty[i], WARPS);
    }
    for (int i = 0; i < HEAD_SLOTS; i++) {
      barrier_init(&s.head_full[i], 1);
      barrier_init(&s.head_empty[i], WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < CONSUMERS)
    consume(a, s);
  else if (threadIdx.x == CONSUMERS)
    produce(a, s);
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

// One matrix of a layer → bf16 (rows, columns). A block of threads takes one chunk; first, chunks:
// the matrix's own in the stream of each of `blocks` blocks.
extern "C" __global__ void __launch_bounds__(CONSUMERS) unpack_matrix(const unsigned char *body,
                                                                      const float *codebook, int layer, int first,
                                                                      int chunks, int columns, u16 *out) {
  constexpr int PITCH = GROUP + 8;  // against bank conflicts
  __shared__ alignas(16) u16 tiles[WARPS][CHUNK_ROWS * PITCH];
  __shared__ float values[16];
  int block = blockIdx.x / chunks, c = first + blockIdx.x % chunks, which;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < 16) values[threadIdx.x] = codebook[threadIdx.x];
  __syncthreads();
  const unsigned char *chunk =
      body + ((static_cast<long long>(layer) * BLOCKS + block) * LAYER_CHUNKS + c) * BODY_BYTES;
  const u16 *scales = reinterpret_cast<const u16 *>(chunk + CHUNK_ROWS * CHUNK_COLUMNS / 2);
  for (int g = 0; g < 2; g++) {
    uint4 codes = *reinterpret_cast<const uint4 *>(chunk + warp * 1024 + g * 512 + lane * 16);
    u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
    for (int half = 0; half < 2; half++) {
      int row = lane / 4 + 8 * half;
      float scale = from_bf16(scales[(2 * warp + g) * CHUNK_ROWS + row]);
#pragma unroll
      for (int k = 0; k < 4; k++)
        for (int right = 0; right < 2; right++) {
          u32 byte = words[k] >> 8 * (2 * right + half) & 255;
          u32 pair = to_bf16(values[byte >> 4] * scale) | static_cast<u32>(to_bf16(values[byte & 15] * scale)) << 16;
          *reinterpret_cast<u32 *>(tiles[warp] + row * PITCH + 16 * k + 8 * right + 2 * (lane % 4)) = pair;
        }
    }
    __syncwarp();
    // Row by row: eight lanes write 128 bytes side by side.
    for (int i = 0; i < 4; i++) {
      int row = lane / 8 + 4 * i, at = matrix_row(block, c, row, which);
      int column = (which == 3 ? c - first : 0) * CHUNK_COLUMNS + warp * 128 + g * GROUP + lane % 8 * 8;
      *reinterpret_cast<uint4 *>(out + static_cast<long long>(at) * columns + column) =
          *reinterpret_cast<const uint4 *>(tiles[warp] + row * PITCH + lane % 8 * 8);
    }
    __syncwarp();
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
