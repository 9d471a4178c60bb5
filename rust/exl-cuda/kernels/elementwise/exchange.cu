// Parts of a matrix that several GPUs computed, gathered on each of them. Each GPU stores its part into the mailboxes of the others, over
// NVLink or PCIe, as words of 64 bits: 32 bits of values and a mark. A reader polls a word until it has the mark of this exchange, so no
// fence and no flag of its own is needed. Marks grow from exchange to exchange; two halves of a mailbox take turns. A GPU writes into a half
// again only after it has received the exchange in between, which its reader sent behind its last read of that half. So a step has an even
// number of exchanges, and one that not all GPUs receive is its last.
#include "common/abi.cuh"
#include "common/common.cuh"

constexpr int EXCHANGE_GPUS = 8;

struct ExchangeTask {
  uint64_t* mailbox[EXCHANGE_GPUS];  // of each GPU, in its memory: two halves of `half` words
  const uint32_t* own;               // [rows, width of this GPU], contiguous, in units of 32 bits as all widths
  uint32_t* full;                    // [rows, begin[gpus]]
  const uint32_t* step;              // number of the step, the same on all GPUs
  uint32_t* failed;                  // becomes 1 if a word does not arrive in time; from then on this GPU gets NaN and sends nothing
  int64_t half;
  uint64_t limit;                    // nanoseconds
  int begin[EXCHANGE_GPUS + 1];      // first column of each GPU; the end of the last one for all behind it
  int gpus, me, rows;
  uint32_t number;                   // of the exchange within its step, below EXCHANGES
  uint32_t receivers;                // bit i: GPU i gets the whole
  uint32_t phases;                   // bit 0: send, bit 1: receive
};
ABI_SIZE(ExchangeTask, 176); ABI_AT(ExchangeTask, mailbox, 0); ABI_AT(ExchangeTask, own, 64); ABI_AT(ExchangeTask, full, 72);
ABI_AT(ExchangeTask, step, 80); ABI_AT(ExchangeTask, failed, 88); ABI_AT(ExchangeTask, half, 96); ABI_AT(ExchangeTask, limit, 104);
ABI_AT(ExchangeTask, begin, 112); ABI_AT(ExchangeTask, gpus, 148); ABI_AT(ExchangeTask, me, 152); ABI_AT(ExchangeTask, rows, 156);
ABI_AT(ExchangeTask, number, 160); ABI_AT(ExchangeTask, receivers, 164); ABI_AT(ExchangeTask, phases, 168);

constexpr uint32_t EXCHANGES = 1024;  // most exchanges of a step

DEVICE uint64_t time_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

constexpr uint32_t NOTHING = 0x7fff7fff;  // NaN as FP32, and as two of either half type

// The word at `from` once it has `mark`; false if it does not arrive in time.
DEVICE bool arrived(uint32_t& value, const uint64_t* from, uint32_t mark, uint64_t limit) {
  uint64_t begin = 0;
  for (uint32_t tries = 0;; tries++) {
    uint64_t word;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    value = uint32_t(word);
    if (uint32_t(word >> 32) == mark) return true;
    if (tries % 1024 != 1023) continue;
    const uint64_t now = time_ns();
    if (begin == 0) begin = now;
    if (now - begin > limit) return false;
  }
}

// Few blocks: all must be resident, since each first sends and then waits for the blocks of other GPUs.
extern "C" __global__ void __launch_bounds__(256) exchange(const ExchangeTask task) {
  pdl_trigger();
  pdl_wait();
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  const uint32_t mark = *task.step * EXCHANGES + task.number + 1;
  const int columns = task.begin[task.gpus];
  const int64_t half = (task.number & 1) * task.half;
  const bool gets = task.receivers >> task.me & 1;
  bool lost = *reinterpret_cast<volatile uint32_t*>(task.failed) != 0;
  if ((task.phases & 1) && !lost) {
    const int from = task.begin[task.me], width = task.begin[task.me + 1] - from;
    for (int i = first; i < task.rows * width; i += stride) {
      const uint32_t value = task.own[i];
      const uint64_t word = uint64_t(mark) << 32 | value;
      for (int gpu = 0; gpu < task.gpus; gpu++) {
        if (gpu == task.me || !(task.receivers >> gpu & 1)) continue;
        uint64_t* to = task.mailbox[gpu] + half + int64_t(from) * task.rows + i;
        asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
      }
      if (gets) task.full[int64_t(i / width) * columns + from + i % width] = value;
    }
  }
  if (!(task.phases & 2) || !gets) return;
  const uint64_t* mailbox = task.mailbox[task.me] + half;
  for (int gpu = 0; gpu < task.gpus; gpu++) {
    const int from = task.begin[gpu], width = task.begin[gpu + 1] - from;
    if (gpu == task.me) continue;
    for (int i = first; i < task.rows * width; i += stride) {
      uint32_t value = NOTHING;
      if (!lost && !arrived(value, mailbox + int64_t(from) * task.rows + i, mark, task.limit)) {
        lost = true;
        *task.failed = 1;
      }
      if (lost) value = NOTHING;
      task.full[int64_t(i / width) * columns + from + i % width] = value;
    }
  }
  if (!lost) return;
  // The own columns too: without a send they still have the values of an earlier step.
  const int from = task.begin[task.me], width = task.begin[task.me + 1] - from;
  for (int i = first; i < task.rows * width; i += stride)
    task.full[int64_t(i / width) * columns + from + i % width] = NOTHING;
}
