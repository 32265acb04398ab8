# SPDX-License-Identifier: Apache-2.0
"""``kvdisk report``: a store as one file that opens without a network."""
