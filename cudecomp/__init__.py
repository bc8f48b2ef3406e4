# SPDX-License-Identifier: Apache-2.0
"""Pencil decompositions, global transposes and halo exchange for arrays split over many processes."""

from ._build import VERSION
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
