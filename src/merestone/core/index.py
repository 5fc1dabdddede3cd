"""The prefix index: a compressed radix tree over token ids, one a root.

Knows token ids and which checkpoint hangs at which depth. Must not know frames or eviction.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from merestone.core.checkpoint import Checkpoint, Root, State

Tokens = NDArray[np.int32]


class Node:
    """A place where sequences part or a checkpoint hangs; ``edge`` leads to it from ``parent``."""

    __slots__ = ("checkpoint", "children", "edge", "parent")

    def __init__(self, parent: Node | None, edge: Tokens) -> None:
        self.parent = parent
        self.edge = edge
        self.children: dict[int, Node] = {}
        self.checkpoint: Checkpoint | None = None


class PrefixIndex:
    """Sealed and published checkpoints by their tokens, each at exactly its depth.

    Every node but a tree's top holds a checkpoint or parts at least two sequences, so the tree has
    fewer than two nodes a checkpoint.
    """

    def __init__(self) -> None:
        self.tops: dict[Root, Node] = {}
        self.nodes: dict[int, Node] = {}

    def walk(self, root: Root, tokens: Tokens) -> tuple[int, list[Checkpoint]]:
        """How many of ``tokens`` are known under ``root``, and the checkpoints on that path,
        shallowest first."""
        node, depth = self.tops.get(root), 0
        path: list[Checkpoint] = []
        while node is not None and depth < tokens.size:
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            shared = _common(child.edge, tokens[depth:])
            depth += shared
            if shared < child.edge.size:
                break
            if child.checkpoint is not None:
                path.append(child.checkpoint)
            node = child
        return depth, path

    def find(self, root: Root, tokens: Tokens) -> Checkpoint | None:
        """The checkpoint of exactly ``tokens``."""
        _, path = self.walk(root, tokens)
        return path[-1] if path and path[-1].at == tokens.size else None

    def insert(self, tokens: Tokens, checkpoint: Checkpoint) -> None:
        """Hang ``checkpoint`` at the depth of ``tokens``, where none hangs yet."""
        assert 0 < tokens.size == checkpoint.at
        node = self.tops.get(checkpoint.root)
        if node is None:
            node = self.tops[checkpoint.root] = Node(None, tokens[:0].copy())
        depth = 0
        while depth < tokens.size:
            child = node.children.get(int(tokens[depth]))
            if child is None:
                # A copy: a view would keep the whole prompt alive.
                child = node.children[int(tokens[depth])] = Node(node, tokens[depth:].copy())
            shared = _common(child.edge, tokens[depth:])
            if shared < child.edge.size:
                child = _split(child, shared)
            node, depth = child, depth + shared
        assert node.checkpoint is None, f"two checkpoints at the same {checkpoint.at} tokens"
        node.checkpoint = checkpoint
        self.nodes[checkpoint.id] = node

    def remove(self, checkpoint: Checkpoint) -> None:
        """Take ``checkpoint`` out, and the nodes that only it needed."""
        node = self.nodes.pop(checkpoint.id)
        node.checkpoint = None
        parent = node.parent
        assert parent is not None
        if not node.children:
            del parent.children[int(node.edge[0])]
            node = parent
        if node.parent is None:
            if not node.children:
                del self.tops[checkpoint.root]
        elif node.checkpoint is None and len(node.children) == 1:
            _merge(node)

    def ancestor(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """The deepest published checkpoint above ``checkpoint``."""
        node = self.nodes[checkpoint.id].parent
        while node is not None:
            above = node.checkpoint
            if above is not None and above.state is State.PUBLISHED:
                return above
            node = node.parent
        return None

    def tokens(self, checkpoint: Checkpoint) -> Tokens:
        """The token ids of an indexed checkpoint."""
        return np.concatenate([node.edge for node in reversed([*self._up(checkpoint)])])

    def _up(self, checkpoint: Checkpoint) -> Iterator[Node]:
        node: Node | None = self.nodes[checkpoint.id]
        while node is not None:
            yield node
            node = node.parent


def _common(left: Tokens, right: Tokens) -> int:
    """Length of the common prefix."""
    size = min(left.size, right.size)
    differs = left[:size] != right[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def _split(child: Node, at: int) -> Node:
    """Put a node ``at`` tokens into the edge that leads to ``child``; return it."""
    assert child.parent is not None
    middle = Node(child.parent, child.edge[:at])
    child.parent.children[int(child.edge[0])] = middle
    child.parent, child.edge = middle, child.edge[at:]
    middle.children[int(child.edge[0])] = child
    return middle


def _merge(node: Node) -> None:
    """Replace ``node``, which parts nothing, by its only child."""
    assert node.parent is not None
    (child,) = node.children.values()
    child.edge = np.concatenate([node.edge, child.edge])
    child.parent = node.parent
    node.parent.children[int(child.edge[0])] = child
