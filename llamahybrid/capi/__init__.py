"""Every C binding."""
