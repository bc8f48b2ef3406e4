# SPDX-License-Identifier: Apache-2.0
"""Exit with a message unless the launcher started the given number of ranks of one MPI_COMM_WORLD."""

import sys

from mpi4py import MPI

wanted = int(sys.argv[1])
library = MPI.Get_library_version().splitlines()[0]
if MPI.COMM_WORLD.size != wanted:
    sys.exit(
        f"started {wanted} ranks, but MPI_COMM_WORLD has {MPI.COMM_WORLD.size}: the launcher is not that of the MPI "
        f"library in use ({library}). Set MPI and MPIEXEC, see the head of the Makefile."
    )
if MPI.COMM_WORLD.rank == 0:
    print(f"MPI: {library}")
