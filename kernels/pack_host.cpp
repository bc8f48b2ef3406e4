// SPDX-License-Identifier: Apache-2.0
//
// Pack programs on the host: each box is compiled once to a walk over tiles, and copied by one of two kernels.
//
// Owns the loops over memory and the choice among their variants. Knows nothing of axes, peers or messages.
//
// An *item* is what is contiguous on both sides of a box: a unit, or a longer run. Long items are copied one by one.
// Short items are gathered, a tile at a time, into a buffer that stays in the first-level cache and is laid out as the
// destination; from there whole cache lines are written. Writing lines from a buffer instead of from registers costs
// little and makes one store loop serve every item size and alignment.
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "pack.h"
#include "tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define CUDECOMP_INLINE inline __attribute__((always_inline))

namespace {

using cudecomp::kCol;
using cudecomp::kRow;
using cudecomp::smaller;
using cudecomp::Tile;
using cudecomp::Walk;

constexpr int64_t kLine = 64;
constexpr int64_t kPage = 4096;

// Programs that write this much or more bypass the caches, since a plain store first reads the line that it overwrites.
// Measured (copy on one Sapphire Rapids core): bypassing loses at 1 MiB, wins by 1.2 at 8 MiB, and by 1.7 out of cache.
constexpr int64_t kStreamBytes = int64_t{4} << 20;

// Shorter items hold too few whole lines to be streamed one by one.
constexpr int64_t kLongItem = 256;

// A tile's rows are this long, in the source and in the destination: eight lines are enough to amortise a page or
// DRAM row, and a square tile of 8-byte items (and what is fetched for the next one) fits the first-level cache.
constexpr int64_t kTileBytes = 512;
constexpr int64_t kMaxSide = 64;
constexpr int64_t kMinSide = 4;

// So many tiles write one page of the destination before the next row of tiles begins: without this bound, a long
// destination row would make every tile of it open new source pages.
constexpr int64_t kBand = kPage / kTileBytes;

template <int64_t bytes>
CUDECOMP_INLINE void copy_fixed(char *dst, const char *src) {
    std::memcpy(dst, src, bytes);
}

// ---- streaming ------------------------------------------------------------------------------------------------------

// Copy `bytes` from `src` to `dst`, past the caches where the processor can, and fetch as much from `next` into the
// second-level cache. Fetching what comes next while lines are written made permuted copies 1.5 times as fast.
using StreamRow = void (*)(char *dst, const char *src, int64_t bytes, const char *next);

// Fewer bytes than a line.
CUDECOMP_INLINE void copy_part(char *dst, const char *src, int64_t bytes) {
    int64_t at = 0;
    if (bytes & 32) copy_fixed<32>(dst, src), at = 32;
    if (bytes & 16) copy_fixed<16>(dst + at, src + at), at += 16;
    if (bytes & 8) copy_fixed<8>(dst + at, src + at), at += 8;
    if (bytes & 4) copy_fixed<4>(dst + at, src + at), at += 4;
    if (bytes & 2) copy_fixed<2>(dst + at, src + at), at += 2;
    if (bytes & 1) copy_fixed<1>(dst + at, src + at);
}

template <class Line>
CUDECOMP_INLINE void stream_row(char *dst, const char *src, int64_t bytes, const char *next) {
    int64_t at = smaller(-reinterpret_cast<intptr_t>(dst) & (kLine - 1), bytes);
    if (at > 0) {
        __builtin_prefetch(next, 0, 2);
        Line::write_part(dst, src, at);
    }
    for (; at + kLine <= bytes; at += kLine) {
        __builtin_prefetch(next + at, 0, 2);
        Line::write(dst + at, src + at);
    }
    if (at < bytes) Line::write_part(dst + at, src + at, bytes - at);
}

#if defined(__x86_64__)
#define CUDECOMP_AVX2 __attribute__((target("avx2")))
#define CUDECOMP_AVX512 __attribute__((target("avx512f,avx512bw")))

struct LineSse2 {
    static CUDECOMP_INLINE void write(char *dst, const char *src) {
        for (int k = 0; k < kLine; k += 16)
            _mm_stream_si128(reinterpret_cast<__m128i *>(dst + k),
                             _mm_loadu_si128(reinterpret_cast<const __m128i *>(src + k)));
    }
    static CUDECOMP_INLINE void write_part(char *dst, const char *src, int64_t bytes) { copy_part(dst, src, bytes); }
};

struct LineAvx2 {
    CUDECOMP_AVX2 static inline void write(char *dst, const char *src) {
        for (int k = 0; k < kLine; k += 32)
            _mm256_stream_si256(reinterpret_cast<__m256i *>(dst + k),
                                _mm256_loadu_si256(reinterpret_cast<const __m256i *>(src + k)));
    }
    static CUDECOMP_INLINE void write_part(char *dst, const char *src, int64_t bytes) { copy_part(dst, src, bytes); }
};

struct LineAvx512 {
    CUDECOMP_AVX512 static inline void write(char *dst, const char *src) {
        _mm512_stream_si512(reinterpret_cast<__m512i *>(dst), _mm512_loadu_si512(src));
    }
    CUDECOMP_AVX512 static inline void write_part(char *dst, const char *src, int64_t bytes) {
        const __mmask64 mask = (uint64_t{1} << bytes) - 1;
        _mm512_mask_storeu_epi8(dst, mask, _mm512_maskz_loadu_epi8(mask, src));
    }
};

void stream_row_sse2(char *dst, const char *src, int64_t bytes, const char *next) {
    stream_row<LineSse2>(dst, src, bytes, next);
}

CUDECOMP_AVX2 void stream_row_avx2(char *dst, const char *src, int64_t bytes, const char *next) {
    stream_row<LineAvx2>(dst, src, bytes, next);
}

CUDECOMP_AVX512 void stream_row_avx512(char *dst, const char *src, int64_t bytes, const char *next) {
    stream_row<LineAvx512>(dst, src, bytes, next);
}

// Streaming stores are not ordered by a release.
void fence_streams() { _mm_sfence(); }
#else
struct LinePlain {
    static CUDECOMP_INLINE void write(char *dst, const char *src) { copy_fixed<kLine>(dst, src); }
    static CUDECOMP_INLINE void write_part(char *dst, const char *src, int64_t bytes) { copy_part(dst, src, bytes); }
};

void stream_row_plain(char *dst, const char *src, int64_t bytes, const char *next) {
    stream_row<LinePlain>(dst, src, bytes, next);
}

void fence_streams() {}
#endif

// ---- rows of bytes --------------------------------------------------------------------------------------------------

struct Rows {
    char *dst;
    const char *src;
    int64_t dst_stride;
    int64_t src_stride;
    int64_t count;
    int64_t bytes;  // of one row
};

using CopyRows = void (*)(const Rows &);

template <class CopyRow>
CUDECOMP_INLINE void for_each_row(const Rows &rows, CopyRow copy_row) {
    char *dst = rows.dst;
    const char *src = rows.src;
    for (int64_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride) copy_row(dst, src);
}

template <int64_t bytes>
void copy_fixed_rows(const Rows &rows) {
    for_each_row(rows, [](char *dst, const char *src) { copy_fixed<bytes>(dst, src); });
}

// Rows of `step` bytes or more in steps, the last of which may overlap the one before.
template <int64_t step>
void copy_short_rows(const Rows &rows) {
    const int64_t last = rows.bytes - step;
    for_each_row(rows, [last](char *dst, const char *src) {
        for (int64_t k = 0; k < last; k += step) copy_fixed<step>(dst + k, src + k);
        copy_fixed<step>(dst + last, src + last);
    });
}

void copy_long_rows(const Rows &rows) {
    const auto bytes = static_cast<size_t>(rows.bytes);
    for_each_row(rows, [bytes](char *dst, const char *src) { std::memcpy(dst, src, bytes); });
}

CopyRows row_kernel(int64_t bytes) {
    switch (bytes) {
        case 1: return copy_fixed_rows<1>;
        case 2: return copy_fixed_rows<2>;
        case 4: return copy_fixed_rows<4>;
        case 8: return copy_fixed_rows<8>;
        case 16: return copy_fixed_rows<16>;
        case 24: return copy_fixed_rows<24>;
        case 32: return copy_fixed_rows<32>;
        case 48: return copy_fixed_rows<48>;
        case 64: return copy_fixed_rows<64>;
    }
    if (bytes >= kLongItem) return copy_long_rows;
    if (bytes > 16) return copy_short_rows<16>;
    if (bytes > 8) return copy_short_rows<8>;
    if (bytes > 4) return copy_short_rows<4>;
    return copy_short_rows<2>;
}

// ---- gathering a tile -----------------------------------------------------------------------------------------------

// A tile of `rows` x `cols` items, to be laid out in `buffer` row after row, `pitch` bytes apart.
struct Gather {
    char *buffer;
    int64_t pitch;
    const char *src;
    int64_t row_stride;  // in the source, bytes from an item to the next row's
    int64_t col_stride;  // and to the next column's
    int64_t rows;
    int64_t cols;
    int64_t item;
};

using GatherTile = void (*)(const Gather &);

// Any item, any strides.
void gather_columns(const Gather &tile) {
    const CopyRows copy = row_kernel(tile.item);
    for (int64_t c = 0; c < tile.cols; ++c)
        copy({tile.buffer + c * tile.item, tile.src + c * tile.col_stride, tile.pitch, tile.row_stride, tile.rows,
              tile.item});
}

// Cover a tile whose columns are contiguous in the source with n x n blocks, the last of which overlap their
// neighbours. False where the tile is too small.
template <class Block>
CUDECOMP_INLINE bool cover(const Gather &tile) {
    constexpr int64_t n = Block::n, item = Block::item;
    if (tile.rows < n || tile.cols < n) return false;
    for (int64_t c = 0; c < tile.cols; c += n) {
        const int64_t col = smaller(c, tile.cols - n);
        for (int64_t r = 0; r < tile.rows; r += n) {
            const int64_t row = smaller(r, tile.rows - n);
            Block::transpose(tile.buffer + row * tile.pitch + col * item, tile.pitch,
                             tile.src + col * tile.col_stride + row * item, tile.col_stride);
        }
    }
    return true;
}

// Whole lines made of smaller blocks. Touching each line once, on both sides, matters more than the size of a block:
// without it 8-byte items took 1.3 times as long.
template <class Block>
struct Lines {
    static constexpr int64_t item = Block::item;
    static constexpr int n = kLine / item;

