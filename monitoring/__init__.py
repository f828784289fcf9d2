"""Prometheus rules, Grafana dashboards as code, and what checks and draws them."""
