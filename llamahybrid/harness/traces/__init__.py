"""Requests of a running program as JSONL: recorded by a hook or a proxy, readable or hashed, and replayed."""
