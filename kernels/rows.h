// SPDX-License-Identifier: Apache-2.0
//
// Loops over rows of bytes on the host: copied through the caches, or streamed past them a line at a time.
//
// Knows nothing of boxes and tiles. For pack_host.cpp alone: the names have internal linkage.
#ifndef CUDECOMP_ROWS_H
#define CUDECOMP_ROWS_H

#include <cstdint>
#include <cstring>

#include "tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define CUDECOMP_INLINE inline __attribute__((always_inline))

namespace {

using cudecomp::smaller;

constexpr int64_t kLine = 64;

// Shorter items hold too few whole lines to be streamed one by one.
constexpr int64_t kLongItem = 256;

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

// Fetch a line that will be written in part.
CUDECOMP_INLINE void fetch_to_write(const char *at) {
#if defined(__x86_64__)
    asm volatile("prefetchw %0" : : "m"(*at));  // the builtin is a plain prefetch unless the target says otherwise
#else
    __builtin_prefetch(at, 1);
#endif
}

// Rows ahead at which the lines of scattered rows are fetched: the processor's own prefetchers lose such strides at the
// end of each page, and stores that miss are few in flight (writing 8 bytes of each line took twice as long without).
constexpr int64_t kFetchScattered = 24;

template <bool scattered, class CopyRow>
CUDECOMP_INLINE void for_each_row(const Rows &rows, CopyRow copy_row) {
    const int64_t dst_ahead = kFetchScattered * rows.dst_stride, src_ahead = kFetchScattered * rows.src_stride;
    char *dst = rows.dst;
    const char *src = rows.src;
    for (int64_t i = 0; i < rows.count; ++i, dst += rows.dst_stride, src += rows.src_stride) {
        if (scattered) {
            fetch_to_write(dst + dst_ahead);
            __builtin_prefetch(src + src_ahead);
        }
        copy_row(dst, src);
    }
}

template <bool scattered, int64_t bytes>
void copy_fixed_rows(const Rows &rows) {
    for_each_row<scattered>(rows, [](char *dst, const char *src) { copy_fixed<bytes>(dst, src); });
}

// Rows of `step` bytes or more in steps, the last of which may overlap the one before.
template <bool scattered, int64_t step>
void copy_short_rows(const Rows &rows) {
    const int64_t last = rows.bytes - step;
    for_each_row<scattered>(rows, [last](char *dst, const char *src) {
        for (int64_t k = 0; k < last; k += step) copy_fixed<step>(dst + k, src + k);
        copy_fixed<step>(dst + last, src + last);
    });
}

void copy_long_rows(const Rows &rows) {
    const auto bytes = static_cast<size_t>(rows.bytes);
    for_each_row<false>(rows, [bytes](char *dst, const char *src) { std::memcpy(dst, src, bytes); });
}

// The loop for rows of so many bytes; `scattered` where few rows share a line.
template <bool scattered = false>
CopyRows row_kernel(int64_t bytes) {
    switch (bytes) {
        case 1: return copy_fixed_rows<scattered, 1>;
        case 2: return copy_fixed_rows<scattered, 2>;
        case 4: return copy_fixed_rows<scattered, 4>;
        case 8: return copy_fixed_rows<scattered, 8>;
        case 16: return copy_fixed_rows<scattered, 16>;
        case 24: return copy_fixed_rows<scattered, 24>;
        case 32: return copy_fixed_rows<scattered, 32>;
        case 48: return copy_fixed_rows<scattered, 48>;
        case 64: return copy_fixed_rows<scattered, 64>;
    }
    if (bytes >= kLongItem) return copy_long_rows;
    if (bytes > 16) return copy_short_rows<scattered, 16>;
    if (bytes > 8) return copy_short_rows<scattered, 8>;
    if (bytes > 4) return copy_short_rows<scattered, 4>;
    return copy_short_rows<scattered, 2>;
}

}  // namespace
#endif
