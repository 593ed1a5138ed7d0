"""Datasets that yield encoded images: what workers read."""
