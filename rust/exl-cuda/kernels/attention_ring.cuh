// Ring of stages: keys, then values, of each unit of 64 keys; and the row that is put in by hand because the pages lack it.
#pragma once
#include "attention_common.cuh"
#include "attention_stage.cuh"

static_assert(UNIT == STAGE, "a stage is a unit");

// A key or value as packed in the pages, in shared memory: bytes, then scales.
template <int CODEC, int DIM>
constexpr int packed_bytes() { return (row_bytes<CODEC, DIM>() + scale_bytes<CODEC, DIM>() + 15) / 16 * 16; }

// S: KC, VC, DIM, SLOT_BYTES, WARPS.
template <class S>
struct Ring {
  static constexpr int KEYS_PER_WARP = STAGE / S::WARPS;
  const Attention& a;
  const Keys& keys;
  uint8_t* slots;
  const uint8_t* own = nullptr;  // packed key and value of keys.fresh, once they are there
  int head, first_unit, stages, issued = 0, issue_slot = 0, take_slot = 0, row;

  DEVICE Ring(const Attention& a, const Keys& keys, uint8_t* slots, int head, int first_unit, int units)
      : a(a), keys(keys), slots(slots), head(head), first_unit(first_unit), stages(units * 2) {
    row = find(0);
    for (int i = 0; i < a.ring - 1; i++) issue();
  }
  DEVICE int find(int unit) const {
    const int key = (first_unit + unit) * UNIT + (threadIdx.x >> 5) * KEYS_PER_WARP + threadIdx.x % KEYS_PER_WARP;
    return 2 * unit < stages ? locate(a, keys, head, key) : -1;
  }
  DEVICE int after(int slot) const { return slot + 1 == a.ring ? 0 : slot + 1; }
  // The next stage's copies; the rows of the next unit are looked up one stage ahead.
  DEVICE void issue() {
    if (issued < stages) {
      uint8_t* to = slots + issue_slot * S::SLOT_BYTES;
      const int first = (threadIdx.x >> 5) * KEYS_PER_WARP;
      if (issued & 1) {
        copy_rows<S::VC, S::DIM, KEYS_PER_WARP>(to, value_stride<S::VC, S::DIM>(), first, a.value, a.value_scales, row, a.dim);
        row = find((issued + 1) / 2);
      } else {
        copy_rows<S::KC, S::DIM, KEYS_PER_WARP>(to, key_stride<S::KC, S::DIM>(), first, a.key, a.key_scales, row, a.dim);
      }
      if (own) put(issued, to);
    }
    copy_commit();
    issued++;
    issue_slot = after(issue_slot);
  }
  // The oldest stage, once it is there; its predecessor's slot is filled anew. A barrier of the block.
  DEVICE const uint8_t* take() {
    copy_wait_for(a.ring - 2);
    __syncthreads();
    issue();
    const uint8_t* stage = slots + take_slot * S::SLOT_BYTES;
    take_slot = after(take_slot);
    return stage;
  }
  // Puts the fresh key into the stages already under way, and from now on into those to come. `packed`: written before a barrier.
  DEVICE void give(const uint8_t* packed) {
    own = packed;
    for (int i = 0, slot = 0; i < issued; i++, slot = after(slot)) put(i, slots + slot * S::SLOT_BYTES);
  }
  DEVICE void put(int stage, uint8_t* to) {
    const int key = keys.fresh - (first_unit + stage / 2) * UNIT;
    if (key < 0 || key >= UNIT || stage >= stages || threadIdx.x / 32 != key / KEYS_PER_WARP) return;
    if (stage & 1) put_row<S::VC>(to, value_stride<S::VC, S::DIM>(), key, own + packed_bytes<S::KC, S::DIM>());
    else put_row<S::KC>(to, key_stride<S::KC, S::DIM>(), key, own);
  }
  template <int CODEC>
  DEVICE void put_row(uint8_t* to, int stride, int key, const uint8_t* from) {
    constexpr int WORDS = row_bytes<CODEC, S::DIM>() / 4, SCALES = scale_bytes<CODEC, S::DIM>() / 4;
    const int lane = threadIdx.x & 31;
    for (int i = lane; i < WORDS; i += 32) reinterpret_cast<uint32_t*>(to + key * stride)[i] = reinterpret_cast<const uint32_t*>(from)[i];
    if (lane < SCALES)
      reinterpret_cast<uint32_t*>(to + STAGE * stride)[key * SCALES + lane] = reinterpret_cast<const uint32_t*>(from)[WORDS + lane];
  }
};
