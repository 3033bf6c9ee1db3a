"""Requests in callers' threads: send, wait, sample over a row, detokenize, build chunks."""
