// Parts of a matrix that several GPUs computed, gathered on each of them. Each GPU stores its part into the others' exchange buffers, over
// NVLink or PCIe, as words of 64 bits: 32 bits of values and a mark. A reader polls a word until it has the mark of this exchange, so no
// fence and no flag of its own is needed. Marks grow from exchange to exchange; two halves of a buffer take turns. A GPU writes into a half
// again only after it has received the exchange in between, which its reader sent behind its last read of that half. So a step has an even
// number of exchanges, and one that not all GPUs receive is its last.
#include "common/abi.cuh"
#include "common/common.cuh"

constexpr int EXCHANGE_GPUS = 8;

struct ExchangeTask {
  uint64_t* buffer[EXCHANGE_GPUS];   // of each GPU, in its memory: two halves of `half` words
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
  uint32_t phases;                   // bit 0: send, bit 1: receive, bit 2: addresses and widths are those of pairs of words
};
ABI_SIZE(ExchangeTask, 176); ABI_AT(ExchangeTask, buffer, 0); ABI_AT(ExchangeTask, own, 64); ABI_AT(ExchangeTask, full, 72);
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

// N words of a matrix, which are N times 64 bits in an exchange buffer, accessed at once. Each word of 64 bits arrives as a whole.
template <int N>
struct alignas(4 * N) Words {
  uint32_t v[N];
};

template <int N>
DEVICE void send(uint64_t* to, const Words<N>& words, uint32_t mark) {
  const uint64_t high = uint64_t(mark) << 32;
  if constexpr (N == 1) asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(high | words.v[0]) : "memory");
  else asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(high | words.v[0]), "l"(high | words.v[1]) : "memory");
}

// Reads the words at `from` once they have `mark`; returns false if they do not arrive in time.
template <int N>
DEVICE bool arrived(Words<N>& words, const uint64_t* from, uint32_t mark, uint64_t limit) {
  uint64_t begin = 0;
  for (uint32_t tries = 0;; tries++) {
    uint64_t word[N];
    if constexpr (N == 1) asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word[0]) : "l"(from) : "memory");
    else asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(word[0]), "=l"(word[1]) : "l"(from) : "memory");
    bool all = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
      words.v[i] = uint32_t(word[i]);
      all = all && uint32_t(word[i] >> 32) == mark;
    }
    if (all) return true;
    if (tries % 1024 != 1023) continue;
    const uint64_t now = time_ns();
    if (begin == 0) begin = now;
    if (now - begin > limit) return false;
  }
}

template <int N>
DEVICE void gather(const ExchangeTask& task, uint32_t mark) {
  const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  const int columns = task.begin[task.gpus];
  const int64_t half = (task.number & 1) * task.half;
  const bool gets = task.receivers >> task.me & 1;
  bool lost = *reinterpret_cast<volatile uint32_t*>(task.failed) != 0;
  auto keep = [&](int from, int width, int i, const Words<N>& words) {
    const int row = i / width;
    *reinterpret_cast<Words<N>*>(task.full + int64_t(row) * columns + from + i - row * width) = words;
  };
  if ((task.phases & 1) && !lost) {
    const int from = task.begin[task.me], width = task.begin[task.me + 1] - from;
    for (int i = N * first; i < task.rows * width; i += N * stride) {
      const Words<N> words = *reinterpret_cast<const Words<N>*>(task.own + i);
      for (int gpu = 0; gpu < task.gpus; gpu++)
        if (gpu != task.me && (task.receivers >> gpu & 1)) send<N>(task.buffer[gpu] + half + int64_t(from) * task.rows + i, words, mark);
      if (gets) keep(from, width, i, words);
    }
  }
  if (!(task.phases & 2) || !gets) return;
  const uint64_t* buffer = task.buffer[task.me] + half;
  for (int gpu = 0; gpu < task.gpus; gpu++) {
    const int from = task.begin[gpu], width = task.begin[gpu + 1] - from;
    if (gpu == task.me) continue;
    for (int i = N * first; i < task.rows * width; i += N * stride) {
      Words<N> words;
      if (!lost && !arrived<N>(words, buffer + int64_t(from) * task.rows + i, mark, task.limit)) {
        lost = true;
        *task.failed = 1;
      }
#pragma unroll
      for (int j = 0; j < N; j++) words.v[j] = lost ? NOTHING : words.v[j];
      keep(from, width, i, words);
    }
  }
  if (!lost) return;
  // The own columns too: without a send they still have the values of an earlier step.
  const int from = task.begin[task.me], width = task.begin[task.me + 1] - from;
  for (int i = first; i < task.rows * width; i += stride)
    task.full[int64_t(i / width) * columns + from + i % width] = NOTHING;
}

