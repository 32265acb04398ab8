# SPDX-License-Identifier: Apache-2.0
"""Shipped for tests, ours and those of other implementations; nothing in kvdisk imports it."""
