"""The Vision Transformer: attention, patch embedding, encoder blocks, the whole model."""
