"""What a data set is like: its files, classes and pixels, what is damaged, what is there twice. One HTML page of it.

Two passes, both in the workers of a `Loader`: `gather` has `files` look at the bytes of every sample, then decode a
part of them. What comes back for an image is a row of numbers. `summary` says what all rows come to, as plain values,
and what to do about it; `page` puts that and pictures into HTML.
"""
