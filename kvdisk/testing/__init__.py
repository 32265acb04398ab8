# SPDX-License-Identifier: Apache-2.0
"""Suites and stand-ins for tests, our own and those of other implementations; nothing else in
kvdisk imports them."""
