"""The same photographs in every store: how fast each is read, whether all give equal batches, how small an index is.

python -m benchmarks.sources                 images/s of each store, beside its native reader
python -m benchmarks.sources.equal           equal batches from every dataset
python -m benchmarks.sources.ten_million     the index of ten million samples
"""
