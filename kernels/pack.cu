// SPDX-License-Identifier: Apache-2.0
//
// Pack programs for CUDA: the C ABI of pack.h. This file knows strides, bases and flags; it knows nothing of axes,
// peers or messages.
//
// A launch is one persistent grid for any number of segments. Blocks draw tiles of at most 32 KiB in program order, so
// that early segments are complete early. In a block, one warp prepares the next tile and another one completes the
// last tile while the others copy the present one: the latencies of drawing, looking up, fencing and counting, a
// microsecond each, are hidden.
#include <cuda_runtime.h>

#include <new>
#include <vector>

#include "copy.h"
#include "pack.h"
#include "tile.h"

// Blocks of a multiprocessor, which bound the registers of a thread. Measured with two: more blocks of fewer threads,
// or fewer registers, make the compiler wait for loads one by one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
#define CUDECOMP_BLOCKS_PER_SM 1
#else
#define CUDECOMP_BLOCKS_PER_SM 2
#endif

namespace cudecomp {
namespace {

struct Segment {
    // Tiles completed since the program was created: never reset, so that graphs can be replayed.
    unsigned long long done;
    int64_t flag_offset;
    int32_t flag_base;  // < 0: no flag, nothing is counted
    uint32_t tiles;
};

// Tiles [0, grid) of a launch go to the blocks of these numbers, later ones to who draws them. Both words are zero
// between launches.
struct Tickets {
    uint32_t drawn;
    uint32_t blocks_left;
};

struct Tables {
    const Piece *pieces;
    const uint32_t *piece_of_tile;
    Segment *segments;
    Tickets *tickets;
    uint32_t tiles;
};

// Consecutive segments of a launch: launch tiles below `end` that are in no earlier range are program tiles + shift.
struct Range {
    uint32_t end;
    uint32_t shift;
};

// All arguments of a launch, passed by value: a captured launch keeps them. The large one fills the 4 KiB that every
// device and toolkit allows.
template <int kBases, int kRanges>
struct Launch {
    static constexpr int kMostBases = kBases;
    static constexpr int kMostRanges = kRanges;
    char *bases[kBases];
    Range ranges[kRanges];
    Tables tables;
    int32_t range_count;
    int32_t base_count;
    uint32_t tiles;
};
using SmallLaunch = Launch<16, 8>;
using LargeLaunch = Launch<256, 248>;
static_assert(sizeof(LargeLaunch) <= 4096, "kernel parameters");

// ---- synchronisation ----

// Fence at device scope, then count. The fence covers the stores of the other warps, which a barrier ordered before it.
__device__ unsigned long long count_release(unsigned long long *count, unsigned long long more) {
    unsigned long long before;
    asm volatile("atom.add.release.gpu.global.u64 %0, [%1], %2;"
                 : "=l"(before)
                 : "l"(__cvta_generic_to_global(count)), "l"(more)
                 : "memory");
    return before;
}

// Everything counted before is visible to whoever acquires the flag's value: the fence acquires the counts and,
// followed by the store, is a release at system scope. A releasing store would fence once more.
__device__ void raise_flag(char *flag, unsigned long long value) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(flag)), "l"(value) : "memory");
}

// ---- copying tiles: the workers ----

__device__ void work(const Job *jobs, void *memory) {
    wait_barrier(kTile, kThreads);
    for (int slot = 0; jobs[slot].segment >= 0; slot ^= 1) {
        do_job(jobs[slot], memory, threadIdx.x);
        wait_barrier(kTile, kThreads);
    }
}

// ---- preparing tiles: one warp ----

__device__ uint32_t program_tile(const Range *ranges, int count, uint32_t ticket) {
    const uint32_t lane = threadIdx.x % kWarp;
    for (int first = 0;; first += kWarp) {
        const bool inside = first + int(lane) < count && ticket < ranges[first + lane].end;
        const uint32_t found = __ballot_sync(~0u, inside);
        if (found) return ticket + ranges[first + __ffs(found) - 1].shift;
    }
}

// A base address: from the arguments, or from a slot in device memory, which earlier work on the stream has filled.
template <typename Arguments>
__device__ char *base_at(const Arguments &launch, int32_t number) {
    if (number < launch.base_count) return launch.bases[number];
    char *const *slots = reinterpret_cast<char *const *>(launch.bases[launch.base_count - 1]);
    return slots[number - launch.base_count];
}

