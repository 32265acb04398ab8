# SPDX-License-Identifier: Apache-2.0
"""The fake GPU, of host memory, under torch's CUDA build; docs/FAKE_GPU.md says what it does."""
