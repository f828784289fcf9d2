"""The only package that talks to SGLang: plug-in, host pools, CPU platform, what is served."""

#: The release to install where there is a choice; see adapters for all that are served.
SUPPORTED_SGLANG = "0.5.23"
