"""Stores: datasets over files that hold many samples."""
