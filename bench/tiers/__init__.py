"""Arms against each other on real servers, `make bench`: what is started, measured and reported."""
