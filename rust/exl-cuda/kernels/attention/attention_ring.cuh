// Ring of units: 64 keys and their values, copied to shared memory while earlier ones are processed.
#pragma once
#include "attention/attention_common.cuh"
#include "attention/attention_stage.cuh"

static_assert(UNIT == STAGE, "a stage is a unit");

// A key or value as packed in the pages, in shared memory: bytes, then scales.
template <int CODEC, int DIM>
constexpr int packed_bytes() { return (row_bytes<CODEC, DIM>() + scale_bytes<CODEC, DIM>() + 15) / 16 * 16; }

// Constants that the kernels' shapes share. The ring has `RING` units if a block may use `BUDGET` bytes for it, else two or one.
template <int KEY_CODEC, int VALUE_CODEC, int DIM_, int WARPS_, int BUDGET>
struct Stages {
  static constexpr int KC = KEY_CODEC, VC = VALUE_CODEC, DIM = DIM_, WARPS = WARPS_;
  static constexpr int KEY_BYTES = key_stage_bytes<KC, DIM>(), UNIT_BYTES = KEY_BYTES + value_stage_bytes<VC, DIM>();
  static constexpr int RING = BUDGET / UNIT_BYTES < 2 ? 2 : BUDGET / UNIT_BYTES > 4 ? 4 : BUDGET / UNIT_BYTES;
};

template <class S>
struct Ring {
  static constexpr int DIM = S::DIM, KEYS = STAGE / S::WARPS;  // a warp copies KEYS keys and their values
  static constexpr int chunk(int codec) { return codec == E5M2 ? 8 : 16; }
  static constexpr int KEY_CHUNKS = row_bytes<S::KC, DIM>() / chunk(S::KC), VALUE_CHUNKS = row_bytes<S::VC, DIM>() / chunk(S::VC);
  static constexpr int FEWEST = KEY_CHUNKS < VALUE_CHUNKS ? KEY_CHUNKS : VALUE_CHUNKS;
  static constexpr int LANES = FEWEST < 8 ? FEWEST : 8, STEP = 32 / LANES, ROWS = KEYS < STEP ? 1 : KEYS / STEP;  // lanes a row; rows a lane

  const Attention& a;
  const Keys& keys;
  uint8_t* units;
  const uint8_t* own;  // packed key and value of keys.fresh
  int head, first, count, issued = 0, issue_slot = 0, take_slot = 0, row;

