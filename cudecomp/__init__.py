# SPDX-License-Identifier: Apache-2.0
"""Pencil decompositions, global transposes and halo exchange for arrays split over many processes."""

try:
    from ._build import VERSION
except ModuleNotFoundError as error:
    raise ImportError(
        f"{__path__[0]} is the source tree of cudecomp, which has no compiled modules: install the package there by "
        "'pip install .', and start Python from another folder, or with -P, so that it finds what was installed"
    ) from error

from .errors import CudaError, KernelError, PoisonedError
from .exchange import BoxCopy, Exchange, Message
from .grid import ProcessGrid
from .memory import empty
from .pencil import Box, Pencil
from .plan import Call, Chain, HaloPlan, Plan, TransposePlan, capture
from .whole import gather, scatter
from .workspace import Workspace

__version__ = VERSION

__all__ = [
    "Box",
    "BoxCopy",
    "Call",
    "Chain",
    "CudaError",
    "Exchange",
    "HaloPlan",
    "KernelError",
    "Message",
    "Pencil",
    "Plan",
    "PoisonedError",
    "ProcessGrid",
    "TransposePlan",
    "Workspace",
    "__version__",
    "capture",
    "empty",
    "gather",
    "scatter",
]
