// SPDX-License-Identifier: Apache-2.0
//
// Gathering a tile of short items on the host, into a buffer that is laid out as the destination: small blocks are
// transposed in vector registers. Also the choice of loops for this processor, those of rows.h included.
//
// Knows nothing of boxes. For pack_host.cpp alone: the names have internal linkage.
#ifndef CUDECOMP_GATHER_H
#define CUDECOMP_GATHER_H

#include "rows.h"

namespace {

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

}  // namespace
#endif