// Fill in the addresses and extents of tile `t` of job.piece.
template <typename Arguments>
__device__ void aim(Job &job, const Arguments &launch, uint32_t t) {
    const Piece &piece = job.piece;
    const char *src = base_at(launch, piece.src_base);
    char *dst = base_at(launch, piece.dst_base);
    if (!src || !dst) {  // nobody takes these bytes: a tile without any
        job.kind = kLine;
        job.segment = piece.segment;
        job.width = 16;
        job.first = job.last = 0;
        return;
    }
    const uint32_t bits = piece.align | uint32_t(uintptr_t(src) & 15) | uint32_t(uintptr_t(dst) & 15);
    job.width = uint8_t(bits & (0u - bits));
    job.kind = piece.kind;
    job.segment = piece.segment;
    if (piece.kind == kPlane) {
        job.tile = plane_tile(piece, t);
        job.src = src + job.tile.src_offset;
        job.dst = dst + job.tile.dst_offset;
        return;
    }
    const Span span = flat_tile(piece, t);
    job.src = src + piece.src_offset;
    job.dst = dst + piece.dst_offset;
    job.first = span.first;
    job.last = span.last;
    if (span.one_row && piece.contiguous) {
        const Cursor<int64_t> at = seek<int64_t>(piece, span.first);
        job.src += at.src;
        job.dst += at.dst;
        job.last = (span.last - span.first) << piece.unit_log;
        job.kind = kLine;
    }
}

// Ask for a ticket. The answer, in lane 0, takes about a microsecond: it is first looked at a tile later.
template <typename Arguments>
__device__ uint32_t draw(const Arguments &launch) {
    if (launch.tiles <= gridDim.x || threadIdx.x % kWarp != 0) return launch.tiles;
    return gridDim.x + atomicAdd(&launch.tables.tickets->drawn, 1u);
}

// The last block to leave puts the tickets back for the next launch. A block's own draws are complete: it saw their
// answers.
template <typename Arguments>
__device__ void leave(const Arguments &launch) {
    if (launch.tiles <= gridDim.x || threadIdx.x % kWarp != 0) return;
    Tickets *tickets = launch.tables.tickets;
    __threadfence();
    if (atomicAdd(&tickets->blocks_left, 1u) != gridDim.x - 1) return;
    tickets->drawn = 0;
    tickets->blocks_left = 0;
}

// Prepare the job of a ticket; false where no tile is left. `guess` is a piece that the block may need next: the stream
// of data drives the tables out of the second-level cache, so they are called back a tile ahead.
template <typename Arguments>
__device__ bool prepare(const Arguments &launch, Job &job, uint32_t ticket, uint32_t &guess) {
    const uint32_t lane = threadIdx.x % kWarp;
    if (ticket >= launch.tiles) {
        if (lane == 0) job.segment = -1;
        return false;
    }
    const Tables &tables = launch.tables;
    const uint32_t tile = program_tile(launch.ranges, launch.range_count, ticket);
    const uint32_t *words = reinterpret_cast<const uint32_t *>(tables.pieces + tables.piece_of_tile[tile]);
    const char *next = reinterpret_cast<const char *>(tables.pieces + guess) + lane * 32;
    if (lane * 32 < sizeof(Piece)) asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(next)));
    guess = tables.piece_of_tile[min(tile + gridDim.x, tables.tiles - 1)];
    for (uint32_t i = lane; i < sizeof(Piece) / sizeof(uint32_t); i += kWarp)
        reinterpret_cast<uint32_t *>(&job.piece)[i] = words[i];
    __syncwarp();
    if (lane == 0) aim(job, launch, tile - job.piece.first_tile);
    return true;
}

template <typename Arguments>
__device__ void prepare_tiles(const Arguments &launch, Job *jobs) {
    uint32_t ahead = draw(launch), guess = 0;
    bool more = prepare(launch, jobs[0], blockIdx.x, guess);
    wait_barrier(kTile, kThreads);
    for (int slot = 1; more; slot ^= 1) {
        const uint32_t ticket = __shfl_sync(~0u, ahead, 0);
        if (ticket < launch.tiles) ahead = draw(launch);
        more = prepare(launch, jobs[slot], ticket, guess);
        wait_barrier(kTile, kThreads);
    }
    leave(launch);
}

// ---- completing tiles: one warp ----

// Count tiles whose stores this warp has seen complete by a barrier; raise the flag with the last one of a run.
__device__ void complete(Segment &segment, uint32_t tiles, char *flag) {
    const uint32_t of = segment.tiles;
    const unsigned long long done = count_release(&segment.done, tiles) + tiles;
    const unsigned long long runs = of == 1 ? done : done / of;
    if (runs * of == done && flag) raise_flag(flag, runs);
}

