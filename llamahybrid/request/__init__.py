"""One request, from its prompt to its last token."""
