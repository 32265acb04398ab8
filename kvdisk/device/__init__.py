# SPDX-License-Identifier: Apache-2.0
"""The bytes on the drives: segment files, slot headers, engine stores, and the devices that move
batches."""