// Tiles of one segment that follow each other in a block are counted together: the barrier that ends one tile also says
// that the next one is prepared.
template <typename Arguments>
__device__ void complete_tiles(const Arguments &launch, const Job *jobs) {
    wait_barrier(kTile, kThreads);
    uint32_t tiles = 0;
    for (int slot = 0, index; (index = jobs[slot].segment) >= 0; slot ^= 1) {
        Segment &segment = launch.tables.segments[index];
        const int32_t base = segment.flag_base;
        char *flag = base < 0 ? nullptr : base_at(launch, base);
        wait_barrier(kTile, kThreads);
        ++tiles;
        if (jobs[slot ^ 1].segment == index) continue;
        if (base >= 0 && threadIdx.x % kWarp == 0)
            complete(segment, tiles, flag ? flag + segment.flag_offset : nullptr);
        tiles = 0;
    }
}

template <typename Arguments>
__global__ void __launch_bounds__(kThreads, CUDECOMP_BLOCKS_PER_SM)
    run_tiles(const __grid_constant__ Arguments launch) {
    __shared__ Job jobs[2];
    __shared__ uint4 memory[kTileBytes / sizeof(uint4)];
    if (threadIdx.x < kWorkers)
        work(jobs, memory);
    else if (threadIdx.x < kWorkers + kWarp)
        prepare_tiles(launch, jobs);
    else
        complete_tiles(launch, jobs);
}

// ---- host ----

constexpr int64_t kMostTiles = int64_t(1) << 31;

bool valid_box(const cudecomp_box &box, int64_t segments, int64_t bases) {
    int64_t bits = box.src_offset | box.dst_offset;
    for (int d = 0; d < CUDECOMP_DIMS; ++d) {
        if (box.extent[d] < 1) return false;
        bits |= box.src_stride[d] | box.dst_stride[d];
    }
    bool unit = box.unit == 1 || box.unit == 2 || box.unit == 4 || box.unit == 8 || box.unit == 16;
    return unit && bits % box.unit == 0 && box.segment >= 0 && box.segment < segments && box.src_base >= 0 &&
           box.src_base < bases && box.dst_base >= 0 && box.dst_base < bases;
}

bool valid_flag(const cudecomp_flag &flag, int64_t bases) { return flag.base < bases && flag.offset % 8 == 0; }

// The tables of a program while they are built.
struct Draft {
    std::vector<Piece> pieces;
    std::vector<uint32_t> piece_of_tile;
    std::vector<Segment> segments;
    std::vector<uint32_t> first_tile;  // per segment, and the end
};

int draft_program(const cudecomp_box *boxes, int64_t box_count, const cudecomp_flag *flags, int64_t segment_count,
                  int64_t base_count, Draft &draft) {
    int64_t box = 0, tiles = 0;
    for (int64_t s = 0; s < segment_count; ++s) {
        const int64_t first = tiles;
        const bool flagged = flags && flags[s].base >= 0;
        if (flags && !valid_flag(flags[s], base_count)) return CUDECOMP_INVALID;
        size_t piece = draft.pieces.size();
        for (; box < box_count && boxes[box].segment == s; ++box) {
            if (!valid_box(boxes[box], segment_count, base_count)) return CUDECOMP_INVALID;
            add_pieces(boxes[box], draft.pieces);
        }
        if (flagged && piece == draft.pieces.size()) draft.pieces.push_back(empty_piece(int32_t(s)));
        for (; piece < draft.pieces.size(); ++piece) {
            draft.pieces[piece].first_tile = uint32_t(tiles);
            tiles += draft.pieces[piece].tiles;
            if (tiles >= kMostTiles) return CUDECOMP_INVALID;
            draft.piece_of_tile.resize(size_t(tiles), uint32_t(piece));
        }
        draft.first_tile.push_back(uint32_t(first));
        draft.segments.push_back(
            {0, flagged ? flags[s].offset : 0, flagged ? int32_t(flags[s].base) : -1, uint32_t(tiles - first)});
    }
    draft.first_tile.push_back(uint32_t(tiles));
    return box == box_count ? 0 : CUDECOMP_INVALID;  // else the segments do not ascend, or there are too few
}

}  // namespace
}  // namespace cudecomp

struct cudecomp_program {
    std::vector<uint32_t> first_tile;
    int64_t base_count;
    int blocks;
    void *memory;
    cudecomp::Tables tables;
};