    static CUDECOMP_INLINE void transpose(char *dst, int64_t dst_stride, const char *src, int64_t src_stride) {
        for (int r = 0; r < n; r += Block::n)
            for (int c = 0; c < n; c += Block::n)
                Block::transpose(dst + r * dst_stride + c * item, dst_stride, src + c * src_stride + r * item,
                                 src_stride);
    }
};

#if defined(__clang__)
#define CUDECOMP_SHUFFLE(made, a, b, indices) shuffle(made, a, b, indices)

template <class Vector>
CUDECOMP_INLINE void shuffle(Vector &made, const Vector &a, const Vector &b, const Vector &indices) {
    constexpr int n = sizeof a / sizeof a[0];
    for (int i = 0; i < n; ++i) made[i] = indices[i] < n ? a[indices[i]] : b[indices[i] - n];
}
#else
#define CUDECOMP_SHUFFLE(made, a, b, indices) (made) = __builtin_shuffle(a, b, indices)
#endif

// n x n items in n vectors. Zipping vector i with vector i + n / 2, log2(n) times, transposes them. A macro, since GCC
// lowers vector operations for the target of the function that they are written in, before it inlines that function.
// Loads are spelled out, since GCC 12 turns a memcpy into a vector of bytes into a load that must be aligned.
#define CUDECOMP_BLOCK(NAME, BYTES, TARGET)                                                                       \
    template <class Item>                                                                                         \
    struct NAME {                                                                                                 \
        static constexpr int64_t item = sizeof(Item);                                                             \
        static constexpr int n = BYTES / sizeof(Item);                                                            \
        typedef Item Vector __attribute__((vector_size(BYTES)));                                                  \
        typedef Item Unaligned __attribute__((vector_size(BYTES), aligned(1), may_alias));                        \
                                                                                                                  \
        TARGET static inline void transpose(char *dst, int64_t dst_stride, const char *src, int64_t src_stride) { \
            Vector from[n], to[n], lower, upper;                                                                  \
            for (int i = 0; i < n; ++i) {                                                                         \
                lower[i] = static_cast<Item>(i / 2 + i % 2 * n);                                                  \
                upper[i] = static_cast<Item>(lower[i] + n / 2);                                                   \
                from[i] = *reinterpret_cast<const Unaligned *>(src + i * src_stride);                             \
            }                                                                                                     \
            for (int round = 1; round < n; round *= 2) {                                                          \
                for (int i = 0; i < n / 2; ++i) {                                                                 \
                    CUDECOMP_SHUFFLE(to[2 * i], from[i], from[i + n / 2], lower);                                 \
                    CUDECOMP_SHUFFLE(to[2 * i + 1], from[i], from[i + n / 2], upper);                             \
                }                                                                                                 \
                std::memcpy(from, to, sizeof from);                                                               \
            }                                                                                                     \
            for (int i = 0; i < n; ++i) *reinterpret_cast<Unaligned *>(dst + i * dst_stride) = from[i];           \
        }                                                                                                         \
    };

CUDECOMP_BLOCK(Block16, 16, )

template <class Item>
void gather_16(const Gather &tile) {
    using Block = Block16<Item>;
    if (!cover<Lines<Block>>(tile) && !cover<Block>(tile)) gather_columns(tile);
}

struct SingleItem {
    static constexpr int64_t item = 16;
    static constexpr int n = 1;
    static CUDECOMP_INLINE void transpose(char *dst, int64_t, const char *src, int64_t) { copy_fixed<item>(dst, src); }
};

void gather_single_items(const Gather &tile) {
    if (!cover<Lines<SingleItem>>(tile)) gather_columns(tile);
}

#if defined(__x86_64__)
struct Block32 {
    static constexpr int64_t item = 8;
    static constexpr int n = 4;

