"""Where the layers of a model lie besides this machine's own memory: RPC servers of llama.cpp."""
