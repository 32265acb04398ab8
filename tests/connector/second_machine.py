# SPDX-License-Identifier: Apache-2.0
"""The second machine of an engine, as ``vllm serve --headless`` is it; with the flags of that.

A script, because that command asks for a version of the package ``vllm``, and the CPU build has
another name.
"""

from __future__ import annotations

import sys


def main() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(sys.argv[1:])
    arguments.api_server_count = 0
    run_headless(arguments)


if __name__ == "__main__":  # vLLM's processes import it again
    main()
