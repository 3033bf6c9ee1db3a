"""Drafts, and how long they may be."""
