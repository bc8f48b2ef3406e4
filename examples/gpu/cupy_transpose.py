# SPDX-License-Identifier: Apache-2.0
"""Transpose CuPy arrays between pencils, on a stream, and replay the captured work; checks its answer.

mpiexec -n 4 python examples/gpu/cupy_transpose.py
"""

import cupy
from mpi4py import MPI

import cudecomp

SHAPE = (64, 48, 40)

comm = MPI.COMM_WORLD
cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
grid = cudecomp.ProcessGrid.choose(comm.size, SHAPE)
x = cudecomp.Pencil(SHAPE, grid, axis=0)
y = x.pencil(1, order="contiguous")
values = cupy.arange(SHAPE[0] * SHAPE[1] * SHAPE[2], dtype="f8").reshape(SHAPE)

with cudecomp.TransposePlan(x, y, "f8", comm, device="cuda") as plan, cupy.cuda.Stream(non_blocking=True) as stream:
    a, b = cupy.asarray(plan.empty_src()), cupy.asarray(plan.empty_dst())
    x.interior(a, plan.rank)[...] = values[x.slices(plan.rank)]
    plan.run(a, b, stream=stream)  # ordered on the stream, like CuPy's own work
    right = bool((y.interior(b, plan.rank) == values[y.slices(plan.rank)]).all())

    call = plan.capture(a, b)  # once ...
    for _ in range(10):
        a += 1
        call.replay(stream=stream)  # ... and launched as one unit as often as needed
    right &= bool((y.interior(b, plan.rank) == values[y.slices(plan.rank)] + 10).all())

if not comm.allreduce(right, MPI.LAND):
    raise SystemExit("the transpose is wrong")
if comm.rank == 0:
    print(f"transposed {SHAPE} over {comm.size} ranks by {plan.backend}, {plan.stats['replays']} replays: right")
