"""Which llama.cpp library runs: choosing, loading and building engines."""
