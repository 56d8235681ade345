"""The Hugging Face layer: certified attention modules, the cache, conversion and telemetry."""
