# SPDX-License-Identifier: Apache-2.0
"""``kvdisk bench``: how fast each tier and route is, beside what the drive can do, in one run."""
