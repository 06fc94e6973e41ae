"""The Attention tab of TensorBoard, which needs only files, console and colours of this package."""
