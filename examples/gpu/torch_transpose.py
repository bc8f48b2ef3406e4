# SPDX-License-Identifier: Apache-2.0
"""A Fourier transform of PyTorch tensors over three pencils, there and back; checks its answer.

mpiexec -n 4 python examples/gpu/torch_transpose.py
"""

from contextlib import ExitStack

import torch
from mpi4py import MPI

import cudecomp

SHAPE = (32, 48, 40)

comm = MPI.COMM_WORLD
torch.cuda.set_device(comm.rank % torch.cuda.device_count())
grid = cudecomp.ProcessGrid.choose(comm.size, SHAPE)
# The axis of each transform is the fastest one in memory.
pencils = [cudecomp.Pencil(SHAPE, grid, axis, order="contiguous") for axis in range(3)]

with ExitStack() as stack:
    plans = [
        stack.enter_context(cudecomp.TransposePlan(a, b, "c16", comm, device="cuda"))
        for a, b in ((pencils[0], pencils[1]), (pencils[1], pencils[2]))
    ]
    back = [stack.enter_context(plan.reverse()) for plan in reversed(plans)]
    generator = torch.Generator("cuda").manual_seed(comm.rank)
    shape = pencils[0].memory_shape(comm.rank)
    first = torch.randn(shape, dtype=torch.complex128, device="cuda", generator=generator)

    field = torch.fft.fft(first)
    for plan in plans:
        moved = torch.as_tensor(plan.empty_dst(), device="cuda")
        plan.run(field, moved, stream=torch.cuda.current_stream())
        field = torch.fft.fft(moved)
    for plan in back:
        moved = torch.as_tensor(plan.empty_dst(), device="cuda")
        plan.run(torch.fft.ifft(field), moved, stream=torch.cuda.current_stream())
        field = moved
    error = float((torch.fft.ifft(field) - first).abs().max()) if first.numel() else 0.0

error = comm.allreduce(error, MPI.MAX)
if comm.rank == 0:
    print(f"a transform of {SHAPE} over {comm.size} ranks, there and back: error {error:.1e}")
if error > 1e-12:
    raise SystemExit("the transform is wrong")
