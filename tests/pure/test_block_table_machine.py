"""A state machine over both block tables and a dict of what each row must hold."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from ramify.cache import PrefixCache
from ramify.errors import CacheError
from ramify.kv.block_table import BlockTable, ContiguousBlockTable, PagedBlockTable


class TableMachine(RuleBasedStateMachine):
    """Rows come, grow, shrink and leave; the pages of the paged table are too few for all."""

    @initialize(
        num_rows=st.integers(1, 4),
        max_pages=st.integers(1, 4),
        page_size=st.sampled_from([1, 2, 3, 8]),
        num_pages=st.integers(1, 12),
    )
    def make(self, num_rows: int, max_pages: int, page_size: int, num_pages: int) -> None:
        self.cache = PrefixCache(num_pages, page_size)
        paged = PagedBlockTable(num_rows, max_pages, page_size, source=self.cache)
        contiguous = ContiguousBlockTable(num_rows, max_pages, page_size)
        self.tables: list[BlockTable] = [paged, contiguous]
        self.models: list[dict[int, int]] = [{}, {}]  # row → tokens
        self.num_rows, self.page_size = num_rows, page_size
        self.max_tokens = max_pages * page_size

    def needed(self, lengths: list[int]) -> int:
        return sum(-(-length // self.page_size) for length in lengths)

    def room(self, which: int) -> int:
        """Pages that the model says are left."""
        used = self.needed(list(self.models[which].values()))
        return (self.cache.num_pages if which == 0 else 10**6) - used

    @rule(which=st.integers(0, 1), lengths=st.lists(st.integers(0, 34), max_size=3))
    def some_arrive(self, which: int, lengths: list[int]) -> None:
        """All get the smallest free rows, or none gets any."""
        table, model = self.tables[which], self.models[which]
        free = [row for row in range(self.num_rows) if row not in model]
        fits = (
            len(lengths) <= len(free)
            and max(lengths, default=0) <= self.max_tokens
            and self.needed(lengths) <= self.room(which)
        )
        try:
            rows = table.allocate_all(lengths)
        except CacheError:
            assert not fits
            return
        assert fits
        assert rows == free[: len(lengths)]
        model.update(zip(rows, lengths, strict=True))

    @rule(which=st.integers(0, 1), row=st.integers(-1, 4), more=st.integers(-9, 9))
    def one_grows(self, which: int, row: int, more: int) -> None:
        """Or shrinks; its first pages stay."""
        table, model = self.tables[which], self.models[which]
        length = model.get(row, 0) + more
        fits = row in model and 0 <= length <= self.max_tokens
        fits = fits and self.needed([length]) - self.needed([model[row]]) <= self.room(which)
        before = table.view([row])[0].tolist() if row in model else []
        try:
            table.update(row, more)
        except CacheError:
            assert not fits
            return
        assert fits
        kept = min(self.needed([length]), self.needed([model[row]]))
        assert table.view([row])[0].tolist()[:kept] == before[:kept]
        model[row] = length

    @rule(which=st.integers(0, 1), row=st.integers(-1, 4))
    def one_leaves(self, which: int, row: int) -> None:
        """Only a row that is held can be released."""
        try:
            self.tables[which].release(row)
        except CacheError:
            assert row not in self.models[which]
            return
        del self.models[which][row]

    @rule(which=st.integers(0, 1))
    def all_leave(self, which: int) -> None:
        """A reset is the release of all."""
        self.tables[which].reset()
        self.models[which].clear()

    @invariant()
    def tables_hold_what_the_models_hold(self) -> None:
        """Lengths, whole pages for them and no more, no page in two rows, none lost."""
        for table, model in zip(self.tables, self.models, strict=True):
            rows = list(model)
            assert table.num_free_rows == self.num_rows - len(rows)
            assert table.lengths(rows).tolist() == list(model.values())
            pages = [[page for page in row if page >= 0] for row in table.view(rows).tolist()]
            for held, length in zip(pages, model.values(), strict=True):
                assert len(held) == self.needed([length])
            together = [page for held in pages for page in held]
            assert len(set(together)) == len(together)
            if isinstance(table, ContiguousBlockTable):
                width = self.max_tokens // self.page_size
                assert all(
                    held == list(range(row * width, row * width + len(held)))
                    for row, held in zip(rows, pages, strict=True)
                )
            else:
                assert self.cache.stats().free_pages == self.cache.num_pages - len(together)
                assert not any(self.cache.is_free(page) for page in together)
                assert (table.array >= 0).sum() == len(together)


def test_both_tables_do_what_a_dict_does() -> None:
    """Any order of arrivals, growth and departures, with too few rows and pages for them."""
    run_state_machine_as_test(
        TableMachine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )
