# SPDX-License-Identifier: Apache-2.0
"""Where blocks are on NVMe, durably."""
