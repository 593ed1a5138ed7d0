"""The reference backend: all transforms with torch and numpy, image by image on the CPU and in batches on CUDA."""
