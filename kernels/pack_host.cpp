// SPDX-License-Identifier: Apache-2.0
//
// Pack programs on the host: each box is compiled once to a walk over tiles, and copied item by item or tile by tile.
//
// Owns the walk over a box and the life of programs; rows.h and gather.h have the loops over memory and their variants.
// Knows nothing of axes, peers or messages.
//
// An *item* is what is contiguous on both sides of a box: a unit, or a longer run. Long items are copied one by one.
// Short items are gathered, a tile at a time, into a buffer that stays in the first-level cache and is laid out as the
// destination; from there whole cache lines are written. Writing lines from a buffer instead of from registers costs
// little and makes one store loop serve every item size and alignment.
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "gather.h"
#include "pack.h"
#include "tile.h"

namespace {

using cudecomp::kCol;
using cudecomp::kRow;
using cudecomp::Tile;
using cudecomp::Walk;

constexpr int64_t kPage = 4096;

// Programs that write this much or more bypass the caches, since a plain store first reads the line that it overwrites.
// Measured (copy on one Sapphire Rapids core): bypassing loses at 1 MiB, wins by 1.2 at 8 MiB, and by 1.7 out of cache.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

// A tile's rows are this long, in the source and in the destination: eight lines are enough to amortise a page or
// DRAM row, and a square tile of 8-byte items (and what is fetched for the next one) fits the first-level cache.
constexpr int64_t kTileBytes = 512;
constexpr int64_t kMaxSide = 64;
constexpr int64_t kMinSide = 4;

// So many tiles write one page of the destination before the next row of tiles begins: without this bound, a long
// destination row would make every tile of it open new source pages.
constexpr int64_t kBand = kPage / kTileBytes;

// Items of each copy in turn, where copies go abreast: their lines stay in the first-level cache.
constexpr int64_t kAbreast = 128;

// ---- one box --------------------------------------------------------------------------------------------------------

struct Copy {
    Walk walk;  // over items
    int64_t item;
    int32_t src_base;
    int32_t dst_base;
    int64_t abreast;  // so many copies, this one first, are done a tile of each in turn
    bool stream;
    CopyRows copy_rows;
    StreamRow stream_row;
    GatherTile gather;  // null: items are copied one by one
};

// A tile and the number of its first column.
struct Place {
    Tile tile;
    int64_t col;
};

// The tiles of a box, in bands of columns.
class Places {
  public:
    explicit Places(const Walk &walk) : walk_(walk) {}

    bool done() const { return outer_ == walk_.extent[0] * walk_.extent[1]; }

    Place place() const { return place_in(walk_); }

    // The place with the same number in another box of the same extents.
    Place place_in(const Walk &walk) const {
        const int64_t col = band_ + col_;
        const int64_t number = (outer_ * walk.row_tiles + row_) * walk.col_tiles + col;
        return {cudecomp::tile_at(walk, number), col * walk.tile_cols};
    }

    void advance() {
        if (++col_ < smaller(kBand, walk_.col_tiles - band_)) return;
        col_ = 0;
        if (++row_ < walk_.row_tiles) return;
        row_ = 0;
        if ((band_ += kBand) < walk_.col_tiles) return;
        band_ = 0;
        ++outer_;
    }

