"""The reference: all transforms with torch and numpy, image by image on the CPU, batch by batch on CUDA."""
