"""The reference: all transforms with torch and numpy, image by image on the CPU, in batches on CUDA."""
