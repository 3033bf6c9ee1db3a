"""Conversations to measure: as token ids and as chat messages, of one user and of several."""
