"""Devices for a model's layers beyond this machine: RPC servers of llama.cpp."""
