"""What a caller's thread does of a request: ask, wait, sample over a row, spell, build chunks."""
