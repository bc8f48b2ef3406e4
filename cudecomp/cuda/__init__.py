# SPDX-License-Identifier: Apache-2.0
"""The CUDA device: streams, events, graphs, memory, arrays and the engine; imported when a plan asks for it."""
