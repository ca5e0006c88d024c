"""Stand-ins for the parts of verl and Trinity that need a GPU, so that tests run on a CPU. Loaded only there."""
