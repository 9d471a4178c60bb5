"""Two threads never reach one filter: every method waits for what runs in the background."""

import pytest
from background_cases import FILTERS, METHODS, C, Plugin, V, Watch

from exl_filters import FilterStack


@pytest.mark.covers("filters: background")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FILTERS)
def test_no_method_meets_what_runs_in_the_background(name, method, pool):
    watch = Watch()
    f = FILTERS[name](watch)
    f.background_next(pool)
    assert watch.entered.wait(250)
    METHODS[method](f)
    f.background_drop()
    assert watch.overlaps == []
    assert watch.inside == []


@pytest.mark.covers("filters: background")
@pytest.mark.parametrize("method", ["next", "feed", "is_complete", "clone"])
def test_a_filter_asked_while_its_stack_runs_waits_for_the_stack(method, pool):
    made = []

    class Cloned(Plugin):
        def clone(self, c=None):
            f = type(self)()
            f.watch = Watch()
            f.watch.entered.set()
            made.append(f)
            return f

    with FilterStack([Cloned()], vocab_size=4, stop_ids=[3]) as stack:
        (f,) = made
        stack.begin()
        f.watch.entered.clear()
        held = stack.filters[0]
        assert held is f
        assert stack.prefetch(pool)
        assert f.watch.entered.wait(250)
        METHODS[method](held)
        assert f.watch.overlaps == []


@pytest.mark.covers("filters: background")
@pytest.mark.parametrize(
    "ask",
    [
        lambda s: s.complete,
        lambda s: s.diagnose(),
        lambda s: s.next_mask(),
        lambda s: s.status,
        lambda s: s.validate([0, 1]),
        lambda s: s.accept_text("a"),
        lambda s: s.allows(0),
        lambda s: s.copy(),
        lambda s: s.feed(1),
        lambda s: s.rewind(1),
        lambda s: s.begin(),
        lambda s: s.close(),
    ],
    ids=range(12),
)
def test_no_method_of_a_stack_meets_what_runs_in_the_background(ask, pool):
    watch = Watch()

    class Same(Plugin):
        """Clones are under the same watch, as a matcher's copies are not."""

        def clone(self, c=None):
            f = Same()
            f.count = self.count
            return f

    Same.watch = watch
    watch.entered.set()
    with FilterStack([Same()], vocab_size=4, stop_ids=[3]) as stack:
        stack.feed(0)
        watch.entered.clear()
        assert stack.prefetch(pool)
        assert watch.entered.wait(250)
        ask(stack)
        assert watch.overlaps == []


def test_many_things_at_once_on_one_grammar_filter(pool):
    """Without a watch: llguidance itself raises "Already borrowed" for two at a time."""
    pytest.importorskip("llguidance", reason="extra `grammar`")
    from exl_filters.grammar import ExLlamaV2GrammarFilter

    f = ExLlamaV2GrammarFilter(None, V, regex="[abc]{3000}")
    f.attach(C)
    ways = [METHODS[name] for name in ("next", "fill_bitmask", "is_complete", "validate", "forced", "clone", "feed")]
    for turn in range(700):
        if f.background_result is None:
            f.background_next(pool)
        ways[turn % len(ways)](f)
    assert f.get_next()[0] == [0, 1, 2]