  private:
    const Walk &walk_;
    int64_t outer_ = 0, band_ = 0, row_ = 0, col_ = 0;
};

char *line_up(char *at) { return at + (-reinterpret_cast<intptr_t>(at) & (kLine - 1)); }

// Rows ahead at which lines are fetched that will be written in part: a store that misses holds up the streaming stores
// after it (rows of odd length take 1.2 times as long without).
constexpr int64_t kFetchRows = 2;
constexpr int64_t kFetchGathered = 8;

// Only where a row begins or ends within a line: fetching a line that is then streamed would cost a write-back.
void fetch_part(const char *end) {
    if (reinterpret_cast<intptr_t>(end) % kLine != 0) __builtin_prefetch(end, 1);
}

void stream_rows(StreamRow stream_row, Rows rows) {
    const int64_t ahead = rows.bytes > 2 * kPage ? kPage : rows.src_stride;
    for (; rows.count > 0; --rows.count, rows.dst += rows.dst_stride, rows.src += rows.src_stride) {
        if (rows.count > kFetchRows) {
            const char *later = rows.dst + kFetchRows * rows.dst_stride;
            fetch_part(later);
            fetch_part(later + rows.bytes);
        }
        stream_row(rows.dst, rows.src, rows.bytes, rows.src + ahead);
    }
}

void copy_items(const Copy &copy, const Tile &tile, const char *src, char *dst) {
    const Walk &walk = copy.walk;
    Rows rows{dst + tile.dst_offset,
              src + tile.src_offset,
              walk.dst_stride[kCol],
              walk.src_stride[kCol],
              tile.cols,
              copy.item};
    for (int64_t r = 0; r < tile.rows; ++r) {
        if (copy.stream)
            stream_rows(copy.stream_row, rows);
        else
            copy.copy_rows(rows);
        rows.dst += walk.dst_stride[kRow];
        rows.src += walk.src_stride[kRow];
    }
}

// A gathered tile, row after row as the destination has them. `bytes` are the tile's own; up to a line more may follow.
struct Gathered {
    const char *row;
    int64_t pitch;
    int64_t bytes;
    int64_t room;
    bool first;  // tile of its rows
    bool last;
};

// Write whole lines: the start of the first one is left to the tile before, the end of the last one taken from the tile
// after, so that only the ends of the box are written in part.
void stream_gathered(const Copy &copy, Gathered from, int64_t rows, char *dst, const char *next, int64_t next_rows) {
    const int64_t dst_stride = copy.walk.dst_stride[kRow], next_stride = copy.walk.src_stride[kCol];
    for (int64_t r = 0; r < rows; ++r, dst += dst_stride, from.row += from.pitch, next += next_stride) {
        char *start = from.first ? dst : line_up(dst);
        char *end = dst + from.bytes;
        if (!from.last) end += smaller(line_up(end) - end, from.room - from.bytes);
        if (r + kFetchGathered < rows) {
            const char *later = dst + kFetchGathered * dst_stride;
            if (from.first) fetch_part(later);
            if (from.last) fetch_part(later + from.bytes);
        }
        if (start < end) copy.stream_row(start, from.row + (start - dst), end - start, r < next_rows ? next : from.row);
    }
}

void gather_items(const Copy &copy, const Place &place, const Place &next, bool aligned, const char *src, char *dst) {
    // The added lines are for what follows a tile, and so that the rows do not fall into a few sets of the cache.
    alignas(kLine) char buffer[kMaxSide * (kTileBytes + 3 * kLine)];
    const Walk &walk = copy.walk;
    const Tile &tile = place.tile;
    const int64_t left = walk.extent[kCol] - place.col;
    const int64_t extra = copy.stream && !aligned ? (kLine + copy.item - 2) / copy.item : 0;
    const int64_t cols = smaller(tile.cols + extra, left);
    const int64_t bytes = tile.cols * copy.item;
    const int64_t pitch = cols * copy.item / kLine * kLine + kLine;
    copy.gather({buffer, pitch, src + tile.src_offset, walk.src_stride[kRow], walk.src_stride[kCol], tile.rows, cols,
                 copy.item});
    dst += tile.dst_offset;
    if (copy.stream) {
        const Gathered from{buffer, pitch, bytes, cols * copy.item, place.col == 0, left == tile.cols};
        return stream_gathered(copy, from, tile.rows, dst, src + next.tile.src_offset, next.tile.cols);
    }
    for (int64_t r = 0; r < tile.rows; ++r)
        std::memcpy(dst + r * walk.dst_stride[kRow], buffer + r * pitch, static_cast<size_t>(bytes));
}

// Do all tiles begin and end with a line?
bool line_aligned(const Copy &copy, const char *dst) {
    const Walk &walk = copy.walk;
    int64_t bits = reinterpret_cast<intptr_t>(dst) | walk.dst_offset | walk.tile_cols * copy.item;
    for (int d = 0; d < kCol; ++d)
        if (walk.extent[d] > 1) bits |= walk.dst_stride[d];
    return bits % kLine == 0;
}

void run_copy(const Copy &copy, void *const *bases) {
    const char *src = static_cast<const char *>(bases[copy.src_base]);
    char *dst = static_cast<char *>(bases[copy.dst_base]);
    const bool aligned = line_aligned(copy, dst);
    Places places(copy.walk);
    Place place = places.place();
    while (!places.done()) {
        places.advance();
        const Place next = places.done() ? place : places.place();
        if (copy.gather != nullptr)
            gather_items(copy, place, next, aligned, src, dst);
        else
            copy_items(copy, place.tile, src, dst);
        place = next;
    }
}

// Copies with the same walk, a tile of each in turn.
void run_abreast(const Copy *copies, int64_t count, void *const *bases) {
    for (Places places(copies->walk); !places.done(); places.advance()) {
        for (const Copy *copy = copies; copy < copies + count; ++copy) {
            const Tile tile = places.place_in(copy->walk).tile;
            copy_items(*copy, tile, static_cast<const char *>(bases[copy->src_base]),
                       static_cast<char *>(bases[copy->dst_base]));
        }
    }
}

// ---- compiling ------------------------------------------------------------------------------------------------------

// Take the dimension that is contiguous on both sides, if there is one, out of the box; return the bytes of an item.
int64_t take_run(cudecomp_box &box) {
    int run = kCol;
    while (run >= 0 && (box.extent[run] == 1 || box.src_stride[run] != box.unit || box.dst_stride[run] != box.unit))
        --run;
    if (run < 0) return box.unit;
    const int64_t bytes = box.extent[run] * box.unit;
    for (int d = run; d > 0; --d) {
        box.extent[d] = box.extent[d - 1];
        box.src_stride[d] = box.src_stride[d - 1];
        box.dst_stride[d] = box.dst_stride[d - 1];
    }
    box.extent[0] = 1;
    box.src_stride[0] = box.dst_stride[0] = 0;
    return bytes;
}

int64_t clamp(int64_t value, int64_t low, int64_t high) { return value < low ? low : smaller(value, high); }

// Tiles of nearly `side` items that share `extent` evenly, in whole lines where items are short: no sliver at the end.
int64_t even_side(int64_t extent, int64_t side, int64_t item) {
    const int64_t parts = (extent + side - 1) / side;
    const int64_t line = item < kLine ? kLine / item : 1;
    const int64_t even = (extent + parts - 1) / parts;
    return smaller((even + line - 1) / line * line, side);
}

void choose_tiles(Copy &copy) {
    Walk &walk = copy.walk;
    if (!walk.permuted) return cudecomp::set_tiles(walk, walk.extent[kRow], walk.extent[kCol]);
    const int64_t side = clamp(kTileBytes / copy.item, kMinSide, kMaxSide);
    cudecomp::set_tiles(walk, even_side(walk.extent[kRow], side, copy.item),
                        even_side(walk.extent[kCol], side, copy.item));
}

// Items that are narrow, and each in a line of its own on one side at least.
bool is_scattered(const Copy &copy) {
    return copy.item < kLine && (copy.walk.src_stride[kCol] >= kLine || copy.walk.dst_stride[kCol] >= kLine);
}

Copy compile(cudecomp_box box, bool stream) {
    Copy copy{};
    copy.abreast = 1;
    copy.item = take_run(box);
    copy.src_base = box.src_base;
    copy.dst_base = box.dst_base;
    copy.walk = cudecomp::walk_box(box);
    copy.copy_rows = is_scattered(copy) ? row_kernel<true>(copy.item) : row_kernel(copy.item);
    copy.stream_row = variants().stream_row;
    if (copy.walk.permuted && copy.item < kLongItem && copy.walk.dst_stride[kCol] == copy.item)
        copy.gather = copy.walk.src_stride[kRow] == copy.item ? gather_kernel(copy.item) : gather_columns;
    copy.stream = stream && (copy.gather != nullptr || copy.item >= kLongItem);
    choose_tiles(copy);
    return copy;
}

bool alike(const Copy &a, const Copy &b) {
    return a.item == b.item && std::memcmp(a.walk.extent, b.walk.extent, sizeof a.walk.extent) == 0 &&
           std::memcmp(a.walk.src_stride, b.walk.src_stride, sizeof a.walk.src_stride) == 0 &&
           std::memcmp(a.walk.dst_stride, b.walk.dst_stride, sizeof a.walk.dst_stride) == 0;
}

// Let scattered copies that follow each other in a segment, and differ in place alone, go abreast. These are the two
// faces of a halo along the fastest axis: the end of a row lies in the same line as the start of the next one.
void pair_up(Copy *first, Copy *last) {
    while (first < last) {
        Copy *next = first + 1;
        const bool scattered = is_scattered(*first) && first->gather == nullptr;
        while (scattered && next < last && alike(*first, *next)) ++next;
        first->abreast = next - first;
        if (first->abreast > 1) {
            const int64_t cols = smaller(first->walk.extent[kCol], kAbreast);
            const int64_t rows = clamp(kAbreast / cols, 1, first->walk.extent[kRow]);
            for (Copy *copy = first; copy < next; ++copy) cudecomp::set_tiles(copy->walk, rows, cols);
        }
        first = next;
    }
}

int64_t bytes_of(const cudecomp_box &box) {
    int64_t bytes = box.unit;
    for (int64_t extent : box.extent) bytes *= extent;
    return bytes;
}

// By the bytes of the whole program: its segments usually run one after another.
bool worth_streaming(const cudecomp_box *boxes, int64_t box_count) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < box_count; ++i) bytes += bytes_of(boxes[i]);
    return bytes >= kStreamBytes;
}

