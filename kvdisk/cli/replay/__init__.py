# SPDX-License-Identifier: Apache-2.0
"""``kvdisk replay``: takes a trace of requests through the tiers, without the model."""
