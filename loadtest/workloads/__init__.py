"""Workloads: what is sent. Plain Python; nothing here knows Locust or a server."""

from loadtest.workloads.base import Conversation, Request, Workload, poisson
from loadtest.workloads.chat import Chat
from loadtest.workloads.mooncake import Trace, TraceError
from loadtest.workloads.shared_prefix import SharedPrefix

WORKLOADS: tuple[type[Workload], ...] = (SharedPrefix, Chat, Trace)

__all__ = [
    "WORKLOADS",
    "Chat",
    "Conversation",
    "Request",
    "SharedPrefix",
    "Trace",
    "TraceError",
    "Workload",
    "poisson",
]
