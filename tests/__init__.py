"""Tests, and in `lab` the campaigns and simulators that are too long or too special for them."""
