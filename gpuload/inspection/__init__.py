"""What a data set is like: its files, classes and pixels, what is damaged, what is there twice. One HTML page of it.

Two passes, both in the workers of a `Loader`: `gather` has `files` look at the bytes of every sample, then `pixels`
decode a part of them. What comes back for an image is a row of numbers, some 60 bytes, so a million take 60 MB.
`duplicates` finds rows that are alike, `summary` says what all of it comes to, as plain values, with `advice`; `sheet`
has pictures of it, and `page` puts everything into HTML.
"""
