"""State machine: both block tables against a dict of row lengths."""

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
from tests.budget import examples


class TableMachine(RuleBasedStateMachine):
    """Rows are allocated, grow, shrink and are released; the paged table has too few pages for all."""

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
        """Pages for rows of these lengths."""
        return sum(-(-length // self.page_size) for length in lengths)

    def free_pages(self, which: int) -> int:
        """Pages that are left according to the model."""
        used = self.needed(list(self.models[which].values()))
        return (self.cache.num_pages if which == 0 else 10**6) - used

    @rule(which=st.integers(0, 1), lengths=st.lists(st.integers(0, 34), max_size=3))
    def allocate_rows(self, which: int, lengths: list[int]) -> None:
        """All get the smallest free rows, or the call raises and none is allocated."""
        table, model = self.tables[which], self.models[which]
        free = [row for row in range(self.num_rows) if row not in model]
        fits = (
            len(lengths) <= len(free)
            and max(lengths, default=0) <= self.max_tokens
            and self.needed(lengths) <= self.free_pages(which)
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
    def update_row(self, which: int, row: int, more: int) -> None:
        """A row grows or shrinks and keeps its first pages."""
        table, model = self.tables[which], self.models[which]
        length = model.get(row, 0) + more
        fits = row in model and 0 <= length <= self.max_tokens
        fits = fits and self.needed([length]) - self.needed([model[row]]) <= self.free_pages(which)
        before = table.view([row])[0].tolist() if row in model else []
        try:
            table.update(row, more)
        except CacheError:
            assert not fits
            return
        assert fits
        num_kept = min(self.needed([length]), self.needed([model[row]]))
        assert table.view([row])[0].tolist()[:num_kept] == before[:num_kept]
        model[row] = length

    @rule(which=st.integers(0, 1), row=st.integers(-1, 4))
    def release_row(self, which: int, row: int) -> None:
        """Only a row in use can be released."""
        try:
            self.tables[which].release(row)
        except CacheError:
            assert row not in self.models[which]
            return
        del self.models[which][row]

    @rule(which=st.integers(0, 1))
    def reset_table(self, which: int) -> None:
        """Reset releases every row."""
        self.tables[which].reset()
        self.models[which].clear()

    @invariant()
    def tables_match_the_models(self) -> None:
        """Equal lengths, just enough pages for them, no page in two rows, none lost."""
        for table, model in zip(self.tables, self.models, strict=True):
            rows = list(model)
            assert table.num_free_rows == self.num_rows - len(rows)
            assert table.lengths(rows).tolist() == list(model.values())
            pages = [[page for page in row if page >= 0] for row in table.view(rows).tolist()]
            for row_pages, length in zip(pages, model.values(), strict=True):
                assert len(row_pages) == self.needed([length])
            used = [page for row_pages in pages for page in row_pages]
            assert len(set(used)) == len(used)
            if isinstance(table, ContiguousBlockTable):
                width = self.max_tokens // self.page_size
                assert all(
                    row_pages == list(range(row * width, row * width + len(row_pages)))
                    for row, row_pages in zip(rows, pages, strict=True)
                )
            else:
                assert self.cache.stats().free_pages == self.cache.num_pages - len(used)
                assert not any(self.cache.is_free(page) for page in used)
                assert (table.array >= 0).sum() == len(used)


def test_both_tables_match_a_dict() -> None:
    """Any order of allocation, growth and release, with too few rows and pages."""
    run_state_machine_as_test(
        TableMachine,
        settings=settings(max_examples=examples(60), stateful_step_count=30, deadline=None),
    )
