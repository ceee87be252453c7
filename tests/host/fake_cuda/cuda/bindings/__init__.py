"""A stand-in for NVIDIA's bindings, found before installed ones."""
