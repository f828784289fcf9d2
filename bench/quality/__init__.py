"""What a quantised L2 costs in quality, measured on restored prefixes of real servers."""
