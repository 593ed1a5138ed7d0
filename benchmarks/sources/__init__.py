"""The same photographs in every store: how fast each store is read, and whether all stores give equal batches.

python -m benchmarks.sources                 images/s of each store, and of other libraries' readers
python -m benchmarks.sources.equal           checks for equal batches from every dataset
"""
