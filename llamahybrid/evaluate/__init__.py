"""How anyone proves it: native counters, conversations to measure, the least possible work, and tables."""
