"""What the context holds now: every change to context memory is made, checked and undone here."""
