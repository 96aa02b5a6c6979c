import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.state.slots import CacheError
from specdec_core.topology import Topology, chain, tree
from tests.strategies import topologies

LAYERS, SLOTS, HEADS, CAPACITY, WIDTH = 2, 3, 2, 12, 4
STAMP = np.arange(LAYERS)[:, None, None] * 100 + np.arange(HEADS)[:, None] * 10 + np.arange(WIDTH)


def make(capacity: int = CAPACITY) -> RaggedKV:
    return RaggedKV(LAYERS, SLOTS, HEADS, capacity, WIDTH, torch.float64)


def write(cache: RaggedKV, slot: int, first: int, values: list[int]) -> None:
    """As a kernel would: value v of an entry, marked by layer, head and lane; the cache's values are negative keys."""
    for place, value in enumerate(values, start=first):
        cache.keys[:, slot, :, place] = torch.as_tensor(1000 * value + STAMP, dtype=torch.float64)
        cache.values[:, slot, :, place] = -cache.keys[:, slot, :, place]


def read(cache: RaggedKV, slot: int) -> list[int]:
    """The committed values, after checking that every layer, head and lane has its own."""
    length = int(cache.lengths[slot])
    entries = cache.keys[:, slot, :, :length].numpy()
    assert (cache.values[:, slot, :, :length].numpy() == -entries).all()
    values = entries[0, 0, :, 0].astype(int) // 1000
    assert (entries == 1000 * values[:, None] + STAMP.reshape(LAYERS, HEADS, 1, WIDTH)).all()
    return values.tolist()


def verified(cache: RaggedKV, slot: int, values: list[int]) -> int:
    cache.require_room(np.array([slot]), np.array([len(values)]))
    epoch = cache.begin()
    write(cache, slot, int(cache.lengths[slot]), values)
    return epoch


def holding(values: list[int], slot: int = 1) -> RaggedKV:
    cache = make()
    cache.commit(np.array([slot]), [np.arange(len(values))], verified(cache, slot, values))
    return cache


slot_lists = st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=SLOTS, unique=True)


class AgainstLists(RuleBasedStateMachine):
    """Any interleaving of passes, commits, rewinds and releases, against a list of values a slot."""

    @initialize()
    def start(self) -> None:
        self.cache, self.lists = make(), [[] for _ in range(SLOTS)]
        self.pending: tuple[int, list[int], list[Topology], list[list[int]]] | None = None
        self.next_value = 1

    def fresh(self, count: int) -> list[int]:
        self.next_value += count
        return list(range(self.next_value - count, self.next_value))

    @rule(slots=slot_lists, shapes=st.lists(topologies(6), min_size=SLOTS, max_size=SLOTS))
    def verify(self, slots, shapes) -> None:
        shapes = shapes[: len(slots)]
        counts = [len(shape) for shape in shapes]
        if any(len(self.lists[slot]) + count > CAPACITY for slot, count in zip(slots, counts, strict=True)):
            with pytest.raises(CacheError, match="over its capacity of 12"):
                self.cache.require_room(np.array(slots), np.array(counts))
            return
        self.cache.require_room(np.array(slots), np.array(counts))
        values = [self.fresh(count) for count in counts]
        epoch = self.cache.begin()
        for slot, new in zip(slots, values, strict=True):
            write(self.cache, slot, len(self.lists[slot]), new)
        self.pending = epoch, slots, shapes, values

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def commit(self, data) -> None:
        epoch, slots, shapes, values = self.pending
        nodes = [data.draw(st.integers(-1, len(shape) - 1)) for shape in shapes]  # -1: nothing is kept
        paths = [
            shape.path(node) if node >= 0 else np.empty(0, np.int64) for shape, node in zip(shapes, nodes, strict=True)
        ]
        self.cache.commit(np.array(slots), paths, epoch)
        for slot, path, new in zip(slots, paths, values, strict=True):
            self.lists[slot] += [new[node] for node in path]
        self.refuse(epoch, slots)
        self.pending = None

    @rule(slots=slot_lists, data=st.data())
    def rewind(self, slots, data) -> None:
        lengths = [data.draw(st.integers(0, len(self.lists[slot]))) for slot in slots]
        self.cache.rewind(np.array(slots), np.array(lengths))
        for slot, length in zip(slots, lengths, strict=True):
            del self.lists[slot][length:]
        self.forget()

    @rule(slots=slot_lists)
    def release(self, slots) -> None:
        self.cache.release(np.array(slots))
        for slot in slots:
            self.lists[slot].clear()
        self.forget()

    @precondition(lambda self: not self.pending)
    @rule(slot=st.integers(0, SLOTS - 1))
    def borrow(self, slot) -> None:
        view = self.cache.scratch_view()
        room = CAPACITY - len(self.lists[slot])
        if room:
            view.commit(np.array([slot]), [np.arange(room)], verified(view, slot, [-1] * room))
            assert read(view, slot) == self.lists[slot] + [-1] * room

    def forget(self) -> None:
        if self.pending:
            self.refuse(self.pending[0], self.pending[1])
            self.pending = None

    def refuse(self, epoch: int, slots: list[int]) -> None:
        with pytest.raises(CacheError, match="stale"):
            self.cache.commit(np.array(slots), [np.arange(1)] * len(slots), epoch)

    @invariant()
    def agrees(self) -> None:
        assert self.cache.lengths.tolist() == [len(each) for each in self.lists]
        assert [read(self.cache, slot) for slot in range(SLOTS)] == self.lists


AgainstLists.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestAgainstLists = AgainstLists.TestCase


