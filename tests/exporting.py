# SPDX-License-Identifier: Apache-2.0
"""Owns arrays as other libraries export them; knows nothing of what takes them."""


class DLPack:
    """Exports an array by DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()
