"""What is under test: llama_cpp's class, ours, one of yours, a llama-server, any OpenAI-compatible URL."""
