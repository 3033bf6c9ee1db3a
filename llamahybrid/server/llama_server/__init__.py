"""llama-server's own routes, beside those that it has from OpenAI (llama.cpp, tools/server/README.md)."""
