# SPDX-License-Identifier: Apache-2.0
"""``kvdisk report``: draws a store as one file that opens without a network."""
