"""Pictures of the dashboards without a Grafana: Grafana's own components, in headless Chromium."""
