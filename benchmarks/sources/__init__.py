"""The same photographs in every store: how fast each is read, and whether all give equal batches.

python -m benchmarks.sources                 images/s of each store, beside its native reader
python -m benchmarks.sources.equal           equal batches from every dataset
"""
