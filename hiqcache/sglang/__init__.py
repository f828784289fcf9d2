"""The only package that talks to SGLang: plug-in, host pools, CPU platform, what is served."""

#: The release whose seams this package uses.
SUPPORTED_SGLANG = "0.5.23"
