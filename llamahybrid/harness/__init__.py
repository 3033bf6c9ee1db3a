"""Maintainers' harness: check, bench, compare, hazards, record and replay, as commands and from Python."""
