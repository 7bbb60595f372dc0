"""Shape autotuner."""
