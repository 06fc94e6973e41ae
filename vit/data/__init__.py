"""Data sets, image files, preprocessing, batches and augmentation."""
