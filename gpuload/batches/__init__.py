"""From the columns of a batch to the user's batch: collation, targets, mixing of labels, padding. Main process."""
