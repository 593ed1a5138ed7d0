"""Workers on other machines, as actors of a Ray cluster."""
