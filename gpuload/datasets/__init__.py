"""Datasets that yield encoded images, which workers read."""
