"""Probes of a libllama in situations that are known to fail, each in a process of its own.

`case` defines probes, `effect` results; `model` and `context` are the C API for probes, `child` runs a
probe, `runner` many. The probes are in one module for each family, listed in `catalogue`.
"""
