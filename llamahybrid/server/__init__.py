"""The HTTP server: llama_cpp.server's routes, settings and config file, with slots behind them."""
