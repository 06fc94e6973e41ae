"""The Attention tab of TensorBoard. It imports nothing else of this package but `vit.files`."""
