"""The reference backend: every transform in torch and numpy, image by image on the CPU and in batches on CUDA."""
