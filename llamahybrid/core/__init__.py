"""The decode loop: one thread of a model that owns its context, and what runs in it."""
