"""The load generator: Locust with workloads that share prefixes. Imports nothing beside it."""
