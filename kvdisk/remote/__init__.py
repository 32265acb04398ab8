# SPDX-License-Identifier: Apache-2.0
"""The remote store: named objects in a bucket that hosts share."""
