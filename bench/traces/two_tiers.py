"""SGLang's two cache tiers under write_through, exactly, without tensors: for trace simulation.

The rules are those of SGLang 0.5.23's UnifiedRadixCache with full attention, HiCache and LRU:

- A radix tree of nodes; a node's KV is in L1 (device), in L2 (host), or in both. Children are never
  in a tier that their parent has left.
- A request matches its prompt, all but the last token; what L2 alone holds is restored, unless that
  is fewer than 10 tokens or L1 cannot make room. The whole prompt is then in the tree and in L1.
- Every node is stored to L2 when it enters the tree (write_through). Where L2 cannot make room, the
  node stays in L1 alone, and later requests through it try again.
- L1 evicts its least recently used leaf, whole: a node stored to L2 stays in the tree, another is
  gone. L2 evicts its least recently used node that has left L1 and has no children.
- A match or an insert that ends inside a node splits it; the part that was not asked for becomes as
  recent as the rest, as in SGLang.

A unit is a token, or a page of the server's page size: SGLang keeps whole pages only. Requests come
one after the other; what runs at the same time on a server shares L1, so a server under load sees
somewhat less of it. tests/bench/traces compares this with a real server, request by request.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from typing import NamedTuple

#: SGLang restores nothing shorter (UnifiedRadixCache.load_back_threshold), in tokens.
RESTORE_AT_LEAST = 10


#: Where a unit is a page, SGLang frees one more than it takes (alloc_paged_token_slots_extend).
PAGE_SPARE = 1


class Hit(NamedTuple):
    """Units of a prompt that came from each tier."""

    device: int
    host: int


class _Node:
    __slots__ = ("children", "device", "device_children", "host", "key", "parent", "pinned", "time")

    def __init__(self, key: tuple[Hashable, ...], parent: _Node | None) -> None:
        self.key = key
        self.parent = parent
        self.children: dict[Hashable, _Node] = {}
        self.device_children = 0
        self.device = False
        self.host = False
        self.pinned = False
        self.time = 0


class _Leaves:
    """The least recently used of a changing set of nodes; entries are checked when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, _Node]] = []
        self._entries = 0

    def push(self, node: _Node) -> None:
        self._entries += 1
        heapq.heappush(self._heap, (node.time, self._entries, node))

    def pop(self) -> _Node | None:
        """The next node whose entry is current, taken off; None where there is no more."""
        while self._heap:
            time, _, node = heapq.heappop(self._heap)
            if time == node.time:
                return node
        return None


