// SPDX-License-Identifier: Apache-2.0
//
// Signals between ranks on a GPU: the C ABI of signal.h. One kernel of one block; bulk kernels never wait, since ranks
// may share a GPU. Epochs are kept and advanced on the device, so that a captured run can be replayed.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstring>
#include <new>

#include "pack.h"
#include "signal.h"

namespace cudecomp {
namespace {

constexpr unsigned long long kLast = 1ull << 62;  // in an epoch: none comes after it
constexpr int kMostThreads = 1024;
constexpr int kFree = CUDECOMP_LINE / sizeof(uint64_t);  // from written(k) to free(k), in words

// What changes from run to run, in device memory.
struct Progress {
    unsigned long long epoch;    // of the latest run
    unsigned long long stopped;  // not 0: why, and no other signal is given
};

struct State {
    Progress *progress;
    const cudecomp_edge *edges;
    char **slots;
    uint64_t *status;
    uint64_t timeout;
    int32_t count;
    int32_t fields;
};

struct Places {
    uint64_t words[2 * CUDECOMP_MAX_FIELDS];
};

// ---- words that other ranks, on this device or others, read and write ----

__device__ unsigned long long load_acquire(const uint64_t *word) {
    unsigned long long value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
    return value;
}

__device__ void store_release(uint64_t *word, unsigned long long value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
}

__device__ unsigned long long load_relaxed(const uint64_t *word) {
    unsigned long long value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(__cvta_generic_to_global(word)) : "memory");
    return value;
}

__device__ void store_relaxed(uint64_t *word, unsigned long long value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), "l"(value) : "memory");
}

__device__ unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// ---- the parts of a signal: a thread per peer ----

__device__ unsigned long long load_own(const unsigned long long *word) {
    return *static_cast<const volatile unsigned long long *>(word);
}

// Stop for good; the first reason stays.
__device__ void stop(const State &state, int why, int32_t peer) {
    const unsigned long long reason = (static_cast<unsigned long long>(why) << 32) | uint32_t(peer);
    if (atomicCAS(&state.progress->stopped, 0ull, reason) == 0) store_release(state.status, reason);
}

// Wait until a peer's epoch has been reached; false, and stopped, if it never will be.
__device__ bool wait_for(const State &state, const uint64_t *word, unsigned long long epoch, int32_t peer) {
    unsigned long long start = 0;
    for (;;) {
        const unsigned long long value = load_acquire(word);
        if ((value & ~kLast) >= epoch) return true;
        if (value & kLast) stop(state, CUDECOMP_PEER_LEFT, peer);
        if (load_own(&state.progress->stopped)) return false;
        if (state.timeout == 0) continue;
        if (start == 0)
            start = nanoseconds();
        else if (nanoseconds() - start > state.timeout)
            stop(state, CUDECOMP_TIMED_OUT, peer);
    }
}

__device__ void offer(const State &state, const cudecomp_edge &edge, const Places &places, unsigned long long epoch) {
    uint64_t *line = edge.theirs + kFree;
    for (int i = 0; i < 2 * state.fields; ++i) store_relaxed(line + 1 + i, places.words[i]);
    store_release(line, epoch);
}

// Fill in where a peer's fields lie, and where written(k) is to be stored; null if nothing may be written.
__device__ void admit(const State &state, const cudecomp_edge &edge, bool ready) {
    char **slots = state.slots + edge.put;
    const uint64_t *line = edge.mine + kFree;
    for (int i = 0; i < state.fields; ++i)
        slots[i] = ready ? edge.table[load_relaxed(line + 1 + 2 * i)] + load_relaxed(line + 2 + 2 * i) : nullptr;
    slots[state.fields] = ready ? reinterpret_cast<char *>(edge.theirs) : nullptr;
}

__device__ void leave(const cudecomp_edge &edge, bool failed) {
    uint64_t *written = edge.theirs, *free = edge.theirs + kFree;
    store_release(written, load_relaxed(written) | kLast);
    store_release(free, failed ? kLast : load_relaxed(free) | kLast);
}

// Signals have stopped in this launch: nothing is written any more, and peers are told.
__device__ void shut(const State &state, int what) {
    for (int i = threadIdx.x; i < state.count; i += blockDim.x) {
        const cudecomp_edge &edge = state.edges[i];
        if ((what & CUDECOMP_ADMIT) && edge.put >= 0) admit(state, edge, false);
        leave(edge, !(what & CUDECOMP_LEAVE));
    }
}

// All offers come before the first wait. The loads at the start do not depend on each other: each takes its time.
__global__ void run_signal(const __grid_constant__ State state, const __grid_constant__ Places places, int what) {
    Progress *progress = state.progress;
    const bool stopped = load_own(&progress->stopped) != 0;
    const unsigned long long epoch = load_own(&progress->epoch) + ((what & CUDECOMP_OFFER) ? 1 : 0);
    __syncthreads();
    if (threadIdx.x == 0) {
        if (what & CUDECOMP_OFFER) progress->epoch = epoch;
        if (what & (CUDECOMP_LEAVE | CUDECOMP_FAIL)) stop(state, CUDECOMP_LEFT, 0);
    }
    if ((what & CUDECOMP_OFFER) && !stopped)
        for (int i = threadIdx.x; i < state.count; i += blockDim.x)
            if (state.edges[i].source) offer(state, state.edges[i], places, epoch);
    for (int i = threadIdx.x; i < state.count; i += blockDim.x) {
        const cudecomp_edge &edge = state.edges[i];
        if ((what & CUDECOMP_ADMIT) && edge.put >= 0)
            admit(state, edge, !stopped && wait_for(state, edge.mine + kFree, epoch, edge.peer));
        if ((what & CUDECOMP_ARRIVE) && edge.source && !stopped) wait_for(state, edge.mine, epoch, edge.peer);
    }
    __syncthreads();
    // Leaving is said once more where signals have stopped before: a run that was in flight may have overwritten it.
    if ((!stopped && load_own(&progress->stopped)) || (what & CUDECOMP_LEAVE)) shut(state, what);
}

}  // namespace
}  // namespace cudecomp

