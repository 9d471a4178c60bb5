// A GPU that does nothing, for bench_queueing.py: it replaces the CUDA driver, the functions of the CUDA runtime that
// torch calls, and cuBLAS. Launches return at once; memory of the device is memory of the host that nothing touches.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector_types.h>

#define NOTHING(name) \
  int name(void) { return 0; }
#define SM 132
#define MEMORY (80ull << 30)

long stand_in_launches;  // of kernels and of matmuls of cuBLAS

static int launched(void) {
  stand_in_launches++;
  return 0;
}

static int attribute(int which) {
  switch (which) {
    case 1: return 1024;      // threads of a block
    case 8: return 49152;     // shared memory of a block
    case 10: return 32;       // threads of a warp
    case 16: return SM;
    case 39: return 2048;     // threads of an SM
    case 75: return 9;        // compute capability
    case 76: return 0;
    case 81: return 233472;   // shared memory of an SM
    case 97: return 232448;   // shared memory of a block that asks for it
    default: return 16;
  }
}

// The driver.
NOTHING(cuInit)
int cuDriverGetVersion(int* version) { return *version = 13000, 0; }
int cuDeviceGetCount(int* count) { return *count = 1, 0; }
int cuDeviceGet(int* device, int index) { return *device = index, 0; }
int cuDeviceGetName(char* name, int size, int device) { return strncpy(name, "stand-in", size), 0; }
int cuDeviceTotalMem_v2(size_t* bytes, int device) { return *bytes = MEMORY, 0; }
int cuDeviceGetAttribute(int* value, int which, int device) { return *value = attribute(which), 0; }
int cuGetErrorName(int code, const char** text) { return *text = "an error", 0; }
int cuGetErrorString(int code, const char** text) { return *text = "an error", 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { return *flags = 0, *active = 1, 0; }
NOTHING(cuDevicePrimaryCtxRetain)
int cuCtxGetCurrent(void** context) { return *context = (void*)1, 0; }
NOTHING(cuCtxPushCurrent_v2)
NOTHING(cuCtxPopCurrent_v2)
NOTHING(cuModuleLoadData)
NOTHING(cuModuleGetFunction)
NOTHING(cuFuncSetAttribute)
NOTHING(cuStreamGetCtx)
NOTHING(cuThreadExchangeStreamCaptureMode)
NOTHING(cuMemcpyHtoDAsync_v2)
int cuLaunchKernelEx(void) { return launched(); }

// The runtime.
static void* memory(size_t bytes) {
  return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
int cudaMalloc(void** place, size_t bytes) { return *place = memory(bytes), 0; }
int cudaHostAlloc(void** place, size_t bytes, unsigned flags) { return *place = memory(bytes), 0; }
int cudaMemGetInfo(size_t* available, size_t* total) { return *available = *total = MEMORY, 0; }
int cudaGetDeviceCount(int* count) { return *count = 1, 0; }
int cudaGetDevice(int* device) { return *device = 0, 0; }
int cudaDriverGetVersion(int* version) { return *version = 13000, 0; }
int cudaRuntimeGetVersion(int* version) { return *version = 13000, 0; }
int cudaDeviceGetAttribute(int* value, int which, int device) { return *value = attribute(which), 0; }
int cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -1, 0; }
int cudaDeviceCanAccessPeer(int* can, int device, int other) { return *can = 1, 0; }
static int capturing;
int cudaStreamIsCapturing(void* stream, int* status) { return *status = capturing, 0; }
int cudaStreamGetCaptureInfo(void* stream, int* status, unsigned long long* id) {
  if (id) *id = 1;
  return *status = capturing, 0;
}
int cudaStreamBeginCapture(void* stream, int mode) { return capturing = 1, 0; }
int cudaStreamEndCapture(void* stream, void** graph) { return capturing = 0, *graph = (void*)8, 0; }
int cudaGraphInstantiateWithFlags(void** graph, void* of, unsigned long long flags) { return *graph = (void*)8, 0; }
int cudaGraphGetNodes(void* graph, void** nodes, size_t* count) { return *count = 1, 0; }
int cudaGraphLaunch(void* graph, void* stream) { return launched(); }
NOTHING(cudaGraphDestroy)
NOTHING(cudaGraphExecDestroy)
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority) { return *stream = malloc(8), 0; }
int cudaEventCreateWithFlags(void** event, unsigned flags) { return *event = malloc(8), 0; }
int cudaEventElapsedTime(float* ms, void* from, void* to) { return *ms = 0, 0; }
int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) { return memcpy(to, from, bytes), 0; }
int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return memcpy(to, from, bytes), 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks) { return *blocks = 2, 0; }
int cudaPointerGetAttributes(struct cudaPointerAttributes* found, const void* place) {
  memset(found, 0, sizeof *found);
  found->type = cudaMemoryTypeHost;
  return 0;
}
int cudaFuncGetAttributes(struct cudaFuncAttributes* found, const void* kernel) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  return 0;
}
int cudaGetDeviceProperties(struct cudaDeviceProp* found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "stand-in");
  found->major = 9;
  found->multiProcessorCount = SM;
  found->totalGlobalMem = MEMORY;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  for (int i = 0; i < 3; i++) found->maxThreadsDim[i] = 1024, found->maxGridSize[i] = 65535;
  found->maxGridSize[0] = 2147483647;
  return 0;
}
int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long flags,
                                     int* status) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (status) *status = *function ? 0 : 1;
  return 0;
}
int cudaLaunchKernelExC(const void* config, const void* kernel, void** arguments) { return launched(); }
int __cudaGetKernel(void** kernel, const void* function) { return *kernel = (void*)function, 0; }
int __cudaLaunchKernel(void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, void* stream) {
  return launched();
}
NOTHING(cudaDeviceEnablePeerAccess)
NOTHING(cudaDeviceSynchronize)
NOTHING(cudaEventDestroy)
NOTHING(cudaEventQuery)
NOTHING(cudaEventRecord)
NOTHING(cudaEventRecordWithFlags)
NOTHING(cudaEventSynchronize)
NOTHING(cudaFree)
NOTHING(cudaFreeHost)
NOTHING(cudaFuncSetAttribute)
NOTHING(cudaGetLastError)
NOTHING(cudaPeekAtLastError)
NOTHING(cudaMemset)
NOTHING(cudaMemsetAsync)
NOTHING(cudaSetDevice)
NOTHING(cudaStreamDestroy)
NOTHING(cudaStreamQuery)
NOTHING(cudaStreamSynchronize)
NOTHING(cudaStreamWaitEvent)
NOTHING(cudaThreadExchangeStreamCaptureMode)

// cuBLAS.
int cublasCreate_v2(void** handle) { return *handle = malloc(8), 0; }
int cublasGetMathMode(void* handle, int* mode) { return *mode = 0, 0; }
int cublasGetPointerMode_v2(void* handle, int* mode) { return *mode = 0, 0; }
NOTHING(cublasDestroy_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
int cublasGemmEx(void) { return launched(); }
int cublasGemmStridedBatchedEx(void) { return launched(); }
int cublasSgemm_v2(void) { return launched(); }
int cublasDgemm_v2(void) { return launched(); }
int cublasSgemmStridedBatched(void) { return launched(); }
int cublasDgemmStridedBatched(void) { return launched(); }
