"""Context memory: every change of it is made, verified and undone here."""
