"""`Loader`, its options and its cursor; sessions and epochs; state; the limits of the machine. Main process."""
