"""What happens to telemetry on its way through a pipeline."""
