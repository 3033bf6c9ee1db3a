"""Campaigns, reference contexts and simulators that the tests and benchmarks share."""

import llamahybrid  # noqa: F401  (chooses the engine before a module of this folder imports llama_cpp)
