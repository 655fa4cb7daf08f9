"""The reference fine-tuning run, on TRL: configuration, data, objectives and metrics of ``pgs train``."""
