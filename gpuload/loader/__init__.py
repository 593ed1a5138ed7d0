"""`Loader`, its options and where it stands; sessions and epochs; state; the limits of the machine. Main process."""