    CUDECOMP_AVX2 static inline __m256i load(const char *src) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(src));
    }
    CUDECOMP_AVX2 static inline void store(char *dst, const __m256i &row) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(dst), row);
    }
    CUDECOMP_AVX2 static inline void transpose(char *dst, int64_t dst_stride, const char *src, int64_t src_stride) {
        const __m256i a = load(src), b = load(src + src_stride);
        const __m256i c = load(src + 2 * src_stride), d = load(src + 3 * src_stride);
        const __m256i ab_even = _mm256_unpacklo_epi64(a, b), ab_odd = _mm256_unpackhi_epi64(a, b);
        const __m256i cd_even = _mm256_unpacklo_epi64(c, d), cd_odd = _mm256_unpackhi_epi64(c, d);
        store(dst, _mm256_permute2x128_si256(ab_even, cd_even, 0x20));
        store(dst + dst_stride, _mm256_permute2x128_si256(ab_odd, cd_odd, 0x20));
        store(dst + 2 * dst_stride, _mm256_permute2x128_si256(ab_even, cd_even, 0x31));
        store(dst + 3 * dst_stride, _mm256_permute2x128_si256(ab_odd, cd_odd, 0x31));
    }
};

CUDECOMP_AVX2 void gather_32(const Gather &tile) {
    if (!cover<Lines<Block32>>(tile)) gather_16<uint64_t>(tile);
}

