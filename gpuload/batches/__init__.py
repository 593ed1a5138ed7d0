"""From the columns of a batch to what the user gets: collation, targets, mixing of labels, padding. Main process."""
