// SPDX-License-Identifier: Apache-2.0
//
// How the workers of a CUDA block copy one tile. This file knows addresses and strides of one piece; it knows nothing
// of segments, flags or launches. For pack.cu alone: the names have internal linkage.
#ifndef CUDECOMP_COPY_H
#define CUDECOMP_COPY_H

#include <type_traits>

#include "tile.h"

namespace cudecomp {
namespace {

constexpr int kWorkers = 512;
constexpr int kWarp = 32;
constexpr int kThreads = kWorkers + 2 * kWarp;
constexpr int kTileBytes = 1 << kTileBytesLog;
constexpr int kThreadBytes = kTileBytes / kWorkers;  // loaded by each thread before its first store
constexpr uint8_t kLine = 255;                       // a Job's kind: contiguous bytes

static_assert((1 << kEdgeLog) <= kWorkers, "the workers cover an edge of a tile at once");
static_assert(sizeof(Piece) % sizeof(uint32_t) == 0, "pieces are copied word by word");

// What the warps of a block tell each other: one tile of work.
struct Job {
    Piece piece;
    const char *src;  // kLine: the first byte; kFlat, kPlane: as for Cursor and PlaneTile
    char *dst;
    uint32_t first;   // kFlat: unit numbers
    uint32_t last;    // kLine: bytes
    PlaneTile tile;   // kPlane
    int32_t segment;  // -1: no tile is left
    uint8_t kind;
    uint8_t width;  // bytes of a vector access
};

// The branches of the kernel meet at different places, hence named barriers and no __syncthreads.
enum Barrier {
    kTile = 1,  // all threads: a tile is done, the next one is prepared
    kTurn = 2   // workers: a tile is complete in shared memory
};

__device__ void wait_barrier(int id, int threads) {
    __syncwarp();
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kBytes>
using VectorOf = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<
        kBytes == 8, uint2,
        std::conditional_t<kBytes == 4, unsigned int, std::conditional_t<kBytes == 2, unsigned short, unsigned char>>>>;

// Sources are complete when a launch begins, but may have been written, by peers too, since the program was created:
// hence never through the read-only path.
template <typename Vector>
__device__ Vector load(const char *address) {
    return __ldcg(reinterpret_cast<const Vector *>(address));
}

// Through the first-level cache, for accesses that leave parts of their sectors to others of the same tile.
template <typename Vector>
__device__ Vector load_cached(const char *address) {
    return __ldca(reinterpret_cast<const Vector *>(address));
}

template <typename Vector>
__device__ void store(char *address, Vector value) {
    __stcg(reinterpret_cast<Vector *>(address), value);
}

// Loads of one thread in flight.
template <typename Vector>
CUDECOMP_HD constexpr int batch_size(int most) {
    return kThreadBytes / int(sizeof(Vector)) < most ? kThreadBytes / int(sizeof(Vector)) : most;
}

// Loads past the end are clamped to the last vector instead of skipped: a batch without branches stays in registers,
// and what the extra ones read is in the cache.
template <typename Vector>
__device__ void copy_line(const Job &job, int worker) {
    constexpr int kBatch = batch_size<Vector>(8), kStep = kWorkers * sizeof(Vector);
    const char *src = job.src;
    char *dst = job.dst;
    const uint32_t end = job.last & ~uint32_t(sizeof(Vector) - 1), most = end - uint32_t(sizeof(Vector));
    for (uint32_t at = worker * sizeof(Vector); at < end; at += kBatch * kStep) {
        Vector values[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) values[i] = load<Vector>(src + min(at + i * kStep, most));
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (at + i * kStep < end) store(dst + at + i * kStep, values[i]);
    }
    const uint32_t tail = end + worker;
    if (tail < job.last) store(dst + tail, load<unsigned char>(src + tail));
}

// Units in walked order, a vector of them per access; single units where the fastest dimensions are not contiguous. The
// accesses of a thread are a warp apart, so that most of them only step along a row.
template <typename Vector, typename Offset>
__device__ void copy_flat(const Job &job, int worker) {
    constexpr int kBatch = sizeof(Offset) == 4 ? batch_size<Vector>(8) : 2;  // more would not fit the registers
    const uint32_t vector = sizeof(Vector) >> job.piece.unit_log, step = kWarp * vector, last = job.last;
    const uint32_t lane = worker % kWarp, warp = worker / kWarp;
    const char *src = job.src;
    char *dst = job.dst;
    for (uint32_t x = job.first + warp * kBatch * step + lane * vector; x < last; x += kWorkers * kBatch * vector) {
        Vector values[kBatch];
        Offset to[kBatch];
        Cursor<Offset> at = seek<Offset>(job.piece, x);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            values[i] = load_cached<Vector>(src + at.src);
            to[i] = at.dst;
            if (i + 1 < kBatch && at.x + step < last) advance(at, job.piece, step);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (x + i * step < last) store(dst + to[i], values[i]);
    }
}

__device__ uint32_t pick(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// Word `k` of the vector along the columns for row `row`, out of vectors along the rows, one per column.
template <int kUnit, int kCount, int kWords>
__device__ uint32_t turned_word(const uint32_t (&in)[kCount][kWords], int row, int k) {
    if constexpr (kUnit >= 4) {
        constexpr int kUnitWords = kUnit / 4;
        return in[k / kUnitWords][row * kUnitWords + k % kUnitWords];
    } else if constexpr (kUnit == 2) {
        uint32_t selector = row % 2 ? 0x7632 : 0x5410;
        return pick(in[2 * k][row / 2], in[2 * k + 1][row / 2], selector);
    } else {
        uint32_t selector = 0x40 + 0x11 * (row % 4);
        uint32_t low = pick(in[4 * k][row / 4], in[4 * k + 1][row / 4], selector);
        uint32_t high = pick(in[4 * k + 2][row / 4], in[4 * k + 3][row / 4], selector);
        return pick(low, high, 0x5410);
    }
}

// A square of kCount x kCount units, kept as vectors, is transposed in registers.
template <int kUnit, int kCount, typename Vector>
__device__ void turn_square(Vector (&square)[kCount]) {
    if constexpr (kCount > 1) {
        constexpr int kWords = sizeof(Vector) / 4;
        uint32_t in[kCount][kWords];
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll
            for (int k = 0; k < kWords; ++k) in[i][k] = reinterpret_cast<const uint32_t *>(&square[i])[k];
#pragma unroll
        for (int i = 0; i < kCount; ++i)
#pragma unroll
            for (int k = 0; k < kWords; ++k)
                reinterpret_cast<uint32_t *>(&square[i])[k] = turned_word<kUnit, kCount, kWords>(in, i, k);
    }
}

CUDECOMP_HD constexpr int log2_of(int value) { return value > 1 ? 1 + log2_of(value / 2) : 0; }

// The columns of a thread: vectors col, col + step ... below cols, each the first of kCount columns of units.
struct Columns {
    uint32_t col;
    uint32_t step;
    uint32_t cols;
};

template <bool kSplit, int kSquares, int kCount, typename Vector>
__device__ void fetch_squares(const Job &job, const char *base, const Columns &at,
                              Vector (&squares)[kSquares][kCount]) {
    const int64_t stride = job.piece.src_stride[kCol], skip = stride * ((at.step - 1) * kCount);
    const uint32_t first = job.tile.first_col + at.col * kCount;
    const char *src = base + first * stride;
#pragma unroll
    for (int i = 0; i < kSquares; ++i, src += skip) {
#pragma unroll
        for (int k = 0; k < kCount; ++k, src += stride) {
            squares[i][k] = Vector{};
            if (at.col + i * at.step >= at.cols) continue;
            squares[i][k] = load<Vector>(kSplit ? base + src_column(job.piece, first + i * at.step * kCount + k) : src);
        }
    }
}

// Read vectors along the rows, transpose squares of them in registers, put them into shared memory as vectors along the
// columns.
template <int kUnit, typename Vector>
__device__ void read_plane(const Job &job, Vector *tile, const Swizzle &swizzle, int worker) {
    constexpr int kCount = sizeof(Vector) / kUnit, kCountLog = log2_of(kCount), kBatch = batch_size<Vector>(16);
    constexpr int kSquares = kBatch / kCount > 0 ? kBatch / kCount : 1;
    const uint32_t lanes_log = job.piece.rows_log - kCountLog;
    const uint32_t group = worker & ((1u << lanes_log) - 1), row = group << kCountLog;
    if (row >= job.tile.rows) return;
    const char *base = job.src + row * job.piece.src_stride[kRow];
    const uint32_t spread = group_swizzle(swizzle, group), first = row << swizzle.row_log;
    Columns at = {uint32_t(worker) >> lanes_log, uint32_t(kWorkers) >> lanes_log, job.tile.cols >> kCountLog};
    while (at.col < at.cols) {
        Vector squares[kSquares][kCount];
        if (job.piece.src_col_skip == 0)
            fetch_squares<false>(job, base, at, squares);
        else
            fetch_squares<true>(job, base, at, squares);
#pragma unroll
        for (int i = 0; i < kSquares; ++i, at.col += at.step) {
            if (at.col >= at.cols) break;
            turn_square<kUnit, kCount>(squares[i]);
#pragma unroll
            for (int k = 0; k < kCount; ++k) tile[(first + (k << swizzle.row_log) + at.col) ^ spread] = squares[i][k];
        }
    }
}

template <bool kSplit, int kUnit, typename Vector>
__device__ void write_plane(const Job &job, const Vector *tile, const Swizzle &swizzle, int worker) {
    constexpr int kCountLog = log2_of(sizeof(Vector) / kUnit), kBatch = batch_size<Vector>(8);
    const uint32_t lanes_log = swizzle.row_log, step = kWorkers >> lanes_log, rows = job.tile.rows;
    const uint32_t col = (worker & ((1u << lanes_log) - 1)) << kCountLog;
    if (col >= job.tile.cols) return;
    uint32_t row = worker >> lanes_log, place = worker;
    const int64_t stride = step * job.piece.dst_stride[kRow];
    char *base = job.dst + col * job.piece.dst_stride[kCol];
    char *dst = base + (job.tile.first_row + row) * job.piece.dst_stride[kRow];
    while (row < rows) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i, row += step, place += kWorkers, dst += stride) {
            if (row >= rows) break;
            char *to = kSplit ? base + dst_row(job.piece, job.tile.first_row + row) : dst;
            store(to, tile[place ^ group_swizzle(swizzle, row >> kCountLog)]);
        }
    }
}

template <int kUnit, int kWidth>
__device__ void turn_plane(const Job &job, void *memory, int worker) {
    using Vector = VectorOf<kWidth>;
    Vector *tile = static_cast<Vector *>(memory);
    const Swizzle swizzle =
        make_swizzle(job.piece.rows_log, job.piece.cols_log, log2_of(kUnit), log2_of(kWidth / kUnit));
    read_plane<kUnit>(job, tile, swizzle, worker);
    wait_barrier(kTurn, kWorkers);
    if (job.piece.dst_row_skip == 0)
        write_plane<false, kUnit>(job, tile, swizzle, worker);
    else
        write_plane<true, kUnit>(job, tile, swizzle, worker);
}

// Vectors are wider than 8 bytes only for units of at least 4: a square of narrower units would not fit the registers.
__device__ void do_plane(const Job &job, void *memory, int worker) {
    const int width = job.width;
    switch (job.piece.unit_log) {
        case 4: return turn_plane<16, 16>(job, memory, worker);
        case 3: return width >= 16 ? turn_plane<8, 16>(job, memory, worker) : turn_plane<8, 8>(job, memory, worker);
        case 2:
            if (width >= 16) return turn_plane<4, 16>(job, memory, worker);
            return width >= 8 ? turn_plane<4, 8>(job, memory, worker) : turn_plane<4, 4>(job, memory, worker);
        case 1:
            if (width >= 8) return turn_plane<2, 8>(job, memory, worker);
            return width >= 4 ? turn_plane<2, 4>(job, memory, worker) : turn_plane<2, 2>(job, memory, worker);
        default:
            if (width >= 8) return turn_plane<1, 8>(job, memory, worker);
            return width >= 4 ? turn_plane<1, 4>(job, memory, worker) : turn_plane<1, 1>(job, memory, worker);
    }
}

template <typename Vector>
__device__ void do_flat(const Job &job, int worker) {
    if (job.kind == kLine)
        copy_line<Vector>(job, worker);
    else if (job.piece.narrow)
        copy_flat<Vector, uint32_t>(job, worker);
    else
        copy_flat<Vector, int64_t>(job, worker);
}

__device__ void do_job(const Job &job, void *memory, int worker) {
    if (job.kind == kPlane) return do_plane(job, memory, worker);
    switch (job.width) {
        case 16: return do_flat<uint4>(job, worker);
        case 8: return do_flat<uint2>(job, worker);
        case 4: return do_flat<unsigned int>(job, worker);
        case 2: return do_flat<unsigned short>(job, worker);
        default: return do_flat<unsigned char>(job, worker);
    }
}

}  // namespace
}  // namespace cudecomp
#endif
