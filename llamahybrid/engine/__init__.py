"""Which llama.cpp library runs: the pinned sdist, and building it."""