namespace cudecomp {
namespace {

// Copy the tables into one allocation: segments and tickets first, which need the strictest alignment.
cudaError_t upload(const Draft &draft, cudecomp_program &program) {
    const size_t segments = draft.segments.size() * sizeof(Segment), pieces = draft.pieces.size() * sizeof(Piece),
                 table = draft.piece_of_tile.size() * sizeof(uint32_t), bytes = segments + 128 + pieces + table;
    cudaError_t error = cudaMalloc(&program.memory, bytes);
    if (error != cudaSuccess) return error;
    char *at = static_cast<char *>(program.memory);
    program.tables.segments = reinterpret_cast<Segment *>(at);
    program.tables.tickets = reinterpret_cast<Tickets *>(at + segments);
    program.tables.pieces = reinterpret_cast<const Piece *>(at + segments + 128);
    program.tables.piece_of_tile = reinterpret_cast<const uint32_t *>(at + segments + 128 + pieces);
    program.tables.tiles = uint32_t(draft.piece_of_tile.size());
    const struct {
        const void *from;
        size_t bytes;
        size_t at;
    } parts[] = {{draft.segments.data(), segments, 0},
                 {draft.pieces.data(), pieces, segments + 128},
                 {draft.piece_of_tile.data(), table, segments + 128 + pieces}};
    // A stream of its own: others may be waiting for peers.
    cudaStream_t stream;
    error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error != cudaSuccess) return error;
    error = cudaMemsetAsync(at + segments, 0, 128, stream);
    for (const auto &part : parts)
        if (error == cudaSuccess && part.bytes)
            error = cudaMemcpyAsync(at + part.at, part.from, part.bytes, cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    return error;
}

// As much shared memory as two blocks need; the rest is first-level cache, which thin boxes live on.
cudaError_t prefer_cache(const void *kernel, int device) {
    constexpr int kReserved = 1024;  // the driver's own share of a block
    cudaFuncAttributes attributes;
    int shared = 0;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    if (error != cudaSuccess || shared <= 0) return error;
    const int percent = int((attributes.sharedSizeBytes + kReserved) * 200 / size_t(shared)) + 1;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent < 100 ? percent : 100);
}

// How many blocks of a kernel the current device holds. Asking also loads the kernel, which a capture would forbid.
template <typename Arguments>
cudaError_t resident_blocks(int *blocks) {
    const void *kernel = reinterpret_cast<const void *>(run_tiles<Arguments>);
    int device = 0, multiprocessors = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error == cudaSuccess) error = prefer_cache(kernel, device);
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, kThreads, 0);
    *blocks *= multiprocessors;
    return error;
}

template <typename Arguments>
cudaError_t start(const cudecomp_program &program, void *const *bases, const Range *ranges, int count, void *stream) {
    Arguments launch;
    for (int64_t i = 0; i < program.base_count; ++i) launch.bases[i] = static_cast<char *>(bases[i]);
    for (int i = 0; i < count; ++i) launch.ranges[i] = ranges[i];
    launch.tables = program.tables;
    launch.base_count = int32_t(program.base_count);
    launch.range_count = count;
    launch.tiles = ranges[count - 1].end;
    const unsigned blocks = launch.tiles < unsigned(program.blocks) ? launch.tiles : unsigned(program.blocks);
    void *arguments[] = {&launch};
    return cudaLaunchKernel(reinterpret_cast<const void *>(run_tiles<Arguments>), dim3(blocks), dim3(kThreads),
                            arguments, 0, static_cast<cudaStream_t>(stream));
}

int launch_ranges(const cudecomp_program &program, void *const *bases, const Range *ranges, int count, void *stream) {
    if (count == 0) return cudaSuccess;
    const bool small = program.base_count <= SmallLaunch::kMostBases && count <= SmallLaunch::kMostRanges;
    return small ? start<SmallLaunch>(program, bases, ranges, count, stream)
                 : start<LargeLaunch>(program, bases, ranges, count, stream);
}

int build(const cudecomp_box *boxes, int64_t box_count, const cudecomp_flag *flags, int64_t segment_count,
          int64_t base_count, int64_t slot_count, int32_t max_blocks, cudecomp_program &program) {
    Draft draft;
    int status = draft_program(boxes, box_count, flags, segment_count, base_count + slot_count, draft);
    if (status != 0) return status;
    int small = 0, large = 0;
    cudaError_t error = resident_blocks<SmallLaunch>(&small);
    if (error == cudaSuccess) error = resident_blocks<LargeLaunch>(&large);
    if (error == cudaSuccess) error = upload(draft, program);
    program.blocks = small < large ? small : large;
    if (max_blocks > 0 && max_blocks < program.blocks) program.blocks = max_blocks;
    program.base_count = base_count;
    program.first_tile = std::move(draft.first_tile);
    return error;
}

// ---- the table of pack.h ----

