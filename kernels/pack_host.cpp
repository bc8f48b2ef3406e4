// SPDX-License-Identifier: Apache-2.0
//
// Pack programs on the host: each box is compiled once to a walk over tiles, and copied by one of two kernels.
//
// `copy_rows` copies contiguous runs of bytes; `transpose` copies boxes whose fastest dimensions differ, by way of a
// small buffer that stays in the first-level cache.
#include <climits>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "pack.h"
#include "tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using cudecomp::kCol;
using cudecomp::kRow;
using cudecomp::Tile;
using cudecomp::Walk;

constexpr int64_t kLine = 64;

// ---- runs -----------------------------------------------------------------------------------------------------------

// Rows of bytes at a fixed distance from one another.
struct Rows {
    char *dst;
    const char *src;
    int64_t dst_stride;
    int64_t src_stride;
    int64_t count;
    int64_t bytes;  // of one row
};

using CopyRows = void (*)(const Rows &);

template <int64_t bytes>
void copy_fixed_rows(const Rows &rows) {
    char *dst = rows.dst;
    const char *src = rows.src;
    for (int64_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride)
        std::memcpy(dst, src, bytes);
}

// Rows of `step` bytes or more in steps, the last of which may overlap the one before.
template <int64_t step>
void copy_short_rows(const Rows &rows) {
    char *dst = rows.dst;
    const char *src = rows.src;
    const int64_t last = rows.bytes - step;
    for (int64_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride) {
        for (int64_t k = 0; k < last; k += step) std::memcpy(dst + k, src + k, step);
        std::memcpy(dst + last, src + last, step);
    }
}

void copy_long_rows(const Rows &rows) {
    char *dst = rows.dst;
    const char *src = rows.src;
    for (int64_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride)
        std::memcpy(dst, src, static_cast<size_t>(rows.bytes));
}

CopyRows row_kernel(int64_t bytes) {
    switch (bytes) {
        case 8: return copy_fixed_rows<8>;
        case 16: return copy_fixed_rows<16>;
        case 24: return copy_fixed_rows<24>;
        case 32: return copy_fixed_rows<32>;
        case 48: return copy_fixed_rows<48>;
        case 64: return copy_fixed_rows<64>;
    }
    if (bytes >= 512) return copy_long_rows;
    if (bytes >= 16) return copy_short_rows<16>;
    if (bytes >= 8) return copy_short_rows<8>;
    if (bytes >= 4) return copy_short_rows<4>;
    if (bytes >= 2) return copy_short_rows<2>;
    return copy_fixed_rows<1>;
}

// ---- programs -------------------------------------------------------------------------------------------------------

struct Copy {
    Walk walk;      // in items
    int64_t item;   // bytes that are contiguous on both sides
    int32_t src_base;
    int32_t dst_base;
    CopyRows copy_rows;
};

void copy_tile(const Copy &copy, const Tile &tile, const char *src, char *dst) {
    const Walk &walk = copy.walk;
    Rows rows{dst + tile.dst_offset, src + tile.src_offset, walk.dst_stride[kCol], walk.src_stride[kCol], tile.cols,
              copy.item};
    for (int64_t r = 0; r < tile.rows; ++r) {
        copy.copy_rows(rows);
        rows.dst += walk.dst_stride[kRow];
        rows.src += walk.src_stride[kRow];
    }
}

// Take the dimension that is contiguous on both sides, if there is one, out of the box; return the bytes of its run.
int64_t take_run(cudecomp_box &box) {
    for (int d = kCol; d >= 0; --d) {
        if (box.extent[d] == 1 || box.src_stride[d] != box.unit || box.dst_stride[d] != box.unit) continue;
        const int64_t bytes = box.extent[d] * box.unit;
        for (; d > 0; --d) {
            box.extent[d] = box.extent[d - 1];
            box.src_stride[d] = box.src_stride[d - 1];
            box.dst_stride[d] = box.dst_stride[d - 1];
        }
        box.extent[0] = 1;
        box.src_stride[0] = box.dst_stride[0] = 0;
        return bytes;
    }
    return box.unit;
}

Copy compile(cudecomp_box box) {
    Copy copy{};
    copy.item = take_run(box);
    copy.src_base = box.src_base;
    copy.dst_base = box.dst_base;
    copy.walk = cudecomp::walk_box(box);
    copy.copy_rows = row_kernel(copy.item);
    if (copy.walk.permuted)
        cudecomp::set_tiles(copy.walk, 32, 32);
    else
        cudecomp::set_tiles(copy.walk, copy.walk.extent[kRow], copy.walk.extent[kCol]);
    return copy;
}

void run_copy(const Copy &copy, void *const *bases) {
    const char *src = static_cast<const char *>(bases[copy.src_base]);
    char *dst = static_cast<char *>(bases[copy.dst_base]);
    for (int64_t t = 0; t < copy.walk.tiles; ++t) copy_tile(copy, cudecomp::tile_at(copy.walk, t), src, dst);
}

bool valid_unit(int32_t unit) { return unit == 1 || unit == 2 || unit == 4 || unit == 8 || unit == 16; }

