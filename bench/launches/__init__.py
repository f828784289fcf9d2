"""Where the launch shapes, the ring and the limits of hiqcache/transfers/launch.py come from."""
