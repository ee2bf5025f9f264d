"""Steps on a GPU: rows on the device, one packed copy a step, every step a graph replay."""
