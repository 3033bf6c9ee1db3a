"""The laboratory: histories, threads, signals, damaged files, simulators: `make fuzz`, `make soak`."""
