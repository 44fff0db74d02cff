"""Where telemetry leaves."""
