"""The Attention tab of TensorBoard, which needs only console and colours of this package."""