CUDECOMP_BLOCK(Block64, 64, CUDECOMP_AVX512)

template <class Item>
CUDECOMP_AVX512 void gather_64(const Gather &tile) {
    if (!cover<Block64<Item>>(tile)) gather_16<Item>(tile);
}
#endif

// ---- the variants for this processor --------------------------------------------------------------------------------

struct Variants {
    StreamRow stream_row;
    GatherTile gather_4;  // 4-byte items
    GatherTile gather_8;
};

Variants choose_variants() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
        return {stream_row_avx512, gather_64<uint32_t>, gather_64<uint64_t>};
    if (__builtin_cpu_supports("avx2")) return {stream_row_avx2, gather_16<uint32_t>, gather_32};
    return {stream_row_sse2, gather_16<uint32_t>, gather_16<uint64_t>};
#else
    return {stream_row_plain, gather_16<uint32_t>, gather_16<uint64_t>};
#endif
}

const Variants &variants() {
    static const Variants chosen = choose_variants();
    return chosen;
}

GatherTile gather_kernel(int64_t item) {
    switch (item) {
        case 1: return gather_16<uint8_t>;
        case 2: return gather_16<uint16_t>;
        case 4: return variants().gather_4;
        case 8: return variants().gather_8;
        case 16: return gather_single_items;
    }
    return gather_columns;
}

// ---- one box --------------------------------------------------------------------------------------------------------

struct Copy {
    Walk walk;  // over items
    int64_t item;
    int32_t src_base;
    int32_t dst_base;
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

    Place place() const {
        const int64_t col = band_ + col_;
        const int64_t number = (outer_ * walk_.row_tiles + row_) * walk_.col_tiles + col;
        return {cudecomp::tile_at(walk_, number), col * walk_.tile_cols};
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

Copy compile(cudecomp_box box, bool stream) {
    Copy copy{};
    copy.item = take_run(box);
    copy.src_base = box.src_base;
    copy.dst_base = box.dst_base;
    copy.walk = cudecomp::walk_box(box);
    copy.copy_rows = row_kernel(copy.item);
    copy.stream_row = variants().stream_row;
    if (copy.walk.permuted && copy.item < kLongItem && copy.walk.dst_stride[kCol] == copy.item)
        copy.gather = copy.walk.src_stride[kRow] == copy.item ? gather_kernel(copy.item) : gather_columns;
    copy.stream = stream && (copy.gather != nullptr || copy.item >= kLongItem);
    choose_tiles(copy);
    return copy;
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
    bool streams;
};

namespace {

void run_segment(cudecomp_program &program, void *const *bases, int64_t s) {
    cudecomp_program::Segment &segment = program.segments[static_cast<size_t>(s)];
    for (int64_t i = segment.first; i < segment.last; ++i) run_copy(program.copies[static_cast<size_t>(i)], bases);
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
           int64_t base_count, int32_t max_blocks, cudecomp_program **program) {
    if (program == nullptr) return CUDECOMP_INVALID;
    *program = nullptr;
    if (!valid_program(boxes, box_count, flags, segment_count, base_count, max_blocks)) return CUDECOMP_INVALID;
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
    static const cudecomp_kernel_table table = {CUDECOMP_ABI, CUDECOMP_DEVICE_HOST, error_string, create, destroy, run,
                                                run_list};
    return &table;
}
