# SPDX-License-Identifier: Apache-2.0
"""Owns memory that processes of one host share; knows nothing of what is in it.

A segment is a file of /dev/shm. All of it is reserved when it is made, so that too small a /dev/shm is an error there
and not a SIGBUS later. Its name is removed as soon as all peers have it mapped: a process that dies leaves nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Any

from .flags import load, store
from .mapping import Mapping

FOLDER = "/dev/shm"


class Segment:
    """Shared memory mapped into this process; NumPy arrays made of it (`numpy.asarray`) keep it mapped.

    Made by `Segment.create` in one process and `Segment.attach` in others.

    Attributes
    ----------
    address, nbytes : int
        Where it lies in this process.
    offer : str
        What `attach` takes, in another process.
    memory : None
        What must live as long as another process maps it: nothing, the system takes care of it.
    """

    memory = None

    def __init__(self, path: str, file: int, nbytes: int):
        self.offer = path
        self.nbytes = nbytes
        self._map = Mapping(file, max(nbytes, 1))
        self.address: int = self._map.address

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Make a segment of zeros; OSError if the memory is not there."""
        path = f"{FOLDER}/cudecomp-{os.getpid()}-{secrets.token_hex(8)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, max(nbytes, 1))
            return cls(path, file, nbytes)
        except BaseException as error:
            os.unlink(path)
            what = f"shared memory of {nbytes} bytes in {FOLDER}"
            if isinstance(error, OverflowError):
                raise MemoryError(f"{what}: more than this machine can address") from None
            if isinstance(error, OSError):
                raise OSError(error.errno, f"{what}: {error.strerror}; a larger one may be needed") from None
            raise
        finally:
            os.close(file)

    @classmethod
    def attach(cls, offer: str, nbytes: int) -> Segment:
        """Map a segment that another process of this host has made."""
        file = os.open(offer, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(offer, file, nbytes)
        finally:
            os.close(file)

    def withdraw(self) -> None:
        """Remove the name, nobody else will map it; the memory lives as long as it is mapped somewhere."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.offer)

    def store(self, index: int, value: int) -> None:
        """Write a 64-bit word of it, with release."""
        store(self.address + 8 * index, value)

    def load(self, index: int) -> int:
        """Read a 64-bit word of it, with acquire."""
        return load(self.address + 8 * index)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}
