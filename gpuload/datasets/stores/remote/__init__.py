"""Files at URLs: whatever fsspec reaches, in ranges of bytes, with retries and a cache on disk."""