int destroy(cudecomp_program *program) {
    if (!program) return 0;
    cudaError_t error = program->memory ? cudaFree(program->memory) : cudaSuccess;
    delete program;
    return error;
}

// The caller has the status: do not leave it to the next one who asks the runtime.
int finish(int status) {
    if (status > 0) cudaGetLastError();
    return status;
}

int create(const cudecomp_box *boxes, int64_t box_count, const cudecomp_flag *flags, int64_t segment_count,
           int64_t base_count, int64_t slot_count, int32_t max_blocks, cudecomp_program **program) {
    if (!program) return CUDECOMP_INVALID;
    *program = nullptr;
    const bool counts = box_count >= 0 && segment_count >= 0 && segment_count < kMostTiles && base_count >= 0 &&
                        base_count <= LargeLaunch::kMostBases && slot_count >= 0 && slot_count < kMostTiles &&
                        (slot_count == 0 || base_count > 0) && max_blocks >= 0;
    if (!counts || (box_count > 0 && !boxes)) return CUDECOMP_INVALID;
    cudecomp_program *made = new (std::nothrow) cudecomp_program{};
    if (!made) return CUDECOMP_NO_MEMORY;
    int status;
    try {
        status = build(boxes, box_count, flags, segment_count, base_count, slot_count, max_blocks, *made);
    } catch (const std::bad_alloc &) {
        status = CUDECOMP_NO_MEMORY;
    }
    if (status == 0)
        *program = made;
    else
        destroy(made);
    return finish(status);
}

// Launches of one program, replays included, must not overlap: they share its tickets and counts. One stream orders
// them.
int run(cudecomp_program *program, void *const *bases, int64_t first, int64_t last, void *stream) {
    if (!program || first < 0 || first > last || last >= int64_t(program->first_tile.size())) return CUDECOMP_INVALID;
    const uint32_t tile = program->first_tile[size_t(first)], tiles = program->first_tile[size_t(last)] - tile;
    const Range range = {tiles, tile};
    return finish(launch_ranges(*program, bases, &range, tiles > 0, stream));
}

int run_list(cudecomp_program *program, void *const *bases, const int64_t *segments, int64_t count, void *stream) {
    if (!program || count < 0 || (count > 0 && !segments)) return CUDECOMP_INVALID;
    const int64_t segment_count = int64_t(program->first_tile.size()) - 1;
    for (int64_t i = 0; i < count; ++i)
        if (segments[i] < 0 || segments[i] >= segment_count) return CUDECOMP_INVALID;
    Range ranges[LargeLaunch::kMostRanges];
    int filled = 0, status = 0;
    uint32_t end = 0;
    for (int64_t i = 0; i < count && status == 0;) {
        const uint32_t first = program->first_tile[size_t(segments[i])];
        int64_t last = segments[i] + 1;
        for (++i; i < count && segments[i] == last; ++i) ++last;
        const uint32_t tiles = program->first_tile[size_t(last)] - first;
        if (tiles == 0) continue;
        if (filled == LargeLaunch::kMostRanges) {
            status = launch_ranges(*program, bases, ranges, filled, stream);
            filled = 0, end = 0;
        }
        ranges[filled++] = {end + tiles, first - end};
        end += tiles;
    }
    return finish(status != 0 ? status : launch_ranges(*program, bases, ranges, filled, stream));
}

int retain(void *stream, void *kept, void (*release)(void *)) {
    cudaStreamCaptureStatus capturing;
    cudaGraph_t graph = nullptr;
    cudaUserObject_t object;
#if CUDART_VERSION >= 13000
    cudaError_t error = cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &capturing, nullptr, &graph);
#else
    cudaError_t error = cudaStreamGetCaptureInfo_v2(static_cast<cudaStream_t>(stream), &capturing, nullptr, &graph);
#endif
    if (error == cudaSuccess && capturing != cudaStreamCaptureStatusActive) error = cudaErrorIllegalState;
    if (error == cudaSuccess) error = cudaUserObjectCreate(&object, kept, release, 1, cudaUserObjectNoDestructorSync);
    if (error == cudaSuccess) {
        error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
        if (error != cudaSuccess) cudaUserObjectRelease(object, 1);
    }
    return finish(error);
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

extern "C" __attribute__((visibility("default"))) const cudecomp_kernel_table *cudecomp_kernels(void) {
    static const cudecomp_kernel_table table = {CUDECOMP_ABI,       CUDECOMP_DEVICE_CUDA, cudecomp::error_string,
                                                cudecomp::create,   cudecomp::destroy,    cudecomp::run,
                                                cudecomp::run_list, cudecomp::retain};
    return &table;
}
