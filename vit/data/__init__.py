"""Images: data sets, batches, augmentation."""
