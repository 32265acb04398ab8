# SPDX-License-Identifier: Apache-2.0
"""The wing that decides; it runs in the scheduler process."""
