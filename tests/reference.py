# SPDX-License-Identifier: Apache-2.0
"""The reference of the tests is the one that users have; what it knows of the package is said there."""

from cudecomp.testing import HALO, PADDING, POISON, check, fill, items, mismatch, poisoned, run

__all__ = ["HALO", "PADDING", "POISON", "check", "fill", "items", "mismatch", "poisoned", "run"]
