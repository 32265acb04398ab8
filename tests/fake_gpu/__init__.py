# SPDX-License-Identifier: Apache-2.0
"""A GPU of host memory under torch's CUDA build; docs/FAKE_GPU.md says what it does."""
