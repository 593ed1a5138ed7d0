"""`Loader` with its options, sessions, epochs, state and statistics, and the machine's limits."""
