"""The tree of requests: exact sharing, against a dictionary of tuples, and the faults of old."""

import itertools
import sys
from collections.abc import Hashable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ramify.analysis import RequestPrefixMatcher, RequestTree
from ramify.analysis.sharing.finite_cache import PrefillCost
from ramify.errors import ConfigError, InvalidKeyError
from tests.budget import examples

TOKENS = st.lists(st.integers(0, 2), max_size=8).map(tuple)
IDS = st.integers(0, 6)
Tokens = tuple[int, ...]


def shared(first: Tokens, second: Tokens) -> int:
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


class TreeMachine(RuleBasedStateMachine):
    """Random inserts, replacements and removals; every answer equals that of a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.matcher = RequestPrefixMatcher()
        self.tree = self.matcher.tree
        self.model: dict[int, Tokens] = {}

    @rule(request=IDS, tokens=TOKENS)
    def insert(self, request: int, tokens: Tokens) -> None:
        passed = list(tokens)
        self.matcher.add_request_prefix(request, passed)
        passed.append(99)  # the caller's list is not stored
        self.model.pop(request, None)
        self.model[request] = tokens

    @rule(request=IDS)
    def remove(self, request: int) -> None:
        self.matcher.remove_request(request)
        self.model.pop(request, None)

    @rule(request=IDS, tokens=TOKENS)
    def find(self, request: int, tokens: Tokens) -> None:
        lengths = {other: shared(tokens, stored) for other, stored in self.model.items()}
        assert self.tree.shared_lengths(tokens) == {
            other: length for other, length in lengths.items() if length
        }
        self._assert_longest(self.tree.find_shared_prefixes(tokens), lengths)
        lengths.pop(request, None)
        longest = self.tree.find_shared_prefixes(tokens, exclude=request)
        self._assert_longest(longest, lengths)
        others = self.matcher.find_computation_sharing_opportunities(request, tokens)
        assert others == longest[0]

    def _assert_longest(self, sharing: tuple[list[Hashable], int], lengths: dict[int, int]) -> None:
        longest = max(lengths.values(), default=0)
        expected = [other for other, length in lengths.items() if length == longest > 0]
        assert sharing == (expected, longest)

    @invariant()
    def totals_are_those_of_the_prefixes(self) -> None:
        prefixes = {
            tokens[: end + 1] for tokens in self.model.values() for end in range(len(tokens))
        }
        total = sum(map(len, self.model.values()))
        assert self.tree.request_ids == list(self.model)
        assert (self.tree.total_tokens, self.tree.unique_tokens) == (total, len(prefixes))
        assert self.tree.tokens_saved == total - len(prefixes)
        for request, tokens in self.model.items():
            assert tuple(self.tree.tokens_of(request)) == tokens

    @invariant()
    def nodes_are_the_branches_and_ends(self) -> None:
        nodes = list(self.tree.nodes())
        assert len(nodes) == self.tree.num_nodes
        ends = {tuple(self.tree.prefix_of(node.id)): node for node in nodes}
        assert len(ends) == len(nodes)
        stored = list(self.model.values())
        branches = {
            first[: shared(first, second)] for first, second in itertools.combinations(stored, 2)
        }
        assert set(ends) == (branches | set(stored)) - {()}
        for prefix, node in ends.items():
            having = [
                request for request, tokens in self.model.items() if tokens[: len(prefix)] == prefix
            ]
            assert (node.end, node.num_requests) == (len(prefix), len(having))
            assert self.tree.requests_below(node.id) == having
        assert sum(node.tokens_saved for node in nodes) == self.tree.tokens_saved

    @invariant()
    def groups_are_a_forest(self) -> None:
        groups = {group.id: group for group in self.matcher.get_prefix_groups()}
        shared_nodes = [node for node in self.tree.nodes() if node.is_shared]
        assert list(groups) == [node.id for node in shared_nodes]
        for group in groups.values():
            assert group.request_ids == self.tree.requests_below(group.id)
            for child in group.children:
                assert groups[child].parent == group.id
                assert set(groups[child].request_ids) <= set(group.request_ids)
        assert sum(group.tokens_saved for group in groups.values()) == self.tree.tokens_saved

    @invariant()
    def speedup_is_tokens_over_computed_tokens(self) -> None:
        saving = self.matcher.estimate_saving()
        assert saving.computed_tokens == self.tree.unique_tokens
        if self.tree.total_tokens:
            assert saving.speedup == pytest.approx(self.tree.total_tokens / self.tree.unique_tokens)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=examples(60), stateful_step_count=25, deadline=None)


def test_eb10_ids_share_the_longest_length() -> None:
    """A request that shares one token is not among those that share three; lengths are per id."""
    tree = RequestTree()
    tree.insert_request("a", [1, 2, 3, 4, 5])
    tree.insert_request("b", [1, 2, 3, 6, 7])
    tree.insert_request("c", [1, 9])

    assert tree.find_shared_prefixes([1, 2, 3, 8]) == (["a", "b"], 3)
    assert tree.shared_lengths([1, 2, 3, 8]) == {"a": 3, "b": 3, "c": 1}
    assert tree.find_shared_prefixes([7]) == ([], 0)


def test_eb11_of_two_equal_prompts_one_can_leave() -> None:
    """Removing one of two identical prompts leaves the other as it was."""
    tree = RequestTree()
    tree.insert_request("a", [1, 2, 3])
    tree.insert_request("b", [1, 2, 3])

    tree.remove_request("a")

    assert tree.find_shared_prefixes([1, 2, 3]) == (["b"], 3)
    assert (tree.total_tokens, tree.unique_tokens) == (3, 3)


def test_eb11_a_request_under_new_tokens_leaves_no_orphans() -> None:
    """Inserting an id again replaces its tokens; nothing of the old ones is left."""
    tree = RequestTree()
    tree.insert_request("a", [1, 2, 3])

    tree.insert_request("a", [4, 5])

    assert tree.find_shared_prefixes([1, 2, 3]) == ([], 0)
    assert (tree.num_nodes, tree.unique_tokens, len(tree)) == (1, 2, 1)


def test_eb11_the_callers_list_is_copied() -> None:
    """Changing a list after it was inserted changes nothing in the tree."""
    tokens = [1, 2, 3]
    tree = RequestTree()
    tree.insert_request("a", tokens)

    tokens[0] = 7

    assert tree.tokens_of("a") == [1, 2, 3]


def test_long_and_deep_prompts_need_no_recursion() -> None:
    """A prompt of 100,000 tokens is a node; deep chains of nodes are walked without recursion."""
    tree = RequestTree()
    tree.insert_request("long", range(100_000))
    assert tree.num_nodes == 1

    depth = sys.getrecursionlimit() + 200
    matcher = RequestPrefixMatcher()
    for length in range(1, depth + 1):
        matcher.add_request_prefix(length, range(length))

    assert matcher.tree.num_nodes == depth
    assert len(matcher.get_prefix_groups()) == depth - 1
    assert matcher.find_computation_sharing_opportunities("new", range(depth)) == [depth]
    for length in range(depth, 0, -1):
        matcher.remove_request(length)
    assert matcher.tree.num_nodes == matcher.tree.unique_tokens == 0


def test_eb13_one_shared_token_is_no_speedup() -> None:
    """Four requests that share 1 of 201 tokens gain 1.004, and the token is saved three times."""
    matcher = RequestPrefixMatcher()
    for request in range(4):
        matcher.add_request_prefix(request, [0, *range(1000 * request + 1, 1000 * request + 201)])

    suggestions = matcher.get_optimization_suggestions()

    assert suggestions.estimated_speedup_factor == pytest.approx(804 / 801)
    assert suggestions["performance_analysis"]["tokens_saved"] == 3
    assert suggestions.sharing_graph.potential_savings == 3
    assert suggestions.total_sharing_opportunities == 1


def test_a_finite_cache_saves_less() -> None:
    """The speed-up is stated for a capacity: a prefix that was evicted is computed again."""
    prompts = [[1, 2, 3], [4, 5, 6], [1, 2, 3]]
    speedups = {}
    for capacity in (3, 6, None):
        matcher = RequestPrefixMatcher(capacity_tokens=capacity)
        for request, tokens in enumerate(prompts):
            matcher.add_request_prefix(request, tokens)
        speedups[capacity] = matcher.get_optimization_suggestions().estimated_speedup_factor

    assert speedups == {3: 1.0, 6: 1.5, None: 1.5}


def test_attention_makes_late_tokens_dearer() -> None:
    """With a cost for attention, sharing the head saves less than its share of tokens."""
    matcher = RequestPrefixMatcher(cost=PrefillCost(attention_tokens=100))
    matcher.add_request_prefix("a", [*range(100), 7])
    matcher.add_request_prefix("b", [*range(100), 8])

    saving = matcher.estimate_saving()

    alone = 101 + 101 * 50.5 / 100
    assert saving.speedup == pytest.approx(2 * alone / (alone + 1 + 100.5 / 100))


def test_nothing_shared_and_nothing_at_all() -> None:
    """Without sharing the speed-up is 1 and small batches are recommended."""
    matcher = RequestPrefixMatcher()
    for prompts in ([], [[1], [2], []]):
        for request, tokens in enumerate(prompts):
            matcher.add_request_prefix(request, tokens)

        suggestions = matcher.get_optimization_suggestions()

        assert suggestions.estimated_speedup_factor == 1.0
        assert suggestions.prefix_groups == suggestions.top_opportunities == ()
        assert suggestions.recommended_batch_sizes == (1, 2, 4)


def test_batches_hold_whole_groups() -> None:
    """Recommended batch sizes are those of the groups, and the common ones, without repetition."""
    matcher = RequestPrefixMatcher()
    for request in range(8):
        matcher.add_request_prefix(request, [request % 2, request])

    assert matcher.get_optimization_suggestions().recommended_batch_sizes == (1, 2, 4, 8)
    matcher.add_request_prefix(8, [0, 8])
    assert matcher.get_optimization_suggestions().recommended_batch_sizes == (1, 2, 4, 5, 8)


def test_blocks_count_their_tokens() -> None:
    """With hashed blocks, lengths are in tokens and the rest of a prompt is never shared."""
    tree = RequestTree(block_size=512)
    tree.insert_request("a", np.array([3, 2**64 - 1], np.uint64), num_tokens=1100)
    tree.insert_request("b", [3, 2**64 - 1], num_tokens=1100)

    assert tree.find_shared_prefixes([3]) == (["a", "b"], 512)
    assert (tree.total_tokens, tree.unique_tokens) == (2200, 1024 + 2 * 76)
    with pytest.raises(ConfigError, match="whole blocks"):
        tree.insert_request("c", [3, 4], num_tokens=600)
    assert "c" not in tree


@pytest.mark.parametrize(
    "tokens", [[-1], [2**64], ["1"], "abc", [1.5], np.array([-1]), np.array([0.5])]
)
def test_what_is_no_token_is_refused(tokens: object) -> None:
    """Bad tokens are refused and the request that had the id stays as it was."""
    tree = RequestTree()
    tree.insert_request("a", [1, 2])

    with pytest.raises(InvalidKeyError):
        tree.insert_request("a", tokens)  # type: ignore[arg-type]

    assert tree.tokens_of("a") == [1, 2]


def test_unknown_ids_and_bad_options() -> None:
    """Removing an unknown id changes nothing; asking for its tokens is a KeyError."""
    tree = RequestTree()
    tree.remove_request("nobody")

    with pytest.raises(KeyError):
        tree.tokens_of("nobody")
    with pytest.raises(ConfigError, match="at least 1 token"):
        RequestTree(block_size=0)
    with pytest.raises(ConfigError, match="less than a block"):
        RequestPrefixMatcher(block_size=16, capacity_tokens=15)
    with pytest.raises(KeyError):
        RequestPrefixMatcher().get_shared_computation_graph()["no_such_field"]


def test_removed_requests_leave_no_memory() -> None:
    """Columns are reused: a thousand rounds of insert and remove end with the nodes of one."""
    tree = RequestTree()

    for round_ in range(1000):
        for request in range(3):
            tree.insert_request(request, [round_, request, round_ + request])
        for request in range(3):
            tree.remove_request(request)

    assert (len(tree), tree.num_nodes, tree.total_tokens, tree.unique_tokens) == (0, 0, 0, 0)
    assert len(tree._edges) <= 6
    assert len(tree._ids) <= 4
    assert not tree._child
