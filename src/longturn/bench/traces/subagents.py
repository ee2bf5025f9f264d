"""Subagents for sessions that were recorded without: groups as they were recorded in others.

A group is what one request of a root agent started together: its subagents with the lengths, answers and pauses of all
their requests, the time between that request's answer and their first requests, and the time between the last of their
answers and the root's next request, which waits for them. Groups are given to sessions whole, so nothing of their shape
is made up. Subagents share prompts with each other as recorded: those of one group as far as they did, groups of one
kind their tools and system prompt, and none with the root.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

from longturn.bench.traces.blocks import BlockTrie
from longturn.bench.traces.tree import Conversation, SessionTree, TraceRequest
from longturn.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Subagents that one request started."""

    source: SessionTree
    members: tuple[Conversation, ...]
    begin_s: float
    """When the request that started them had been answered, on the source's clock."""
    end_s: float
    """When the last of them had ended."""
    join_s: float
    """From there to the root's next request."""

    @property
    def requests(self) -> int:
        return sum(len(member.requests) for member in self.members)


def of_subagent(tree: SessionTree, number: int) -> bool:
    """Whether a conversation is a subagent's, or that of an agent which one started."""
    at: int | None = number
    while at is not None:
        if tree.conversations[at].kind == "subagent":
            return True
        at = tree.conversations[at].parent
    return False


def recorded_groups(trees: Sequence[SessionTree]) -> list[Group]:
    """Groups that a root agent started and waited for before its next request."""
    found: list[Group] = []
    for tree in trees:
        together: dict[int, list[Conversation]] = defaultdict(list)
        for item in tree.conversations:
            if item.kind == "subagent" and item.parent == 0 and item.spawn_after is not None:
                together[item.spawn_after].append(item)
        for spawn, members in together.items():
            if any(member.join_before != spawn + 1 for member in members):
                continue
            end_s = max(member.end_s for member in members)
            join_s = max(0.0, tree.root.requests[spawn + 1].start_s - end_s)
            found.append(Group(tree, tuple(members), tree.root.requests[spawn].end_s, end_s, join_s))
    return found


def finer(groups: Sequence[Group], requests: float) -> list[Group]:
    """Groups whose subagents have `requests` requests on average, where a corpus is known to have more than these.

    What a request adds to the prompt before it comes in several requests instead of one: read file by file, so to say,
    and not all at once. Each of them has the answer, the server's time and the pause of the one that it was made of.

    Raises:
        ConfigError: `requests` is not above 0.
    """
    if not 0 < requests < float("inf"):
        raise ConfigError(f"requests of a subagent must be more than 0, not {requests}")
    members = sum(len(group.members) for group in groups)
    following = sum(group.requests for group in groups) - members
    parts = members * (requests - 1) / following if following else 1.0
    if parts <= 1:
        return list(groups)
    debt = 0.0
    made = []
    for group in groups:
        found = []
        for member in group.members:
            finished, debt = _finer(member, group.source, parts, debt)
            found.append(finished)
        end_s = max(member.end_s for member in found)
        made.append(dataclasses.replace(group, members=tuple(found), end_s=end_s))
    return made


def _finer(member: Conversation, source: SessionTree, parts: float, debt: float) -> tuple[Conversation, float]:
    trie, size = source.trie, source.block_tokens
    requests = [member.requests[0]]
    for before, request in itertools.pairwise(member.requests):
        debt += parts
        count = int(debt)
        debt -= count
        depth = trie.depth(request.node)
        shared = trie.depth(trie.common(before.node, request.node))
        for part in range(1, count + 1):
            blocks = shared + (depth - shared) * part // count
            at = dataclasses.replace(
                request,
                start_s=requests[-1].end_s + request.gap_s,
                node=trie.ancestor(request.node, blocks),
                input_tokens=request.input_tokens - (depth - blocks) * size,
            )
            requests.append(at)
    return dataclasses.replace(member, requests=tuple(requests)), debt