struct cudecomp_signals {
    cudecomp::State state;
    void *memory;  // progress and edges
    unsigned threads;
};

namespace cudecomp {
namespace {

int destroy(cudecomp_signals *signals) {
    if (!signals) return 0;
    cudaError_t error = signals->memory ? cudaFree(signals->memory) : cudaSuccess;
    delete signals;
    return error;
}

cudaError_t upload(const cudecomp_edge *edges, cudecomp_signals &signals) {
    const size_t bytes = size_t(signals.state.count) * sizeof(cudecomp_edge);
    cudaError_t error = cudaMalloc(&signals.memory, CUDECOMP_LINE + bytes);
    if (error != cudaSuccess) return error;
    char *there = static_cast<char *>(signals.memory);
    signals.state.progress = reinterpret_cast<Progress *>(there);
    signals.state.edges = reinterpret_cast<const cudecomp_edge *>(there + CUDECOMP_LINE);
    // A stream of its own: others may be waiting for peers.
    cudaStream_t stream;
    error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error != cudaSuccess) return error;
    error = cudaMemsetAsync(there, 0, CUDECOMP_LINE, stream);
    if (error == cudaSuccess && bytes)
        error = cudaMemcpyAsync(there + CUDECOMP_LINE, edges, bytes, cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    // Loads the kernel too, which a capture would forbid.
    cudaFuncAttributes attributes;
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, run_signal) : error;
}

int create(const cudecomp_edge *edges, int64_t count, int64_t fields, char **slots, uint64_t *status, uint64_t timeout,
           cudecomp_signals **signals) {
    if (!signals) return CUDECOMP_INVALID;
    *signals = nullptr;
    if (count < 0 || count >= (1 << 24) || (count && !edges) || fields < 1 || fields > CUDECOMP_MAX_FIELDS || !status)
        return CUDECOMP_INVALID;
    cudecomp_signals *made = new (std::nothrow) cudecomp_signals{};
    if (!made) return CUDECOMP_NO_MEMORY;
    made->state = {nullptr, nullptr, slots, status, timeout, int32_t(count), int32_t(fields)};
    made->threads = count == 0 ? 32 : count < kMostThreads ? unsigned(count + 31) / 32 * 32 : kMostThreads;
    const cudaError_t error = upload(edges, *made);
    if (error == cudaSuccess)
        *signals = made;
    else
        destroy(made);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

int signal(cudecomp_signals *signals, int32_t what, const uint64_t *places, void *stream) {
    if (!signals || ((what & CUDECOMP_OFFER) && !places)) return CUDECOMP_INVALID;
    Places copied;
    if (places) std::memcpy(copied.words, places, size_t(signals->state.fields) * 2 * sizeof(uint64_t));
    void *arguments[] = {&signals->state, &copied, &what};
    const cudaError_t error = cudaLaunchKernel(reinterpret_cast<const void *>(run_signal), dim3(1),
                                               dim3(signals->threads), arguments, 0, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

// The driver is asked through the runtime, so that nothing links to it.
cudaError_t driver_function(const char *name, void **function) {
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error = cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess) return error;
    return found == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorSymbolNotFound;
}

int allocation(uint64_t address, uint64_t *start, uint64_t *bytes, uint64_t *identity) {
    using Ask = CUresult (*)(void *, CUpointer_attribute, CUdeviceptr);
    void *function = nullptr;
    const cudaError_t error = driver_function("cuPointerGetAttribute", &function);
    if (error != cudaSuccess) return error;
    const Ask ask = reinterpret_cast<Ask>(function);
    int status = ask(start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CUdeviceptr(address));
    if (status == 0) status = ask(bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, CUdeviceptr(address));
    if (status == 0) status = ask(identity, CU_POINTER_ATTRIBUTE_BUFFER_ID, CUdeviceptr(address));
    return status;  // the values of CUresult are those of cudaError_t
}

const char *error_string(int status) {
    switch (status) {
        case CUDECOMP_INVALID: return "an argument is out of its range";
        case CUDECOMP_NO_MEMORY: return "out of host memory";
        default: return status < 0 ? "unknown status" : cudaGetErrorString(cudaError_t(status));
    }
}

}  // namespace
}  // namespace cudecomp

extern "C" __attribute__((visibility("default"))) const cudecomp_signal_table *cudecomp_signal_functions(void) {
    static const cudecomp_signal_table table = {cudecomp::create, cudecomp::destroy, cudecomp::signal,
                                                cudecomp::allocation, cudecomp::error_string};
    return &table;
}
