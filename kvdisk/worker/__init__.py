# SPDX-License-Identifier: Apache-2.0
"""The worker's wing: it moves bytes, in every worker process. It decides nothing, and knows neither
vLLM nor the index."""
