# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the package; knows nothing of what raises them.

Arguments give ValueError or TypeError, a peer that does not answer in time TimeoutError, everything else RuntimeError.
"""


class KernelError(RuntimeError):
    """A function of a kernel library returned an error status."""


class CudaError(RuntimeError):
    """A CUDA function returned an error status."""


class PoisonedError(RuntimeError):
    """The plan failed earlier, in a way that leaves it unusable; close it and build another."""
