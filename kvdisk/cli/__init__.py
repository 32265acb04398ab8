# SPDX-License-Identifier: Apache-2.0
"""The ``kvdisk`` command. Offline: it reads stores, and needs no engine."""
