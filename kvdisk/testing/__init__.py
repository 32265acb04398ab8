# SPDX-License-Identifier: Apache-2.0
"""For tests of what uses the library, or is a store of its own (docs/LIBRARY.md); nothing else in
kvdisk imports them."""