// All blocks must be resident, since each first sends and then waits for the blocks of other GPUs: at most one an SM.
extern "C" __global__ void __launch_bounds__(256) exchange(const ExchangeTask task) {
  pdl_trigger();
  pdl_wait();
  const uint32_t mark = *task.step * EXCHANGES + task.number + 1;
  if (task.phases & 4) gather<2>(task, mark);
  else gather<1>(task, mark);
}

// Results of many rows: each GPU stores its columns straight into the results in the memory of all GPUs. Nothing is sent twice. Launches are
// ordered by events, or each block marks behind a fence that its stores are done, and one block of each GPU waits for all marks. Two results
// take turns for the same reason as two halves of an exchange buffer.
struct ColumnsTask {
  uint32_t* full[EXCHANGE_GPUS];   // of each GPU: [rows, columns], in units of 32 bits
  uint32_t* marks[EXCHANGE_GPUS];  // of each GPU: COLUMN_BLOCKS words of each GPU that stores into its result
  const uint32_t* own;             // [rows, width]
  const uint32_t* step;            // as of `ExchangeTask`; so are failed, limit and number
  uint32_t* failed;
  uint64_t limit;
  int columns, from, width;        // of a row: all, and the first of this GPU and their number
  int gpus, me, rows;
  uint32_t number;
  uint32_t phases;                 // bit 0: mark, bit 1: wait for marks, bit 2: addresses and widths are those of four words
};
ABI_SIZE(ColumnsTask, 192); ABI_AT(ColumnsTask, full, 0); ABI_AT(ColumnsTask, marks, 64); ABI_AT(ColumnsTask, own, 128);
ABI_AT(ColumnsTask, step, 136); ABI_AT(ColumnsTask, failed, 144); ABI_AT(ColumnsTask, limit, 152); ABI_AT(ColumnsTask, columns, 160);
ABI_AT(ColumnsTask, from, 164); ABI_AT(ColumnsTask, width, 168); ABI_AT(ColumnsTask, gpus, 172); ABI_AT(ColumnsTask, me, 176);
ABI_AT(ColumnsTask, rows, 180); ABI_AT(ColumnsTask, number, 184); ABI_AT(ColumnsTask, phases, 188);

constexpr int COLUMN_BLOCKS = 256;  // most blocks of a launch; all GPUs launch the same number

template <int N>
DEVICE void store_all(const ColumnsTask& task) {
  const int width = task.width / N, count = task.rows * width, stride = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {
    const Words<N> words = reinterpret_cast<const Words<N>*>(task.own)[i];
    const int row = i / width;
    const int64_t to = int64_t(row) * task.columns + task.from + N * (i - row * width);
    for (int gpu = 0; gpu < task.gpus; gpu++) *reinterpret_cast<Words<N>*>(task.full[gpu] + to) = words;
  }
}

// Waits until a word has `mark`; returns false if that takes too long.
DEVICE bool marked(const uint32_t* word, uint32_t mark, uint64_t limit) {
  uint64_t begin = 0;
  for (uint32_t tries = 0;; tries++) {
    uint32_t found;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(word) : "memory");
    if (found == mark) return true;
    if (tries % 1024 != 1023) continue;
    const uint64_t now = time_ns();
    if (begin == 0) begin = now;
    if (now - begin > limit) return false;
  }
}

// Only the first block waits, after it has stored: blocks need not be resident together.
extern "C" __global__ void __launch_bounds__(256) store_columns(const ColumnsTask task) {
  pdl_trigger();
  pdl_wait();
  bool lost = (task.phases & 3) && *reinterpret_cast<volatile uint32_t*>(task.failed) != 0;
  if (!lost) {
    if (task.phases & 4) store_all<4>(task);
    else store_all<1>(task);
  }
  if (!(task.phases & 3)) return;
  const uint32_t mark = *task.step * EXCHANGES + task.number + 1;
  if ((task.phases & 1) && !lost) {
    __threadfence_system();
    __syncthreads();
    const int gpu = threadIdx.x;
    if (gpu < task.gpus && gpu != task.me) {
      uint32_t* to = task.marks[gpu] + task.me * COLUMN_BLOCKS + blockIdx.x;
      asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(to), "r"(mark) : "memory");
    }
  }
  if (!(task.phases & 2) || blockIdx.x != 0) return;
  for (int i = threadIdx.x; i < task.gpus * int(gridDim.x) && !lost; i += blockDim.x) {
    const int gpu = i / gridDim.x, block = i - gpu * gridDim.x;
    if (gpu != task.me) lost = !marked(task.marks[task.me] + gpu * COLUMN_BLOCKS + block, mark, task.limit);
  }
  __threadfence_system();
  if (!__syncthreads_or(lost)) return;
  if (threadIdx.x == 0) *task.failed = 1;
  for (int64_t i = threadIdx.x; i < int64_t(task.rows) * task.columns; i += blockDim.x) task.full[task.me][i] = NOTHING;
}