// ---- programs -------------------------------------------------------------------------------------------------------

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
                   int64_t base_count, int64_t slot_count, int32_t max_blocks) {
    if (box_count < 0 || segment_count < 0 || base_count < 0 || slot_count != 0 || max_blocks < 0) return false;
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
    bool streams;
};

namespace {

void run_segment(cudecomp_program &program, void *const *bases, int64_t s) {
    cudecomp_program::Segment &segment = program.segments[static_cast<size_t>(s)];
    const Copy *copies = program.copies.data();
    for (int64_t i = segment.first; i < segment.last; i += copies[i].abreast) {
        if (copies[i].abreast > 1)
            run_abreast(copies + i, copies[i].abreast, bases);
        else
            run_copy(copies[i], bases);
    }
    ++segment.runs;
    if (program.streams) fence_streams();
    if (segment.flag.base < 0) return;
    void *flag = static_cast<char *>(bases[segment.flag.base]) + segment.flag.offset;
    __atomic_store_n(static_cast<uint64_t *>(flag), segment.runs, __ATOMIC_RELEASE);
}

bool valid_run(const cudecomp_program *program, void *const *bases, void *stream) {
    return program != nullptr && stream == nullptr && (bases != nullptr || program->base_count == 0);
}

int create(const cudecomp_box *boxes, int64_t box_count, const cudecomp_flag *flags, int64_t segment_count,
           int64_t base_count, int64_t slot_count, int32_t max_blocks, cudecomp_program **program) {
    if (program == nullptr) return CUDECOMP_INVALID;
    *program = nullptr;
    if (!valid_program(boxes, box_count, flags, segment_count, base_count, slot_count, max_blocks))
        return CUDECOMP_INVALID;
    try {
        auto made = std::make_unique<cudecomp_program>();
        made->base_count = base_count;
        made->streams = worth_streaming(boxes, box_count);
        made->copies.reserve(static_cast<size_t>(box_count));
        made->segments.resize(static_cast<size_t>(segment_count));
        int64_t next = 0;
        for (int64_t s = 0; s < segment_count; ++s) {
            auto &segment = made->segments[static_cast<size_t>(s)];
            segment.first = next;
            for (; next < box_count && boxes[next].segment == s; ++next)
                made->copies.push_back(compile(boxes[next], made->streams));
            segment.last = next;
            pair_up(made->copies.data() + segment.first, made->copies.data() + segment.last);
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
    static const cudecomp_kernel_table table = {
        CUDECOMP_ABI, CUDECOMP_DEVICE_HOST, error_string, create, destroy, run, run_list, nullptr};
    return &table;
}
