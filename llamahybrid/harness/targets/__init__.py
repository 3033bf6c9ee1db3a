"""Targets: llama_cpp's class, ours, the user's, a llama-server, any OpenAI-compatible URL."""
