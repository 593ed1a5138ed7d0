"""`Cached`: the samples of another dataset, kept as encoded bytes in memory or on disk that all workers share."""