def test_the_accepted_path_of_a_tree_is_gathered_to_the_front():
    cache = holding([7])
    epoch = verified(cache, 1, [10, 11, 12, 13, 14])
    cache.commit(np.array([1]), [tree((-1, 0, 0, 2, 2)).path(4)], epoch)
    assert read(cache, 1) == [7, 10, 12, 14]


@given(st.sampled_from([1, 2]), st.integers(0, 9), st.lists(st.integers(0, 54), unique=True).map(sorted))
def test_any_ascending_nodes_are_gathered_and_nothing_else_is_touched(layers, base, path):
    """Of one layer and head, a slot's entries lie in one piece: there torch refuses what it may copy over itself."""
    cache = RaggedKV(layers, SLOTS, layers, 64, WIDTH)
    for store in (cache.keys, cache.values):
        store.normal_(generator=torch.Generator().manual_seed(base))
    cache.lengths[:] = base
    before, kept = [store.clone() for store in (cache.keys, cache.values)], np.array(path, np.int64)
    cache.commit(np.array([1]), [kept], cache.begin())
    assert cache.lengths.tolist() == [base, base + len(path), base]
    for store, whole in zip((cache.keys, cache.values), before, strict=True):
        end = base + (path[-1] + 1 if path else 0)  # a draft's own entries may be written over, and no others
        assert torch.equal(store[:, 1, :, base : base + len(path)], whole[:, 1, :, base + kept])
        assert torch.equal(store[:, 1, :, :base], whole[:, 1, :, :base])
        assert torch.equal(store[:, 1, :, end:], whole[:, 1, :, end:])
        assert torch.equal(store[:, [0, 2]], whole[:, [0, 2]])


@pytest.mark.parametrize("path", [[0, 2, 1], [0, 2, 2], [1, 0], [-1, 0], [0, 1, 11], [11]])
def test_a_path_out_of_order_or_out_of_the_slot_is_refused_before_anything_is_moved(path):
    cache = holding([7])
    verified(cache, 0, [4, 5, 6])
    epoch = verified(cache, 1, [8, 9, 10])
    before = cache.keys.clone()
    with pytest.raises(CacheError, match=rf"nodes {re.escape(str(path))} behind the 1 entries of slot 1: .*of 12$"):
        cache.commit(np.array([0, 1]), [np.array([0, 2]), np.array(path)], epoch)
    assert torch.equal(cache.keys, before) and cache.lengths.tolist() == [0, 1, 0]
    cache.commit(np.array([0, 1]), [np.array([0, 2]), np.array([1])], epoch)  # the verification still holds
    assert (read(cache, 0), read(cache, 1)) == ([4, 6], [7, 9])


def test_a_chain_commits_without_touching_storage():
    cache = holding([7])
    epoch = verified(cache, 1, [8, 9])
    before = cache.keys.clone()
    cache.commit(np.array([1]), [chain(2).path(1)], epoch)
    assert torch.equal(cache.keys, before) and read(cache, 1) == [7, 8, 9]


def test_a_second_verification_invalidates_the_first():
    cache = holding([7])
    first, second = verified(cache, 1, [8, 9]), verified(cache, 1, [5])
    with pytest.raises(CacheError, match=f"verification {first} is stale"):
        cache.commit(np.array([1]), [np.arange(2)], first)
    cache.commit(np.array([1]), [np.arange(1)], second)
    assert read(cache, 1) == [7, 5]


def test_a_verification_is_committed_once():
    cache = make()
    epoch = verified(cache, 0, [8, 9])
    cache.commit(np.array([0]), [np.arange(1)], epoch)
    with pytest.raises(CacheError, match="stale"):
        cache.commit(np.array([0]), [np.arange(2)], epoch)
    assert read(cache, 0) == [8]


def test_no_room_names_the_slot_and_changes_nothing():
    cache = holding([7, 8])
    with pytest.raises(
        CacheError, match="slot 1 holds 2 entries and is asked to take 11 more, over its capacity of 12"
    ):
        cache.require_room(np.array([0, 1]), np.array([12, 11]))
    assert cache.lengths.tolist() == [0, 2, 0] and read(cache, 1) == [7, 8]


def test_a_pass_names_a_slot_once():
    with pytest.raises(CacheError, match=r"slots \[2, 0, 2\] name one twice"):
        make().require_room(np.array([2, 0, 2]), np.array([1, 1, 1]))


def test_the_last_entry_can_be_used():
    make().require_room(np.array([0]), np.array([CAPACITY]))


@pytest.mark.parametrize("length", [3, -1])
def test_rewinding_forward_or_below_nothing_is_refused_and_changes_nothing(length):
    cache = holding([7, 8])
    with pytest.raises(CacheError, match="expected 0…current"):
        cache.rewind(np.array([0, 1]), np.array([0, length]))
    assert read(cache, 1) == [7, 8]


def test_scratch_leaves_lengths_and_committed_entries_alone():
    cache = holding([7, 8])
    view = cache.scratch_view()
    view.commit(np.array([1]), [np.arange(3)], verified(view, 1, [1, 2, 3]))
    view.release(np.array([0]))
    assert read(view, 1) == [7, 8, 1, 2, 3] and read(cache, 1) == [7, 8]
    cache.commit(np.array([1]), [np.arange(1)], verified(cache, 1, [9]))
    assert read(cache, 1) == [7, 8, 9]


@pytest.mark.parametrize(("slots", "capacity"), [(0, 4), (2, 0)])
def test_an_empty_cache_is_refused(slots, capacity):
    with pytest.raises(CacheError, match=f"{slots} slots and {capacity} entries"):
        RaggedKV(1, slots, 1, capacity, 2)


def test_storage_starts_finite():
    cache = make()
    assert not cache.keys.any() and not cache.values.any()
