"""What a libllama does in the situations that are known to go wrong: one probe each, in its own process.

`probe` says what a probe and a verdict are, `bench` is the C API as probes use it, `child` runs one probe,
`runner` runs many and survives what happens to them, `report` shows it. The probes themselves lie in one
module per family, listed in `catalogue`.
"""
