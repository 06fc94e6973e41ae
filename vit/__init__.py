"""Vision Transformers with hand-written attention: train, evaluate, look inside."""
