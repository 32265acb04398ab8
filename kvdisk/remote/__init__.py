# SPDX-License-Identifier: Apache-2.0
"""Blocks beyond this machine: named objects of a store that other hosts share."""
