"""The slots in shared memory and their layout, for the main process and the workers. Imports no torch."""
