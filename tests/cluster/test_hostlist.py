from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cluster.hostlist import LIMIT, expand
from launch.errors import UserError


@pytest.mark.parametrize(("text", "names"), [
    ("node", ["node"]),
    ("node[001-003]", ["node001", "node002", "node003"]),
    ("n[1,3,8-10]", ["n1", "n3", "n8", "n9", "n10"]),
    ("a[001-10]", [f"a{number:03d}" for number in range(1, 11)]),          # the width of the low end
    ("b04-[8-10]", ["b04-8", "b04-9", "b04-10"]),
    ("r[1-2]n[08-10]", ["r1n08", "r1n09", "r1n10", "r2n08", "r2n09", "r2n10"]),
    ("gpu[1-2]-ib[0-1]", ["gpu1-ib0", "gpu1-ib1", "gpu2-ib0", "gpu2-ib1"]),
    ("h100-[001-002]-ib0,x", ["h100-001-ib0", "h100-002-ib0", "x"]),       # scontrol prints nothing here, rc 0
    ("c,a,b", ["c", "a", "b"]),
    ("cpu-[001-001]", ["cpu-001"])])
def test_names(text, names):
    assert list(expand(text)) == names


@pytest.mark.parametrize("text", ["a[1-3", "a1-3]", "a[3-1]", "a,,b", "a[]", "a[1,]", "a[x]", "a[[1]]", "", ",",
                                  "a b", "a[1]]", "a[-3]", "a[1-2-3]", "a/b", "a[1-99999999999]", "[1-99999]x[1-9]",
                                  "a[１-３]", "-", "a[1 2]"])
def test_a_broken_list_is_refused(text):
    """`scontrol show hostnames` turns some of these into half a name, with status 0."""
    with pytest.raises(UserError) as error:
        expand(text, "x.yaml:2, nodes.names")
    assert error.value.where == "x.yaml:2, nodes.names" and "node[001-032]" in error.value.fix


@given(st.text(alphabet="ab01,-[]", max_size=20))
def test_any_text_expands_or_is_refused(text):
    try:
        names = expand(text)
    except UserError:
        return
    assert 1 <= len(names) <= LIMIT and all(name and not set(name) & set("[],") for name in names)


@given(st.integers(0, 120), st.integers(0, 30), st.integers(1, 5))
def test_a_range_holds_each_number_once(low, count, width):
    names = expand(f"n[{low:0{width}d}-{low + count}]x")
    assert [int(name[1:-1]) for name in names] == list(range(low, low + count + 1))
    assert all(len(name) >= width + 2 for name in names)