  DEVICE Ring(const Attention& a, const Keys& keys, uint8_t* units, const uint8_t* own, int head, int first, int count)
      : a(a), keys(keys), units(units), own(own), head(head), first(first), count(count) {
    row = find(0);
#pragma unroll 1
    for (int i = 0; i < max(a.ring - 1, 1); i++) issue();
  }
  DEVICE int after(int slot) const { return slot + 1 == a.ring ? 0 : slot + 1; }
  // Page row of the key that this lane looks up.
  DEVICE int find(int unit) const {
    return unit < count ? locate(a, keys, head, (first + unit) * UNIT + (threadIdx.x >> 5) * KEYS + threadIdx.x % KEYS) : -1;
  }
  // Issues the next unit's copies. The place of the unit after it is looked up one unit ahead.
  DEVICE void issue() {
    if (issued < count) {
      uint8_t* to = units + issue_slot * S::UNIT_BYTES;
      int rows[ROWS];
#pragma unroll
      for (int i = 0; i < ROWS; i++) rows[i] = __shfl_sync(~0u, row, (threadIdx.x & 31) / LANES % KEYS + i * STEP);
      copy<S::KC, key_stride<S::KC, DIM>()>(to, a.key, a.key_scales, rows);
      copy_commit();
      copy<S::VC, value_stride<S::VC, DIM>()>(to + S::KEY_BYTES, a.value, a.value_scales, rows);
      copy_commit();
      row = find(issued + 1);
    } else {
      copy_commit();
      copy_commit();
    }
    issued++;
    issue_slot = after(issue_slot);
  }
  template <int CODEC, int STRIDE>
  DEVICE void copy(uint8_t* to, const uint8_t* from, const __half* scales, const int (&rows)[ROWS]) {
    constexpr int CHUNK = chunk(CODEC), STEPS = row_bytes<CODEC, DIM>() / CHUNK / LANES;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, blocks = (a.dim + 63) / 64;
    const int bytes = (is_hadamard<CODEC>() ? blocks * 8 : a.dim / 8) * unit_bytes<CODEC>(), at = lane % LANES * CHUNK;
    uint8_t* mine = to + (warp * KEYS + lane / LANES) * STRIDE + at;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const uint8_t* source = from + (int64_t)max(rows[i], 0) * bytes + at;
      if (KEYS < STEP && lane / LANES >= KEYS) break;
#pragma unroll
      for (int c = 0; c < STEPS; c++)
        copy_async<CHUNK>(mine + i * STEP * STRIDE + c * LANES * CHUNK, source + c * LANES * CHUNK,
                          rows[i] >= 0 && at + c * LANES * CHUNK < bytes);
    }
    if constexpr (is_hadamard<CODEC>()) {
      constexpr int WORDS = DIM / 64, ITEMS = KEYS * WORDS;  // a word: two scales
#pragma unroll
      for (int i = 0; i < (ITEMS + 31) / 32; i++) {
        const int item = i * 32 + lane, key = item / WORDS, word = item % WORDS, source = __shfl_sync(~0u, row, key % KEYS);
        const bool present = source >= 0 && word < blocks;
        if (ITEMS % 32 == 0 || item < ITEMS)
          copy_async<4>(to + STAGE * STRIDE + (warp * ITEMS + item) * 4, scales + (present ? ((int64_t)source * blocks + word) * 2 : 0), present);
      }
    }
  }
  // Returns the oldest unit's keys once they are present. Contains a barrier of the block.
  DEVICE const uint8_t* take_keys() {
    if (a.ring == S::RING) copy_wait<2 * S::RING - 3>();
    else copy_wait<1>();
    const uint8_t* stage = units + take_slot * S::UNIT_BYTES;
    if (holds_fresh()) put<S::KC>(const_cast<uint8_t*>(stage), key_stride<S::KC, DIM>(), own);
    __syncthreads();
    return stage;
  }
  // Returns the unit's values. Contains a barrier too, after which no thread reads the previous unit: a new unit takes its place.
  DEVICE const uint8_t* take_values() {
    if (a.ring == S::RING) copy_wait<2 * S::RING - 4>();
    else copy_wait<0>();
    const uint8_t* stage = units + take_slot * S::UNIT_BYTES + S::KEY_BYTES;
    if (holds_fresh()) put<S::VC>(const_cast<uint8_t*>(stage), value_stride<S::VC, DIM>(), own + packed_bytes<S::KC, DIM>());
    __syncthreads();
    take_slot = after(take_slot);
    taken++;
    if (a.ring > 1) issue();
    return stage;
  }
  // Call this when a unit has been processed. If the ring has room for one unit, the next one is fetched now.
  DEVICE void unit_done() {
    if (a.ring > 1) return;
    __syncthreads();
    issue();
  }

 private:
  int taken = 0;

  // Returns whether the fresh key is in the current unit. The copies wrote zeros for it.
  DEVICE bool holds_fresh() const { return keys.fresh >= 0 && keys.fresh / UNIT == first + taken; }
  template <int CODEC>
  DEVICE void put(uint8_t* to, int stride, const uint8_t* from) {
    constexpr int WORDS = row_bytes<CODEC, DIM>() / 4, SCALES = scale_bytes<CODEC, DIM>() / 4;
    const int key = keys.fresh % UNIT, lane = threadIdx.x & 31;
    if (warp_index() != key / KEYS) return;  // the warp whose copies wrote the zeros
    __syncwarp();
#pragma unroll 1
    for (int i = lane; i < WORDS; i += 32) reinterpret_cast<uint32_t*>(to + key * stride)[i] = reinterpret_cast<const uint32_t*>(from)[i];
    if (lane < SCALES)
      reinterpret_cast<uint32_t*>(to + STAGE * stride)[key * SCALES + lane] = reinterpret_cast<const uint32_t*>(from)[WORDS + lane];
  }
};
