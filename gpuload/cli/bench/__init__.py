"""``gpuload bench``: what this machine reads, decodes, augments, copies and loads; the bottleneck; a setting.

Everything is measured with the loader's own parts, on the user's own data: `parts` measures, `verdict` judges,
`command` tells. Importing this package imports no torch, since its workers import `reading`.
"""