class TwoTierCache:
    """L1 of ``device`` units over L2 of ``host`` units.

    restore_at_least: the shortest prefix that is restored, in units.
    spare: what L1 frees for a request beyond what it takes, if it can (PAGE_SPARE).
    """

    def __init__(self, device: int, host: int, restore_at_least: int = 1, spare: int = 0) -> None:
        if device < 1 or host < 0:
            raise ValueError(f"L1 needs at least 1 unit and L2 at least 0: {device}, {host}")
        self.device_free = device
        self.host_free = host
        self._device = device
        self._restore_at_least = max(1, restore_at_least)
        self._spare = spare
        self._root = _Node((), None)
        self._root.device = True
        self._clock = 0
        self._device_leaves = _Leaves()
        self._host_leaves = _Leaves()

    def request(self, prompt: Sequence[Hashable], scratch: int = 0) -> Hit:
        """Serve one prompt: match, restore, compute the rest, keep it.

        ``scratch`` units of L1 hold what is computed but not kept (a last, partial page).
        Raises ValueError for a prompt that L1 cannot hold.
        """
        key = tuple(prompt)
        if len(key) + scratch > self._device:
            raise ValueError(f"a prompt of {len(key)} units does not fit L1 ({self._device})")
        # SGLang computes at least the last token; a partial page is that already.
        path = self._match(key if scratch else key[:-1])
        device = sum(len(node.key) for node in path if node.device)
        evicted = [node for node in path if not node.device]
        host = sum(len(node.key) for node in evicted)
        self._pin(path, True)
        if host and (host < self._restore_at_least or not self._restore(evicted, host)):
            self._pin(evicted, False)
            path, host = [node for node in path if node.device], 0
        self._make_room(len(key) - device - host + scratch + self._spare)
        self._pin(path, False)
        self._insert(key)
        return Hit(device, host)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _match(self, key: tuple[Hashable, ...]) -> list[_Node]:
        node, offset = self._root, 0
        path: list[_Node] = []
        while offset < len(key) and (child := node.children.get(key[offset])) is not None:
            shared = _shared(child.key, key, offset)
            if shared < len(child.key):
                path.append(self._split(child, shared))
                break
            path.append(child)
            node, offset = child, offset + shared
        for each in path:
            self._touch(each)
        return path

    def _touch(self, node: _Node) -> None:
        node.time = self._tick()
        self._offer(node)

    def _offer(self, node: _Node) -> None:
        """Enter a node with the leaves of the tier that may evict it next."""
        if node.parent is None or node.pinned:
            return
        if node.device:
            if not node.device_children:
                self._device_leaves.push(node)
        elif node.host and not node.children:
            self._host_leaves.push(node)

    def _split(self, child: _Node, at: int) -> _Node:
        assert child.parent is not None
        upper = _Node(child.key[:at], child.parent)
        upper.device, upper.host = child.device, child.host
        upper.device_children = int(child.device)
        upper.children[child.key[at]] = child
        child.parent.children[child.key[0]] = upper
        child.key, child.parent = child.key[at:], upper
        upper.time = self._tick()
        self._touch(child)
        return upper

    def _pin(self, path: Sequence[_Node], pinned: bool) -> None:
        for node in path:
            node.pinned = pinned
        if not pinned:
            for node in path:
                self._offer(node)

    def _restore(self, nodes: Sequence[_Node], units: int) -> bool:
        self._make_room(units)
        if self.device_free < units:
            return False
        for node in nodes:
            self._enter_device(node)
        return True

    def _enter_device(self, node: _Node) -> None:
        assert node.parent is not None
        node.device = True
        node.parent.device_children += 1
        self.device_free -= len(node.key)

    def _make_room(self, units: int) -> None:
        while self.device_free < units:
            node = self._device_leaves.pop()
            if node is None:
                return
            if not node.device or node.device_children or node.pinned:
                continue
            self._leave_device(node)

    def _leave_device(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None
        node.device = False
        parent.device_children -= 1
        self.device_free += len(node.key)
        if node.host:
            self._offer(node)
        else:
            del parent.children[node.key[0]]
        self._offer(parent)

    def _insert(self, key: tuple[Hashable, ...]) -> None:
        node, offset = self._root, 0
        while offset < len(key) and (child := node.children.get(key[offset])) is not None:
            shared = _shared(child.key, key, offset)
            self._touch(child)
            if shared < len(child.key):
                child = self._split(child, shared)
            if not child.device:
                # Computed anew because it was not restored.
                self._enter_device(child)
            if not child.host:
                self._store(child)
            self._offer(child)
            node, offset = child, offset + shared
        if offset < len(key):
            leaf = _Node(key[offset:], node)
            node.children[key[offset]] = leaf
            self._enter_device(leaf)
            leaf.time = self._tick()
            self._store(leaf)
            self._offer(leaf)

    def _store(self, node: _Node) -> None:
        """Write a node through to L2, its missing ancestors first; stop where there is no room."""
        chain = [node]
        parent = node.parent
        while parent is not None and parent.parent is not None and not parent.host:
            chain.append(parent)
            parent = parent.parent
        for each in reversed(chain):
            if not self._make_host_room(len(each.key)):
                return
            each.host = True
            self.host_free -= len(each.key)

    def _make_host_room(self, units: int) -> bool:
        while self.host_free < units:
            node = self._host_leaves.pop()
            if node is None:
                return False
            if node.device or not node.host or node.children or node.pinned:
                continue
            parent = node.parent
            assert parent is not None
            node.host = False
            self.host_free += len(node.key)
            del parent.children[node.key[0]]
            self._offer(parent)
        return True


def pages_of(prompt: Sequence[int], page_size: int) -> list[Hashable]:
    """The whole pages of a prompt: what a cache of such pages keeps of it."""
    if page_size == 1:
        return list(prompt)
    whole = len(prompt) // page_size * page_size
    return [tuple(prompt[at : at + page_size]) for at in range(0, whole, page_size)]


def _shared(left: tuple[Hashable, ...], right: tuple[Hashable, ...], offset: int) -> int:
    """Units that ``left`` and ``right`` from ``offset`` on have in common."""
    end = min(len(left), len(right) - offset)
    if left[:end] == right[offset : offset + end]:
        return end
    return next(i for i in range(end) if left[i] != right[offset + i])
