# SPDX-License-Identifier: Apache-2.0
"""Owns the pictures of decompositions, for which it imports matplotlib on demand; knows nothing of plans or MPI."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import cos, radians, sin
from typing import Any

from .pencil import Pencil

MOST_RANKS = 1024  # more boxes than this are a grey cube
MOST_LABELS = 64
ELEVATION, AZIMUTH = 24, -52  # degrees; the eye looks at the high end of axes 0 and 2 and the low end of axis 1
GAP = 0.03  # between boxes, as a part of the array's longest extent divided by the parts

Point = tuple[float, ...]


def picture(pencils: Sequence[Pencil], path: str, plane: Any = None, title: str = "") -> None:
    """Draw which rank owns what in 3-D pencils, and beside them a plane of a field; write it to `path`. Local.

    Parameters
    ----------
    pencils : sequence of Pencil
        The decompositions, each one panel.
    path : str
        Where the picture goes; its ending names the format.
    plane : 2-D array, optional
        Values to show in a last panel: axis 0 of the field upwards, axis 1 to the right.
    title : str
        What the plane shows.

    Raises
    ------
    ImportError, ValueError
        As for `check_picture`.
    """
    figure_class = check_picture(pencils[0], path)
    panels = len(pencils) + (plane is not None)
    figure = figure_class(figsize=(3.4 * panels, 3.8), layout="constrained")
    for number, pencil in enumerate(pencils):
        _draw_pencil(figure.add_subplot(1, panels, number + 1, projection="3d"), pencil)
    if plane is not None:
        _draw_plane(figure, figure.add_subplot(1, panels, panels), plane, title)
    figure.savefig(path, dpi=110)


def check_picture(pencil: Pencil, path: str) -> Any:
    """Return matplotlib's Figure class if a picture like this one can be drawn and written. Local.

    Raises
    ------
    ImportError
        matplotlib is not installed.
    ValueError
        The pencil is not of three axes, there are too many ranks to show, or the format is unknown.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("a picture needs matplotlib; install it by: pip install matplotlib") from None
    if pencil.ndim != 3:
        raise ValueError(f"a picture shows arrays of 3 axes, this one has {pencil.ndim}")
    if pencil.grid.size > MOST_RANKS:
        raise ValueError(f"a picture shows at most {MOST_RANKS} ranks, these are {pencil.grid.size}")
    ending, known = path.rpartition(".")[2].lower(), Figure().canvas.get_supported_filetypes()
    if ending not in known:
        raise ValueError(f"{path}: the picture's format is {ending!r}, expected one of {', '.join(known)}")
    return Figure


def _draw_pencil(axes: Any, pencil: Pencil) -> None:
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    axes.computed_zorder = False  # boxes are drawn from the back to the front instead
    axes.view_init(ELEVATION, AZIMUTH)
    for depth, (rank, low, high) in enumerate(_back_to_front(pencil)):
        colour = _colour(rank, pencil.grid.size)
        for axis, (face, shade) in enumerate(zip(_faces(low, high), (0.9, 0.78, 1.0), strict=True)):
            tone = tuple(shade * part for part in colour)
            axes.add_collection3d(Poly3DCollection([face], facecolors=[tone], edgecolors="black", lw=0.4, zorder=depth))
            if axis == pencil.axis and pencil.grid.size <= MOST_LABELS:
                middle = [sum(places) / 4 for places in zip(*face, strict=True)]
                axes.text(*middle, str(rank), ha="center", va="center", fontsize=9, zorder=pencil.grid.size)
    for name, extent in zip("xyz", pencil.global_shape, strict=True):
        getattr(axes, f"set_{name}lim")(0, extent)
        getattr(axes, f"set_{name}label")(f"axis {'xyz'.index(name)}", labelpad=-12, fontsize=8)
        getattr(axes, f"set_{name}ticks")([])
    axes.set_box_aspect(pencil.global_shape, zoom=0.97)
    axes.set_title(f"pencil of axis {pencil.axis}: axis {pencil.axis} is whole", fontsize=10, y=1.0)


def _back_to_front(pencil: Pencil) -> list[tuple[int, Point, Point]]:
    """Return (rank, low corner, high corner) of all boxes with items, shrunk a little, the farthest first."""
    towards_eye = _towards_eye()
    found = []
    for rank in range(pencil.grid.size):
        box = pencil.box(rank)
        if box.size:
            gaps = [
                GAP * max(pencil.global_shape) / max(2, max(pencil.grid.shape)) if n > 1 else 0.0 for n in box.shape
            ]
            low = tuple(start + gap / 2 for start, gap in zip(box.start, gaps, strict=True))
            high = tuple(stop - gap / 2 for stop, gap in zip(box.stop, gaps, strict=True))
            found.append((rank, low, high))
    middle = {rank: [a + b for a, b in zip(low, high, strict=True)] for rank, low, high in found}
    return sorted(found, key=lambda one: sum(a * b for a, b in zip(middle[one[0]], towards_eye, strict=True)))


def _towards_eye() -> Point:
    up, around = radians(ELEVATION), radians(AZIMUTH)
    return cos(up) * cos(around), cos(up) * sin(around), sin(up)


def _faces(low: Point, high: Point) -> Iterator[list[Point]]:
    """Yield the three faces of a box that the eye sees, across axis 0, 1 and 2."""
    for axis, side in enumerate(_towards_eye()):
        place = high[axis] if side > 0 else low[axis]
        a, b = (other for other in range(3) if other != axis)
        corners = []
        for first, second in ((low[a], low[b]), (high[a], low[b]), (high[a], high[b]), (low[a], high[b])):
            corner = [0.0, 0.0, 0.0]
            corner[axis], corner[a], corner[b] = place, first, second
            corners.append(tuple(corner))
        yield corners


def _colour(rank: int, ranks: int) -> Point:
    """Return the colour of a rank: distinct pale ones for few ranks, a scale for many."""
    from matplotlib import colormaps

    if ranks <= 12:
        return tuple(colormaps["Set3"](rank)[:3])
    return tuple(0.25 + 0.75 * part for part in colormaps["turbo"](rank / (ranks - 1))[:3])


def _draw_plane(figure: Any, axes: Any, plane: Any, title: str) -> None:
    image = axes.imshow(plane, origin="lower", cmap="RdBu_r", aspect="auto")
    figure.colorbar(image, ax=axes, shrink=0.7)
    axes.set(xlabel="axis 1", ylabel="axis 0")
    axes.set_title(title, fontsize=10)
