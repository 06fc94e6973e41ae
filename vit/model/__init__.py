"""The Vision Transformer, from attention up."""
