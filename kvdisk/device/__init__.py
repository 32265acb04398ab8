# SPDX-License-Identifier: Apache-2.0
"""The bytes: segment files, slot headers, homes, and the devices that move batches."""
