"""Building the user's batch from columns: collation, targets, label mixing, padding. Runs in the main process."""
