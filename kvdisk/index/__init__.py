# SPDX-License-Identifier: Apache-2.0
"""The durable index: which block is in which NVMe slot."""
