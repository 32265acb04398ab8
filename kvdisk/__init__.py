# SPDX-License-Identifier: Apache-2.0
"""kvdisk keeps the KV cache of a vLLM server on pinned host memory and NVMe."""

__version__ = "0.1.0"