bool valid_box(const cudecomp_box &box, int64_t segment_count, int64_t base_count) {
    if (!valid_unit(box.unit)) return false;
    if (box.segment < 0 || box.segment >= segment_count) return false;
    if (box.src_base < 0 || box.src_base >= base_count || box.dst_base < 0 || box.dst_base >= base_count) return false;
    if (box.src_offset % box.unit != 0 || box.dst_offset % box.unit != 0) return false;
    for (int d = 0; d < CUDECOMP_DIMS; ++d) {
        if (box.extent[d] < 1) return false;
        if (box.src_stride[d] % box.unit != 0 || box.dst_stride[d] % box.unit != 0) return false;
    }
    return true;
}

bool valid_flag(const cudecomp_flag &flag, int64_t base_count) {
    return flag.base < 0 || (flag.base < base_count && flag.offset % 8 == 0);
}

bool valid_program(const cudecomp_box *boxes, int64_t box_count, const cudecomp_flag *flags, int64_t segment_count,
                   int64_t base_count, int32_t max_blocks) {
    if (box_count < 0 || segment_count < 0 || base_count < 0 || max_blocks < 0) return false;
    if (box_count > 0 && boxes == nullptr) return false;
    for (int64_t i = 0; i < box_count; ++i) {
        if (!valid_box(boxes[i], segment_count, base_count)) return false;
        if (i > 0 && boxes[i].segment < boxes[i - 1].segment) return false;
    }
    for (int64_t s = 0; flags != nullptr && s < segment_count; ++s)
        if (!valid_flag(flags[s], base_count)) return false;
    return true;
}

}  // namespace

struct cudecomp_program {
    struct Segment {
        int64_t first;  // copy
        int64_t last;
        cudecomp_flag flag;
        uint64_t runs;
    };
    std::vector<Copy> copies;
    std::vector<Segment> segments;
    int64_t base_count;
};

namespace {

void run_segment(cudecomp_program &program, void *const *bases, int64_t s) {
    cudecomp_program::Segment &segment = program.segments[static_cast<size_t>(s)];
    for (int64_t i = segment.first; i < segment.last; ++i) run_copy(program.copies[static_cast<size_t>(i)], bases);
    ++segment.runs;
    if (segment.flag.base < 0) return;
    void *flag = static_cast<char *>(bases[segment.flag.base]) + segment.flag.offset;
    __atomic_store_n(static_cast<uint64_t *>(flag), segment.runs, __ATOMIC_RELEASE);
}

bool valid_run(const cudecomp_program *program, void *const *bases, void *stream) {
    return program != nullptr && stream == nullptr && (bases != nullptr || program->base_count == 0);
}

int create(const cudecomp_box *boxes, int64_t box_count, const cudecomp_flag *flags, int64_t segment_count,
           int64_t base_count, int32_t max_blocks, cudecomp_program **program) {
    if (program == nullptr) return CUDECOMP_INVALID;
    *program = nullptr;
    if (!valid_program(boxes, box_count, flags, segment_count, base_count, max_blocks)) return CUDECOMP_INVALID;
    try {
        auto made = std::make_unique<cudecomp_program>();
        made->base_count = base_count;
        made->copies.reserve(static_cast<size_t>(box_count));
        made->segments.resize(static_cast<size_t>(segment_count));
        int64_t next = 0;
        for (int64_t s = 0; s < segment_count; ++s) {
            auto &segment = made->segments[static_cast<size_t>(s)];
            segment.first = next;
            for (; next < box_count && boxes[next].segment == s; ++next) made->copies.push_back(compile(boxes[next]));
            segment.last = next;
            segment.flag = flags != nullptr ? flags[s] : cudecomp_flag{0, -1};
        }
        *program = made.release();
    } catch (...) {
        return CUDECOMP_NO_MEMORY;
    }
    return 0;
}

int destroy(cudecomp_program *program) {
    delete program;
    return 0;
}

int run(cudecomp_program *program, void *const *bases, int64_t first, int64_t last, void *stream) {
    if (!valid_run(program, bases, stream)) return CUDECOMP_INVALID;
    if (first < 0 || first > last || last > static_cast<int64_t>(program->segments.size())) return CUDECOMP_INVALID;
    for (int64_t s = first; s < last; ++s) run_segment(*program, bases, s);
    return 0;
}

int run_list(cudecomp_program *program, void *const *bases, const int64_t *segments, int64_t count, void *stream) {
    if (!valid_run(program, bases, stream)) return CUDECOMP_INVALID;
    if (count < 0 || (count > 0 && segments == nullptr)) return CUDECOMP_INVALID;
    const auto known = static_cast<int64_t>(program->segments.size());
    for (int64_t i = 0; i < count; ++i)
        if (segments[i] < 0 || segments[i] >= known) return CUDECOMP_INVALID;
    for (int64_t i = 0; i < count; ++i) run_segment(*program, bases, segments[i]);
    return 0;
}

const char *error_string(int status) {
    switch (status) {
        case 0: return "success";
        case CUDECOMP_INVALID: return "an argument is out of its range";
        case CUDECOMP_NO_MEMORY: return "the host has no memory left";
    }
    return "unknown status";
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const cudecomp_kernel_table *cudecomp_kernels(void) {
    static const cudecomp_kernel_table table = {CUDECOMP_ABI, CUDECOMP_DEVICE_HOST, error_string, create,
                                                destroy,      run,                  run_list};
    return &table;
}
