"""gpuload: the image loader for people who train vision models on GPUs."""
