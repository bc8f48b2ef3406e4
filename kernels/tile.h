// SPDX-License-Identifier: Apache-2.0
//
// Index arithmetic shared by the host and the CUDA kernels: how a box is walked as tiles.
//
// Host kernels walk a box as tiles of a plane (Walk). The plane has the destination's fastest dimension as its columns.
// Its rows are the source's fastest dimension where that is another one (a permuted box), else the destination's next
// dimension. The other dimensions are outer loops.
//
// CUDA kernels walk pieces: boxes simplified, cut until 32-bit arithmetic reaches every unit, and shaped as tiles of
// one size in bytes (Piece). All of it compiles for the host too, so that tests without a GPU exercise it.
#ifndef CUDECOMP_TILE_H
#define CUDECOMP_TILE_H

#include <vector>

#include "pack.h"

#ifdef __CUDACC__
#define CUDECOMP_HD __host__ __device__
#else
#define CUDECOMP_HD
#endif

namespace cudecomp {

constexpr int kRow = CUDECOMP_DIMS - 2;
constexpr int kCol = CUDECOMP_DIMS - 1;

// A box with its dimensions reordered to (outer, outer, row, column), and the tiles that cover its planes.
struct Walk {
    int64_t extent[CUDECOMP_DIMS];
    int64_t src_stride[CUDECOMP_DIMS];
    int64_t dst_stride[CUDECOMP_DIMS];
    int64_t src_offset;
    int64_t dst_offset;
    int64_t tile_rows;
    int64_t tile_cols;
    int64_t row_tiles;
    int64_t col_tiles;
    int64_t tiles;  // of the whole box
    bool permuted;
};

// One tile: byte offsets of its first unit from the bases, and its extents in units.
struct Tile {
    int64_t src_offset;
    int64_t dst_offset;
    int64_t rows;
    int64_t cols;
};

// The dimension with the smallest stride among those of more than one unit; the last one where there is none.
inline int fastest(const int64_t *extent, const int64_t *stride) {
    int best = kCol;
    for (int d = kCol; d >= 0; --d)
        if (extent[d] > 1 && (extent[best] == 1 || stride[d] < stride[best])) best = d;
    return best;
}

inline Walk walk_box(const cudecomp_box &box) {
    int col = fastest(box.extent, box.dst_stride);
    int row = fastest(box.extent, box.src_stride);
    Walk walk{};
    walk.permuted = row != col;
    if (!walk.permuted) row = col > 0 ? col - 1 : kCol;
    int order[CUDECOMP_DIMS] = {0, 0, row, col};
    for (int d = 0, outer = 0; d < CUDECOMP_DIMS; ++d)
        if (d != row && d != col) order[outer++] = d;
    for (int d = 0; d < CUDECOMP_DIMS; ++d) {
        walk.extent[d] = box.extent[order[d]];
        walk.src_stride[d] = box.src_stride[order[d]];
        walk.dst_stride[d] = box.dst_stride[order[d]];
    }
    walk.src_offset = box.src_offset;
    walk.dst_offset = box.dst_offset;
    return walk;
}

inline void set_tiles(Walk &walk, int64_t rows, int64_t cols) {
    walk.tile_rows = rows;
    walk.tile_cols = cols;
    walk.row_tiles = (walk.extent[kRow] + rows - 1) / rows;
    walk.col_tiles = (walk.extent[kCol] + cols - 1) / cols;
    walk.tiles = walk.extent[0] * walk.extent[1] * walk.row_tiles * walk.col_tiles;
}

CUDECOMP_HD inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Tile number `t`, columns fastest: consecutive tiles write consecutive addresses where they can.
CUDECOMP_HD inline Tile tile_at(const Walk &walk, int64_t t) {
    int64_t col = (t % walk.col_tiles) * walk.tile_cols;
    t /= walk.col_tiles;
    int64_t row = (t % walk.row_tiles) * walk.tile_rows;
    t /= walk.row_tiles;
    int64_t inner = t % walk.extent[1], outer = t / walk.extent[1];
    Tile tile;
    tile.src_offset = walk.src_offset + outer * walk.src_stride[0] + inner * walk.src_stride[1] +
                      row * walk.src_stride[kRow] + col * walk.src_stride[kCol];
    tile.dst_offset = walk.dst_offset + outer * walk.dst_stride[0] + inner * walk.dst_stride[1] +
                      row * walk.dst_stride[kRow] + col * walk.dst_stride[kCol];
    tile.rows = smaller(walk.tile_rows, walk.extent[kRow] - row);
    tile.cols = smaller(walk.tile_cols, walk.extent[kCol] - col);
    return tile;
}

// ---- pieces: what the CUDA kernels walk ----

constexpr int kTileBytesLog = 15;         // a tile moves at most 32 KiB: a unit of work, of order and of completion
constexpr int64_t kPieceBytes = 1 << 30;  // a piece has at most these bytes, so that its unit numbers fit dividers
constexpr int kEdgeLog = 9;               // the longest edge of a permuted tile has 2^9 units
constexpr int64_t kThin = 3;              // a permuted plane with a shorter edge is walked in flat order instead
constexpr int64_t kShort = 64;            // a shorter edge of a plane takes an outer dimension in, where it can

// Division by a constant with one multiplication; exact for numerators below 2^31.
struct Divider {
    uint32_t value;
    uint32_t multiplier;
    uint32_t shift;
};

CUDECOMP_HD inline int log2_ceil(uint64_t value) {
    int log = 0;
    while ((uint64_t(1) << log) < value) ++log;
    return log;
}

inline Divider make_divider(uint32_t value) {
    // With s = ceil(log2(value)), m = ceil(2^(31+s) / value) is off by less than value <= 2^s, hence n * m / 2^(31+s)
    // is off by less than 1 / value for n < 2^31.
    uint32_t shift = 31 + uint32_t(log2_ceil(value));
    return {value, uint32_t(((uint64_t(1) << shift) + value - 1) / value), shift};
}

CUDECOMP_HD inline uint32_t quotient(uint32_t n, const Divider &d) {
    return uint32_t((uint64_t(n) * d.multiplier) >> d.shift);
}

enum PieceKind : uint8_t {
    kFlat,  // units numbered in walked order, a tile is a range of numbers: short rows still fill whole warps
    kPlane  // permuted: a tile is a rectangle of the plane, turned in shared memory
};

// Dimensions as in Walk: (outer, outer, row, column). Rows of a plane may number two dimensions that are one in the
// source: row r lies in the destination at r * stride + (r / row_split) * dst_row_skip. Likewise columns may number two
// dimensions that are one in the destination.
struct Piece {
    int64_t src_stride[CUDECOMP_DIMS];
    int64_t dst_stride[CUDECOMP_DIMS];
    int64_t src_offset;
    int64_t dst_offset;
    int64_t src_col_skip;
    int64_t dst_row_skip;
    uint32_t units;
    uint32_t tiles;       // at least one, also where there is nothing to copy: a tile completes a segment
    uint32_t first_tile;  // in the program
    int32_t segment;
    int32_t src_base;
    int32_t dst_base;
    uint32_t align;    // every vector access is aligned to the lowest bit set here and in the two bases
    Divider split[3];  // kFlat: by extents 1, 2, 3; kPlane: by extent 1 and the number of row and column tiles
    Divider row_split;
    Divider col_split;
    uint32_t rows;  // extent of the plane
    uint32_t cols;
    PieceKind kind;
    uint8_t unit_log;
    uint8_t rows_log;  // kPlane: edges of a tile
    uint8_t cols_log;
    uint8_t narrow;      // kFlat: byte offsets of all units from the first one fit 32 bits
    uint8_t contiguous;  // the fastest dimensions are contiguous, so that vector accesses are possible
    uint8_t unused[2];
};

// Drop dimensions of one unit and join those that are one dimension in both layouts.
inline cudecomp_box collapse(const cudecomp_box &box) {
    cudecomp_box out = box;
    int d = kCol;
    auto set = [&](int to, int64_t extent, int64_t src, int64_t dst) {
        out.extent[to] = extent, out.src_stride[to] = src, out.dst_stride[to] = dst;
    };
    set(kCol, 1, box.unit, box.unit);
    for (int i = kCol; i >= 0; --i) {
        if (box.extent[i] == 1) continue;
        bool joins = box.src_stride[i] == out.extent[d] * out.src_stride[d] &&
                     box.dst_stride[i] == out.extent[d] * out.dst_stride[d];
        if (out.extent[d] == 1)
            set(d, box.extent[i], box.src_stride[i], box.dst_stride[i]);
        else if (joins)
            out.extent[d] *= box.extent[i];
        else
            set(--d, box.extent[i], box.src_stride[i], box.dst_stride[i]);
    }
    while (d > 0) set(--d, 1, 0, 0);
    return out;
}

// Edges of a permuted tile: 256 bytes, but at least 32 units, along the rows and what is left along the columns, where
// the plane allows it; else the short side of the plane is one edge and the other one takes what the tile has left.
inline void shape_plane(Piece &piece) {
    int area = kTileBytesLog - piece.unit_log, best = 8 - piece.unit_log < 5 ? 5 : 8 - piece.unit_log;
    auto edge = [](uint32_t extent, int most) {
        int log = log2_ceil(extent);
        most = most < kEdgeLog ? most : kEdgeLog;
        return uint8_t(log < 3 ? 3 : log < most ? log : most);
    };
    piece.rows_log = edge(piece.rows, best < area / 2 ? best : area / 2);
    piece.cols_log = edge(piece.cols, area - piece.rows_log);
    piece.rows_log = edge(piece.rows, area - piece.cols_log);
    piece.split[1] = make_divider(((piece.rows - 1) >> piece.rows_log) + 1);
    piece.split[2] = make_divider(((piece.cols - 1) >> piece.cols_log) + 1);
}

// Let a short edge `d` of a plane take in an outer dimension that is one with it in the layout of `stride`, the layout
// that is contiguous along `d`. Return the stride of that dimension in the other layout and the number of units before
// it is stepped along; 0 where there is none.
struct Absorbed {
    int64_t stride;
    int64_t every;
};

inline Absorbed absorb(Walk &walk, int d, const int64_t *stride, const int64_t *other) {
    for (int outer = 1; outer >= 0 && walk.extent[d] < kShort; --outer) {
        if (walk.extent[outer] == 1 || stride[outer] != walk.extent[d] * stride[d]) continue;
        Absorbed absorbed = {other[outer], walk.extent[d]};
        walk.extent[d] *= walk.extent[outer];
        walk.extent[outer] = 1;
        walk.src_stride[outer] = walk.dst_stride[outer] = 0;
        return absorbed;
    }
    return {0, 0};
}

// Bits that bound the alignment of vector accesses along the fastest dimensions: all offsets at which one may begin,
// and the ends of rows. The end of a single row is left to accesses of one unit.
inline uint32_t alignment(const Walk &walk, int unit, bool plane) {
    uint64_t bits = uint64_t(walk.src_offset) | uint64_t(walk.dst_offset);
    bool single = walk.extent[0] * walk.extent[1] * walk.extent[kRow] == 1;
    if (!single) bits |= uint64_t(walk.extent[kCol] * unit);
    if (plane) bits |= uint64_t(walk.extent[kRow] * unit);
    for (int d = 0; d < CUDECOMP_DIMS; ++d) {
        if (walk.extent[d] == 1) continue;
        if (d != (plane ? kRow : kCol)) bits |= uint64_t(walk.src_stride[d]);
        if (d != kCol) bits |= uint64_t(walk.dst_stride[d]);
    }
    return uint32_t(bits & 31) | 16;
}

// The walk of a permuted plane that is too thin for tiles: flat, along the long side.
inline void flatten_thin(Walk &walk) {
    if (walk.extent[kCol] >= kThin || walk.extent[kRow] < kThin) return;
    auto swap = [](int64_t *values) {
        int64_t row = values[kRow];
        values[kRow] = values[kCol], values[kCol] = row;
    };
    swap(walk.extent), swap(walk.src_stride), swap(walk.dst_stride);
}

// Whether byte offsets of all units fit 32 bits.
inline bool is_narrow(const Walk &walk) {
    int64_t last = 0, limit = int64_t(1) << 32;
    for (int d = 0; d < CUDECOMP_DIMS; ++d) {
        int64_t src = walk.src_stride[d], dst = walk.dst_stride[d];
        if (src < 0 || dst < 0 || src >= limit || dst >= limit) return false;
        last += (walk.extent[d] - 1) * (src > dst ? src : dst);
    }
    return last < limit;
}

inline void make_plane(Piece &piece, Walk &walk, int unit) {
    Absorbed col = absorb(walk, kCol, walk.dst_stride, walk.src_stride);
    Absorbed row = absorb(walk, kRow, walk.src_stride, walk.dst_stride);
    piece.src_col_skip = col.every ? col.stride - col.every * walk.src_stride[kCol] : 0;
    piece.dst_row_skip = row.every ? row.stride - row.every * walk.dst_stride[kRow] : 0;
    piece.col_split = make_divider(col.every ? uint32_t(col.every) : 1);
    piece.row_split = make_divider(row.every ? uint32_t(row.every) : 1);
    piece.rows = uint32_t(walk.extent[kRow]), piece.cols = uint32_t(walk.extent[kCol]);
    piece.contiguous = walk.src_stride[kRow] == unit && walk.dst_stride[kCol] == unit;
    piece.align = alignment(walk, unit, true) | uint32_t((col.stride | row.stride) & 15);
    piece.split[0] = make_divider(uint32_t(walk.extent[1]));
    shape_plane(piece);
    piece.tiles = uint32_t(walk.extent[0] * walk.extent[1]) * piece.split[1].value * piece.split[2].value;
}

inline void make_flat(Piece &piece, const Walk &walk, int unit) {
    piece.contiguous = walk.src_stride[kCol] == unit && walk.dst_stride[kCol] == unit;
    piece.align = alignment(walk, unit, false);
    piece.narrow = is_narrow(walk);
    for (int d = 1; d < CUDECOMP_DIMS; ++d) piece.split[d - 1] = make_divider(uint32_t(walk.extent[d]));
    piece.tiles = ((piece.units - 1) >> (kTileBytesLog - piece.unit_log)) + 1;
}

// A collapsed box of at most kPieceBytes.
inline Piece make_piece(const cudecomp_box &box) {
    Walk walk = walk_box(box);
    Piece piece{};
    piece.segment = box.segment, piece.src_base = box.src_base, piece.dst_base = box.dst_base;
    piece.src_offset = box.src_offset, piece.dst_offset = box.dst_offset;
    piece.unit_log = uint8_t(log2_ceil(uint64_t(box.unit)));
    piece.units = uint32_t(box.extent[0] * box.extent[1] * box.extent[2] * box.extent[3]);
    if (walk.permuted) {
        Walk plane = walk;
        make_plane(piece, plane, box.unit);
        piece.kind = piece.rows >= kThin && piece.cols >= kThin ? kPlane : kFlat;
        if (piece.kind == kPlane)
            walk = plane;
        else
            flatten_thin(walk);
    }
    if (piece.kind == kFlat) make_flat(piece, walk, box.unit);
    if (!piece.contiguous) piece.align = uint32_t(box.unit);
    for (int d = 0; d < CUDECOMP_DIMS; ++d)
        piece.src_stride[d] = walk.src_stride[d], piece.dst_stride[d] = walk.dst_stride[d];
    return piece;
}

// Cut a box in halves, slowest dimension first, until it has at most kPieceBytes, and append its pieces.
inline void add_pieces(cudecomp_box box, std::vector<Piece> &pieces) {
    box = collapse(box);
    int64_t bytes = box.unit;
    int d = 0;
    while (d < kCol && box.extent[d] == 1) ++d;
    for (int i = 0; i < CUDECOMP_DIMS; ++i) bytes = bytes > kPieceBytes ? bytes : bytes * box.extent[i];
    if (bytes <= kPieceBytes) return pieces.push_back(make_piece(box));
    // The cut keeps the alignment of a long contiguous box.
    int64_t half = box.extent[d] / 2, grain = int64_t(1) << kTileBytesLog;
    if (d == kCol && half > grain) half = half / grain * grain;
    cudecomp_box rest = box;
    box.extent[d] = half;
    rest.extent[d] -= half;
    rest.src_offset += half * box.src_stride[d];
    rest.dst_offset += half * box.dst_stride[d];
    add_pieces(box, pieces);
    add_pieces(rest, pieces);
}

// The piece of a segment without boxes: nothing to copy, one tile.
inline Piece empty_piece(int32_t segment) {
    Piece piece{};
    piece.segment = segment;
    piece.tiles = 1;
    piece.align = 16;
    for (Divider &d : piece.split) d = make_divider(1);
    piece.row_split = piece.col_split = make_divider(1);
    return piece;
}

// kFlat: unit number `x`, its column, and its byte offsets from the first unit of the piece. Offset is uint32_t for
// narrow pieces.
template <typename Offset>
struct Cursor {
    uint32_t x;
    uint32_t col;
    Offset src;
    Offset dst;
};

template <typename Offset>
CUDECOMP_HD inline Cursor<Offset> seek(const Piece &piece, uint32_t x) {
    uint32_t row = quotient(x, piece.split[2]);
    uint32_t col = x - row * piece.split[2].value;
    uint32_t inner = quotient(row, piece.split[1]);
    row -= inner * piece.split[1].value;
    uint32_t outer = quotient(inner, piece.split[0]);
    inner -= outer * piece.split[0].value;
    Cursor<Offset> at = {x, col, 0, 0};
    at.src = Offset(col) * Offset(piece.src_stride[kCol]) + Offset(row) * Offset(piece.src_stride[kRow]) +
             Offset(inner) * Offset(piece.src_stride[1]) + Offset(outer) * Offset(piece.src_stride[0]);
    at.dst = Offset(col) * Offset(piece.dst_stride[kCol]) + Offset(row) * Offset(piece.dst_stride[kRow]) +
             Offset(inner) * Offset(piece.dst_stride[1]) + Offset(outer) * Offset(piece.dst_stride[0]);
    return at;
}

// Go `step` units on; divide only where that leaves the row.
template <typename Offset>
CUDECOMP_HD inline void advance(Cursor<Offset> &at, const Piece &piece, uint32_t step) {
    if (at.col + step >= piece.split[2].value) {
        at = seek<Offset>(piece, at.x + step);
        return;
    }
    at.x += step;
    at.col += step;
    at.src += Offset(step) * Offset(piece.src_stride[kCol]);
    at.dst += Offset(step) * Offset(piece.dst_stride[kCol]);
}

// kPlane: where column `col` of the plane begins in the source, from its column 0; likewise for rows in the
// destination.
CUDECOMP_HD inline int64_t src_column(const Piece &piece, uint32_t col) {
    return col * piece.src_stride[kCol] + quotient(col, piece.col_split) * piece.src_col_skip;
}

CUDECOMP_HD inline int64_t dst_row(const Piece &piece, uint32_t row) {
    return row * piece.dst_stride[kRow] + quotient(row, piece.row_split) * piece.dst_row_skip;
}

// kPlane: one tile. The offsets, from the bases, are those of (first_row, column 0) in the source and (row 0,
// first_col) in the destination.
struct PlaneTile {
    int64_t src_offset;
    int64_t dst_offset;
    uint32_t first_row;
    uint32_t first_col;
    uint32_t rows;
    uint32_t cols;
};

CUDECOMP_HD inline PlaneTile plane_tile(const Piece &piece, uint32_t t) {
    uint32_t row = quotient(t, piece.split[2]);
    PlaneTile tile;
    tile.first_col = (t - row * piece.split[2].value) << piece.cols_log;
    uint32_t inner = quotient(row, piece.split[1]);
    tile.first_row = (row - inner * piece.split[1].value) << piece.rows_log;
    uint32_t outer = quotient(inner, piece.split[0]);
    inner -= outer * piece.split[0].value;
    tile.src_offset = piece.src_offset + outer * piece.src_stride[0] + inner * piece.src_stride[1] +
                      tile.first_row * piece.src_stride[kRow];
    tile.dst_offset = piece.dst_offset + outer * piece.dst_stride[0] + inner * piece.dst_stride[1] +
                      tile.first_col * piece.dst_stride[kCol];
    uint32_t rows = piece.rows - tile.first_row, cols = piece.cols - tile.first_col;
    tile.rows = rows < 1u << piece.rows_log ? rows : 1u << piece.rows_log;
    tile.cols = cols < 1u << piece.cols_log ? cols : 1u << piece.cols_log;
    return tile;
}

// kFlat: the unit numbers [first, last) of tile `t`; with `one_row`, they lie in one row.
struct Span {
    uint32_t first;
    uint32_t last;
    bool one_row;
};

CUDECOMP_HD inline Span flat_tile(const Piece &piece, uint32_t t) {
    int log = kTileBytesLog - piece.unit_log;
    Span span;
    span.first = t << log;
    uint32_t full = span.first + (1u << log);
    span.last = full < piece.units ? full : piece.units;
    span.one_row =
        span.first < span.last && quotient(span.first, piece.split[2]) == quotient(span.last - 1, piece.split[2]);
    return span;
}

// Where shared memory keeps the vectors of 2^vector_log units along the columns of a permuted tile. Rows come in groups
// of 2^vector_log. Writers are consecutive in groups, readers in columns; the swizzle spreads both over all banks. It
// permutes aligned spans of `mask + 1` vectors, and a span never crosses a group.
struct Swizzle {
    uint32_t row_log;  // vectors in a row
    uint32_t vector_log;
    uint32_t shift;
    uint32_t mask;
};

CUDECOMP_HD inline Swizzle make_swizzle(int rows_log, int cols_log, int unit_log, int vector_log) {
    int width_log = unit_log + vector_log;
    int phase_log = 7 - width_log;  // 128 bytes in vectors: what the banks serve at once
    int lanes_log = rows_log - vector_log;
    int shift = phase_log > lanes_log ? phase_log - lanes_log : 0;
    if (2 - width_log > shift) shift = 2 - width_log;
    int mask_log = phase_log < cols_log ? phase_log : cols_log;
    return {uint32_t(cols_log - vector_log), uint32_t(vector_log), uint32_t(shift), (1u << mask_log) - 1};
}

// What is xor-ed to the row-major places of a group of rows.
CUDECOMP_HD inline uint32_t group_swizzle(const Swizzle &s, uint32_t group) { return (group << s.shift) & s.mask; }

// Call visit(src_offset, dst_offset) for every unit that tile `t` of a piece copies, with the arithmetic of the
// kernels.
template <typename Offset, typename Visit>
inline void visit_flat(const Piece &piece, uint32_t t, Visit visit) {
    Span span = flat_tile(piece, t);
    if (span.first == span.last) return;
    Cursor<Offset> at = seek<Offset>(piece, span.first);
    for (;; advance(at, piece, 1)) {
        visit(piece.src_offset + int64_t(at.src), piece.dst_offset + int64_t(at.dst));
        if (at.x + 1 == span.last) return;
    }
}

template <typename Visit>
inline void visit_tile(const Piece &piece, uint32_t t, Visit visit) {
    if (piece.kind == kFlat && piece.narrow) return visit_flat<uint32_t>(piece, t, visit);
    if (piece.kind == kFlat) return visit_flat<int64_t>(piece, t, visit);
    PlaneTile tile = plane_tile(piece, t);
    for (uint32_t row = 0; row < tile.rows; ++row) {
        int64_t src = tile.src_offset + row * piece.src_stride[kRow];
        int64_t dst = tile.dst_offset + dst_row(piece, tile.first_row + row);
        for (uint32_t col = 0; col < tile.cols; ++col)
            visit(src + src_column(piece, tile.first_col + col), dst + col * piece.dst_stride[kCol]);
    }
}

}  // namespace cudecomp
#endif
