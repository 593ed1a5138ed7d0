"""Inspection of datasets: their files, classes and pixels, damage and duplicates, shown on one HTML page.

There are two passes, both in the workers of a `Loader`: `measure` uses `files` to check the bytes of every sample, then
to decode some of the images. The result for an image is a record. `summary` aggregates all records to plain values,
with advice; `page` renders the summary and pictures as HTML.
"""
