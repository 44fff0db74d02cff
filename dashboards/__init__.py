"""Grafana dashboards, alert and recording rules, generated: the next milestone fills this package."""
