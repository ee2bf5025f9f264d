"""Step times through the whole engine, on random weights: what `longturn bench step` prints."""