def with_subagents(
    trees: Sequence[SessionTree], groups: Sequence[Group], share: float, ratio: float, seed: int
) -> list[SessionTree]:
    """Sessions of which a share has subagents, until these have so many requests to each request of another agent.

    Args:
        trees: keep the agents that they have.
        groups: what is given to them, drawn anew each time.
        share: of sessions with subagents, 0 to 1. Those that have some count; others are chosen by lot.
        ratio: requests of subagents to each other request. Every request of a root agent of the chosen sessions is as
            likely to start a group as another, but for the last, and for those that start or precede the end of one
            already: if none is left, fewer must do. No session gets a second one before all have one.
        seed: of all that is drawn.

    Raises:
        ConfigError: a value out of range, or no group where some are asked for.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"the share of sessions with subagents must be between 0 and 1, not {share}")
    if not 0 <= ratio < float("inf"):
        raise ConfigError(f"requests of subagents to each other request must be at least 0, not {ratio}")
    inner = others = 0
    for tree in trees:
        for number, item in enumerate(tree.conversations):
            if of_subagent(tree, number):
                inner += len(item.requests)
            else:
                others += len(item.requests)
    missing = round(ratio * others) - inner
    rng = random.Random(f"subagents:{seed}")
    order = list(range(len(trees)))
    rng.shuffle(order)
    having = [any(item.kind == "subagent" for item in tree.conversations) for tree in trees]
    order.sort(key=lambda index: not having[index])
    chosen = order[: round(share * len(trees))]
    places = [
        (index, turn)
        for index in chosen
        for turn in sorted(set(range(len(trees[index].root.requests) - 1)) - _taken(trees[index]))
    ]
    rng.shuffle(places)
    if not all(having[index] for index in chosen):  # each of them has one before any has a second
        once = {index: turn for index, turn in reversed(places) if not having[index]}
        places.sort(key=lambda place: once.get(place[0]) != place[1])
    given: dict[int, dict[int, Group]] = defaultdict(dict)
    for index, turn in places:
        if missing <= 0:
            break
        if not groups:
            raise ConfigError("no session has recorded subagents whose end its root agent waited for: none to give")
        group = rng.choice(groups)
        if group.source.block_tokens != trees[index].block_tokens:
            continue
        given[index][turn] = group
        missing -= group.requests
    return [_given(tree, given[index]) if index in given else tree for index, tree in enumerate(trees)]


def _taken(tree: SessionTree) -> set[int]:
    """Requests of the root after which subagents start, or before whose successor some are waited for."""
    found: set[int] = set()
    for item in tree.conversations:
        if item.parent == 0:
            found |= {turn for turn in (item.spawn_after,) if turn is not None}
            found |= {item.join_before - 1} if item.join_before is not None else set()
    return found


def _given(tree: SessionTree, groups: Mapping[int, Group]) -> SessionTree:
    """The session with groups after some requests of its root; what comes later moves by the time that they take."""
    trie = BlockTrie()
    known: dict[int, int] = {}
    prompts: dict[str, dict[int, int]] = {}
    """Tools and system prompts of subagents, by the session that they are from."""
    root: list[TraceRequest] = []
    moved_s: list[float] = []
    made: list[Conversation] = []
    shift_s = wait_s = 0.0
    for turn, request in enumerate(tree.root.requests):
        shift_s += wait_s
        node = trie.take(tree.trie, request.node, known)
        start_s = request.start_s + shift_s
        root.append(dataclasses.replace(request, start_s=start_s, gap_s=request.gap_s + wait_s, node=node))
        moved_s.append(shift_s)
        wait_s = 0.0
        group = groups.get(turn)
        if group is None:
            continue
        since_s = root[-1].end_s
        made += _members(tree.id, group, turn, since_s, trie, prompts.setdefault(group.source.id, {}))
        following = tree.root.requests[turn + 1]
        wait_s = max(0.0, since_s + group.end_s - group.begin_s + group.join_s - following.start_s - shift_s)
    kept: list[Conversation] = []
    later_s = [0.0]
    """Of each agent: with the request that started it, or with its parent."""
    for item in tree.conversations[1:]:
        by_s = later_s[item.parent or 0]
        if item.parent == 0 and item.spawn_after is not None:
            by_s = moved_s[item.spawn_after]
        later_s.append(by_s)
        requests = tuple(
            dataclasses.replace(request, start_s=request.start_s + by_s, node=trie.take(tree.trie, request.node, known))
            for request in item.requests
        )
        kept.append(dataclasses.replace(item, requests=requests))
    conversations = (dataclasses.replace(tree.root, requests=tuple(root)), *kept, *made)
    return dataclasses.replace(tree, trie=trie, conversations=conversations)


def _members(
    name: str, group: Group, turn: int, since_s: float, trie: BlockTrie, prompt: dict[int, int]
) -> list[Conversation]:
    """The subagents of a group that request `turn` of a root starts, whose answer was complete at `since_s`.

    Args:
        prompt: blocks of tools and system prompt that such subagents have here already; gets those of this group.
    """
    source = group.source.trie
    known = dict(prompt)
    shift_s = since_s - group.begin_s
    made: list[Conversation] = []
    for number, member in enumerate(group.members):
        requests = tuple(
            dataclasses.replace(request, start_s=request.start_s + shift_s, node=trie.take(source, request.node, known))
            for request in member.requests
        )
        made.append(
            dataclasses.replace(
                member, id=f"{name}::given:{turn}.{number}", requests=requests, parent=0, spawn_after=turn,
                join_before=turn + 1,
            )
        )  # fmt: skip
    prompt.update((node, known[node]) for node in _prompt_blocks(group))
    return made


def _prompt_blocks(group: Group) -> list[int]:
    """Blocks of its source that hold tools and system prompt of its subagents: as many as declared, but no more than
    all subagents of the session begin with."""
    trie = group.source.trie
    nodes = [item.requests[0].node for item in group.source.conversations if item.kind == "subagent"]
    common = nodes[0]
    for node in nodes[1:]:
        common = trie.common(common, node)
    declared = min(member.system_tokens for member in group.members) // group.source.block_tokens
    return trie.path(trie.ancestor(common, min(declared, trie.depth(common))))
